"""A run as a table on a terminal."""

from __future__ import annotations

from typing import Any

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


def _method(summary: dict[str, Any]) -> str:
    steps = summary.get("optimizer_steps_per_rl_step")
    return f"{summary['scheduler']} G={steps}" if steps else str(summary["scheduler"])


def duration(seconds: float) -> str:
    """Return a time span in the unit that reads best."""
    for unit, size_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:,.2f} {unit}"
    return f"{seconds * 1e3:,.2f} ms"
