"""What ``train --check`` found, as a table on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.records.check_report import CheckReport, Finding

STYLES = {Finding.OK: "green", Finding.SLOW: "yellow", Finding.WRONG: "bold red", Finding.UNCHECKED: "dim"}


def print_check(report: CheckReport, name: str) -> None:
    """Print a row per measurement, then what to do.

    Args:
        report: What was found.
        name: The run file, for the title.
    """
    table = Table(title=escape(f"{name}: check"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("what", "measured", "expected", "finding"):
        table.add_column(column, overflow="fold", no_wrap=column == "finding")
    for row in report.rows:
        style = STYLES[row.finding]
        table.add_row(escape(row.what), escape(row.measured), escape(row.expected), f"[{style}]{row.finding}[/{style}]")
    console = Console()
    console.print(table)
    for row in report.rows:
        if row.advice:
            console.print(escape(f"{row.finding}, {row.what.strip()}: {row.advice}"), soft_wrap=True)
