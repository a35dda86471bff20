"""Explanations of a plan: bottlenecks, the effect of more GPUs and of each coefficient, and what was left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, assert_never

from pipelinerl.config.resolve import stated_coefficients
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import Level, coefficient_table
from pipelinerl.records.bottleneck import BALANCED_SHARE, Bottleneck
from pipelinerl.records.plan_report import CoefficientEffect, CoefficientEffects, NotTried, SplitCurve
from sim.planning.axes import MAX_LAG, Axis, Choice, ignored_axes, listed_axes, schedule_of, values_of
from sim.planning.candidates import Candidate, Rejected, Screened, Screener
from sim.planning.search_space import Reason, SearchSpace
from sim.planning.simulate import Outcome

MOST_ACCELERATORS = 4096
"""Accelerators up to which a size that fits is looked for (count)."""


def bottleneck(outcome: Outcome, screener: Screener) -> str:
    """Return one line: the bottleneck in the simulation, and the gain from more GPUs by the screening."""
    candidate, waiting = outcome.candidate, outcome.waiting
    more = unit_of(candidate.config)
    if candidate.config.colocated:
        gain = _gain(candidate, screener, accelerators=more)
        return f"colocated: generation and switches take {waiting:.0%} of the time; {_gpus(more)} {gain:+.0%}"
    generation = _gain(candidate, screener, accelerators=more, generation_accelerators=more)
    training = _gain(candidate, screener, accelerators=more)
    max_lag = candidate.config.scheduler.max_lag
    if outcome.bottleneck is Bottleneck.REWARD:
        return (
            f"reward-bound: the trainer waits {waiting:.0%} of the time, slots stay free while rollouts are scored; "
            "a larger scheduler.ready_queue_size would fill them"
        )
    if outcome.bottleneck in (Bottleneck.GENERATION, Bottleneck.LAG):
        bounded = max_lag is not None and MAX_LAG.applies_to(candidate.schedule)
        freer = _gain(candidate, screener, max_lag=None) if bounded else 0.0
        if outcome.bottleneck is Bottleneck.LAG or freer > max(generation, BALANCED_SHARE):
            return (
                f"lag-bound: max_lag={max_lag} makes the trainer wait {waiting:.0%} of the time; without a bound "
                f"{freer:+.0%}; {_gpus(more, 'generation ')} {generation:+.0%}"
            )
        return (
            f"generation-bound: the trainer waits {waiting:.0%} of the time; {_gpus(more, 'generation ')} "
            f"{generation:+.0%}"
        )
    if outcome.bottleneck is Bottleneck.TRAINING:
        estimate = screener.screen(candidate).estimate
        spare = estimate.step_s / estimate.generation_s - 1
        return (
            f"training-bound: generation could give {spare:.0%} more, the trainer waits {waiting:.0%} of the time; "
            f"{_gpus(more, 'training ')} {training:+.0%}"
        )
    engine = candidate.config.cluster.tensor_parallel
    best, generating = max(
        (_gain(candidate, screener, accelerators=more, generation_accelerators=part), part)
        for part in range(0, more + 1, engine)
    )
    return (
        f"balanced: the trainer waits {waiting:.0%} of the time; {_gpus(more)} {best:+.0%}, "
        f"{generating} of them to generate"
    )


def unit_of(config: RunConfig) -> int:
    """Return the number of GPUs that 'more GPUs' adds: a node of 8 in whole engines, or an engine if few are there."""
    engine = config.cluster.tensor_parallel
    return engine * math.ceil(8 / engine) if config.cluster.accelerators >= 32 else engine


def _gpus(more: int, kind: str = "") -> str:
    return f"{more} more {kind}GPU{'s give' if more > 1 else ' gives'}"


def why_it_lost(loser: Outcome, winner: Outcome, screener: Screener, *, tie: float) -> str:
    """Return one line: its loss in throughput and its bottleneck; or, where it was as fast, its lag."""
    slower = 1 - loser.tokens_per_s / winner.tokens_per_s
    lags = f"its mean lag is {loser.lag_mean:.1f} instead of {winner.lag_mean:.1f}"
    if slower <= tie:
        return f"as fast within {tie:.0%}, but {lags}"
    return f"{slower:.0%} slower, {lags}; {bottleneck(loser, screener)}"


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
        left = [one for one in screened if space.limits.broken(one.estimate.lag_mean, one.gpu_hours) is None]
        best = max(left, key=rate, default=here)
        differs = best.candidate.way != recommended.way and rate(best) > (1 + least) * rate(here)
        return rate(here), best.candidate.label if differs else None

    base, already = moved({})  # a candidate not simulated may look faster as things are: no coefficient makes that so
    stated = stated_coefficients(config)
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


def _gain(candidate: Candidate, screener: Screener, **changes: int | None) -> float:
    """Return the screened gain in throughput of more accelerators, or of another ``max_lag``."""
    config = candidate.config
    cluster, scheduler = config.cluster, config.scheduler
    if "max_lag" in changes:
        scheduler = scheduler.model_copy(update={"max_lag": changes["max_lag"]})
    added: dict[str, Any] = {
        name: (getattr(cluster, name) or 0) + (changes[name] or 0)
        for name in ("accelerators", "generation_accelerators")
        if name in changes
    }
    changed = config.model_copy(update={"cluster": cluster.model_copy(update=added), "scheduler": scheduler})
    more = screener.screen(replace(candidate, config=changed))
    return more.tokens_per_s / screener.screen(candidate).tokens_per_s - 1


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


def _relaxed(reason: Reason, mine: Sequence[Rejected], space: SearchSpace) -> str:
    """Return what would let in one of the candidates that are rejected for a reason."""
    memory, accelerators = space.memory, space.accelerators
    needed = [one.needed for one in mine if one.needed is not None]
    match reason:
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
                return f"fits from {fewest} training accelerators on"
            packs = "smaller packs or activation_checkpointing in [train.trainer] may help"
            return f"no number of accelerators would do{'' if space.config.train is None else f'; {packs}'}"
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
