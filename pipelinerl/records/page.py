"""What is forwarded of runs, comparisons, plans and validations: a page in words and tables, and its Markdown."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"([+-]?[\d,]*\.?\d+(?:[eE][+-]?\d+)?)(k?)")
_NONE = ("", "-")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts, for a terminal and for a page."""

    title: str
    """What it shows."""
    columns: tuple[str, ...]
    """The names of the columns."""
    rows: list[list[str]]
    """A cell per column."""
    note: str = ""
    """What the columns mean."""
    sortable: bool = True
    """Whether its rows are alike; else it is read from top to bottom, and may have long texts."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a reader gets who has nothing but this page."""

    title: str
    """What it is about, in a line."""
    question: str
    """The question that was asked."""
    answer: str
    """The answer in a sentence."""
    facts: list[tuple[str, str]]
    """Band, cost and the like: a name and a text each."""
    lists: dict[str, list[str]]
    """Lines by the title above them: reasons, and what would change the answer."""
    tables: list[Table]
    """The numbers."""
    assumptions: list[str]
    """What the numbers rest on, a line each."""
    run_file: str | None
    """The run file to go on from. None: there is none."""


def sort_values(cells: list[str]) -> list[float | None] | list[str]:
    """Return what the cells of a column are sorted by: the number that each begins with, or else their texts.

    ``1,250``, ``35%``, ``9,500-12k`` are the numbers 1250, 35, 9500; ``12k`` is 12000; a cell without a value is None.
    """
    found = [_NUMBER.match(cell) for cell in cells]
    if not any(found) or any(one is None and cell not in _NONE for one, cell in zip(found, cells, strict=True)):
        return cells
    return [None if one is None else float(one[1].replace(",", "")) * (1000 if one[2] else 1) for one in found]


def page_markdown(page: Page) -> str:
    """Return a page for a pull request: tables in Markdown, the run file folded away."""
    lines = [f"# {page.title}", "", f"**{page.question}**", "", page.answer, ""]
    lines += [f"- {name}: {text}" for name, text in page.facts]
    for title, texts in page.lists.items():
        lines += _list(title, texts)
    for table in page.tables:
        lines += ["", f"## {table.title[:1].upper()}{table.title[1:]}", ""]
        for row in (list(table.columns), ["---"] * len(table.columns), *table.rows):
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
        lines += ["", table.note] if table.note else []
    lines += _list("Assumptions", page.assumptions)
    if page.run_file is not None:
        fold = ["<details><summary>The run file</summary>", "", "```toml", page.run_file.rstrip(), "```", ""]
        lines += ["", *fold, "</details>"]
    return "\n".join(lines) + "\n"


def _list(title: str, texts: list[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {text}" for text in texts)] if texts else []
