"""What a plan is about: the run file, its answers, what fits into memory, and the limits every candidate keeps to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipelinerl.config.plan import PlanConfig
from pipelinerl.config.resolve import named_hardware, run_trainer_fits
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import coefficients
from pipelinerl.hardware.memory import kv_cache_tokens
from pipelinerl.rl.drift import DriftModel, ess_at_lag
from pipelinerl.theory.paper import lengths_from
from pipelinerl.theory.steady_state import LengthStatistics
from sim.workload import Workload, grown_length

SAMPLE_SIZE = 8192
"""Answers drawn to know their distribution (count)."""


class Reason(StrEnum):
    """Why a candidate is out."""

    HEADS = "the attention heads do not divide by tensor_parallel"
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
    drift: DriftModel | None
    gpu_hours: float | None
    budget: float | None
    price: float | None
    """Of a GPU-hour (USD), where known."""

    def ess(self, lag_mean: float) -> float | None:
        """Return the effective sample size that the run file's drift model gives a mean lag; None without one."""
        return None if self.drift is None else ess_at_lag(self.drift, lag_mean)

    def broken(
        self, lag_mean: float, gpu_hours: float, *, ess: float | None = None, slack: float = 1.0
    ) -> Reason | None:
        """Return the first limit that a mean lag and a number of GPU-hours break, if any.

        ``ess`` is the effective sample size where more is known than the mean lag, which alone is a bit optimistic.
        """
        if ess is None:
            ess = self.ess(lag_mean / slack)
        if self.mean_lag is not None and lag_mean > self.mean_lag * slack:
            return Reason.MEAN_LAG
        if self.min_ess is not None and ess is not None and ess < self.min_ess:
            return Reason.ESS
        if self.gpu_hours is not None and gpu_hours > self.gpu_hours * slack:
            return Reason.GPU_HOURS
        if self.budget is not None and gpu_hours * (self.price or 0.0) > self.budget * slack:
            return Reason.BUDGET
        return None


class Memory:
    """What fits where.

    Args:
        config: The run file; without ``hardware.gpu`` and ``hardware.model`` only its ``kv_cache_tokens`` limits.
        longest: Longest rollout, prompt included (tokens).
    """

    def __init__(self, config: RunConfig, longest: int) -> None:
        self._config, self._longest = config, longest
        self.gpu: Gpu | None = None
        self.model: LanguageModel | None = None
        hardware = config.hardware
        if (named := named_hardware(hardware)) is not None:
            self.gpu, self.model = named
            self._coefficients = coefficients(hardware.level, hardware.coefficients)

    def cache_tokens(self, tensor_parallel: int) -> float:
        """Return the KV cache of an engine (tokens)."""
        given = self._config.hardware.kv_cache_tokens
        if given is not None:
            return given
        if self.gpu is None or self.model is None:
            return math.inf
        return kv_cache_tokens(self.gpu, self.model, tensor_parallel=tensor_parallel, coefficients=self._coefficients)

    def engine_fits(self, tensor_parallel: int) -> bool:
        """Return whether weights and the longest rollout fit into an engine."""
        return self.cache_tokens(tensor_parallel) >= self._longest

    def heads_divide(self, tensor_parallel: int) -> bool:
        """Return whether every accelerator of an engine gets as many whole heads, as far as that is known."""
        return self.model is None or self.model.divides_by(tensor_parallel)

    def trainer_fits(self, accelerators: int) -> bool:
        """Return whether weights, gradients, optimizer states and activations fit."""
        if self.gpu is None or self.model is None:
            return True
        return run_trainer_fits(
            self._config, self.gpu, self.model, training_accelerators=accelerators, longest=self._longest
        )


def answers_of(config: RunConfig) -> tuple[LengthStatistics, int]:
    """Return prompts and answers as the simulator will draw them first, and the longest rollout there can be (tokens).

    Growing answers are taken as they are in the middle of the run.
    """
    workload = Workload(config.workload, seed=config.seed)
    length, size = config.workload.length, config.workload.group_size
    groups = [workload.group(index, index) for index in range(max(1, SAMPLE_SIZE // size))]
    drawn = np.array([group.lengths for group in groups], dtype=np.int64)
    if length.growth != 1.0:
        grown = [
            grown_length(one, factor=(1 + length.growth) / 2, max_tokens=length.max) for one in drawn.ravel().tolist()
        ]
        drawn = np.array(grown, dtype=np.int64).reshape(drawn.shape)
    wait = (drawn * (drawn.max(axis=1, keepdims=True) - drawn)).sum() / drawn.sum()
    prompt = float(np.mean([group.prompt_tokens for group in groups]))
    answers = LengthStatistics(lengths_from(drawn.ravel()), prompt_tokens=prompt, group_wait=float(wait))
    return answers, workload.longest_rollout_tokens


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
        drift=config.drift,
        gpu_hours=plan.gpu_hours,
        budget=plan.budget,
        price=price,
    )


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that candidates are made from and judged by."""

    config: RunConfig
    plan: PlanConfig
    answers: LengthStatistics
    memory: Memory
    limits: Limits


def space_of(config: RunConfig) -> Space:
    """Return the space of a run file.

    Raises:
        ConfigError: If a file it names is wrong, GPU or model are unknown, or there is a budget and no price.
    """
    plan = config.plan or PlanConfig()
    answers, longest = answers_of(config)
    memory = Memory(config, longest)
    return Space(config, plan, answers, memory, limits_of(config, plan, memory.gpu))
