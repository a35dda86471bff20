"""The first screen of a plan's HTML page: a number, which GPUs do what, kinds of schedule as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelinerl.records.plan_report import PlannedCandidate, PlanReport


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its band; 0 if no candidate keeps to the limits."""

    name: str
    value: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Overview:
    """First screen for a reader who decides; the rest is folded, but answer and first table of several cases."""

    best: Bar
    unit: str
    facts: Sequence[tuple[str, str]]
    splits: Mapping[str, Mapping[str, int]]
    """GPUs of each case by their work (count)."""
    bars: Sequence[Bar]


def overview(
    plans: Mapping[str, PlanReport], best: str, facts: Sequence[tuple[str, str]], *, priced: bool, prices: str
) -> Overview:
    """Return the first screen of plans by case, or of one without a name.

    ``facts``: lines on the best case. ``prices`` says on which its cost rests.
    """
    kinds = {(case, kind): one for case, plan in plans.items() for kind, one in plan.families.items()}
    chosen = {(case, plan.recommended.family): plan.recommended for case, plan in plans.items()}
    bars = {key: _bar(", ".join(filter(None, key)), one, priced) for key, one in (kinds | chosen).items()}
    return Overview(
        best=bars[best, plans[best].recommended.family],
        unit=f"USD per million trained tokens{prices}" if priced else "trained tokens per second",
        facts=facts,
        splits={bars[key].name: _work(one) for key, one in chosen.items()},
        bars=[*bars.values()],
    )


def _bar(name: str, one: PlannedCandidate | None, priced: bool) -> Bar:
    if one is None or not priced:
        return Bar(name, one.tokens_per_s, *one.band_tokens_per_s) if one else Bar(name)
    value, high, low = (cost.usd_per_million_tokens or 0.0 for cost in (one.cost, *one.band_costs))
    return Bar(name, value, low, high)


def _work(best: PlannedCandidate) -> dict[str, int]:
    number, generate, idle = best.cluster.accelerators, best.cluster.generation_accelerators, best.idle
    if best.scheduler.schedule.colocated or generate is None:
        return {"generate and train in turn": number} | ({"are idle": idle} if idle else {})
    return {"generate": generate, "train": number - generate}
