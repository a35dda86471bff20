"""What limits a simulated candidate, and what more GPUs would give it within the limits of the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipelinerl.config.run import RunConfig
from pipelinerl.records.bottleneck import BALANCED_SHARE, Bottleneck
from sim.planning.axes import MAX_LAG
from sim.planning.candidates import Candidate, Screened, Screener
from sim.planning.search_space import Limits, Reason
from sim.planning.simulate import Outcome

NOTHING = 0.005
"""Gain in throughput that counts for nothing (relative): about the error that as many draws as ``plan`` makes leave."""
MORE_ENVIRONMENTS = 0.25
"""Environments that are added to those there are, to say what more give (share)."""
FEW_SEQUENCES = 4
"""Sequences per rank below which a trainer's time is decided by the longest of them (count)."""


@dataclass(frozen=True, slots=True)
class _Grown:
    """A candidate with more GPUs."""

    generating: int
    """Those of the new ones that generate (count)."""
    slots: int
    """Its H."""
    gain: float
    """Its throughput over that with the GPUs there are, less 1, by the screening."""
    screened: Screened


def verdict(outcome: Outcome, screener: Screener, limits: Limits) -> str:
    """Return one line: the bottleneck in the simulation, and the gain from more GPUs by the screening."""
    return f"{bottleneck(outcome, screener)}; {_more_gpus(outcome, screener, limits)}"


def unit_of(config: RunConfig) -> int:
    """Return the number of GPUs that 'more GPUs' adds: a node of 8 in whole engines, or an engine if few are there."""
    engine = config.cluster.tensor_parallel
    return engine * math.ceil(8 / engine) if config.cluster.accelerators >= 32 else engine


def bottleneck(outcome: Outcome, screener: Screener) -> str:
    """Return what limits a candidate in its simulation, in words."""
    candidate, waits = outcome.candidate, f"the trainer waits {outcome.waiting:.0%} of the time"
    if candidate.config.colocated:
        return f"colocated: generation and switches take {outcome.waiting:.0%} of the time"
    if outcome.bottleneck is Bottleneck.REWARD:
        return (
            f"reward-bound: {waits}, slots stay free while rollouts are scored; a larger scheduler.ready_queue_size "
            "would fill them"
        )
    if outcome.bottleneck is Bottleneck.ENVIRONMENT:
        assert candidate.config.environment is not None  # else it has none
        there = candidate.config.environment.count
        more = math.ceil(MORE_ENVIRONMENTS * there)
        grown = screener.screen(_changed(candidate, environments=there + more)).tokens_per_s
        gain = grown / screener.screen(candidate).tokens_per_s - 1
        given = "would do harm:" if gain < 0 else "give"  # where the KV caches of more rollouts do not fit
        return f"environment-bound: {waits}, all {there} environments are in use; {more} more {given} {gain:+.0%}"
    if outcome.bottleneck in (Bottleneck.GENERATION, Bottleneck.PREFILL, Bottleneck.LAG):
        freer = _without_bound(candidate, screener)
        if outcome.bottleneck is Bottleneck.LAG or freer > max(_more_engines(candidate, screener), BALANCED_SHARE):
            max_lag = candidate.config.scheduler.max_lag
            return (
                f"lag-bound: max_lag={max_lag} makes the trainer wait {outcome.waiting:.0%} of the time; without a "
                f"bound {freer:+.0%}"
            )
        if outcome.bottleneck is Bottleneck.PREFILL:
            return f"prefill-bound: {waits}, engines spend more time on prefill than on decoding"
        return f"generation-bound: {waits}"
    if outcome.bottleneck is Bottleneck.TRAINING:
        estimate = screener.screen(candidate).estimate
        return f"training-bound: generation could give {estimate.step_s / estimate.generation_s - 1:.0%} more, {waits}"
    return f"balanced: {waits}"


def _without_bound(candidate: Candidate, screener: Screener) -> float:
    """Return the screened gain in throughput without a bound on the lag; 0 if there is none."""
    if candidate.config.scheduler.max_lag is None or not MAX_LAG.applies_to(candidate.schedule):
        return 0.0
    free = screener.screen(_changed(candidate, max_lag=None))
    return free.tokens_per_s / screener.screen(candidate).tokens_per_s - 1


def _more_engines(candidate: Candidate, screener: Screener) -> float:
    """Return the screened gain in throughput if more GPUs generate, whatever the limits."""
    more = unit_of(candidate.config)
    grown = screener.screen(_changed(candidate, more=more, generating=more))
    return grown.tokens_per_s / screener.screen(candidate).tokens_per_s - 1


def _more_gpus(outcome: Outcome, screener: Screener, limits: Limits) -> str:
    """Return what more GPUs give on whichever side they give most, and which limit stops them from giving more."""
    more = unit_of(outcome.candidate.config)
    best, free = _best(outcome, screener, more, limits), _best(outcome, screener, more, None)
    assert free is not None
    bought = more - outcome.candidate.idle  # whole engines take the idle ones too
    given = f"{bought} more GPU{'s give' if bought > 1 else ' gives'}"
    limit = _broken(outcome, free.screened, screener, limits)
    if limit is None and free.gain <= NOTHING:
        return f"{given} nothing: {_what_stays(free, screener)}"
    if limit is None:
        return f"{given} {_in_words(free, outcome, more)}"
    reason = limit.value
    if limits.at(outcome.candidate.rented).broken(outcome.lag_mean, outcome.gpu_hours, ess=outcome.ess) is not None:
        return f"{given} {_in_words(free, outcome, more)}, and {reason} stays broken"
    if best is None or best.gain <= NOTHING:
        return f"{given} nothing within {reason} ({free.gain:+.0%} without it)"
    stopped = f" ({free.gain:+.0%} without it)" if free.gain > best.gain + NOTHING else ""
    return f"{given} {_in_words(best, outcome, more)}, within {reason}{stopped}"


def _in_words(grown: _Grown, outcome: Outcome, more: int) -> str:
    config = outcome.candidate.config
    slots = f" with H={grown.slots}" if grown.slots != config.scheduler.generation_batch_size else ""
    if config.colocated:
        return f"{grown.gain:+.0%}{slots}"
    sides = {0: "all to train", more: "all to generate"}
    return f"{grown.gain:+.0%}{slots}, {sides.get(grown.generating, f'{grown.generating} of them to generate')}"


def _what_stays(grown: _Grown, screener: Screener) -> str:
    """Return why more GPUs give nothing."""
    config, estimate = grown.screened.candidate.config, grown.screened.estimate
    if config.colocated:
        sequences, slots = config.rl_step_rollouts, config.scheduler.generation_batch_size
        each = sequences / config.num_engines
        few = f"the {sequences} sequences of an RL step are {each:.3g} for each engine with {slots} slots, "
        return (
            f"{few if each < slots else ''}the longest answers and the switches take {estimate.generation_s:.3g} s of "
            f"a step of {estimate.step_s:.3g} s with them too"
        )
    if estimate.generation_s > estimate.training_s + estimate.publishing_s:
        lag, free = config.scheduler.max_lag, _without_bound(grown.screened.candidate, screener)
        bound = f", as max_lag={lag} keeps slots free ({free:+.0%} without a bound)" if free > NOTHING else ""
        return f"generation takes {estimate.generation_s:.3g} s per step with them too{bound}"
    return (
        f"training takes {estimate.training_s:.3g} s{_why_training_stays(config, estimate.training_s, screener)} and "
        f"publishing {estimate.publishing_s:.3g} s per step with them too"
    )


def _why_training_stays(config: RunConfig, training_s: float, screener: Screener) -> str:
    """Return why a trainer of more GPUs is not faster, if that is known: fixed costs, or too few sequences."""
    training, scheduler = screener.resolved(config).training, config.scheduler
    fixed_s = training.step_s + training.micro_batch_s * scheduler.train_batch_size / scheduler.micro_batch
    if fixed_s > training_s / 2:
        return f" ({fixed_s:.3g} s of it whatever the number of GPUs)"
    if training.sequence_accelerators is None:
        return ""
    each = scheduler.train_batch_size * training.sequence_accelerators / config.training_accelerators
    return f" (B={scheduler.train_batch_size} is {each:.2g} sequences for each rank)" if each < FEW_SEQUENCES else ""


def _best(outcome: Outcome, screener: Screener, more: int, limits: Limits | None) -> _Grown | None:
    """Return the best way to use more GPUs; None if none keeps to the limits.

    Of each part that generates, H is the run's, or the largest below it with which the limits are kept.
    """
    candidate = outcome.candidate
    config = candidate.config
    now, own = screener.screen(candidate).tokens_per_s, config.scheduler.generation_batch_size
    sizes = range(own, 0, -math.ceil(own / 16))
    parts = [0] if config.colocated else range(0, more + 1, config.cluster.tensor_parallel)
    found = []
    for part in parts:
        for slots in sizes:
            grown = screener.screen(_changed(candidate, more=more, generating=part, slots=slots))
            if limits is None or _broken(outcome, grown, screener, limits) is None:
                found.append(_Grown(part, slots, grown.tokens_per_s / now - 1, grown))
                break
    return max(found, key=lambda one: one.gain, default=None)


def _broken(outcome: Outcome, grown: Screened, screener: Screener, limits: Limits) -> Reason | None:
    """Return the limit broken with more GPUs, the screening corrected by the simulation without them."""
    here = screener.screen(outcome.candidate)
    lag = here.estimate.lag_mean
    ratio = outcome.lag_mean / lag if lag > 0 else 1.0
    hours = grown.gpu_hours * outcome.gpu_hours / here.gpu_hours
    return limits.at(grown.candidate.rented).broken(grown.estimate.lag_mean * ratio, hours)


def _changed(
    candidate: Candidate,
    *,
    more: int = 0,
    generating: int = 0,
    slots: int | None = None,
    max_lag: int | None = -1,
    environments: int | None = None,
) -> Candidate:
    """Return a candidate with more GPUs, another H, another bound on the lag (-1: its own), or more environments."""
    cluster, scheduler = candidate.config.cluster, candidate.config.scheduler
    own = cluster.generation_accelerators
    added = {
        "accelerators": cluster.accelerators + more,
        "generation_accelerators": None if own is None else own + generating,
    }
    settings = {
        "generation_batch_size": slots or scheduler.generation_batch_size,
        "max_lag": scheduler.max_lag if max_lag == -1 else max_lag,
    }
    tables = {"cluster": cluster.model_copy(update=added), "scheduler": scheduler.model_copy(update=settings)}
    if environments is not None and candidate.config.environment is not None:
        tables["environment"] = candidate.config.environment.model_copy(update={"count": environments})
    idle = 0 if more else candidate.idle  # more of them make whole engines
    return replace(candidate, config=candidate.config.model_copy(update=tables), idle=idle)
