"""The notebooks run from first cell to last in any folder, and are stored with the outputs that they give."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from pages import ENVIRONMENT, ROOT

sys.path.append(str(ROOT / "scripts"))
from run_notebooks import NOTEBOOKS, executed

PICTURE = re.compile(r"data:image/png;base64,[^\"]*")
PROGRESS = re.compile(r"^\d+:\d\d:\d\d  .*\r?\n", re.MULTILINE)
"""A line every ten seconds, on a slow machine."""
MOST_BYTES = 300_000


def said(book):
    """The text that each cell shows, in however many pieces it came, without pictures and progress."""
    cells = [cell.outputs for cell in book.cells if cell.cell_type == "code" and cell.outputs]
    texts = ["".join(one.get("text", "") + one.get("data", {}).get("text/html", "") for one in cell) for cell in cells]
    return [PROGRESS.sub("", PICTURE.sub("", text)) for text in texts]


@pytest.mark.slow  # a kernel each
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_any_folder_and_gives_the_stored_outputs(path, tmp_path, monkeypatch):
    """After a change of results: scripts/run_notebooks.py."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    book = executed(path, tmp_path)
    assert any("<table" in text for text in said(book))  # a report showed itself
    assert said(book) == said(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_small_and_name_no_folder_of_their_machine(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert said(book)
    assert path.stat().st_size < MOST_BYTES
    text = path.read_text(encoding="utf-8")
    assert [name for name in (str(ROOT), "/tmp/", "/home/", "/root/") if name in text] == []
    assert not any("execution" in cell.metadata for cell in book.cells)
