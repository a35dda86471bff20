"""The script that counts the project's lines, on a small tree whose counts are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def size() -> Any:
    spec = importlib.util.spec_from_file_location("size_script", ROOT / "scripts" / "size.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_is_neither_blank_nor_comment_nor_docstring(size: Any, tmp_path: Path) -> None:
    source = '"""Docstring\n\nof three lines."""\n\n# comment\nx = (\n    1,  # one\n)\n"""Text under a field."""\n'
    path = tmp_path / "one.py"
    path.write_text(source)
    assert size.counts(path) == (9, 3, 4)


def test_a_module_with_one_importer_beside_it_is_found(size: Any, tmp_path: Path) -> None:
    sources = {
        "a/one.py": "from a import two\nimport a.shared\nimport b.far",
        "a/two.py": "from a.shared import x",
        "a/shared.py": "",
        "b/far.py": "",
    }
    known = {}
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        known[name.removesuffix(".py").replace("/", ".")] = path
    assert size.single_importers(known) == ["a.two"]
