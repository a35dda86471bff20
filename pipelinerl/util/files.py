"""Errors of writing that say where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelinerl.errors import RunFailedError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write to a file, or below a folder, inside this block.

    Raises:
        RunFailedError: One line, with the path, if that cannot be done: Python's own names no file when a disk is full.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> RunFailedError:
    """Return the error of a file that cannot be written."""
    return RunFailedError(f"cannot write {error.filename or path}: {error.strerror or error}")
