"""A run as a table on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.cli.render_cost import cost_line
from pipelinerl.records.bottleneck import Bottleneck
from pipelinerl.records.reports import RunReport

LAST_EVALUATIONS = 5
"""Evaluations beside the run that are shown, the newest (count)."""

_BOTTLENECKS = {
    Bottleneck.PREFILL: "prefill-bound: engines spend more time on prefill than on decoding",
    Bottleneck.LAG: "lag-bound: slots stay free to keep max_lag",
    Bottleneck.ENVIRONMENT: "environment-bound: slots stay free while all environments are in use",
    Bottleneck.REWARD: "reward-bound: slots stay free while rollouts are scored",
}
"""What is said instead of the value alone."""


def print_summary(report: RunReport, name: str) -> None:
    """Print one run as a table of two columns.

    Args:
        report: The numbers of the run.
        name: Name of the run in the title.
    """
    steps = report.optimizer_steps_per_rl_step
    method = f"{report.scheduler} G={steps}" if steps else report.scheduler
    table = Table(title=escape(f"{name}: {method}"), show_header=False, title_justify="left")
    for key, text in summary_rows(report):
        table.add_row(key, text)
    Console().print(table)


def summary_rows(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield what is said of a run: a name and a text each; a name with spaces before it belongs to the one above."""
    lag, busy, duration_s = report.lag, report.utilisation, report.duration_s or 1.0
    yield "optimizer steps", f"{report.optimizer_steps:,}"
    yield "time" if report.updates else "simulated time", duration(report.duration_s)
    yield "throughput", f"{report.tokens_per_s:,.0f} tokens/s, {report.samples_per_s:,.1f} samples/s"
    if report.too_short:
        yield "  too few optimizer steps", ";\n".join(report.too_short)
    if report.tokens_per_flash is not None:
        yield "", f"{report.tokens_per_flash:.2f} tokens/flash"
    yield "token lag (optimizer steps)", f"mean {lag.mean:.2f}, p95 {lag.p95}, p99 {lag.p99}, max {lag.max}"
    yield "  of the mean", f"{lag.in_flight_mean:.2f} in flight, {lag.in_queue_mean:.2f} in queue"
    shares = (f"{key.replace('_', ' ')} {value / duration_s:.0%}" for key, value in report.seconds if value)
    yield "trainer's time", ", ".join(shares) or "none"
    yield "busy", f"generation {busy.generation:.0%}, training {busy.training:.0%}"
    yield "bottleneck", _BOTTLENECKS.get(report.bottleneck, report.bottleneck)
    yield "rollouts", ", ".join(f"{num:,} {key}" for key, num in report.rollouts if num)
    if one := report.environments:
        seconds = ", ".join(f"{name} {value:,.1f}" for name, value in one.seconds.parts.items())
        yield "environments", f"{one.in_use_mean:,.0f} of {one.count:,} in use, {one.turns_mean:.1f} turns a rollout"
        yield "  seconds of a rollout", seconds
    if report.cost:
        yield "cost", cost_line(report.cost).replace("; ", ";\n")
    if report.reward:
        yield "mean reward", f"{report.reward.first:.3f} at first, {report.reward.last:.3f} at last"
    if report.ess and report.mismatch:
        floor = report.mismatch.kl_at_lag_0
        at_lag_0 = "" if floor is None else f", at lag 0 {floor:.1e}"
        yield "effective sample size", f"mean {report.ess.mean:.3f}, min {report.ess.min:.3f} (raw, per token)"
        yield "KL, engine to trainer", f"{report.mismatch.kl:.1e}{at_lag_0} (nats per token)"
    if band := report.ess_modelled:
        yield "modelled effective sample size", f"mean {band.mean:.3f}, {band.low:.3f} to {band.high:.3f} (per token)"
    if report.updates:
        parts = (f"{name[:-2]} {duration(value)}" for name, value in report.updates if name.endswith("_s"))
        yield "weight updates", f"{report.updates.count:,}: {', '.join(parts)}"
    if report.evaluation:
        before, after, during = dict(report.evaluation).values()
        rates = [
            ("before", before),
            *((f"step {one.step}", one.success) for one in (during or [])[-LAST_EVALUATIONS:]),
            ("after", after),
        ]
        yield "held-out problems", ", ".join(f"{when} {rate:.1%}" for when, rate in rates if rate is not None)
    if not report.complete:
        yield "complete", "no: the run ended early"


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
