"""The main module of vLLM's processes: importing vLLM takes a quarter less time without garbage collections meanwhile.

A process that is spawned runs the main module of its parent first. ``main_of_children`` makes it this one, also for the
processes that children spawn; ``imported`` is called by vLLM's plugin, when nearly all is imported.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from importlib.util import find_spec

if __name__ == "__mp_main__":
    gc.disable()


@contextlib.contextmanager
def main_of_children() -> Iterator[None]:
    """Have processes that are spawned meanwhile run this module, and not this process's; nor collect garbage."""
    main = sys.modules["__main__"]
    before, collects = main.__spec__, gc.isenabled()
    main.__spec__ = find_spec(__name__)
    gc.disable()
    try:
        yield
    finally:
        main.__spec__ = before
        if collects:
            gc.enable()


def imported() -> None:
    """Collect garbage again, but never look at what was imported."""
    if sys.modules["__main__"].__name__ == "__mp_main__" and not gc.isenabled():
        gc.freeze()
        gc.enable()
