"""What a command does while there is nothing to count: a line on stderr, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what is being done until this block ends."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    from pipelinerl.cli.progress import REFRESHES_PER_S

    with Console(stderr=True).status(what, refresh_per_second=REFRESHES_PER_S):
        yield
