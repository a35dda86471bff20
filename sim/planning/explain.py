"""Why a plan is as it is: its bottleneck, what more GPUs would give, and which coefficient decides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from pipelinerl.config.resolve import stated_coefficients
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import Level, coefficient_table
from pipelinerl.records.ledger import BALANCED_SHARE
from pipelinerl.theory.steady_state import LengthStatistics
from sim.planning.candidates import Candidate, Screened, Screener, way
from sim.planning.search_space import Limits, Space


class Simulated(Protocol):
    """What a verdict reads of a simulation."""

    @property
    def candidate(self) -> Candidate:
        """What was simulated."""

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""

    @property
    def lag_mean(self) -> float:
        """Mean lag (optimizer steps)."""

    @property
    def waiting(self) -> float:
        """Share of the time in which the trainer neither trains nor publishes."""


def bottleneck(outcome: Simulated, screener: Screener) -> str:
    """Return one line: what holds a run up, from its simulation, and what more GPUs would give, from the screening."""
    candidate, waiting = outcome.candidate, outcome.waiting
    more = unit_of(candidate.config)
    if candidate.config.colocated:
        gain = _gain(candidate, screener, accelerators=more)
        return f"colocated: generation and switches take {waiting:.0%} of the time; {_gpus(more)} {gain:+.0%}"
    generation = _gain(candidate, screener, accelerators=more, generation_accelerators=more)
    training = _gain(candidate, screener, accelerators=more)
    max_lag = candidate.config.scheduler.max_lag
    if waiting > BALANCED_SHARE:
        bounded = "max_lag" in candidate.schedule.axes and max_lag is not None
        freer = _gain(candidate, screener, max_lag=None) if bounded else 0.0
        if freer > max(generation, BALANCED_SHARE):
            return (
                f"lag-bound: max_lag={max_lag} makes the trainer wait {waiting:.0%} of the time; without a bound "
                f"{freer:+.0%}; {_gpus(more, 'generation ')} {generation:+.0%}"
            )
        return (
            f"generation-bound: the trainer waits {waiting:.0%} of the time; {_gpus(more, 'generation ')} "
            f"{generation:+.0%}"
        )
    estimate = screener.screen(candidate).estimate
    if estimate.idle_share > BALANCED_SHARE:
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
    """Return how many GPUs 'more' means: a node of 8 in whole engines, or an engine of a small cluster."""
    engine = config.cluster.tensor_parallel
    return engine * math.ceil(8 / engine) if config.cluster.accelerators >= 32 else engine


def _gpus(more: int, kind: str = "") -> str:
    return f"{more} more {kind}GPU{'s give' if more > 1 else ' gives'}"


def why_it_lost(loser: Simulated, winner: Simulated, screener: Screener, *, tie: float) -> str:
    """Return one line: how much slower, and what held it up; or, where it was as fast, its lag."""
    slower = 1 - loser.tokens_per_s / winner.tokens_per_s
    lags = f"its mean lag is {loser.lag_mean:.1f} instead of {winner.lag_mean:.1f}"
    if slower <= tie:
        return f"as fast within {tie:.0%}, but {lags}"
    return f"{slower:.0%} slower, {lags}; {bottleneck(loser, screener)}"


def sensitivity(
    space: Space, recommended: Candidate, pool: Sequence[Candidate], factors: Mapping[str, float], *, least: float
) -> list[dict[str, Any]]:
    """Return what each coefficient, moved alone to its optimistic or pessimistic value, changes.

    The screening answers, each candidate corrected by what its simulation gave (by the mean of all, if it has none).

    Args:
        space: The run file and its limits.
        recommended: What is recommended with all coefficients as they are.
        pool: What else could be.
        factors: Simulated over screened throughput, by label.
        least: Relative difference in throughput that makes another decision.

    Returns:
        A row per coefficient that has different values and changes anything, the largest effect first: throughput of
        the recommendation over what it is as things are, and what would be recommended instead, if anything else
        is faster by more than ``least``.
    """
    config, answers, limits = space.config, space.answers, space.limits
    if not config.hardware.by_name:
        return []
    usual = sum(factors.values()) / len(factors)

    def rate(screened: Screened) -> float:
        return screened.tokens_per_s * factors.get(screened.candidate.label, usual)

    def moved(changed: Mapping[str, float]) -> tuple[float, str | None]:
        """Return the rate of the recommendation, and what is faster and differs from it, if anything."""
        screener = Screener(config, answers, {"coefficients": {**config.hardware.coefficients, **changed}})
        here = screener.screen(recommended)
        left = [one for one in _screened(pool, screener) if _keeps(one, limits)]
        best = max(left, key=rate, default=here)
        differs = way(best.candidate) != way(recommended) and rate(best) > (1 + least) * rate(here)
        return rate(here), best.candidate.label if differs else None

    base, already = moved({})  # what was not simulated may look faster as things are: no coefficient makes that so
    stated = stated_coefficients(config)
    rows = []
    for name, entry in coefficient_table().items():
        if name in stated:
            continue  # known: it has no other value
        effects: dict[str, Any] = {}
        for level in (Level.OPTIMISTIC, Level.PESSIMISTIC):
            if entry[level.value] != entry[config.hardware.level.value]:
                now, instead = moved({name: entry[level.value]})
                changes = instead if instead != already else None
                effects[level.value] = {"value": entry[level.value], "throughput": now / base, "instead": changes}
        if any(abs(one["throughput"] - 1) >= 5e-4 or one["instead"] for one in effects.values()):
            rows.append((max(abs(one["throughput"] - 1) for one in effects.values()), {"coefficient": name, **effects}))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _screened(pool: Sequence[Candidate], screener: Screener) -> Iterator[Screened]:
    """Yield the steady states of those whose model fits."""
    for candidate in pool:
        with suppress(ConfigError):
            yield screener.screen(candidate)


def _keeps(screened: Screened, limits: Limits) -> bool:
    hours = screened.candidate.gpu_hours(screened.seconds)
    return limits.broken(screened.estimate.lag_mean, hours) is None


def split_curve(config: RunConfig, answers: LengthStatistics, recommended: Candidate) -> dict[str, list[float]]:
    """Return the screened throughput of the recommendation at every split and level, or nothing if it is colocated."""
    if recommended.config.colocated:
        return {}
    cluster = recommended.config.cluster
    unit = cluster.tensor_parallel
    step = unit * max(1, cluster.accelerators // unit // 64)
    splits = range(step, cluster.accelerators, step)
    curve: dict[str, list[float]] = {"generation_accelerators": [float(split) for split in splits]}
    levels = list(Level) if config.hardware.by_name else [config.hardware.level]
    for level in levels:
        screener = Screener(config, answers, {"level": level})
        curve[level.value] = [
            screener.screen(_with(recommended, generation_accelerators=split)).tokens_per_s for split in splits
        ]
    return curve


def _with(candidate: Candidate, *, generation_accelerators: int) -> Candidate:
    cluster = candidate.config.cluster.model_copy(update={"generation_accelerators": generation_accelerators})
    return Candidate(candidate.family, candidate.config.model_copy(update={"cluster": cluster}), candidate.label)


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
    more = screener.screen(Candidate(candidate.family, changed, candidate.label))
    return more.tokens_per_s / screener.screen(candidate).tokens_per_s - 1
