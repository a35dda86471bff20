"""The pages of the documentation, and readers of their sections and tables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
"""Environment of a process that finds the packages."""
FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "sim" / "data" / "README.md"])
}
"""Every page by its path: in the root, in docs/, and of the shipped data."""


def section(page: str, heading: str) -> str:
    """Return the text under a heading, up to the next of the same or a higher level."""
    (start,) = [match for match in re.finditer(r"^(#+) (.+)$", PAGES[page], re.MULTILINE) if match[2] == heading]
    after = PAGES[page][start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", after, re.MULTILINE)
    return after[: end.start()] if end else after


def first_cells(page: str, heading: str) -> list[str]:
    """Return the names in code font in the first column of the table under a heading; a cell may have several."""
    cells = re.findall(r"^\| (`[^`|]+`(?:, `[^`|]+`)*) \|", section(page, heading), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested tables by their dotted keys."""
    return {
        f"{key}.{rest}" if rest else key: value
        for key, inner in tables.items()
        for rest, value in (flat(inner).items() if isinstance(inner, dict) else [("", inner)])
    }
