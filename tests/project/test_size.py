"""The script that counts lines, on a small tree with known counts."""

from __future__ import annotations

import runpy
from pathlib import Path

from pages import ROOT

SIZE = runpy.run_path(str(ROOT / "scripts" / "size.py"))


def test_code_is_neither_blank_nor_comment_nor_docstring(tmp_path: Path) -> None:
    source = '"""Docstring\n\nof three lines."""\n\n# comment\nx = (\n    1,  # one\n)\n"""Text under a field."""\n'
    path = tmp_path / "one.py"
    path.write_text(source)
    assert SIZE["counts"](path) == (9, 3, 4)


def test_a_module_with_one_importer_beside_it_is_found(tmp_path: Path) -> None:
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
    assert SIZE["single_importers"](known) == ["a.two"]
