"""A report in words and tables, worded once: terminal, HTML page, Markdown and notebook render the same ``Page``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from html import escape

from pipelinerl.records.plan_report import PlannedCandidate, PlanReport
from pipelinerl.records.reports import CostReport
from pipelinerl.util.explain import printable

COMMAND = "$ "
"""Starts a line that is a command."""
_NUMBER = re.compile(r"([+-]?[\d,]*\.?\d+(?:[eE][+-]?\d+)?)(k?)")
_NONE = ("", "-")


class Layout(StrEnum):
    """First column of a table on a terminal; pages have a column per cell."""

    PLAIN = "plain"
    GROUPED = "grouped"
    """A heading above the rows that share it."""
    STACKED = "stacked"
    """Above the second column, in the same cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""
    sortable: bool = True
    """Whether rows are alike; else the table is read from top to bottom and may have long texts."""
    layout: Layout = Layout.PLAIN
    texts: tuple[str, ...] = ()
    """Columns of words, which wrap. Empty: the first one."""
    terminal_columns: int | None = None
    """Columns that a terminal has room for, the first ones (count)."""
    marked: int | None = None


class Place(StrEnum):
    """Place of a section on a terminal; pages show all sections in order, above the tables."""

    ANSWER = "answer"
    """Above the table, as paragraphs beside the title; commands below them."""
    LINES = "lines"
    """Below the table, without the title."""
    LIST = "list"
    """Below the table, indented below the title."""
    PAGE_ONLY = "page only"


@dataclass(frozen=True, slots=True)
class Section:
    """Lines below a title; without lines it is not shown."""

    title: str
    lines: Sequence[str]
    place: Place = Place.PAGE_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report for a reader who has nothing else; its texts are ``printable``."""

    title: str
    question: str
    answer: str
    """A sentence; of several cases a line each."""
    facts: Sequence[tuple[str, str]] = ()
    """Band, cost and the like; on a terminal only where the answer is above the table."""
    sections: Sequence[Section] = ()
    tables: list[Table] = field(default_factory=list)
    """A terminal shows the first."""
    assumptions: Sequence[str] = ()
    """A line each; on pages only."""
    run_file: str | None = None
    made: str | None = None
    """Date, version and command of the report."""
    overview: Overview | None = None

    def __post_init__(self) -> None:
        """Escape unseen characters."""
        for one in fields(self):
            object.__setattr__(self, one.name, printable(getattr(self, one.name)))


def sort_values(cells: list[str]) -> list[float | None] | list[str]:
    """Return the keys that sort a column: the numbers that cells begin with (None: no value), or else the texts.

    ``1,250``, ``35%``, ``9,500-12k`` are the numbers 1250, 35, 9500; ``12k`` is 12000.
    """
    found = [_NUMBER.match(cell) for cell in cells]
    if not any(found) or any(one is None and cell not in _NONE for one, cell in zip(found, cells, strict=True)):
        return cells
    return [None if one is None else float(one[1].replace(",", "")) * (1000 if one[2] else 1) for one in found]


def page_markdown(page: Page) -> str:
    """Return a page for a pull request: the run file is folded away, and no name makes HTML or a link."""
    lines = [f"# {page.title}", "", f"**{page.question}**", "", page.answer, ""]
    lines += [f"- {name}: {text}" for name, text in page.facts]
    for one in page.sections:
        lines += _list(one.title, one.lines)
    for table in page.tables:
        lines += ["", f"## {capitalised(table.title)}", "", *markdown_table(table.columns, table.rows)]
        lines += ["", table.note] if table.note else []
    lines += _list("Assumptions", page.assumptions)
    lines = [escape(line, quote=False).replace("](", "]\\(") for line in lines]
    if page.run_file is not None:
        fence = "`" * max(3, *(1 + len(one) for one in re.findall("`*", page.run_file)))
        fold = ["<details><summary>The run file</summary>", "", f"{fence}toml", page.run_file.rstrip(), fence, ""]
        lines += ["", *fold, "</details>"]
    lines += ["", escape(page.made, quote=False)] if page.made else []
    return "\n".join(lines) + "\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = (
        [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        for row in (columns, ["---"] * len(columns), *rows)
    )
    return [f"| {' | '.join(row)} |" for row in cells]


def _list(title: str, texts: Sequence[str]) -> list[str]:
    return ["", f"## {capitalised(title)}", "", *(f"- {text}" for text in texts)] if texts else []


def capitalised(words: str) -> str:
    """Return words with a capital first letter."""
    return f"{words[:1].upper()}{words[1:]}"


def sentence(words: str) -> str:
    """Return words as a sentence."""
    return f"{capitalised(words)}."


def duration(seconds: float) -> str:
    """Return a time span in the unit that reads best, with four significant digits."""
    value, unit = float(f"{seconds:.4g}"), "s"
    if value >= 7200:
        value, unit = value / 3600, "h"
    elif value >= 120:
        value, unit = value / 60, "min"
    elif value < 1:
        value, unit = value * 1e3, "ms"
    return f"{value:,.4g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def short(number: float) -> str:
    """Return a number with at least its whole part and three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def cost_line(cost: CostReport, band: Sequence[CostReport] = ()) -> str:
    """Return the cost of a million trained tokens and of the run, with the range over ``band``."""
    every = (cost, *band)
    each = [_amount([one.gpu_hours_per_million_tokens for one in every], "GPU-hours")]
    run = [_amount([one.gpu_hours for one in every], "GPU-hours")]
    if cost.usd_per_million_tokens is not None:
        each.insert(0, _amount([one.usd_per_million_tokens for one in every], "USD"))
        run.insert(0, _amount([one.usd for one in every], "USD"))
    if cost.kwh is not None:
        run.append(f"at most {_amount([one.kwh for one in every], 'kWh')}")
    return f"{' or '.join(each)} per million trained tokens; {', '.join(run)} for the run"


def _amount(values: Sequence[float | None], unit: str) -> str:
    known = [one for one in values if one is not None]
    if not known:
        return f"no {unit}"
    low, high = min(known), max(known)
    return f"{short(known[0])} {unit}{f' ({short(low)} to {short(high)})' if low < high else ''}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its band; 0 if no candidate keeps to the limits."""

    name: str
    value: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Overview:
    """First screen for a reader who decides; the rest is folded, but answer and first table of several cases."""

    best: Bar
    unit: str
    facts: Sequence[tuple[str, str]]
    splits: Mapping[str, Mapping[str, int]]
    """GPUs of each case by their work (count)."""
    bars: Sequence[Bar]


def overview(
    plans: Mapping[str, PlanReport], best: str, facts: Sequence[tuple[str, str]], *, priced: bool, prices: str
) -> Overview:
    """Return the first screen of plans by case, or of one without a name.

    ``facts``: lines on the best case. ``prices`` says on which its cost rests.
    """
    kinds = {(case, kind): one for case, plan in plans.items() for kind, one in plan.families.items()}
    chosen = {(case, plan.recommended.family): plan.recommended for case, plan in plans.items()}
    bars = {key: _bar(", ".join(filter(None, key)), one, priced) for key, one in (kinds | chosen).items()}
    return Overview(
        best=bars[best, plans[best].recommended.family],
        unit=f"USD per million trained tokens{prices}" if priced else "trained tokens per second",
        facts=facts,
        splits={bars[key].name: _work(one) for key, one in chosen.items()},
        bars=[*bars.values()],
    )


def _bar(name: str, one: PlannedCandidate | None, priced: bool) -> Bar:
    if one is None or not priced:
        return Bar(name, one.tokens_per_s, *one.band_tokens_per_s) if one else Bar(name)
    value, high, low = (cost.usd_per_million_tokens or 0.0 for cost in (one.cost, *one.band_costs))
    return Bar(name, value, low, high)


def _work(best: PlannedCandidate) -> dict[str, int]:
    number, generate, idle = best.cluster.accelerators, best.cluster.generation_accelerators, best.idle
    if best.scheduler.schedule.colocated or generate is None:
        return {"generate and train in turn": number} | ({"are idle": idle} if idle else {})
    return {"generate": generate, "train": number - generate}
