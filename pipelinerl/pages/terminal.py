"""A page on a terminal, drawn by rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from pipelinerl.pages.page import COMMAND, Layout, Page, Place, Section, Table
from pipelinerl.records.reports import Finding
from pipelinerl.util.explain import printable

LEAST = 24
"""Room that a column of words needs (characters)."""
WIDEST = 10_000
"""Room in which a table is measured (characters)."""
FINDINGS: dict[str, str] = {
    Finding.OK: "green",
    Finding.SLOW: "yellow",
    Finding.WRONG: "bold red",
    Finding.UNCHECKED: "dim",
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on."""
        no_reader()


def no_reader() -> None:
    """Have standard output go nowhere: its reader, as ``head``, has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_page(page: Page, name: str, *, only_table: bool = False) -> None:
    """Print answer, first table and sections of a page, or the table alone; ``name`` is before the table's title."""
    console = _Console(markup=False, emoji=False)
    answers = [one for one in page.sections if one.place is Place.ANSWER]
    if answers:
        _print_answers(console, [Section("answer", page.answer.splitlines()), *answers])
    table = page.tables[0]
    drawn, left_out = _fitting(table, printable(name), console)
    console.print(drawn)
    if left_out:
        console.print(f"left out at {console.width} characters a line: {', '.join(left_out)}", style="dim")
    if table.note:
        console.print(f"{table.note}\n" if answers else table.note, style="dim")
    if only_table:
        return
    if answers:
        for fact, text in page.facts:
            console.print(f"{fact.lower()}: {text}", soft_wrap=True, highlight=False)
    for line in _lines(page):
        console.print(line, soft_wrap=True, highlight=False)
    if page.answer and not answers:
        console.print(page.answer, highlight=False)


def _lines(page: Page) -> Iterator[str]:
    for one in page.sections:
        if one.place is Place.LIST and one.lines:
            yield f"{one.title}:"
            yield from (f"  {line}" for line in one.lines)
        elif one.place is Place.LINES:
            yield from one.lines


def _print_answers(console: Console, answers: list[Section]) -> None:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for one in answers:
        if words := [line for line in one.lines if not line.startswith(COMMAND)]:
            grid.add_row(one.title, "\n".join(words))
    console.print(grid)
    for line in (line for one in answers for line in one.lines if line.startswith(COMMAND)):
        console.print(line, soft_wrap=True)
    console.print()


def _fitting(table: Table, name: str, console: Console) -> tuple[RichTable, Sequence[str]]:
    """Draw the first columns that a terminal has room for, two at least; return the names of the others, too."""
    columns = table.columns[: table.terminal_columns]
    short = [
        [" ".join(word[:LEAST] for word in cell.split(" ")) for cell in row] for row in table.rows
    ]  # longer: folded
    number = len(columns)
    while number > 2:
        measured = _drawn(replace(table, rows=short, terminal_columns=number), "")
        if Measurement.get(console, console.options.update(width=WIDEST), measured).minimum <= console.width:
            break
        number -= 1
    return _drawn(replace(table, terminal_columns=number), name), columns[number:]


def _drawn(table: Table, name: str) -> RichTable:
    title, columns = f"{name}: {table.title}", table.columns[: table.terminal_columns]
    if not table.sortable:  # ruled
        drawn = RichTable(title=title, title_justify="left", show_header=any(columns))
    else:
        grouped = table.layout is Layout.GROUPED
        drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        drawn.pad_edge, drawn.show_edge = False, not grouped
    if table.layout is Layout.PLAIN:
        texts = table.texts or columns[:1]
    else:
        texts, columns = columns[1:2], columns[1:]
    for column in columns:
        if column in texts:  # a long name gives way, the numbers do not
            stacked = table.layout is Layout.STACKED
            words = [row[table.columns.index(column)] for row in table.rows]
            longest = max(map(len, words if stacked else " ".join(words).split()), default=0)
            drawn.add_column("" if stacked else column, overflow="fold", min_width=min(LEAST, longest))
        else:
            drawn.add_column(column, justify="left" if column == "finding" else "right", no_wrap=True)
    above = None
    for number, row in enumerate(table.rows):
        cells = [
            Text(cell, style=FINDINGS.get(cell, "")) if column == "finding" else cell
            for cell, column in zip(row, table.columns, strict=True)
        ]
        if table.layout is Layout.STACKED:
            cells = [f"{cells[0]}\n  {cells[1]}", *cells[2:]]
        elif table.layout is Layout.GROUPED:
            if cells[0] != above:
                drawn.add_section()
                drawn.add_row(Text(row[0], style="bold"))
            above, *cells = cells
        drawn.add_row(*cells[: len(columns)], style="bold" if number == table.marked else None)
    return drawn
