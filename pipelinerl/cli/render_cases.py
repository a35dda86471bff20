"""Several cases of one question as one table, and who wins where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipelinerl.cli.render_cost import short
from pipelinerl.cli.render_plan import band, print_candidates
from pipelinerl.cli.render_what_if import against_lines, assumption_lines
from pipelinerl.records.page import Table as PageTable
from pipelinerl.records.plan_report import PlanReport

if TYPE_CHECKING:
    from sim.planning.cases import PlannedCase


def print_cases(cases: Sequence[PlannedCase], name: str) -> None:
    """Print a row per case, who wins, and what limits each.

    Args:
        cases: The cases that have ended.
        name: The run file, for the title.
    """
    plans = {one.name: one.report for one in cases if one.report is not None}
    failures = [f"{one.name}: {line}" for one in cases for line in (one.failure or "").splitlines()]
    first = next(iter(plans.values()))
    lines = [*case_lines(plans), *failures, *assumption_lines(first), *against_lines(first)]
    print_candidates(cases_table(plans), name, lines)


def cases_table(plans: Mapping[str, PlanReport]) -> PageTable:
    """Return the recommendation of every case, by its name, as a table."""
    priced = all(one.recommended.cost.usd is not None for one in plans.values())
    rows = [[name, one.recommended.label, *_numbers(one, priced=priced)] for name, one in plans.items()]
    per, cost = ("$/Mtok", "USD") if priced else ("GPU-h/Mtok", "GPU-hours")
    return PageTable(
        title=f"the recommendation in each of {len(plans)} cases",
        columns=("", "candidate", "tok/s", "band", "s/step", per, "lag", "sure"),
        rows=rows,
        note=f"{per}: {cost} per million trained tokens; mean lag in optimizer steps; band: pessimistic to optimistic "
        "coefficients; sure: probability that it is the fastest of its case within a tie.",
    )


def _numbers(report: PlanReport, *, priced: bool) -> list[str]:
    best = report.recommended
    return [
        f"{best.tokens_per_s:,.0f}",
        band(best),
        f"{best.step_s:.4g}",
        short(per_token(report, priced=priced)),
        f"{best.lag_mean:.2f}",
        f"{report.certainty.right:.2f}",
    ]


def per_token(report: PlanReport, *, priced: bool) -> float:
    """Return the cost of a million trained tokens of a recommendation: money, or GPU-hours."""
    cost = report.recommended.cost
    return (cost.usd_per_million_tokens if priced else cost.gpu_hours_per_million_tokens) or 0.0


def case_lines(plans: Mapping[str, PlanReport]) -> list[str]:
    """Return a line per thing that is said of several cases: who wins where, and what limits each."""
    planned = list(plans.items())
    priced = all(report.recommended.cost.usd is not None for _, report in planned)
    unit = "USD" if priced else "GPU-hours"
    fastest, its = max(planned, key=lambda one: one[1].recommended.tokens_per_s)
    cheapest, other = min(planned, key=lambda one: per_token(one[1], priced=priced))
    lines = [
        f"fastest: {fastest}, {its.recommended.tokens_per_s:,.0f} tokens/s at {short(per_token(its, priced=priced))} "
        f"{unit} per million tokens"
    ]
    if cheapest != fastest:
        faster = its.recommended.tokens_per_s / other.recommended.tokens_per_s - 1
        dearer = per_token(its, priced=priced) / per_token(other, priced=priced) - 1
        lines.append(
            f"cheapest: {cheapest}, {short(per_token(other, priced=priced))} {unit} per million tokens; {fastest} is "
            f"{faster:.0%} faster for {dearer:.0%} more per token"
        )
    winners: dict[str, list[str]] = {}
    for name, report in planned:
        winners.setdefault(report.recommended.family, []).append(name)
    lines.append("; ".join(f"{family} wins with {', '.join(names)}" for family, names in winners.items()))
    lines += [f"{name}: {report.recommended.verdict}" for name, report in planned]
    return lines + [f"{name}: warning: {warning}" for name, report in planned for warning in report.warnings]
