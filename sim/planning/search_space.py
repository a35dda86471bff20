"""The search space of a plan: the run file, its answers, the memory, and the limits that candidates keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

import numpy as np

from pipelinerl.calibration.measured import Measured
from pipelinerl.config.plan import PlanConfig
from pipelinerl.config.resolve import least_memory, named_engine, named_hardware, run_trainer_fits
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import coefficients
from pipelinerl.hardware.memory import kv_cache_tokens
from pipelinerl.records.cost import Prices
from pipelinerl.rl.drift import DriftModel, ess_at_lag
from pipelinerl.theory.lengths import LengthStatistics, lengths_from
from pipelinerl.theory.turns import Turn, TurnMeans
from sim.clock import TICKS_PER_S
from sim.episodes import Episodes
from sim.workload import Workload, grown_length

SAMPLE_SIZE = 8192
"""Answers drawn to know their distribution (count)."""
SAMPLE_EPISODES = 2048
"""Rollouts with turns drawn for the same (count)."""


class Reason(StrEnum):
    """Why a candidate is rejected."""

    TWO_KINDS = "accelerators of two kinds cannot generate and train in turn"
    """It is colocated, and ``hardware.generation_gpu`` names another kind for the engines."""
    HEADS = "the attention heads do not divide by tensor_parallel"
    """The accelerators of an engine would not get as many whole heads each."""
    ENGINE_MEMORY = "weights and the longest rollout do not fit into an engine"
    """An engine could never finish the longest rollout."""
    TRAINER_MEMORY = "training does not fit into the memory of the accelerators that train"
    """Weights, gradients, optimizer states and activations are larger."""
    ROLLOUTS = "more sequences at a time than a run file may hold"
    """In the slots of all engines, or in the batches of an RL step."""
    LAG = "lag_limit"
    """Some batch has a larger lag in any case."""
    MEAN_LAG = "mean_lag_limit"
    """Its mean lag is larger."""
    ESS = "min_ess"
    """The drift model gives its lag a smaller effective sample size."""
    GPU_HOURS = "gpu_hours"
    """The run takes more."""
    BUDGET = "budget"
    """The run costs more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that every candidate keeps to; None: no limit."""

    lag: int | None
    """Largest lag of any trained token (optimizer steps)."""
    mean_lag: float | None
    """Mean lag (optimizer steps)."""
    min_ess: float | None
    """Effective sample size, normalised."""
    drift: DriftModel | None
    """Gives a lag its effective sample size."""
    gpu_hours: float | None
    """GPU-hours of the whole run."""
    budget: float | None
    """Cost of the whole run (USD)."""
    price: float | None
    """Price of a GPU-hour (USD), where known."""
    prices: Prices | None = None
    """What ``price`` follows from, for each candidate."""

    def at(self, config: RunConfig) -> Self:
        """Return the limits with the price of a candidate's GPU-hours, its environments included."""
        return self if self.prices is None else replace(self, price=self.prices.rates(config).usd_per_gpu_hour)

    def ess(self, lag_mean: float) -> float | None:
        """Return the effective sample size that the run file's drift model gives a mean lag; None without one."""
        return None if self.drift is None else ess_at_lag(self.drift, lag_mean)

    @property
    def free_of_draws(self) -> bool:
        """Whether nothing has a limit that differs with what is not known."""
        return (self.mean_lag, self.min_ess, self.gpu_hours, self.budget) == (None, None, None, None)

    def broken(self, lag_mean: float, gpu_hours: float, *, ess: float | None = None) -> Reason | None:
        """Return the first limit that a mean lag and a number of GPU-hours break, if any.

        ``ess`` is the effective sample size where more is known than the mean lag, which alone is a bit optimistic.
        """
        if ess is None:
            ess = self.ess(lag_mean)
        if self.mean_lag is not None and lag_mean > self.mean_lag:
            return Reason.MEAN_LAG
        if self.min_ess is not None and ess is not None and ess < self.min_ess:
            return Reason.ESS
        if self.gpu_hours is not None and gpu_hours > self.gpu_hours:
            return Reason.GPU_HOURS
        if self.budget is not None and gpu_hours * (self.price or 0.0) > self.budget:
            return Reason.BUDGET
        return None

    def needed(self, reason: Reason, lag_mean: float, gpu_hours: float) -> float:
        """Return the value of a limit that a candidate with this mean lag and these GPU-hours would keep to."""
        match reason:
            case Reason.MEAN_LAG:
                return lag_mean
            case Reason.ESS:
                return self.ess(lag_mean) or 0.0
            case Reason.GPU_HOURS:
                return gpu_hours
            case _:
                return gpu_hours * (self.price or 0.0)


class Memory:
    """Tells what fits into the memory of engines and trainer.

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
            self.engine_gpu, self._engine_model = named_engine(hardware, *named)
            self._coefficients = coefficients(hardware.level, hardware.coefficients)

    def cache_tokens(self, tensor_parallel: int, sequences: int = 1) -> float:
        """Return the KV cache of an engine with so many sequences (tokens)."""
        given = self._config.hardware.kv_cache_tokens
        if given is not None:
            return given
        if self.gpu is None or self.model is None:
            return math.inf
        return kv_cache_tokens(
            self.engine_gpu,
            self._engine_model,
            tensor_parallel=tensor_parallel,
            coefficients=self._coefficients,
            sequences=sequences,
        )

    def engine_fits(self, tensor_parallel: int) -> bool:
        """Return whether weights and the longest rollout fit into an engine."""
        return self.cache_tokens(tensor_parallel) >= self._longest

    def heads_divide(self, tensor_parallel: int) -> bool:
        """Return whether every accelerator of an engine gets as many whole heads, as far as that is known."""
        return self.model is None or self.model.divides_by(tensor_parallel)

    def misfit(self, *, tensor_parallel: int, training_accelerators: int) -> Reason | None:
        """Return why engines of this size, or a trainer on so many accelerators, cannot run; None if they can."""
        if not self.heads_divide(tensor_parallel):
            return Reason.HEADS
        if not self.engine_fits(tensor_parallel):
            return Reason.ENGINE_MEMORY
        return None if self.trainer_fits(training_accelerators) else Reason.TRAINER_MEMORY

    def needed_shares(self, *, tensor_parallel: int, training_accelerators: int) -> list[float] | None:
        """Return what an engine and a trainer need at least, over what there is; None if GPU or model are not known."""
        if self.gpu is None or self.model is None:
            return None
        return least_memory(
            self._config,
            self.gpu,
            self.model,
            tensor_parallel=tensor_parallel,
            training_accelerators=training_accelerators,
            longest=self._longest,
        )

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
    if config.environment is not None:
        return _turns_of(config, Episodes(config, workload)), config.longest_rollout_tokens
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


def _turns_of(config: RunConfig, episodes: Episodes) -> LengthStatistics:
    """Return rollouts with turns as the simulator will draw them first."""
    size = config.workload.group_size
    drawn = [episodes.episode(index, index // size) for index in range(size * max(1, SAMPLE_EPISODES // size))]
    rollouts = []
    for one in drawn:
        ends = np.array(one.ends)
        generated = np.diff(ends, prepend=0)
        observed = np.array(one.observed)
        observed[0] += one.prompt_tokens
        acting_s = np.array(one.acting_ticks) / TICKS_PER_S
        rollouts.append(Turn(np.cumsum(observed) + ends - generated, observed, generated, acting_s))
    tokens = np.array([one.ends[-1] for one in drawn]).reshape(-1, size)
    wait = (tokens * (tokens.max(axis=1, keepdims=True) - tokens)).sum() / tokens.sum()
    observed_mean = float(np.mean([one.observed_T.sum() for one in rollouts]))
    return LengthStatistics(
        lengths_from(tokens.ravel()), observed_mean, group_wait=float(wait), turns=TurnMeans.of(rollouts)
    )


def limits_of(config: RunConfig, plan: PlanConfig) -> Limits:
    """Return the limits of a plan.

    Raises:
        ConfigError: If there is a budget and no price.
    """
    prices = Prices.of(config)
    price = prices.rates(config).usd_per_gpu_hour
    if plan.budget is not None and price is None:
        missing = "price.gpu_hour" if prices.gpu_usd is None else "price.generation_gpu_hour"
        raise ConfigError(f"plan.budget needs {missing}, as the catalogue has no price, got budget={plan.budget:g}")
    return Limits(
        lag=plan.lag_limit if plan.lag_limit is not None else config.scheduler.max_lag,
        mean_lag=plan.mean_lag_limit,
        min_ess=plan.min_ess,
        drift=config.drift,
        gpu_hours=plan.gpu_hours,
        budget=plan.budget,
        price=price,
        prices=prices,
    )


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Everything that candidates are made from and compared with."""

    config: RunConfig
    plan: PlanConfig
    answers: LengthStatistics
    memory: Memory
    limits: Limits
    measured: Measured = field(default_factory=Measured)

    @classmethod
    def of(cls, config: RunConfig, measured: Measured | None = None) -> Self:
        """Return the search space of a run file; ``measured`` is what has been merged into it.

        Raises:
            ConfigError: If a file it names is wrong, GPU or model are unknown, or there is a budget and no price.
        """
        plan = config.plan or PlanConfig()
        answers, longest = answers_of(config)
        memory = Memory(config, longest)
        return cls(config, plan, answers, memory, limits_of(config, plan), measured or Measured())

    def split_shown(self, generating: int) -> str:
        """Return what tables call a split: accelerators that generate and that train, with their kinds if two."""
        training = self.accelerators - generating
        if self.config.hardware.generation_gpu is None:
            return f"{generating}/{training}"
        assert self.memory.gpu is not None  # the run file is refused without it
        return f"{generating} {self.memory.engine_gpu.name}/{training} {self.memory.gpu.name}"

    @property
    def accelerators(self) -> int:
        """Accelerators of the cluster (count)."""
        return self.config.cluster.accelerators
