"""Throughput against the number of environments, as a table on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.records.environments_report import EnvironmentsReport
from pipelinerl.records.page import Table as PageTable


def print_environments(report: EnvironmentsReport, name: str) -> None:
    """Print a row per number of environments, then the answer.

    Args:
        report: The runs.
        name: Name of the run file in the title.
    """
    made = environments_table(report)
    title = escape(f"{name}: {made.title}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    *numbers, last = made.columns
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    for row, cells in zip(report.rows, made.rows, strict=True):
        table.add_row(*cells, style="bold" if row.count == report.knee else None)
    console = Console()
    console.print(table)
    console.print(made.note, style="dim")
    console.print(escape(report.verdict), soft_wrap=True)


def environments_table(report: EnvironmentsReport) -> PageTable:
    """Return a row per number of environments."""
    priced = report.rows[0].usd_per_1000_rollouts is not None
    numbers = ("environments", "rollouts/h", "in use", "engines", "trainer", "lag", *(["$/1000"] if priced else []))
    cost_of = "; $/1000: USD of 1000 rollouts, accelerators and environments" if priced else ""
    return PageTable(
        title=f"environments for {report.slots:,} slots of engines",
        columns=(*numbers, "bottleneck"),
        rows=[
            [
                f"{row.count:,}",
                f"{row.rollouts_per_hour:,.0f}",
                f"{row.in_use_mean:,.0f}",
                f"{row.generation:.0%}",
                f"{row.training:.0%}",
                f"{row.lag_mean:.2f}",
                *([] if row.usd_per_1000_rollouts is None else [f"{row.usd_per_1000_rollouts:,.0f}"]),
                row.bottleneck.value,
            ]
            for row in report.rows
        ],
        note=f"Busy shares of engines and trainer; mean lag in optimizer steps{cost_of}.",
    )
