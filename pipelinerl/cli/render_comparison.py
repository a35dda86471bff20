"""A comparison as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.cli.render_cost import short
from pipelinerl.records.comparison_report import ArmReport, ComparisonReport
from pipelinerl.records.page import Table as PageTable


def print_comparison(comparison: ComparisonReport, name: str) -> None:
    """Print a comparison as one table, a block of rows per scenario.

    Args:
        comparison: The comparison.
        name: Name of the run file in the title.
    """
    made = comparison_table(comparison)
    title = escape(f"{name}: {made.title}")
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column("scheduler", overflow="fold")  # a long name gives way, the numbers do not
    for column in made.columns[2:]:
        table.add_column(column, justify="right", no_wrap=True)
    for scenario in comparison.scenarios:
        table.add_section()
        table.add_row(f"[bold]{escape(scenario.name)}[/bold]")
        for _, arm, *numbers in (row for row in made.rows if row[0] == scenario.name):
            table.add_row(escape(arm), *numbers)
    console = Console()
    console.print(table)
    console.print(made.note, style="dim")
    for line in (comparison.answer, *comparison.too_short):
        console.print(line, markup=False, highlight=False)


def comparison_table(comparison: ComparisonReport) -> PageTable:
    """Return a comparison as a table, a row per scenario and arm."""
    reports = [arm.summary for arm in comparison.arms]
    flashes = bool(reports) and all(report.tokens_per_flash is not None for report in reports)
    learned = bool(reports) and all(report.reward is not None for report in reports)
    rate = "tok/flash" if flashes else "tok/s"
    priced = bool(reports) and all(report.cost and report.cost.usd is not None for report in reports)
    shares = ("reward", "ESS") if learned else ("gen", "train", "publ", "wait")
    rows = []
    for scenario in comparison.scenarios:
        for arm in scenario.arms:
            seeds = f" ({len(arm.folders)} seeds)" if learned and len(arm.folders) > 1 else ""
            rest = _learning(arm) if learned else _time_shares(arm)
            rows.append([scenario.name, arm.name + seeds, *_numbers(arm, flashes=flashes, priced=priced), *rest])
    cost = "$/Mtok: USD per million trained tokens; " if priced else ""
    text = "mean reward of the last tenth" if learned else "the rest: shares of the trainer's time"
    return PageTable(
        title=f"speed-up over {comparison.baseline}",
        columns=(
            "scenario",
            "scheduler",
            "speed-up",
            rate,
            "s/step",
            *(["$/Mtok"] if priced else []),
            "lag",
            "max",
            *shares,
        ),
        rows=rows,
        note=f"Speed-up in trained tokens/s; mean and max lag in optimizer steps; {cost}{text}.",
    )


def _numbers(arm: ArmReport, *, flashes: bool, priced: bool) -> list[str]:
    report, steps = arm.summary, arm.summary.optimizer_steps
    usd = report.cost.usd_per_million_tokens if priced and report.cost else None
    return [
        "-" if arm.speedup is None else f"{arm.speedup:.2f}",
        f"{report.tokens_per_flash:.2f}" if flashes else f"{report.tokens_per_s:,.0f}",
        f"{report.duration_s / steps:.4g}" if steps else "-",
        *(["-" if usd is None else short(usd)] if priced else []),
        f"{report.lag.mean:.2f}",
        f"{report.lag.max}",
    ]


def _time_shares(arm: ArmReport) -> list[str]:
    duration_s = arm.summary.duration_s or 1.0
    return [f"{seconds / duration_s:.0%}" if seconds else "-" for _, seconds in arm.summary.seconds]


def _learning(arm: ArmReport) -> list[str]:
    """Return the reward and the ESS of an arm that has learned, over all its seeds."""
    report = arm.summary
    rewards = [one.reward for one in arm.repeats or () if one.reward is not None]
    ess = [one.ess for one in arm.repeats or () if one.ess is not None]
    assert report.reward is not None
    assert report.ess is not None
    return [_mean_and_spread(rewards or [report.reward.last]), _mean_and_spread(ess or [report.ess.mean])]


def _mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean, and of several values the sample standard deviation."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f}±{(sum((one - mean) ** 2 for one in values) / (len(values) - 1)) ** 0.5:.3f}"
