"""A validation as a table on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.records.validation_report import ValidationReport
from pipelinerl.records.validation_table import PAIRS_TITLE, speed_up_words, validation_cells, validation_sentence


def print_validation(report: ValidationReport) -> None:
    """Print predicted beside measured, the bad ones too.

    Args:
        report: The content of validation.json.
    """
    title = "Published runs: each predicted from its inputs and from other rows, never from its own result"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("run", overflow="fold")
    for column in ("unit", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    for row in report.rows:
        name, unit, measured, predicted, _, error, *_ = (escape(cell) for cell in validation_cells(row))
        table.add_row(name, unit, measured, predicted, error)
    console = Console()
    console.print(table)
    for words, names in _assumptions(report).items():
        console.print(f"assumed: {words}: {', '.join(names)}", style="dim", highlight=False, markup=False)
    for one in report.unusable:
        console.print(f"not usable: {one.id}: {one.reason}", style="dim", highlight=False, markup=False)
    if report.speed_ups:
        console.print(PAIRS_TITLE, highlight=False, markup=False)
    for pair in report.speed_ups:
        console.print(f"  {speed_up_words(pair)}", highlight=False, markup=False)
    console.print(validation_sentence(report), highlight=False, markup=False)


def _assumptions(report: ValidationReport) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for row in report.rows:
        for words in row.assumed:
            rows.setdefault(words, []).append(row.id)
    return rows
