"""What ``plan`` could choose: every candidate of a run file, its steady state, and what rules some out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipelinerl.config.plan import PlanConfig
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.config.scheduler import find_schedule
from pipelinerl.hardware.costs import DecodeStep
from pipelinerl.hardware.tables import ResolvedHardware
from pipelinerl.scheduler.events import OnStale
from pipelinerl.scheduler.kinds import PARTIAL_ROLLOUTS, ScheduleKind
from pipelinerl.theory.steady_state import Estimate, LengthStatistics, screen
from sim.planning.search_space import Reason, Space

BATCH_SIZES = tuple(size for k in range(4, 11) for size in (2**k, 3 * 2 ** (k - 1)) if size <= 1024)
"""H tried by default: 16, 24, 32, 48, ... 1024 (sequences per engine)."""
TENSOR_PARALLEL = (1, 2, 4, 8)
"""Sizes of an engine tried by default (accelerators)."""
RL_STEPS = (2, 4, 8, 16, 32, 64)
"""G tried by default (optimizer steps per RL step)."""
NUM_SPLITS = 32
"""Pieces that the accelerators are divided into by default (count)."""
SCREENING_SLACK = 1.1
"""Factor on limits of lag, hours and money while only the screening has judged (no unit)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run; ``config`` is the run file with its choices, not yet checked as a whole."""

    family: str
    """Kind of its schedule, as ``plan.schedulers`` names it."""
    config: RunConfig
    label: str
    """What tables call it."""

    @property
    def schedule(self) -> ScheduleKind:
        """Kind of its schedule."""
        return self.config.scheduler.schedule

    def gpu_hours(self, seconds: float) -> float:
        """Return the GPU-hours of so many seconds."""
        return seconds / 3600 * self.config.cluster.accelerators


@dataclass(frozen=True, slots=True)
class Screened:
    """A candidate and its steady state."""

    candidate: Candidate
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """The whole run (seconds)."""
        return self.estimate.start_s + self.estimate.step_s * self.candidate.config.optimizer_steps

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second over the whole run."""
        return self.estimate.tokens_per_s * self.estimate.step_s * self.candidate.config.optimizer_steps / self.seconds


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that is out."""

    candidate: Candidate
    reason: Reason
    screened: Screened | None = None
    """None: it cannot run at all."""


class Screener:
    """Screens candidates of one run file under one set of hardware coefficients.

    Args:
        config: The run file.
        answers: Its prompts and answers.
        hardware: Changes to its ``hardware`` table, e.g. the level.
    """

    def __init__(
        self, config: RunConfig, answers: LengthStatistics, hardware: Mapping[str, object] | None = None
    ) -> None:
        self._answers = answers
        self._hardware = config.hardware.model_copy(update=dict(hardware or {}))
        self._resolved: dict[tuple[int, int, bool], ResolvedHardware] = {}
        self._decode_steps: dict[tuple[int, int], DecodeStep] = {}

    def resolved(self, config: RunConfig) -> ResolvedHardware:
        """Return the hardware of a candidate in explicit numbers.

        Raises:
            ConfigError: If the model does not fit into its engines.
        """
        key = (config.cluster.tensor_parallel, config.training_accelerators, config.colocated)
        if key not in self._resolved:
            self._resolved[key] = resolved_hardware(config.model_copy(update={"hardware": self._hardware}))
        return self._resolved[key]

    def screen(self, candidate: Candidate) -> Screened:
        """Return the steady state of a candidate."""
        config, hardware = candidate.config, self.resolved(candidate.config)
        tensor_parallel = config.cluster.tensor_parallel
        most = 1 << (config.scheduler.generation_batch_size - 1).bit_length()
        key = (tensor_parallel, most)
        if key not in self._decode_steps:
            self._decode_steps[key] = DecodeStep(hardware.decode, tensor_parallel=tensor_parallel, most=most)
        return Screened(candidate, screen(config, hardware, self._decode_steps[key], self._answers))


def enumerate_candidates(space: Space) -> Iterator[Candidate]:
    """Yield every candidate, those included that cannot run; the run file's own values are always among them."""
    config, plan = space.config, space.plan
    for family in dict.fromkeys(plan.schedulers):
        for tensor_parallel in engine_sizes(space):
            for batch in plan.train_batch_size or [config.scheduler.train_batch_size]:
                for choice in _choices(space, family, tensor_parallel, batch):
                    yield _candidate(config, family, tensor_parallel, batch, **choice)


def engine_sizes(space: Space) -> Sequence[int]:
    """Return the sizes of an engine to try (accelerators)."""
    config, plan = space.config, space.plan
    own, hardware = config.cluster.tensor_parallel, config.hardware
    if plan.tensor_parallel is not None:
        return plan.tensor_parallel
    if hardware.decode is not None or hardware.kv_cache_tokens is not None:
        return [own]
    total = config.cluster.accelerators
    return sorted({own, *(size for size in TENSOR_PARALLEL if total % size == 0 and space.memory.heads_divide(size))})


def _choices(space: Space, family: str, tensor_parallel: int, batch: int) -> Iterator[dict[str, Any]]:
    """Yield the rest of the choices of a family for engines of one size and one batch."""
    config, plan, limits = space.config, space.plan, space.limits
    total, own = config.cluster.accelerators, config.scheduler
    batch_sizes: Sequence[int] = plan.generation_batch_size or sorted(
        size
        for size in {*BATCH_SIZES, own.generation_batch_size}
        if size * space.answers.context <= space.memory.cache_tokens(tensor_parallel) or size == BATCH_SIZES[0]
    )
    schedule = find_schedule(family, key="plan.schedulers")
    rl_steps = [steps for steps in plan.optimizer_steps_per_rl_step or RL_STEPS if steps <= config.optimizer_steps]
    if schedule.colocated:
        splits: Sequence[int] = [total] if total % tensor_parallel == 0 else []
    else:
        splits = _splits(config, plan, tensor_parallel)
    if not schedule.has_rl_steps:
        kept = own.ready_queue_size if (own.ready_queue_size or 0) >= batch else None
        queues: Sequence[int | None] = [kept]
        if plan.ready_queue_size is not None:
            queues = [size for size in plan.ready_queue_size if size >= batch]  # the scheduler takes no smaller one
        lags: Sequence[int | None] = [limits.lag]
        if plan.max_lag is not None:  # the scheduler takes none below ``publish_every`` - 1
            bounds = [lag for lag in plan.max_lag if lag >= own.publish_every - 1]
            lags = sorted({lag if limits.lag is None else min(lag, limits.lag) for lag in bounds})
        for split, size, queue, lag in product(splits, batch_sizes, queues, lags):
            yield {"split": split, "size": size, "queue": queue, "max_lag": lag, "rl_step": None}
        return
    for split, steps in product(splits, rl_steps):
        most = math.ceil(batch * steps * tensor_parallel / split)  # more slots than that stay empty
        enough = next((size for size in batch_sizes if size >= most), None) if not schedule.carries_over else None
        for size in batch_sizes:
            if enough is None or size <= enough:
                yield {"split": split, "size": size, "queue": None, "max_lag": limits.lag, "rl_step": steps}


def _splits(config: RunConfig, plan: PlanConfig, tensor_parallel: int) -> Sequence[int]:
    """Return numbers of accelerators that generate, all multiples of an engine."""
    total = config.cluster.accelerators
    if plan.generation_accelerators is not None:
        values = plan.generation_accelerators
    else:
        unit = math.ceil(max(1, total / NUM_SPLITS) / tensor_parallel) * tensor_parallel
        own = config.cluster.generation_accelerators
        values = sorted({*range(unit, total, unit), *([] if own is None else [own])})
    return [value for value in values if value < total and value % tensor_parallel == 0]


def _candidate(
    config: RunConfig,
    family: str,
    tensor_parallel: int,
    batch: int,
    *,
    split: int,
    size: int,
    queue: int | None,
    max_lag: int | None,
    rl_step: int | None,
) -> Candidate:
    own, schedule = config.scheduler, find_schedule(family, key="plan.schedulers")
    micro = own.micro_batch_size
    changed = {
        "kind": family,
        "partial_rollouts": False,
        "train_batch_size": batch,
        "generation_batch_size": size,
        "ready_queue_size": queue,
        "max_lag": max_lag,
        "on_stale": OnStale.TRAIN if schedule.only_waits and max_lag is not None else own.on_stale,
        "optimizer_steps_per_rl_step": rl_step or own.optimizer_steps_per_rl_step,
        "micro_batch_size": micro if micro is not None and batch % micro == 0 else None,
    }
    cluster = {"tensor_parallel": tensor_parallel}
    if not schedule.colocated:
        cluster["generation_accelerators"] = split
    tables = {
        "scheduler": own.model_copy(update=changed),
        "cluster": config.cluster.model_copy(update=cluster),
        "compare": None,
        "plan": None,
    }
    total = config.cluster.accelerators
    parts = [schedule.name if schedule.colocated else f"{schedule.name} {split}/{total - split}", f"H={size}"]
    parts += [f"G={rl_step}"] if rl_step else []
    parts += [f"TP={tensor_parallel}"] if tensor_parallel > 1 else []
    parts += [f"B={batch}"] if batch != own.train_batch_size else []
    parts += [f"queue={queue}"] if queue != own.ready_queue_size and "ready_queue_size" in schedule.axes else []
    bounds = config.plan.max_lag if config.plan is not None else None
    parts += [f"max_lag={max_lag}"] if bounds is not None and "max_lag" in schedule.axes else []
    return Candidate(family, config.model_copy(update=tables), " ".join(parts))


def own_candidate(config: RunConfig) -> Candidate:
    """Return the run file as it is, as a candidate."""
    scheduler, cluster = config.scheduler, config.cluster
    split = config.generation_accelerators
    candidate = _candidate(
        config,
        PARTIAL_ROLLOUTS.name if scheduler.partial_rollouts else scheduler.kind,
        cluster.tensor_parallel,
        scheduler.train_batch_size,
        split=split,
        size=scheduler.generation_batch_size,
        queue=scheduler.ready_queue_size,
        max_lag=scheduler.max_lag,
        rl_step=scheduler.optimizer_steps_per_rl_step if scheduler.schedule.has_rl_steps else None,
    )
    return Candidate(candidate.family, candidate.config, f"{candidate.label} (run file)")


def screen_all(
    candidates: Iterable[Candidate], space: Space, screener: Screener
) -> tuple[list[Screened], list[Rejected]]:
    """Return the candidates that may keep to the limits with their steady states, and the others with reasons."""
    limits, memory = space.limits, space.memory
    kept: list[Screened] = []
    rejected: list[Rejected] = []
    for candidate in candidates:
        config = candidate.config
        if not memory.heads_divide(config.cluster.tensor_parallel):
            rejected.append(Rejected(candidate, Reason.HEADS))
        elif not memory.engine_fits(config.cluster.tensor_parallel):
            rejected.append(Rejected(candidate, Reason.ENGINE_MEMORY))
        elif not memory.trainer_fits(config.training_accelerators):
            rejected.append(Rejected(candidate, Reason.TRAINER_MEMORY))
        elif limits.lag is not None and config.least_max_lag > limits.lag:
            rejected.append(Rejected(candidate, Reason.LAG))
        else:
            screened = screener.screen(candidate)
            hours = candidate.gpu_hours(screened.seconds)
            reason = limits.broken(screened.estimate.lag_mean, hours, slack=SCREENING_SLACK)
            if reason is None:
                kept.append(screened)
            else:
                rejected.append(Rejected(candidate, reason, screened))
    return kept, rejected


def way(candidate: Candidate) -> tuple[Any, ...]:
    """Return what makes a candidate another decision and not another size of the same: kind, split, engine, G."""
    config = candidate.config
    steps = config.scheduler.optimizer_steps_per_rl_step if candidate.schedule.has_rl_steps else None
    return candidate.family, config.generation_accelerators, config.cluster.tensor_parallel, steps
