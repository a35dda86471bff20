"""What ``plan`` could choose: every candidate of a run file, what rules some out, and the steady state of the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np

from pipelinerl.analytic import lengths_from
from pipelinerl.catalogue import Gpu, LanguageModel, find_gpu, find_model
from pipelinerl.config import ResolvedHardware, RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware import coefficients, kv_cache_tokens, resolved_hardware, training_memory
from pipelinerl.planconfig import PlanConfig
from pipelinerl.screening import Answers, Estimate, StepTime, screen
from sim.lengths import Workload, grown_length

BATCH_SIZES = tuple(size for k in range(4, 11) for size in (2**k, 3 * 2 ** (k - 1)) if size <= 1024)
"""H tried by default: 16, 24, 32, 48, ... 1024 (sequences per engine)."""
TENSOR_PARALLEL = (1, 2, 4, 8)
"""Sizes of an engine tried by default (accelerators)."""
NUM_SPLITS = 32
"""Pieces that the accelerators are divided into by default (count)."""
SAMPLE_SIZE = 8192
"""Answers drawn to know their distribution (count)."""
SCREENING_SLACK = 1.1
"""Factor on limits of lag, hours and money while only the screening has judged (no unit)."""


class Reason(StrEnum):
    """Why a candidate is out."""

    ENGINE_MEMORY = "weights and the longest rollout do not fit into an engine"
    TRAINER_MEMORY = "training does not fit into the memory of the accelerators that train"
    LAG = "lag_limit"
    MEAN_LAG = "mean_lag_limit"
    ESS = "min_ess"
    GPU_HOURS = "gpu_hours"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Limits:
    """What every candidate has to keep to; None: no limit."""

    lag: int | None
    mean_lag: float | None
    min_ess: float | None
    log_ratio_std: float | None
    gpu_hours: float | None
    budget: float | None
    price: float | None
    """Of a GPU-hour (USD), where known."""

    def ess(self, lag_mean: float) -> float | None:
        """Return the modelled effective sample size: log ratios of variance sigma^2 per step of lag, log-normal."""
        return None if self.log_ratio_std is None else math.exp(-(self.log_ratio_std**2) * lag_mean)

    def broken(self, lag_mean: float, gpu_hours: float, *, slack: float = 1.0) -> Reason | None:
        """Return the first limit that a mean lag and a number of GPU-hours break, if any."""
        checks = (
            (Reason.MEAN_LAG, lag_mean, self.mean_lag),
            (Reason.ESS, lag_mean, self._mean_lag_for_ess()),
            (Reason.GPU_HOURS, gpu_hours, self.gpu_hours),
            (Reason.BUDGET, gpu_hours * (self.price or 0.0), self.budget),
        )
        return next((reason for reason, value, most in checks if most is not None and value > most * slack), None)

    def _mean_lag_for_ess(self) -> float | None:
        if self.min_ess is None or self.log_ratio_std is None:
            return None
        return -math.log(self.min_ess) / self.log_ratio_std**2


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run; ``config`` is the run file with its choices, not yet checked as a whole."""

    family: str
    """Kind of its scheduler."""
    config: RunConfig
    label: str
    """What tables call it."""

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

    def __init__(self, config: RunConfig, answers: Answers, hardware: Mapping[str, object] | None = None) -> None:
        self._answers = answers
        self._hardware = config.hardware.model_copy(update=dict(hardware or {}))
        self._resolved: dict[tuple[int, int, bool], ResolvedHardware] = {}
        self._step_times: dict[tuple[int, int], StepTime] = {}

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
        if key not in self._step_times:
            self._step_times[key] = StepTime(hardware, tensor_parallel=tensor_parallel, most=most)
        return Screened(candidate, screen(config, hardware, self._step_times[key], self._answers))


class Memory:
    """What fits where.

    Args:
        config: The run file; without ``hardware.gpu`` and ``hardware.model`` only its ``kv_cache_tokens`` limits.
        longest: Longest rollout, prompt included (tokens).
    """

    def __init__(self, config: RunConfig, longest: int) -> None:
        self._config, self._longest = config, longest
        self.gpu: Gpu | None = None
        self._model: LanguageModel | None = None
        hardware = config.hardware
        if hardware.gpu is not None and hardware.model is not None:
            self.gpu, self._model = find_gpu(hardware.gpu), find_model(hardware.model)
            self._coefficients = coefficients(hardware.level, hardware.coefficients)

    def cache_tokens(self, tensor_parallel: int) -> float:
        """Return the KV cache of an engine (tokens)."""
        given = self._config.hardware.kv_cache_tokens
        if given is not None:
            return given
        if self.gpu is None or self._model is None:
            return math.inf
        return kv_cache_tokens(self.gpu, self._model, tensor_parallel=tensor_parallel, coefficients=self._coefficients)

    def engine_fits(self, tensor_parallel: int) -> bool:
        """Return whether weights and the longest rollout fit into an engine."""
        return self.cache_tokens(tensor_parallel) >= self._longest

    def trainer_fits(self, accelerators: int) -> bool:
        """Return whether weights, gradients, optimizer states and activations fit."""
        if self.gpu is None or self._model is None:
            return True
        settings = {}
        if self._config.train is not None:
            trainer = self._config.train.trainer
            settings = {"zero_stage": trainer.zero_stage, "pack_tokens": trainer.pack_tokens}
        memory = training_memory(self._model, accelerators=accelerators, **settings)
        return memory.total <= self._coefficients.memory_share * self.gpu.memory_bytes


def answers_of(config: RunConfig) -> tuple[Answers, int]:
    """Return prompts and answers as the simulator will draw them first, and the longest rollout there can be (tokens).

    Growing answers are taken as they are in the middle of the run.
    """
    workload = Workload(config.workload, seed=config.seed)
    length, size = config.workload.length, config.workload.group_size
    groups = [workload.group(index, index) for index in range(max(1, SAMPLE_SIZE // size))]
    drawn = np.array([group.lengths for group in groups], dtype=np.int64)
    if length.growth != 1.0:
        grown = [grown_length(one, factor=(1 + length.growth) / 2, max_tokens=length.max) for one in drawn.flat]
        drawn = np.array(grown, dtype=np.int64).reshape(drawn.shape)
    wait = (drawn * (drawn.max(axis=1, keepdims=True) - drawn)).sum() / drawn.sum()
    prompt = float(np.mean([group.prompt_tokens for group in groups]))
    answers = Answers(lengths_from(drawn.ravel()), prompt_tokens=prompt, group_wait=float(wait))
    return answers, workload.longest_prompt_tokens + length.max


def limits_of(config: RunConfig, plan: PlanConfig, gpu: Gpu | None) -> Limits:
    """Return the limits of a plan.

    Raises:
        ConfigError: If there is a budget and no price.
    """
    price = plan.price_per_gpu_hour
    if price is None and gpu is not None:
        price = gpu.price_per_hour
    if plan.budget is not None and price is None:
        raise ConfigError(
            f"plan.budget needs plan.price_per_gpu_hour, as the catalogue has no price, got budget={plan.budget:g}"
        )
    return Limits(
        lag=plan.lag_limit if plan.lag_limit is not None else config.scheduler.max_lag,
        mean_lag=plan.mean_lag_limit,
        min_ess=plan.min_ess,
        log_ratio_std=plan.log_ratio_std_per_step,
        gpu_hours=plan.gpu_hours,
        budget=plan.budget,
        price=price,
    )


def enumerate_candidates(
    config: RunConfig, plan: PlanConfig, limits: Limits, memory: Memory, answers: Answers
) -> Iterator[Candidate]:
    """Yield every candidate, those included that cannot run; the run file's own values are always among them."""
    for family in dict.fromkeys(plan.schedulers):
        for tensor_parallel in _engine_sizes(config, plan):
            for batch in plan.train_batch_size or [config.scheduler.train_batch_size]:
                for choice in _choices(family, tensor_parallel, batch, config, plan, limits, memory, answers):
                    yield _candidate(family, tensor_parallel, batch, config, **choice)


def _engine_sizes(config: RunConfig, plan: PlanConfig) -> Sequence[int]:
    own, hardware = config.cluster.tensor_parallel, config.hardware
    if plan.tensor_parallel is not None:
        return plan.tensor_parallel
    if hardware.decode is not None or hardware.kv_cache_tokens is not None:
        return [own]
    return sorted({own, *(size for size in TENSOR_PARALLEL if config.cluster.accelerators % size == 0)})


def _choices(
    family: str,
    tensor_parallel: int,
    batch: int,
    config: RunConfig,
    plan: PlanConfig,
    limits: Limits,
    memory: Memory,
    answers: Answers,
) -> Iterator[dict[str, int | None]]:
    """Yield the rest of the choices of a family for engines of one size and one batch."""
    total, own = config.cluster.accelerators, config.scheduler
    batch_sizes: Sequence[int] = plan.generation_batch_size or sorted(
        size
        for size in {*BATCH_SIZES, own.generation_batch_size}
        if size * answers.context <= memory.cache_tokens(tensor_parallel) or size == BATCH_SIZES[0]
    )
    rl_steps = [steps for steps in plan.optimizer_steps_per_rl_step if steps <= config.optimizer_steps]
    splits = _splits(config, plan, tensor_parallel) if family != "conventional" else [total]
    if family == "pipeline":
        for split, size, queue, lag in product(
            splits,
            batch_sizes,
            plan.ready_queue_size or [own.ready_queue_size],
            sorted({lag if limits.lag is None else min(lag, limits.lag) for lag in plan.max_lag or []}) or [limits.lag],
        ):
            yield {"split": split, "size": size, "queue": queue, "max_lag": lag, "rl_step": None}
        return
    for split, steps in product(splits, rl_steps):
        most = math.ceil(batch * steps * tensor_parallel / split)  # more slots than that stay empty
        enough = next((size for size in batch_sizes if size >= most), None)
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
    family: str,
    tensor_parallel: int,
    batch: int,
    config: RunConfig,
    *,
    split: int,
    size: int,
    queue: int | None,
    max_lag: int | None,
    rl_step: int | None,
) -> Candidate:
    own = config.scheduler
    micro = own.micro_batch_size
    changed = {
        "kind": family,
        "train_batch_size": batch,
        "generation_batch_size": size,
        "ready_queue_size": queue,
        "max_lag": max_lag,
        "optimizer_steps_per_rl_step": rl_step or own.optimizer_steps_per_rl_step,
        "micro_batch_size": micro if micro is not None and batch % micro == 0 else None,
    }
    cluster = {"tensor_parallel": tensor_parallel}
    if family != "conventional":
        cluster["generation_accelerators"] = split
    tables = {
        "scheduler": own.model_copy(update=changed),
        "cluster": config.cluster.model_copy(update=cluster),
        "compare": None,
        "plan": None,
    }
    total = config.cluster.accelerators
    parts = [family if family == "conventional" else f"{family} {split}/{total - split}", f"H={size}"]
    parts += [f"G={rl_step}"] if rl_step else []
    parts += [f"TP={tensor_parallel}"] if tensor_parallel > 1 else []
    parts += [f"B={batch}"] if batch != own.train_batch_size else []
    parts += [f"queue={queue}"] if queue != own.ready_queue_size and family == "pipeline" else []
    bounds = config.plan.max_lag if config.plan is not None else None
    parts += [f"max_lag={max_lag}"] if bounds is not None and family == "pipeline" else []
    return Candidate(family, config.model_copy(update=tables), " ".join(parts))


def own_candidate(config: RunConfig) -> Candidate:
    """Return the run file as it is, as a candidate."""
    scheduler, cluster = config.scheduler, config.cluster
    split = config.generation_accelerators
    candidate = _candidate(
        scheduler.kind,
        cluster.tensor_parallel,
        scheduler.train_batch_size,
        config,
        split=split,
        size=scheduler.generation_batch_size,
        queue=scheduler.ready_queue_size,
        max_lag=scheduler.max_lag,
        rl_step=None if scheduler.kind == "pipeline" else scheduler.optimizer_steps_per_rl_step,
    )
    return Candidate(candidate.family, candidate.config, f"{candidate.label} (run file)")


def screen_all(
    candidates: Sequence[Candidate], limits: Limits, memory: Memory, screener: Screener
) -> tuple[list[Screened], list[Rejected]]:
    """Return the candidates that may keep to the limits with their steady states, and the others with reasons."""
    kept: list[Screened] = []
    rejected: list[Rejected] = []
    for candidate in candidates:
        config = candidate.config
        if not memory.engine_fits(config.cluster.tensor_parallel):
            rejected.append(Rejected(candidate, Reason.ENGINE_MEMORY))
        elif not memory.trainer_fits(config.training_accelerators):
            rejected.append(Rejected(candidate, Reason.TRAINER_MEMORY))
        elif limits.lag is not None and least_lag(config) > limits.lag:
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


def least_lag(config: RunConfig) -> int:
    """Return the largest lag that a schedule has whatever happens (optimizer steps)."""
    steps = min(config.scheduler.optimizer_steps_per_rl_step, config.optimizer_steps)
    match config.scheduler.kind:
        case "conventional":
            return steps - 1
        case "one_step_off":
            return 2 * steps - 1
        case _:
            return 0  # the scheduler waits until it keeps to max_lag


def why_nothing_is_left(rejected: Sequence[Rejected], limits: Limits, memory: Memory, *, accelerators: int) -> str:
    """Return a line per family: how many candidates each limit rules out, and what would let one in."""
    lines = []
    for family in dict.fromkeys(one.candidate.family for one in rejected):
        counts = Counter(one.reason for one in rejected if one.candidate.family == family)
        parts = [
            f"{count:,} by {reason.value} ({_relaxed(reason, family, rejected, limits, memory, accelerators)})"
            for reason, count in counts.most_common()
        ]
        lines.append(f"plan: no feasible {family} among {counts.total():,}: {'; '.join(parts)}")
    return "\n".join(lines) or "plan: there is no candidate; the lists of [plan] leave none for this cluster"


def _relaxed(
    reason: Reason, family: str, rejected: Sequence[Rejected], limits: Limits, memory: Memory, accelerators: int
) -> str:
    """Return what would let a candidate of a family in that a reason keeps out."""
    mine = [one for one in rejected if one.candidate.family == family and one.reason is reason]
    screened = [one.screened for one in mine if one.screened is not None]
    match reason:
        case Reason.ENGINE_MEMORY:
            size = next((size for size in range(1, accelerators + 1) if memory.engine_fits(size)), None)
            return (
                f"fits from tensor_parallel={size} on"
                if size
                else "no tensor_parallel would do; a shorter length.max or another GPU might"
            )
        case Reason.TRAINER_MEMORY:
            fewest = next((n for n in range(1, 4096) if memory.trainer_fits(n)), None)
            return f"fits from {fewest} training accelerators on" if fewest else "no number of accelerators would do"
        case Reason.LAG:
            return f"lag_limit={min(least_lag(one.candidate.config) for one in mine)} would do"
        case Reason.MEAN_LAG:
            return f"mean_lag_limit={min(one.estimate.lag_mean for one in screened):.2g} would do"
        case Reason.ESS:
            best = max(limits.ess(one.estimate.lag_mean) or 0.0 for one in screened)
            return f"min_ess={best:.2g} would do"
    hours = min(one.candidate.gpu_hours(one.seconds) for one in screened)
    if reason is Reason.GPU_HOURS:
        return f"gpu_hours={math.ceil(hours):,} would do"
    return f"budget={math.ceil(hours * (limits.price or 0.0)):,} would do"
