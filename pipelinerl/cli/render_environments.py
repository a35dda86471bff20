"""Throughput against the number of environments, as a table on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.records.environments_report import EnvironmentsReport


def print_environments(report: EnvironmentsReport, name: str) -> None:
    """Print a row per number of environments, then the answer.

    Args:
        report: The runs.
        name: Name of the run file in the title.
    """
    title = escape(f"{name}: environments for {report.slots:,} slots of engines")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    priced = report.rows[0].usd_per_1000_rollouts is not None
    columns = ("environments", "rollouts/h", "in use", "engines", "trainer", "lag", *(["$/1000"] if priced else []))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bottleneck", overflow="fold")
    for row in report.rows:
        cost = row.usd_per_1000_rollouts
        table.add_row(
            f"{row.count:,}",
            f"{row.rollouts_per_hour:,.0f}",
            f"{row.in_use_mean:,.0f}",
            f"{row.generation:.0%}",
            f"{row.training:.0%}",
            f"{row.lag_mean:.2f}",
            *([] if cost is None else [f"{cost:,.0f}"]),
            row.bottleneck.value,
            style="bold" if row.count == report.knee else None,
        )
    console = Console()
    console.print(table)
    cost_of = "; $/1000: USD of 1000 rollouts, accelerators and environments" if priced else ""
    console.print(f"Busy shares of engines and trainer; mean lag in optimizer steps{cost_of}.", style="dim")
    console.print(escape(report.verdict), soft_wrap=True)
