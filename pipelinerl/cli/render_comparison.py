"""A comparison as a table on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_comparison(comparison: dict[str, Any], name: str) -> None:
    """Print a comparison as one table, a block of rows per scenario.

    Args:
        comparison: The content of comparison.json.
        name: What the title calls the run file.
    """
    baseline = comparison["baseline"]
    title = escape(f"{name}: speed-up over {baseline}")
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column("scheduler", overflow="fold")  # a long name gives way, the numbers do not
    summaries = [arm["summary"] for scenario in comparison["scenarios"] for arm in scenario["arms"]]
    flashes = bool(summaries) and all("tokens_per_flash" in summary for summary in summaries)
    rate = "tok/flash" if flashes else "tok/s"
    learned = bool(summaries) and all("reward" in summary for summary in summaries)
    shares = ("reward", "ESS") if learned else ("gen", "train", "publ", "wait")
    for column in ("speed-up", rate, "s/step", "lag", "max", *shares):
        table.add_column(column, justify="right", no_wrap=True)
    for scenario in comparison["scenarios"]:
        table.add_section()
        table.add_row(f"[bold]{escape(scenario['name'])}[/bold]")
        for arm in scenario["arms"]:
            table.add_row(*_comparison_row(arm, flashes, learned))
    console = Console()
    console.print(table)
    rest = "mean reward of the last tenth" if learned else "the rest: shares of the trainer's time"
    console.print(f"Speed-up in trained tokens/s; mean and max lag in optimizer steps; {rest}.", style="dim")


def _comparison_row(arm: dict[str, Any], flashes: bool, learned: bool) -> list[str]:
    summary = arm["summary"]
    seconds, duration_s = summary["seconds"], summary["duration_s"] or 1.0
    shares = [seconds[key] / duration_s for key in ("generating", "training", "publishing", "waiting_for_data")]
    steps = summary["optimizer_steps"]
    repeats = arm.get("repeats", [])
    seeds = f" ({len(repeats)} seeds)" if learned and len(repeats) > 1 else ""
    return [
        escape(arm["name"]) + seeds,
        "-" if arm["speedup"] is None else f"{arm['speedup']:.2f}",
        f"{summary['tokens_per_flash']:.2f}" if flashes else f"{summary['tokens_per_s']:,.0f}",
        f"{summary['duration_s'] / steps:.4g}" if steps else "-",
        f"{summary['lag']['mean']:.2f}",
        f"{summary['lag']['max']}",
        *(
            (
                _mean_and_spread([one["reward"] for one in repeats] or [summary["reward"]["last"]]),
                _mean_and_spread([one["ess"] for one in repeats] or [summary["ess"]["mean"]]),
            )
            if learned
            else (f"{share:.0%}" if share else "-" for share in shares)
        ),
    ]


def _mean_and_spread(values: list[float]) -> str:
    """Return the mean, and of several values the sample standard deviation."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f}±{(sum((one - mean) ** 2 for one in values) / (len(values) - 1)) ** 0.5:.3f}"
