"""A plan as a table on a terminal, and the reasons for it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.cli.plan_answer import plan_answer, print_answers
from pipelinerl.cli.render_certainty import measurement_lines
from pipelinerl.cli.render_cost import cost_line, short
from pipelinerl.cli.render_what_if import against_lines, assumption_lines
from pipelinerl.hardware.coefficients import Level
from pipelinerl.records.page import Table as PageTable
from pipelinerl.records.plan_report import PlannedCandidate, PlanReport


def print_plan(report: PlanReport, name: str) -> None:
    """Print a plan: the answer in sentences, the candidates it was compared with, then what else is to know.

    Args:
        report: The plan.
        name: The run file, for the title.
    """
    print_answers(plan_answer(report))
    reasons = [f"cost: {plan_cost(report)}", *plan_reasons(report), *measurement_lines(report.certainty)]
    reasons += deciding_coefficients(report)
    print_candidates(plan_table(report), name, [*reasons, *assumption_lines(report), *against_lines(report)])


def print_candidates(made: PageTable, name: str, lines: Sequence[str]) -> None:
    """Print a table of candidates, each below what it stands for, and what is said of them.

    Args:
        made: The table; its first two columns are what a candidate stands for, and its label.
        name: The run file, for the title.
        lines: What is said.
    """
    title = escape(f"{name}: {made.title}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", overflow="fold", min_width=24)
    for column in made.columns[2:]:
        table.add_column(column, justify="right", no_wrap=True)
    for place, label, *numbers in made.rows:
        table.add_row(escape(f"{place}\n  {label}"), *numbers)
    console = Console()
    console.print(table)
    console.print(f"{made.note}\n", style="dim")
    for line in lines:
        console.print(escape(line), soft_wrap=True)


def plan_table(report: PlanReport) -> PageTable:
    """Return the recommendation and the candidates it was compared with as a table."""
    search, best, other = report.search, report.recommended, report.runner_up
    priced = best.cost.usd is not None
    places = [("recommended", best), ("runner-up", other)]
    shown = {one.label for one in (best, other) if one is not None}
    places += [(f"best {family}", one) for family, one in report.families.items() if one and one.label not in shown]
    places.append(("run file", report.own))
    hours = f"GPU-hours of {report.run.optimizer_steps:,} optimizer steps"
    cost = "USD per million trained tokens" if priced else hours
    return PageTable(
        title=f"{search.candidates:,} candidates screened, {report.certainty.ways} compared in "
        f"{report.certainty.draws} draws, {search.simulated} simulated",
        columns=("", "candidate", "tok/s", "band", "s/step", "$/Mtok" if priced else "GPU-h", "lag", "max", "wait"),
        rows=[_row(place, one) for place, one in places if one is not None],
        note=f"{cost}; mean and largest lag in optimizer steps; wait: share of the trainer's time; band: pessimistic "
        "to optimistic coefficients.",
    )


def band(one: PlannedCandidate) -> str:
    """Return the throughput from pessimistic to optimistic coefficients."""
    ends = [one.band[level].tokens_per_s for level in (Level.PESSIMISTIC, Level.OPTIMISTIC) if level in one.band]
    return "-".join(f"{end:,.0f}" if end < 10_000 else f"{end / 1000:,.0f}k" for end in ends) or "-"


def _row(place: str, one: PlannedCandidate) -> list[str]:
    usd = one.cost.usd_per_million_tokens
    return [
        place,
        one.label.removesuffix(" (run file)"),
        f"{one.tokens_per_s:,.0f}",
        band(one),
        f"{one.step_s:.4g}",
        f"{one.cost.gpu_hours:,.1f}" if usd is None else short(usd),
        f"{one.lag_mean:.2f}",
        f"{one.lag_max}",
        f"{one.waiting:.0%}",
    ]


def plan_cost(report: PlanReport) -> str:
    """Return what the recommendation costs, with its band."""
    best = report.recommended
    return cost_line(best.cost, [one.cost for one in best.band.values()])


def plan_reasons(report: PlanReport) -> list[str]:
    """Return a line per reason for the recommendation, and per thing to know of the search."""
    best, other, own = report.recommended, report.runner_up, report.own
    lines = [f"warning: {warning}" for warning in report.warnings]
    lines.append(f"bottleneck: {best.verdict}")
    if other is not None:
        lines.append(f"runner-up ({other.label}): {other.why}")
    if own is not None:
        breaks = "" if own.keeps_to_limits else " (it breaks a limit)"
        if not own.among_schedulers:
            breaks = f" (only to compare with: plan.schedulers has no {own.family})"
        lines.append(f"run file{breaks}: recommended is {own.recommended_over_own:.2f} times as fast; {own.verdict}")
    search = report.search
    if search.within_limits < search.simulated:
        ratios = ", ".join(f"{family} {ratio:.2f}" for family, ratio in search.lag_ratios.items())
        lines.append(
            f"{search.within_limits} of the {search.simulated} simulated keep to the limits; simulated over screened "
            f"mean lag: {ratios}"
        )
    return lines + [f"not tried: {row.key}={row.value}: {row.why}" for row in search.not_tried]


def deciding_coefficients(report: PlanReport) -> list[str]:
    """Return a line with the coefficients that alone change the decision; none if none does."""
    changing = [row.coefficient for row in report.sensitivity if row.changes_decision]
    if not changing:
        return []
    names = ", ".join(changing[:5]) + (f" and {len(changing) - 5} more" if len(changing) > 5 else "")
    return [f"coefficients that alone change the decision, largest effect first: {names}"]
