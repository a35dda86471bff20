"""What a process of a run prints, and all that it starts: into a file of the run's folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def log_to(path: str | None) -> None:
    """Send what is printed from now on to the end of a file; where it cannot be written, leave all as it is.

    Args:
        path: The file. None: nothing happens.
    """
    if path is None:
        return
    with suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for printed in (1, 2):
            os.dup2(file, printed)
        os.close(file)
