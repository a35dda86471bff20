"""Explanations of a plan: bottleneck, more GPUs, synchronous against asynchronous RL, values left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, assert_never

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import DecodeStep, ResolvedHardware, loading_s, training_cost
from pipelinerl.records.plan_report import NotTried, ScreenedColumns
from pipelinerl.records.reports import Bottleneck
from pipelinerl.records.step_ledger import BALANCED_SHARE
from pipelinerl.scheduler.kinds import CONVENTIONAL
from pipelinerl.theory.lengths import LengthStatistics
from pipelinerl.util.strict_model import MOST_ROLLOUTS
from sim.planning.choose import TIE, Rank
from sim.planning.screen import Candidate, Rejected, Screened, Screener, within_limits
from sim.planning.simulate import Outcome
from sim.planning.space import (
    ENGINE,
    MAX_LAG,
    SHARED_BY,
    Axis,
    Choice,
    Limits,
    Reason,
    SearchSpace,
    listed_axes,
    schedule_of,
    unused_values,
    values_of,
    with_values,
)

# ------------------------------------------------------------------------ the bottleneck, and the gain from more GPUs

NOTHING = 0.005
"""Relative gain in throughput that counts for nothing: about the error of as many draws as ``plan`` makes."""
MORE_ENVIRONMENTS = 0.25
"""Environments added to find the gain of more (share of the present number)."""
FEW_SEQUENCES = 4
"""Sequences per rank below which a trainer's time is decided by the longest of them (count)."""


def verdict(outcome: Outcome, screener: Screener, limits: Limits) -> str:
    """Return one line: the bottleneck in the simulation, and the gain from more GPUs by the screening."""
    return f"{bottleneck(outcome, screener)}; {_more_gpus(outcome, screener, limits)}"


def unit_of(config: RunConfig) -> int:
    """Return the number of GPUs that 'more GPUs' adds: a node of 8 in whole engines, or one engine below 32 GPUs."""
    engine = config.cluster.tensor_parallel
    return engine * math.ceil(8 / engine) if config.cluster.accelerators >= 32 else engine


def bottleneck(outcome: Outcome, screener: Screener) -> str:
    """Return the limit of a candidate's throughput in its simulation, in words."""
    candidate, waits = outcome.candidate, f"the trainer waits {outcome.waiting:.0%} of the time"
    if candidate.config.colocated:
        return f"colocated: generation and switches take {outcome.waiting:.0%} of the time"
    if outcome.bottleneck is Bottleneck.REWARD:
        workers = candidate.config.hardware.latency.reward_workers
        remedy = (
            "a larger scheduler.ready_queue_size would fill them" if workers is None else "more reward_workers help"
        )
        return f"reward-bound: {waits}, slots stay free while rollouts are scored; {remedy}"
    if outcome.bottleneck is Bottleneck.ENVIRONMENT:
        assert candidate.config.environment is not None  # else it has none
        there = candidate.config.environment.count
        more = math.ceil(MORE_ENVIRONMENTS * there)
        gain = _gain(candidate, candidate.changed(environment={"count": there + more}), screener)
        given = "would do harm:" if gain < 0 else "give"  # where the KV caches of more rollouts do not fit
        return f"environment-bound: {waits}, all {there} environments are in use; {more} more {given} {gain:+z.0%}"
    if outcome.bottleneck in (Bottleneck.GENERATION, Bottleneck.PREFILL, Bottleneck.LAG):
        freer, more = _without_bound(candidate, screener), unit_of(candidate.config)
        engines = _gain(candidate, _grown(candidate, more, generating=more), screener)
        if outcome.bottleneck is Bottleneck.LAG or freer > max(engines, BALANCED_SHARE):
            max_lag = candidate.config.scheduler.max_lag
            return (
                f"lag-bound: max_lag={max_lag} makes the trainer wait {outcome.waiting:.0%} of the time; without a "
                f"bound {freer:+z.0%}"
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
    return _gain(candidate, candidate.changed(scheduler={"max_lag": None}), screener)


def _gain(candidate: Candidate, other: Candidate, screener: Screener) -> float:
    """Return the screened gain in throughput with another candidate, whatever the limits."""
    return screener.screen(other).tokens_per_s / screener.screen(candidate).tokens_per_s - 1


def _more_gpus(outcome: Outcome, screener: Screener, limits: Limits) -> str:
    """Return the gain of more GPUs on the side where they give most, and the limit that stops them from giving more."""
    candidate, more = outcome.candidate, unit_of(outcome.candidate.config)
    best, free = _best(outcome, screener, more, limits), _best(outcome, screener, more, None)
    assert free is not None
    gain, free_gain = (0.0 if one is None else _gain(candidate, one.candidate, screener) for one in (best, free))
    bought = more - candidate.idle  # whole engines take the idle ones too
    given = f"{bought} more GPU{'s give' if bought > 1 else ' gives'}"
    limit = _broken(outcome, free, screener, limits)
    if limit is None:
        if free_gain <= NOTHING:
            return f"{given} nothing: {_why_no_gain(free, screener)}"
        return f"{given} {free_gain:+z.0%}{_where(free.candidate, candidate, more)}"
    if outcome.breaks(limits) is not None:
        return f"{given} {free_gain:+z.0%}{_where(free.candidate, candidate, more)}, and {limit.value} stays broken"
    if best is None or gain <= NOTHING:
        return f"{given} nothing within {limit.value} ({free_gain:+z.0%} without it)"
    stopped = f" ({free_gain:+z.0%} without it)" if free_gain > gain + NOTHING else ""
    return f"{given} {gain:+z.0%}{_where(best.candidate, candidate, more)}, within {limit.value}{stopped}"


def _where(grown: Candidate, candidate: Candidate, more: int) -> str:
    """Return another H, and the side that takes the new GPUs, in words."""
    slots, own = grown.config.scheduler.generation_batch_size, candidate.config.scheduler.generation_batch_size
    words = f" with H={slots}" if slots != own else ""
    if grown.config.colocated:
        return words
    generating = grown.config.generation_accelerators - candidate.config.generation_accelerators
    sides = {0: "all to train", more: "all to generate"}
    return f"{words}, {sides.get(generating, f'{generating} of them to generate')}"


def _why_no_gain(grown: Screened, screener: Screener) -> str:
    """Return the reason why more GPUs give nothing."""
    config, estimate = grown.candidate.config, grown.estimate
    if config.colocated:
        sequences, slots = config.rl_step_rollouts, config.scheduler.generation_batch_size
        each = sequences / config.num_engines
        few = f"the {sequences} sequences of an RL step are {each:.3g} for each engine with {slots} slots, "
        return (
            f"{few if each < slots else ''}the longest answers and the switches take {estimate.generation_s:.3g} s of "
            f"a step of {estimate.step_s:.3g} s with them too"
        )
    if estimate.generation_s > estimate.training_s + estimate.publishing_s:
        lag, free = config.scheduler.max_lag, _without_bound(grown.candidate, screener)
        bound = f", as max_lag={lag} keeps slots free ({free:+z.0%} without a bound)" if free > NOTHING else ""
        return f"generation takes {estimate.generation_s:.3g} s per step with them too{bound}"
    return (
        f"training takes {estimate.training_s:.3g} s{_why_training_stays(config, estimate.training_s, screener)} and "
        f"publishing {estimate.publishing_s:.3g} s per step with them too"
    )


def _why_training_stays(config: RunConfig, training_s: float, screener: Screener) -> str:
    """Return why a trainer of more GPUs is not faster, if known: fixed costs, or too few sequences."""
    training, scheduler = screener.resolved(config).training, config.scheduler
    fixed_s = training.step_s + training.micro_batch_s * scheduler.train_batch_size / scheduler.micro_batch
    if fixed_s > training_s / 2:
        return f" ({fixed_s:.3g} s of it whatever the number of GPUs)"
    if training.sequence_accelerators is None:
        return ""
    each = scheduler.train_batch_size * training.sequence_accelerators / config.training_accelerators
    return f" (B={scheduler.train_batch_size} is {each:.2g} sequences for each rank)" if each < FEW_SEQUENCES else ""


def _best(outcome: Outcome, screener: Screener, more: int, limits: Limits | None) -> Screened | None:
    """Return the best way to use more GPUs; None if none keeps to the limits.

    Of each part that generates, H is the run's, or the largest below it with which the limits are kept.
    """
    config, own = outcome.candidate.config, outcome.candidate.config.scheduler.generation_batch_size
    parts = [0] if config.colocated else range(0, more + 1, config.cluster.tensor_parallel)
    found = []
    for part in parts:
        for slots in range(own, 0, -math.ceil(own / 16)):
            grown = screener.screen(_grown(outcome.candidate, more, generating=part, slots=slots))
            if limits is None or _broken(outcome, grown, screener, limits) is None:
                found.append(grown)
                break
    return max(found, key=lambda one: one.tokens_per_s, default=None)


def _broken(outcome: Outcome, grown: Screened, screener: Screener, limits: Limits) -> Reason | None:
    """Return the limit broken with more GPUs, the screening corrected by the simulation without them."""
    here = screener.screen(outcome.candidate)
    lag = here.estimate.lag_mean
    ratio = outcome.lag_mean / lag if lag > 0 else 1.0
    hours = grown.gpu_hours * outcome.gpu_hours / here.gpu_hours
    return limits.at(grown.candidate.rented).broken(grown.estimate.lag_mean * ratio, hours)


def _grown(candidate: Candidate, more: int, *, generating: int, slots: int | None = None) -> Candidate:
    """Return a candidate with more GPUs, some of which generate, and another H."""
    cluster, own = candidate.config.cluster, candidate.config.scheduler.generation_batch_size
    accelerators = {"accelerators": cluster.accelerators + more}
    if cluster.generation_accelerators is not None:
        accelerators["generation_accelerators"] = cluster.generation_accelerators + generating
    grown = candidate.changed(cluster=accelerators, scheduler={"generation_batch_size": slots or own})
    return replace(grown, idle=0)  # the new GPUs make whole engines of the idle ones


MOST_ACCELERATORS = 4096
"""Accelerators up to which a size that fits is looked for (count)."""


def screened_columns(kept: Sequence[Screened]) -> ScreenedColumns:
    """Return the candidates that the screening kept, a column per number."""
    return ScreenedColumns(
        label=[one.candidate.label for one in kept],
        family=[one.candidate.family for one in kept],
        tokens_per_s=[float(f"{one.tokens_per_s:.4g}") for one in kept],
        lag_mean=[float(f"{one.estimate.lag_mean:.4g}") for one in kept],
        lag_max=[int(one.estimate.lag_max) for one in kept],
    )


# ------------------------------------------------------------------------------------------- seconds by stage

DECODE, TRAIN, LOG_PROBABILITIES = "decode step", "training", "log-probabilities"
UPDATE, PAUSE, SWITCH = "weight update", "pause of an engine", "phase switch"
"""Stages of a run, in seconds."""


def step_times(config: RunConfig, answers: LengthStatistics, hardware: ResolvedHardware) -> tuple[float, float]:
    """Return the seconds of a token of each sequence with full slots, and of the training of an optimizer step."""
    size, batch = config.cluster.tensor_parallel, config.scheduler.generation_batch_size
    speculation = config.speculation_law
    step = DecodeStep(hardware.decode, tensor_parallel=size, most=batch, speculation=speculation)
    train_s = answers.training_s(
        training_cost(hardware.training, training_accelerators=config.training_accelerators),
        sequences=config.scheduler.train_batch_size,
        micro_batch=config.scheduler.micro_batch,
    )
    return step.of(batch, batch * answers.context), train_s


def stages_of(space: SearchSpace, candidate: Candidate, screener: Screener) -> dict[str, float]:
    """Return the seconds that are charged for a candidate, by stage, at central values.

    A decode step of full slots, over its tokens per sequence; training and log-probabilities of an optimizer step; a
    weight update until engines have it, and their pause; both phase switches of an RL step.
    """
    config, answers = candidate.config, space.answers
    hardware = screener.resolved(config)
    weights, switch = hardware.weights, hardware.switch
    decode_s, train_s = step_times(config, answers, hardware)
    passes_s = 0.0
    if config.hardware.by_name and config.hardware.training is None:
        passed = {**config.hardware.coefficients, "extra_forward_passes": 0.0}
        without = with_values(config, hardware={"coefficients": passed})
        passes_s = train_s - step_times(config, answers, resolved_hardware(without))[1]
    stages = {DECODE: decode_s, TRAIN: train_s - passes_s, LOG_PROBABILITIES: passes_s, UPDATE: loading_s(weights)}
    if candidate.schedule.colocated:
        return {**stages, SWITCH: switch.to_training_s + switch.to_generation_s}
    return {**stages, PAUSE: weights.pause_s}


# ------------------------------------------------------------------------- synchronous against asynchronous RL


def synchronous_is_faster(
    best: Sequence[Outcome], space: SearchSpace, screener: Screener, rank: Rank, *, ranked: str
) -> str | None:
    """Return a warning if asynchronous RL is slower on these GPUs than synchronous RL, by more than a tie.

    ``best`` has the best outcome within the limits of each kind of schedule. Without a synchronous one the screening
    decides. ``ranked`` has the rank in words.
    """

    def fastest(*, colocated: bool) -> Outcome | None:
        some = [one for one in best if one.candidate.schedule.colocated is colocated]
        return max(some, key=rank, default=None)

    apart, together = fastest(colocated=False), fastest(colocated=True)
    if apart is None:
        return None
    split = apart.candidate.config
    sides = f"{split.generation_accelerators} of {space.accelerators} GPUs to generate and the others to train"
    if together is not None:
        slower = 1 - rank(apart) / rank(together)
        if slower <= TIE:
            return None
        return (
            f"asynchronous RL is slower here {ranked}: {sides} gives {slower:.0%} less than all of them for both in "
            f"turn ({apart.candidate.label} against {together.candidate.label}); {bottleneck(apart, screener)}"
        )
    other = screened_synchronous(space, screener)
    if other is None:
        return None
    faster = other.tokens_per_s / screener.screen(apart.candidate).tokens_per_s - 1
    if faster <= TIE:
        return None
    return (
        f"asynchronous RL may be slower here: by the screening {other.candidate.label} is {faster:.0%} faster than "
        f"{apart.candidate.label}; simulate it: add '{CONVENTIONAL.name}' to plan.schedulers"
    )


def screened_synchronous(space: SearchSpace, screener: Screener) -> Screened | None:
    """Return the fastest conventional candidate within the limits by the screening."""
    plan = space.plan.model_copy(update={"schedulers": [CONVENTIONAL.name]})
    return next(iter(within_limits(replace(space, plan=plan), screener)), None)


# ------------------------------------------------------------------------------------------- values left out


def not_tried(
    space: SearchSpace, choices: Sequence[Choice], kept: Sequence[Screened], rejected: Sequence[Rejected]
) -> list[NotTried]:
    """Return the listed values that are in none of the candidates that the screening kept, each with the reason."""
    rows = []
    for axis, value in unused_values(space, [one.candidate.choice for one in kept]):
        tried = value in values_of(axis, choices)
        rows.append(_row(axis, value, _rejections(axis, value, rejected) if tried else axis.unused_because(space)))
    untried = listed_axes(space, tried=False)
    return rows + [_row(axis, values, "none of plan.schedulers has it") for axis, values in untried]


def _row(axis: Axis, value: Any, why: str) -> NotTried:
    return NotTried(key=f"plan.{axis.name}", value=value, why=why)


def _rejections(axis: Axis, value: Any, rejected: Sequence[Rejected]) -> str:
    mine = [one for one in rejected if axis.applies_to(schedule_of(one.choice)) and one.choice[axis.name] == value]
    counts = Counter(one.reason for one in mine).most_common()
    reasons = "; ".join(f"{count:,} {reason.value}" for reason, count in counts)
    return f"no candidate with it fits: {reasons if len(counts) > 1 else counts[0][0].value}"


def why_infeasible(rejected: Sequence[Rejected], space: SearchSpace) -> list[str]:
    """Return a line per kind of schedule: the candidates that each limit rejects, and the change that lets one in."""
    lines = []
    for family in dict.fromkeys(one.family for one in rejected):
        mine = [one for one in rejected if one.family == family]
        counts = Counter(one.reason for one in mine)
        parts = [
            f"{count:,} by {reason.value} ({_relaxed(reason, [one for one in mine if one.reason is reason], space)})"
            for reason, count in counts.most_common()
        ]
        lines.append(f"plan: no feasible {family} among {counts.total():,}: {'; '.join(parts)}")
    return lines or ["plan: there is no candidate; the lists of [plan] leave none for this cluster"]


def why_none_kept(
    broken: Sequence[tuple[Outcome, Rejected]], space: SearchSpace, *, num_kept: int, num_left: int
) -> str:
    """Return one line: the limits that all simulated candidates break, the nearest of each, and the number left."""
    parts = []
    for reason in dict.fromkeys(rejected.reason for _, rejected in broken):
        mine = [(rejected.needed or 0.0, one.candidate.label) for one, rejected in broken if rejected.reason is reason]
        nearest = max if reason is Reason.ESS else min
        needed, label = nearest(mine, key=itemgetter(0))
        parts.append(f"{len(mine)} by {reason.value} (nearest: {needed:.3g}, {label})")
    return (
        f"plan: none of the {len(broken)} simulated keeps to the limits: {'; '.join(parts)}; they had the best odds "
        f"of the {num_kept:,} that the screening lets through; not simulated: {num_left:,}; raise plan.simulate, got "
        f"{space.plan.simulate}"
    )


def _relaxed(reason: Reason, mine: Sequence[Rejected], space: SearchSpace) -> str:
    """Return the change that would let in one of the candidates rejected for a reason."""
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
            if fewest := next((n for n in range(1, MOST_ACCELERATORS + 1) if memory.trainer_fits(n)), None):
                colocated = schedule_of(mine[0].choice).colocated
                engine = min(one.choice[ENGINE.name] for one in mine)
                least = engine * (math.ceil(fewest / engine) + (not colocated))
                return f"fits from {fewest} training accelerators on, cluster.accelerators={least} at least"
            packs = "smaller packs or activation_checkpointing in [train.trainer] may help"
            return f"no number of accelerators would do{'' if space.config.train is None else f'; {packs}'}"
        case Reason.ROW:
            most = max(size for size in SHARED_BY if memory.heads_divide(size))
            return f"pack_tokens={memory.least_pack(most)} with sequence_parallel={most} would do"
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
