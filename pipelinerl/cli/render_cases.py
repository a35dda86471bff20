"""Several cases of one question as one table, and who wins where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipelinerl.cli.plan_answer import COMMAND, choice, next_step, print_answers, sentence, why
from pipelinerl.cli.render_certainty import ALMOST_ONE
from pipelinerl.cli.render_cost import short
from pipelinerl.cli.render_plan import band, print_candidates
from pipelinerl.cli.render_what_if import against_lines, assumption_lines
from pipelinerl.records.page import Table as PageTable
from pipelinerl.records.plan_report import PlanReport

if TYPE_CHECKING:
    from sim.planning.cases import PlannedCase


def print_cases(cases: Sequence[PlannedCase], name: str) -> None:
    """Print who wins, what to run in each case and why, a row per case, and what limits each.

    Args:
        cases: The cases that have ended.
        name: The run file, for the title.
    """
    plans = {one.name: one.report for one in cases if one.report is not None}
    failures = [f"{one.name}: {line}" for one in cases for line in (one.failure or "").splitlines()]
    first = next(iter(plans.values()))
    print_answers({"answer": who_wins(plans), **case_answers(plans), "next": case_next(plans)})
    lines = [*case_limits(plans), *failures, *assumption_lines(first), *against_lines(first)]
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
        ">0.99" if report.certainty.right >= ALMOST_ONE else f"{report.certainty.right:.2f}",
    ]


def per_token(report: PlanReport, *, priced: bool) -> float:
    """Return the cost of a million trained tokens of a recommendation: money, or GPU-hours."""
    cost = report.recommended.cost
    return (cost.usd_per_million_tokens if priced else cost.gpu_hours_per_million_tokens) or 0.0


def who_wins(plans: Mapping[str, PlanReport]) -> list[str]:
    """Return which case is the fastest, which the cheapest, and which kind of scheduler wins in which."""
    priced = all(report.recommended.cost.usd is not None for report in plans.values())
    unit = f"{'USD' if priced else 'GPU-hours'} per million trained tokens"
    fastest, its = max(plans.items(), key=lambda one: one[1].recommended.tokens_per_s)
    cheapest, other = min(
        plans.items(), key=lambda one: (per_token(one[1], priced=priced), -one[1].recommended.tokens_per_s)
    )
    of_fastest, of_cheapest = per_token(its, priced=priced), per_token(other, priced=priced)
    speed = f"{its.recommended.tokens_per_s:,.0f} tokens/s"
    if cheapest == fastest:
        lines = [f"Fastest and cheapest: {fastest}, {speed} for {short(of_fastest)} {unit}."]
    else:
        faster = its.recommended.tokens_per_s / other.recommended.tokens_per_s - 1
        lines = [
            f"Fastest: {fastest}, {speed} for {short(of_fastest)} {unit}. Cheapest: {cheapest}, {short(of_cheapest)}. "
            f"{fastest}: {faster:.0%} faster than {cheapest}, for {of_fastest / of_cheapest - 1:.0%} more per token."
        ]
    winners: dict[str, list[str]] = {}
    for name, report in plans.items():
        winners.setdefault(report.recommended.family, []).append(name)
    return [*lines, sentence("; ".join(f"{family} wins with {', '.join(names)}" for family, names in winners.items()))]


def case_answers(plans: Mapping[str, PlanReport]) -> dict[str, list[str]]:
    """Return what to run in each case, and why."""
    return {name: [choice(report.recommended), why(report)] for name, report in plans.items()}


def case_next(plans: Mapping[str, PlanReport]) -> list[str]:
    """Return what to do next in each case."""
    return [
        line if line.startswith(COMMAND) else f"{name}: {line}"
        for name, report in plans.items()
        for line in next_step(report)
    ]


def case_limits(plans: Mapping[str, PlanReport]) -> list[str]:
    """Return what limits each case, and what speaks against it."""
    lines = [f"{name}: {report.recommended.verdict}" for name, report in plans.items()]
    return lines + [f"{name}: warning: {warning}" for name, report in plans.items() for warning in report.warnings]
