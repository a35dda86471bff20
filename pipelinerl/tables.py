"""Results as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_summary(summary: dict[str, Any], name: str) -> None:
    """Print one run as a table of two columns.

    Args:
        summary: The content of summary.json.
        name: What the title calls the run.
    """
    table = Table(title=escape(f"{name}: {_method(summary)}"), show_header=False, title_justify="left")
    lag, seconds = summary["lag"], summary["seconds"]
    duration_s = summary["duration_s"] or 1.0
    table.add_row("optimizer steps", f"{summary['optimizer_steps']:,}")
    table.add_row("time" if "updates" in summary else "simulated time", duration(summary["duration_s"]))
    table.add_row("throughput", f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['samples_per_s']:,.1f} samples/s")
    if "tokens_per_flash" in summary:
        table.add_row("", f"{summary['tokens_per_flash']:.2f} tokens/flash")
    table.add_row(
        "token lag (optimizer steps)", f"mean {lag['mean']:.2f}, p95 {lag['p95']}, p99 {lag['p99']}, max {lag['max']}"
    )
    table.add_row("  of the mean", f"{lag['in_flight_mean']:.2f} in flight, {lag['in_queue_mean']:.2f} in queue")
    shares = ", ".join(f"{key.replace('_', ' ')} {value / duration_s:.0%}" for key, value in seconds.items() if value)
    table.add_row("trainer's time", shares or "none")
    utilisation = summary["utilisation"]
    table.add_row("busy", f"generation {utilisation['generation']:.0%}, training {utilisation['training']:.0%}")
    table.add_row("bottleneck", summary["bottleneck"])
    rollouts = summary["rollouts"]
    table.add_row("rollouts", ", ".join(f"{rollouts[key]:,} {key}" for key in rollouts if rollouts[key]))
    if "reward" in summary:
        table.add_row(
            "mean reward", f"{summary['reward']['first']:.3f} at first, {summary['reward']['last']:.3f} at last"
        )
    if "ess" in summary:
        ess, mismatch = summary["ess"], summary["mismatch"]
        floor = f", at lag 0 {mismatch['kl_at_lag_0']:.1e}" if "kl_at_lag_0" in mismatch else ""
        table.add_row("effective sample size", f"mean {ess['mean']:.3f}, min {ess['min']:.3f} (raw, per token)")
        table.add_row("KL, engine to trainer", f"{mismatch['kl']:.1e}{floor} (nats per token)")
    if "ess_modelled" in summary:
        band = summary["ess_modelled"]
        text = f"mean {band['mean']:.3f}, {band['low']:.3f} to {band['high']:.3f} (per token)"
        table.add_row("modelled effective sample size", text)
    if "updates" in summary:
        updates = summary["updates"]
        parts = ", ".join(f"{name} {1e3 * updates[f'{name}_s']:.1f} ms" for name in ("pause", "transfer", "resume"))
        table.add_row("weight updates", f"{updates['count']:,}: {parts}")
    if "evaluation" in summary:
        rates = ", ".join(f"{when} {rate:.1%}" for when, rate in summary["evaluation"].items())
        table.add_row("held-out problems", rates.replace("success_", ""))
    if not summary["complete"]:
        table.add_row("complete", "no: the run ended early")
    Console().print(table)


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
    return [
        escape(arm["name"]),
        "-" if arm["speedup"] is None else f"{arm['speedup']:.2f}",
        f"{summary['tokens_per_flash']:.2f}" if flashes else f"{summary['tokens_per_s']:,.0f}",
        f"{summary['duration_s'] / steps:.4g}" if steps else "-",
        f"{summary['lag']['mean']:.2f}",
        f"{summary['lag']['max']}",
        *(
            (f"{summary['reward']['last']:.3f}", f"{summary['ess']['mean']:.3f}")
            if learned
            else (f"{share:.0%}" if share else "-" for share in shares)
        ),
    ]


def _method(summary: dict[str, Any]) -> str:
    steps = summary.get("optimizer_steps_per_rl_step")
    return f"{summary['scheduler']} G={steps}" if steps else str(summary["scheduler"])


def duration(seconds: float) -> str:
    """Return a time span in the unit that reads best."""
    for unit, size_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:,.2f} {unit}"
    return f"{seconds * 1e3:,.2f} ms"
