"""What was assumed, and what differs from another plan, in words."""

from __future__ import annotations

from pipelinerl.cli.render_cost import short
from pipelinerl.records.plan_report import Assumed, Instead, PlanReport


def assumption_lines(report: PlanReport) -> list[str]:
    """Return a line per assumption, the most influential first; none where nothing was assumed."""
    lines = [f"  {assumption(one)}" for one in report.assumed]
    title = (
        "assumed, the most influential first (tokens/s that another value gives "
        f"{report.recommended.family} at its best, by the screening):"
    )
    return [title, *lines] if lines else []


def assumption(one: Assumed) -> str:
    """Return what was assumed, and what other values would give the recommended kind of scheduler."""
    others = (f"{_shown(other.value)} gives {_effect(other)}" for other in one.instead)
    return f"{one.key} = {_shown(one.value)}{': ' if one.instead else ''}{', '.join(others)}"


def against_lines(report: PlanReport) -> list[str]:
    """Return what differs from the plan that this one was compared with, and why; none without one."""
    other, best = report.against, report.recommended
    if other is None:
        return []
    cut_short = "" if other.complete else " (cut short: the best of what it had simulated)"
    lines = [f"against {other.name}{cut_short}:"]
    for one in other.changed:
        alone = " tokens/s alone" if one.alone.throughput else ""
        lines.append(f"  {one.key}: {_shown(one.before)} -> {_shown(one.alone.value)}: {_effect(one.alone)}{alone}")
    if not other.changed:
        lines.append("  the same question")
    faster = best.tokens_per_s / other.tokens_per_s - 1
    lines.append(f"  tokens/s: {other.tokens_per_s:,.0f} -> {best.tokens_per_s:,.0f} ({faster:+.0%})")
    lines.append(f"  mean lag: {other.lag_mean:.2f} -> {best.lag_mean:.2f}")
    for unit, before, after in (
        ("USD", other.cost.usd_per_million_tokens, best.cost.usd_per_million_tokens),
        ("GPU-hours", other.cost.gpu_hours_per_million_tokens, best.cost.gpu_hours_per_million_tokens),
    ):
        if before is not None and after is not None:
            lines.append(f"  {unit} per million tokens: {short(before)} -> {short(after)}")
    same = " (the same)" if other.label == best.label else ""
    lines.append(f"  recommended: {other.label} -> {best.label}{same}")
    return [*lines, f"  bottleneck: {other.verdict} -> {best.verdict}"]


def _shown(value: object) -> str:
    return "not given" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _effect(one: Instead) -> str:
    """Return a change of the throughput, and the kind of scheduler that turns the fastest, if one does."""
    if one.throughput is None:
        return "nothing that keeps to the limits, or no valid run file alone"
    wins = "" if one.fastest is None else f" ({one.fastest} turns the fastest)"
    return f"{one.throughput - 1:+.0%}{wins}"
