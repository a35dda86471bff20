"""Run the notebooks of examples/, and store them with their outputs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
PATIENT = {"timeout": 900, "startup_timeout": 300, "iopub_timeout": 300, "raise_on_iopub_timeout": True}
"""Limits (s). By default a kernel has 60 s to start, and output more than 4 s after its reply is lost."""


def executed(path: Path, folder: Path) -> Any:
    """Return a notebook, run in this folder; its metadata are as stored, without times and versions."""
    book = nbformat.read(path, as_version=4)
    metadata = book.metadata.copy()
    NotebookClient(book, resources={"metadata": {"path": str(folder)}}, record_timing=False, **PATIENT).execute()
    book.metadata = metadata
    return book


def main() -> None:
    """Run them."""
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)


if __name__ == "__main__":
    main()
