"""Explanations of a plan: the effect of each coefficient, synchronous against asynchronous RL, what was left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, assert_never

from pipelinerl.config.resolve import stated_coefficients, transport_of
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import Level, coefficient_table
from pipelinerl.records.plan_report import CoefficientEffect, CoefficientEffects, NotTried, ScreenedColumns, SplitCurve
from pipelinerl.scheduler.kinds import CONVENTIONAL
from pipelinerl.util.limits import MOST_ROLLOUTS
from sim.planning.axes import ENGINE, Axis, Choice, all_choices, ignored_axes, listed_axes, schedule_of, values_of
from sim.planning.candidates import Candidate, Rejected, Screened, Screener, candidate_of, screen_all
from sim.planning.choose import next_to_simulate
from sim.planning.search_space import Limits, Reason, SearchSpace
from sim.planning.simulate import Outcome

MOST_ACCELERATORS = 4096
"""Accelerators up to which a size that fits is looked for (count)."""


def sensitivity(
    space: SearchSpace, recommended: Candidate, pool: Sequence[Candidate], factors: Mapping[str, float], *, least: float
) -> list[CoefficientEffects]:
    """Return what each coefficient, moved alone to its optimistic or pessimistic value, changes.

    The screening answers, each candidate corrected by the ratio that its simulation gave (by the mean ratio, if it has
    none).

    Args:
        space: The run file and its limits.
        recommended: The recommendation with all coefficients as they are.
        pool: The candidates that may take its place.
        factors: Simulated over screened throughput, by label.
        least: Relative difference in throughput that makes another decision.

    Returns:
        A row per coefficient that has different values and changes anything, the largest effect first: throughput of
        the recommendation over what it is as things are, and what would be recommended instead, if anything else
        is faster by more than ``least``.
    """
    config = space.config
    if not config.hardware.by_name:
        return []
    usual = sum(factors.values()) / len(factors)

    def rate(screened: Screened) -> float:
        return screened.tokens_per_s * factors.get(screened.candidate.label, usual)

    def moved(changed: Mapping[str, float]) -> tuple[float, str | None]:
        """Return the rate of the recommendation, and the label of another decision that is faster, if any."""
        coefficients = {**config.hardware.coefficients, **changed}
        screener = Screener(config, space.answers, {"coefficients": coefficients})
        here = screener.screen(recommended)
        screened = _screened(pool, screener)
        left = [one for one in screened if _limits(space, one).broken(one.estimate.lag_mean, one.gpu_hours) is None]
        best = max(left, key=rate, default=here)
        differs = best.candidate.way != recommended.way and rate(best) > (1 + least) * rate(here)
        return rate(here), best.candidate.label if differs else None

    base, already = moved({})  # a candidate not simulated may look faster as things are: no coefficient makes that so
    stated = {*stated_coefficients(config), *(() if transport_of(config) is None else ("sync_s_per_root_gb",))}
    rows = []
    for name, entry in coefficient_table().items():
        if name in stated:
            continue  # known: it has no other value
        row = CoefficientEffects(coefficient=name)
        for level in (Level.OPTIMISTIC, Level.PESSIMISTIC):
            if entry[level.value] != entry[config.hardware.level.value]:
                now, instead = moved({name: entry[level.value]})
                effect = CoefficientEffect(
                    value=entry[level.value], throughput=now / base, instead=instead if instead != already else None
                )
                row = row.model_copy(update={level.value: effect})
        if row.largest >= 5e-4 or row.changes_decision:
            rows.append(row)
    return sorted(rows, key=lambda row: -row.largest)


def _screened(pool: Sequence[Candidate], screener: Screener) -> Iterator[Screened]:
    """Yield the steady states of those whose model fits."""
    for candidate in pool:
        with suppress(ConfigError):
            yield screener.screen(candidate)


def preferred_elsewhere(space: SearchSpace, kept: Sequence[Screened]) -> dict[Level, list[Candidate]]:
    """Return what the screening prefers with the other coefficients, if anything keeps to the limits there."""
    preferred = {}
    for level in (Level.OPTIMISTIC, Level.PESSIMISTIC) if space.config.hardware.by_name else ():
        screener = Screener(space.config, space.answers, {"level": level})
        there, _ = screen_all([one.candidate for one in kept], space.limits, screener)
        preferred[level] = [next_to_simulate(there, space.limits, 1)[0].candidate] if there else []
    return preferred


def screened_columns(kept: Sequence[Screened]) -> ScreenedColumns:
    """Return the candidates that the screening kept, a column per number."""
    return ScreenedColumns(
        label=[one.candidate.label for one in kept],
        family=[one.candidate.family for one in kept],
        tokens_per_s=[float(f"{one.tokens_per_s:.4g}") for one in kept],
        lag_mean=[float(f"{one.estimate.lag_mean:.4g}") for one in kept],
        lag_max=[int(one.estimate.lag_max) for one in kept],
    )


def split_curve(space: SearchSpace, recommended: Candidate) -> SplitCurve:
    """Return the screened throughput of the recommendation at every split and level; empty if it is colocated."""
    if recommended.config.colocated:
        return SplitCurve()
    config, cluster = space.config, recommended.config.cluster
    unit = cluster.tensor_parallel
    step = unit * max(1, cluster.accelerators // unit // 64)
    splits = range(step, cluster.accelerators, step)
    curve = {}
    for level in list(Level) if config.hardware.by_name else [config.hardware.level]:
        screener = Screener(config, space.answers, {"level": level})
        curve[level.value] = [
            screener.screen(_with(recommended, generation_accelerators=split)).tokens_per_s for split in splits
        ]
    return SplitCurve(generation_accelerators=[float(split) for split in splits], **curve)


def _with(candidate: Candidate, *, generation_accelerators: int) -> Candidate:
    cluster = candidate.config.cluster.model_copy(update={"generation_accelerators": generation_accelerators})
    return replace(candidate, config=candidate.config.model_copy(update={"cluster": cluster}))


# ------------------------------------------------------------------------- synchronous against asynchronous RL


def synchronous_is_faster(
    best: Mapping[str, Outcome],
    space: SearchSpace,
    screener: Screener,
    *,
    tie: float,
    bottleneck: Callable[[Outcome], str],
) -> str | None:
    """Return a warning if asynchronous RL is slower on these GPUs than synchronous RL, by more than a tie.

    Where the plan has no synchronous kind, or simulated none that keeps to the limits, the screening speaks for it.

    Args:
        best: The best outcome within the limits of each kind of schedule that has one.
        space: The run file and its limits.
        screener: Gives the steady states.
        tie: Relative difference in throughput that counts for nothing.
        bottleneck: Returns what limits an outcome, in words.
    """

    def fastest(*, colocated: bool) -> Outcome | None:
        some = [one for one in best.values() if one.candidate.schedule.colocated is colocated]
        return max(some, key=lambda one: one.tokens_per_s, default=None)

    apart, together = fastest(colocated=False), fastest(colocated=True)
    if apart is None:
        return None
    split = apart.candidate.config
    sides = f"{split.generation_accelerators} of {space.accelerators} GPUs to generate and the others to train"
    if together is not None:
        slower = 1 - apart.tokens_per_s / together.tokens_per_s
        if slower <= tie:
            return None
        return (
            f"asynchronous RL is slower here: {sides} gives {slower:.0%} less than all of them for both in turn "
            f"({apart.candidate.label} against {together.candidate.label}); {bottleneck(apart)}"
        )
    other = screened_synchronous(space, screener)
    if other is None:
        return None
    faster = other.tokens_per_s / screener.screen(apart.candidate).tokens_per_s - 1
    if faster <= tie:
        return None
    return (
        f"asynchronous RL may be slower here: by the screening {other.candidate.label} is {faster:.0%} faster than "
        f"{apart.candidate.label}; simulate it: add '{CONVENTIONAL.name}' to plan.schedulers"
    )


def screened_synchronous(space: SearchSpace, screener: Screener) -> Screened | None:
    """Return the fastest conventional candidate within the limits by the screening."""
    space = replace(space, plan=space.plan.model_copy(update={"schedulers": [CONVENTIONAL.name]}))
    kept, _ = screen_all((candidate_of(one, space) for one in all_choices(space)), space.limits, screener)
    within = [one for one in kept if _limits(space, one).broken(one.estimate.lag_mean, one.gpu_hours) is None]
    return max(within, key=lambda one: one.tokens_per_s, default=None)


# ------------------------------------------------------------------------------------------- what was left out


def not_tried(
    space: SearchSpace, choices: Sequence[Choice], kept: Sequence[Screened], rejected: Sequence[Rejected]
) -> list[NotTried]:
    """Return the listed values that are in none of the candidates that the screening kept, each with the reason."""
    rows = []
    for axis, values in listed_axes(space):
        used, left = values_of(axis, choices), values_of(axis, [one.candidate.choice for one in kept])
        for value in values:
            if value in used and value not in left:
                rows.append(_row(axis, value, _rejections(axis, value, rejected)))
            elif value not in left:
                rows.append(_row(axis, value, axis.unused_because(space)))
    return rows + [_row(axis, values, "none of plan.schedulers has it") for axis, values in ignored_axes(space)]


def _row(axis: Axis, value: Any, why: str) -> NotTried:
    return NotTried(key=f"plan.{axis.name}", value=value, why=why)


def _rejections(axis: Axis, value: Any, rejected: Sequence[Rejected]) -> str:
    """Return why the candidates with a value were all rejected."""
    mine = [one for one in rejected if axis.applies_to(schedule_of(one.choice)) and one.choice[axis.name] == value]
    counts = Counter(one.reason for one in mine).most_common()
    reasons = "; ".join(f"{count:,} {reason.value}" for reason, count in counts)
    return f"no candidate with it fits: {reasons if len(counts) > 1 else counts[0][0].value}"


def simulated_out(outcomes: Sequence[Outcome], limits: Limits) -> list[Rejected]:
    """Return the rejections of candidates that the screening took for feasible and the simulation does not."""
    rejected = []
    for one in outcomes:
        here = limits.at(one.candidate.rented)
        reason = here.broken(one.lag_mean, one.gpu_hours, ess=one.ess)
        if reason is not None:
            rejected.append(Rejected(one.candidate.choice, reason, here.needed(reason, one.lag_mean, one.gpu_hours)))
        elif limits.lag is not None and one.lag_max > limits.lag:
            rejected.append(Rejected(one.candidate.choice, Reason.LAG, one.lag_max))
    return rejected


def why_infeasible(rejected: Sequence[Rejected], space: SearchSpace) -> str:
    """Return a line per kind of schedule: the candidates that each limit rejects, and what would let one in."""
    lines = []
    for family in dict.fromkeys(one.family for one in rejected):
        mine = [one for one in rejected if one.family == family]
        counts = Counter(one.reason for one in mine)
        parts = [
            f"{count:,} by {reason.value} ({_relaxed(reason, [one for one in mine if one.reason is reason], space)})"
            for reason, count in counts.most_common()
        ]
        lines.append(f"plan: no feasible {family} among {counts.total():,}: {'; '.join(parts)}")
    return "\n".join(lines) or "plan: there is no candidate; the lists of [plan] leave none for this cluster"


def why_none_kept(outcomes: Sequence[Outcome], space: SearchSpace, *, num_kept: int, num_left: int) -> str:
    """Return one line: what was simulated breaks a limit, how nearly it keeps it, and how many were not simulated."""
    parts = []
    broken = [
        (_limits(space, one).broken(one.lag_mean, one.gpu_hours, ess=one.ess) or Reason.LAG, one) for one in outcomes
    ]
    for reason in dict.fromkeys(reason for reason, _ in broken):
        mine = [one for other, one in broken if other is reason]
        nearest = min(mine, key=lambda one: _distance(one, reason))
        limits = _limits(space, nearest)
        needed = nearest.lag_max if reason is Reason.LAG else limits.needed(reason, nearest.lag_mean, nearest.gpu_hours)
        parts.append(f"{len(mine)} by {reason.value} (nearest: {needed:.3g}, {nearest.candidate.label})")
    return (
        f"plan: none of the {len(outcomes)} simulated keeps to the limits: {'; '.join(parts)}; they had the best odds "
        f"of the {num_kept:,} that the screening lets through; not simulated: {num_left:,}; raise plan.simulate, got "
        f"{space.plan.simulate}"
    )


def _limits(space: SearchSpace, one: Screened | Outcome) -> Limits:
    return space.limits.at(one.candidate.rented)


def _distance(outcome: Outcome, reason: Reason) -> float:
    """Return the number of a simulated run that a limit bounds, or one that grows with it."""
    match reason:
        case Reason.LAG:
            return outcome.lag_max
        case Reason.GPU_HOURS | Reason.BUDGET:
            return outcome.gpu_hours
        case _:
            return outcome.lag_mean


def _relaxed(reason: Reason, mine: Sequence[Rejected], space: SearchSpace) -> str:
    """Return what would let in one of the candidates that are rejected for a reason."""
    memory, accelerators = space.memory, space.accelerators
    needed = [one.needed for one in mine if one.needed is not None]
    match reason:
        case Reason.TWO_KINDS:
            return "a pipeline would do, with max_lag=0 as synchronous as this"
        case Reason.HEADS:
            whole = [size for size in range(1, accelerators + 1) if memory.heads_divide(size)]
            return f"tensor_parallel of {', '.join(map(str, whole))} would do"
        case Reason.ENGINE_MEMORY:
            sizes = (size for size in range(1, MOST_ACCELERATORS + 1) if memory.heads_divide(size))
            size = next((size for size in sizes if memory.engine_fits(size)), None)
            there = f", and there are {accelerators}" if size is not None and size > accelerators else ""
            return f"fits from tensor_parallel={size} on{there}" if size else "no tensor_parallel would do"
        case Reason.TRAINER_MEMORY:
            fewest = next((n for n in range(1, MOST_ACCELERATORS + 1) if memory.trainer_fits(n)), None)
            if fewest:
                colocated = schedule_of(mine[0].choice).colocated
                engine = min(one.choice[ENGINE.name] for one in mine)
                least = engine * (math.ceil(fewest / engine) + (not colocated))
                return f"fits from {fewest} training accelerators on, cluster.accelerators={least} at least"
            packs = "smaller packs or activation_checkpointing in [train.trainer] may help"
            return f"no number of accelerators would do{'' if space.config.train is None else f'; {packs}'}"
        case Reason.ROLLOUTS:
            return f"at most {MOST_ROLLOUTS:,} would do"
        case Reason.MEAN_LAG:
            return f"mean_lag_limit={min(needed):.2g} would do"
        case Reason.ESS:
            return f"min_ess={max(needed):.2g} would do"
        case Reason.LAG:
            return f"lag_limit={min(needed)} would do"
        case Reason.GPU_HOURS | Reason.BUDGET:
            return f"{reason.value}={math.ceil(min(needed)):,} would do"
        case _:
            assert_never(reason)
