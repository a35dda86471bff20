"""The notebooks run from their first cell to their last, and are stored without outputs."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pages import ENVIRONMENT, EXAMPLES

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
PATIENT = {"timeout": 900, "startup_timeout": 300, "iopub_timeout": 300, "raise_on_iopub_timeout": True}
"""Limits (s). By default a kernel has 60 s to start, and output more than 4 s after its reply is lost."""


@pytest.mark.slow  # a kernel each
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, resources={"metadata": {"path": str(tmp_path)}}, **PATIENT).execute()
    shown = [one for cell in book.cells if cell.cell_type == "code" for one in cell.outputs]
    assert any("text/html" in one.get("data", {}) for one in shown)  # a report showed itself


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") for cell in book.cells)
