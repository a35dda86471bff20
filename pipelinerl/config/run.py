"""The run file: its keys, one strict model per table; how it is read and written.

Everything wrong with a file is reported at once, a line per fault, as a ``ConfigError``.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, model_validator

from pipelinerl.config.engine import EngineConfig, GenerationConfig, SpeculationConfig, as_measured
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.fleet import FleetConfig, Hours, SpotOffer
from pipelinerl.config.train import Temperature, TrainConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import HardwareConfig, Speculation
from pipelinerl.hardware.transport import WeightTransport
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.drift import DriftModel
from pipelinerl.scheduler.events import OnFull, OnStale, Routing, WeightUpdate
from pipelinerl.scheduler.kinds import CONVENTIONAL, KINDS, PARTIAL_ROLLOUTS, PIPELINE, ScheduleKind
from pipelinerl.util.explain import explaining, shown
from pipelinerl.util.read import parse_toml, read_toml
from pipelinerl.util.strict_model import (
    MOST,
    MOST_ROLLOUTS,
    Accelerators,
    Count,
    CountOrZero,
    Seconds,
    StrictModel,
    Tokens,
    TokensOrZero,
)
from pipelinerl.util.user_code import named_value


class Variant(StrictModel):
    """A named list of overrides, each as after ``--set``."""

    name: str = Field(min_length=1)
    """Its name in tables and figures."""
    set: list[str] = []
    """Overrides ``a.b=value``."""


class CompareConfig(StrictModel):
    """The runs of ``compare``: every arm in every scenario."""

    arms: list[Variant] = Field(min_length=1)
    """The schedulers to compare."""
    scenarios: list[Variant] = [Variant(name="as given")]
    """The circumstances to compare them in: hardware coefficients, length tails."""
    baseline: str
    """Name of the arm that speed-ups refer to."""
    seeds: list[Annotated[int, Field(ge=0)]] = []
    """Seeds of every arm. None: that of the run file."""

    @model_validator(mode="after")
    def _names_are_unique_and_known(self) -> Self:
        for what, variants in (("arms", self.arms), ("scenarios", self.scenarios)):
            names = [variant.name for variant in variants]
            if len(set(names)) < len(names):
                raise ValueError(f"{what} must have different names, got {names}")
        names = [arm.name for arm in self.arms]
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different, got {self.seeds}")
        if self.baseline not in names:
            raise ValueError(f"baseline must be the name of an arm, got {self.baseline!r}; allowed: {names}")
        return self


class PriceConfig(StrictModel):
    """Prices. They change no schedule; ``pipelinerl.records.reports`` has the arithmetic."""

    gpu_hour: float | None = Field(default=None, gt=0)
    """Price of a GPU-hour (USD). None: your GPU file has it; ``plan`` also reads the catalogue."""
    generation_gpu_hour: float | None = Field(default=None, gt=0)
    """The same of GPUs that generate, where others train (USD). None: likewise, or ``gpu_hour``."""
    environment_hour: float = Field(default=0.0, ge=0)
    """Price of an hour of an environment, used or not (USD)."""


class LengthConfig(StrictModel):
    """Lengths of the answers (tokens)."""

    kind: Literal["fixed", "uniform", "lognormal", "empirical"]
    """``fixed``: ``max``; ``uniform``: 1 .. ``max``; ``lognormal``; ``empirical``: whole groups of real answers."""
    max: Tokens
    """Longest answer (tokens). Paper symbol L."""
    mean: float | None = Field(default=None, gt=0)
    """Mean length after the cut (tokens): lognormal; empirical: None keeps the source's."""
    cv: float | None = Field(default=None, gt=0)
    """lognormal: standard deviation over mean before the cut (no unit)."""
    source: str | None = None
    """empirical: a shipped set, a CSV file, or, without turns and with groups in order, a run (its folder or
    trace.jsonl.gz) or another system's trace."""
    growth: float = Field(default=1.0, gt=0, le=MOST)
    """Factor on all lengths at the last optimizer step, linearly from 1 (no unit)."""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        if self.kind == "lognormal":
            for name in ("mean", "cv"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is missing; kind='lognormal' needs mean and cv")
        if self.kind == "empirical" and self.source is None:
            raise ValueError("source is missing; kind='empirical' needs the name of a shipped set or a CSV file")
        if self.kind != "empirical" and self.source is not None:
            raise ValueError(f"source must be left out with kind={self.kind!r}, got {self.source!r}")
        if self.kind in ("lognormal", "empirical") and self.mean is not None and self.mean >= self.max:
            raise ValueError(f"mean must be below max, got mean={self.mean:g}, max={self.max}")
        return self


class WorkloadConfig(StrictModel):
    """The workload: prompts, answers, rewards."""

    group_size: Count = 1
    """Rollouts per prompt (count)."""
    prompt_tokens: TokensOrZero = 0
    """Length of every prompt, where the length source has none (tokens)."""
    success_rate: float = Field(default=0.5, ge=0, le=1)
    """Probability of reward 1, where the length source has no rewards."""
    length: LengthConfig
    """Lengths of the answers."""


class WarmStartConfig(StrictModel):
    """The base model: supervised training on demonstrations before the run begins, in no simulated time."""

    steps: CountOrZero = 400
    """Supervised optimizer steps (count)."""
    batch_size: Count = 64
    """Demonstrations per step (sequences)."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Adam's largest rate, falling to a tenth (no unit)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the base model, which all runs share."""


class PolicyConfig(StrictModel):
    """A small transformer, trained by the simulated schedule on a task that checks its answers."""

    task: Literal["addition", "reverse", "chain", "calculator"]
    """``addition`` of two numbers, ``reverse`` of a word, ``chain``: a long sum, ``calculator``: the same in turns,
    with an ``[environment]``."""
    size: int = Field(ge=1, le=1000)
    """Longest problem: digits, letters or terms (count)."""
    layers: int = Field(default=2, ge=1, le=32)
    """Transformer blocks (count)."""
    width: int = Field(default=64, ge=1, le=4096)
    """Width of the residual stream (count)."""
    heads: Count = 4
    """Attention heads (count); divides ``width``."""
    temperature: Temperature = 1.0
    """Softmax temperature, of sampling and training (no unit)."""
    learning_rate: float = Field(gt=0)
    """Adam's rate (no unit)."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest norm of a batch's gradient (no unit)."""
    loss: LossConfig = LossConfig()
    """The policy gradient."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """The base model."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got heads={self.heads}, width={self.width}")
        for name in ("kl_coefficient", "value_coefficient", "teacher"):
            if getattr(self.loss, name):
                raise ValueError(f"loss.{name} must be left out: the policy has no other model and no value head")
        return self


Values = Annotated[list[Count], Field(min_length=1)]


class PlanConfig(StrictModel):
    """The search space of ``plan``. Each list holds the values tried; the rest of the run file stays as it is.

    ``plan`` refuses a listed value that no candidate can have. A missing list stands for all values that fit.
    """

    schedulers: list[str] = Field(default=[PIPELINE.name, CONVENTIONAL.name], min_length=1)
    """Kinds of schedule to try, each as ``scheduler.kind``."""
    generation_accelerators: Values | None = None
    """Accelerators that generate, where others train. None: about 32 even splits."""
    tensor_parallel: Values | None = None
    """Accelerators of one engine. None: 1, 2, 4, 8, or where none holds the model the two smallest of 16, 32, ... that
    do; the run file's alone where it gives ``decode`` or ``kv_cache_tokens`` as numbers."""
    generation_batch_size: Values | None = None
    """Sequences in progress per engine. None: 16, 24, 32, 48, ... 1024, as far as the KV cache holds."""
    optimizer_steps_per_rl_step: Values | None = None
    """Optimizer steps per RL step. None: 1, 2, 4, ... 64, and the run file's."""
    train_batch_size: Values | None = None
    """Sequences per optimizer step. None: the run file's."""
    ready_queue_size: Values | None = None
    """Finished rollouts that may wait for the trainer (pipeline). None: the run file's, or 2 B."""
    publish_every: Values | None = None
    """Optimizer steps between publications (pipeline). None: 1, 2, 3, 4, 8, and the run file's."""
    environments: Values | None = None
    """Numbers of environments. None: the run file's; for the command ``environments`` from a quarter to twice all
    slots."""
    sequence_parallel: Values | None = None
    """Ranks that share rows. None: as stated, else the fewest of 1, 2, 4, 8 that hold the longest rollout."""
    max_lag: list[CountOrZero] | None = Field(default=None, min_length=1)
    """Bounds on the lag that the pipeline keeps by waiting (optimizer steps). None: ``lag_limit``."""
    lag_limit: CountOrZero | None = None
    """Largest lag allowed of any trained token (optimizer steps). None: ``scheduler.max_lag``."""
    mean_lag_limit: float | None = Field(default=None, ge=0)
    """Largest mean lag allowed (optimizer steps)."""
    min_ess: float | None = Field(default=None, gt=0, lt=1)
    """Least effective sample size allowed, by the drift model of ``[drift]``."""
    gpu_hours: float | None = Field(default=None, gt=0)
    """Largest GPU-hours of the run."""
    budget: float | None = Field(default=None, gt=0)
    """Largest cost of the run by ``[price]`` (USD)."""
    risk: Literal["neutral", "averse"] = "neutral"
    """Whether the expected throughput decides, or, averse to risk, its 10th percentile."""
    spot: SpotOffer | None = None
    """Spot machines to compare with reserved ones. None: all are reserved."""
    mtbf_hours: Hours | None = None
    """Mean time between failures of an accelerator, for the comparison of fleets (hours). None: never."""
    lend_switch_s: Seconds | None = None
    """Time of a switch if the trainer lends its accelerators while it waits: ``fleet.groups[].switch_s`` (s). None:
    not compared."""
    speculate: SpeculationConfig | None = None
    """Speculative decoding to compare with none, as ``engine.speculation``. None: not compared."""
    simulate: Count = 20
    """Candidates simulated (count)."""
    simulate_steps: Count = 200
    """Optimizer steps of a simulation, at most; it ends earlier once throughput and lag are steady (count)."""

    @property
    def schedules(self) -> tuple[ScheduleKind, ...]:
        """The kinds of schedule that ``schedulers`` names."""
        return tuple(find_schedule(name, key=f"schedulers.{index}") for index, name in enumerate(self.schedulers))

    @model_validator(mode="after")
    def _schedulers_exist(self) -> Self:
        if self.speculate is not None and self.speculate.acceptance is None:
            raise ValueError("speculate.acceptance is missing; a comparison needs it")
        assert self.schedules
        return self


def find_schedule(name: str, *, key: str) -> ScheduleKind:
    """Return a kind by its name in ``KINDS``, or ``package.module:ATTRIBUTE``; ConfigError, naming ``key``, if none."""
    return named_value(name, {kind.name: kind for kind in KINDS}, ScheduleKind, key=key)


class AdmissionConfig(StrictModel):
    """A limit on the sequences in progress that follows the room in KV caches; at most ``generation_batch_size``."""

    soft: float = Field(default=0.8, gt=0, lt=1)
    """Share of a KV cache that the limit aims at (no unit)."""
    hard: float = Field(default=0.9, gt=0, le=1)
    """Share from which on nothing starts until something has ended (no unit)."""


class SchedulerConfig(StrictModel):
    """Settings of the scheduler; no hardware, no paths."""

    kind: str = PIPELINE.name
    """The schedule: ``pipeline``, ``conventional``, ``one_step_off``, ``partial_rollouts``, or your own
    ``package.module:ATTRIBUTE`` of a ``ScheduleKind``."""
    train_batch_size: Count
    """Sequences per optimizer step (count). Paper symbol B."""
    generation_batch_size: Count
    """Sequences in progress per engine, at most (count). Paper symbol H."""
    optimizer_steps_per_rl_step: Count = 1
    """Optimizer steps per RL step (not pipeline). Paper symbol G (count)."""
    publish_every: Count = 1
    """Optimizer steps between publications (pipeline)."""
    partial_rollouts: bool = False
    """With ``conventional``: the same as ``partial_rollouts``."""
    micro_batch_size: Count | None = None
    """Sequences the trainer starts on at once (count). None: the whole batch."""
    max_lag: CountOrZero | None = None
    """Largest lag of any trained token (optimizer steps). None: unbounded."""
    weight_update: WeightUpdate = Field(default=WeightUpdate.KEEP, strict=False)
    """Rollouts in progress when new weights arrive."""
    on_stale: OnStale = Field(default=OnStale.TRAIN, strict=False)
    """How ``max_lag`` is kept: by waiting, or by discarding."""
    ready_queue_size: Count | None = None
    """Finished rollouts that may wait (sequences). None: 2 B."""
    on_full: OnFull = Field(default=OnFull.WAIT, strict=False)
    """What happens when the ready queue is full."""
    admission: AdmissionConfig | None = None
    """Sequences in progress by the room in KV caches. None: always ``generation_batch_size``."""
    routing: Routing = Field(default=Routing.ROOM, strict=False, exclude_if=lambda value: value is Routing.ROOM)
    """Which engine takes a rollout, and its next turn."""
    filter_no_signal: bool = False
    """Discard groups of equal rewards."""
    discard_limit: Count | None = None
    """Rollouts given up between two optimizer steps before the run counts as stalled (count). None: 1000 B."""

    @property
    def schedule(self) -> ScheduleKind:
        """The kind of schedule: the one source of facts about it."""
        return PARTIAL_ROLLOUTS if self.partial_rollouts else find_schedule(self.kind, key="kind")

    @property
    def ready_queue_limit(self) -> int:
        """Finished rollouts that may wait for the trainer (sequences)."""
        return self.ready_queue_size if self.ready_queue_size is not None else 2 * self.train_batch_size

    @property
    def stall_limit(self) -> int:
        """Rollouts given up between two optimizer steps before the run counts as stalled (count)."""
        return self.discard_limit if self.discard_limit is not None else 1000 * self.train_batch_size

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch (count)."""
        return self.micro_batch_size if self.micro_batch_size is not None else self.train_batch_size

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        schedule = find_schedule(self.kind, key="kind")
        if self.partial_rollouts and schedule not in (CONVENTIONAL, PARTIAL_ROLLOUTS):
            raise ValueError(
                f"partial_rollouts needs scheduler.kind='conventional', got partial_rollouts=true, kind={self.kind!r}"
            )
        if self.schedule.only_waits and self.max_lag is not None and self.on_stale is not OnStale.TRAIN:
            raise ValueError(
                f"on_stale must be 'train' with {self.schedule.name} and max_lag, got on_stale={self.on_stale.value!r}"
            )
        return self


class ClusterConfig(StrictModel):
    """Number of accelerators and their division between generation and training."""

    accelerators: Accelerators
    """Accelerators in all (count). Paper symbol N."""
    generation_accelerators: Accelerators | None = None
    """Accelerators that generate; the others train. Paper symbol I. Not read by conventional and partial_rollouts
    (count)."""
    tensor_parallel: Accelerators = 1
    """Accelerators of one engine (count)."""


LEAST_ATTEMPT = 0.2
"""Shortest mean time between failures of a trainer, over that from a restart to its checkpoint: of e^5 one succeeds."""


class RunConfig(StrictModel):
    """One run: the root of the run file."""

    seed: int = Field(default=0, ge=0)
    """Seed of every random stream."""
    optimizer_steps: Count
    """Optimizer steps to make (count)."""
    cluster: ClusterConfig
    """Number of accelerators and their division between generation and training."""
    scheduler: SchedulerConfig
    """The schedule of generation and training."""
    workload: WorkloadConfig
    """Prompts, answers and rewards."""
    environment: EnvironmentConfig | None = None
    """Environments, and the turns of rollouts. None: a rollout has one turn."""
    engine: EngineConfig | None = None
    """How engines generate. None: a token per sequence and step."""
    generation: GenerationConfig | None = None
    """Engines that prefill, apart from those that decode. None: all do both."""
    hardware: HardwareConfig
    """Speed of the cluster."""
    fleet: FleetConfig | None = None
    """Engines that come and go, and failures of the trainer. None: nothing fails."""
    faults: list[FaultConfig] | None = Field(default=None, min_length=1)
    """Faults at given times, simulated and real. None: none."""
    policy: PolicyConfig | None = None
    """A small policy that gives the answers and learns. With it the simulator reads no key of ``workload`` but
    ``group_size`` and ``length.max``, and of ``environment.turns`` only ``max`` and ``context_max``: prompts, lengths,
    turns and rewards are those of the policy and its task."""
    drift: DriftModel | None = None
    """How fast importance weights spread with lag (``pipelinerl drift`` fits it): the summary then has a band of the
    effective sample size, labelled as modelled."""
    price: PriceConfig | None = None
    """Prices per hour: ``simulate``, ``compare`` and ``plan`` then print costs."""
    compare: CompareConfig | None = None
    """The runs of ``compare``."""
    plan: PlanConfig | None = None
    """The search space of ``plan``."""
    train: TrainConfig | None = None
    """Settings of ``train``: model, task, optimizer. Hardware by name reads its ``trainer`` and ``transport``."""

    @property
    def num_engines(self) -> int:
        """Engines that have rollouts (count): those that decode."""
        return self.generation_accelerators // self.cluster.tensor_parallel - self.num_prefill_engines

    @property
    def num_prefill_engines(self) -> int:
        """Engines that only prefill (count)."""
        if self.generation is None:
            return 0
        engines = self.generation_accelerators // self.cluster.tensor_parallel
        return engines * self.generation.prefill // (self.generation.prefill + self.generation.decode)

    @property
    def speculation(self) -> SpeculationConfig | None:
        """Speculative decoding, if engines do it."""
        return None if self.engine is None else self.engine.speculation

    @property
    def generation_accelerators(self) -> int:
        """Accelerators that generate (count): N if colocated, else I."""
        if self.colocated:
            return self.cluster.accelerators
        assert self.cluster.generation_accelerators is not None  # checked by the validator
        return self.cluster.generation_accelerators

    @property
    def training_accelerators(self) -> int:
        """Accelerators that train (count): N if colocated, else N - I."""
        if self.colocated:
            return self.cluster.accelerators
        return self.cluster.accelerators - self.generation_accelerators

    @property
    def least_max_lag(self) -> int:
        """Largest lag that a batch is certain to have (optimizer steps); none in a shorter run."""
        return min(self.scheduler.schedule.least_lag(self.scheduler), self.optimizer_steps - 1)

    @property
    def longest_rollout_tokens(self) -> int:
        """Longest rollout by the run file, prompt included (tokens); ``sim.workload`` knows recorded prompts."""
        if self.environment is not None:
            return self.environment.turns.context_max
        elsewhere = self.policy is not None or self.workload.length.kind == "empirical"
        return self.workload.length.max + (0 if elsewhere else self.workload.prompt_tokens)

    @property
    def train_table(self) -> TrainConfig:
        """The table ``train``, which every real run has."""
        assert self.train is not None
        return self.train

    @property
    def train_transport(self) -> WeightTransport:
        """The weight transport of a real run."""
        return self.train_table.chosen_transport(colocated=self.colocated)

    @property
    def room_tokens(self) -> int:
        """Longest rollout, prompt included, that engines and trainer of a real run have room for (tokens)."""
        if self.environment is not None:
            return self.environment.turns.context_max
        return self.train_table.task.max_prompt_tokens + self.workload.length.max

    @property
    def room_key(self) -> str:
        """The keys summed in ``room_tokens``, for messages."""
        one_turn = "train.task.max_prompt_tokens + workload.length.max"
        return one_turn if self.environment is None else "environment.turns.context_max"

    @property
    def longest_answer_tokens(self) -> int:
        """Most tokens that a rollout can generate, in all its turns (tokens)."""
        longest, environment = self.workload.length.max, self.environment
        return longest if environment is None else min(longest * environment.turns.max, environment.turns.context_max)

    @property
    def drawn_faults(self) -> list[FaultConfig]:
        """The faults, each of an engine with its engine: which one is a function of seed and place in the list."""

        def drawn(number: int, fault: FaultConfig) -> FaultConfig:
            engine = random.Random(f"{self.seed} faults {number}").randrange(self.num_engines)
            as_is = fault.engine is not None or not fault.hits_engine
            return fault if as_is else fault.model_copy(update={"engine": engine})

        return [drawn(number, fault) for number, fault in enumerate(self.faults or ())]

    @property
    def trainer_ranks(self) -> int:
        """Ranks of a real trainer (count): one for every accelerator that trains, or that takes turns."""
        return self.training_accelerators // (self.cluster.tensor_parallel if self.colocated else 1)

    @property
    def colocated(self) -> bool:
        """Whether the same accelerators generate and train in turn."""
        return self.scheduler.schedule.colocated

    @property
    def speculation_law(self) -> Speculation | None:
        """The same, as the formulas of steps read it; ConfigError without an acceptance."""
        return None if self.speculation is None else self.speculation.law(self.optimizer_steps)

    @property
    def num_slots(self) -> int:
        """Rollouts in progress on all engines, at most (count)."""
        return self.num_engines * self.scheduler.generation_batch_size

    @property
    def rl_step_rollouts(self) -> int:
        """Rollouts of an RL step, or of an optimizer step where there is none (count)."""
        scheduler = self.scheduler
        return scheduler.train_batch_size * (
            scheduler.optimizer_steps_per_rl_step if scheduler.schedule.has_rl_steps else 1
        )

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_cluster()
        self._check_generation()
        self._check_batches()
        self._check_rollouts()
        self._check_max_lag()
        self._check_plan()
        self._check_longest()
        self._check_environment()
        self._check_step_tokens()
        self._check_fleet()
        self._check_faults()
        return self

    def _check_cluster(self) -> None:
        cluster, scheduler = self.cluster, self.scheduler
        if self.colocated and self.hardware.generation_gpu is not None:
            raise ValueError(
                "hardware.generation_gpu needs a schedule whose engines have accelerators of their own, got "
                f"scheduler.kind={scheduler.kind!r}, which generates and trains on the same ones; kind='pipeline' with "
                "max_lag=0 lets two pools wait for each other"
            )
        if not self.colocated:
            if cluster.generation_accelerators is None:
                raise ValueError(
                    f"cluster.generation_accelerators is missing; scheduler.kind={scheduler.kind!r} needs it"
                )
            if cluster.generation_accelerators >= cluster.accelerators:
                raise ValueError(
                    "cluster.generation_accelerators must be below cluster.accelerators, got "
                    f"generation_accelerators={cluster.generation_accelerators}, accelerators={cluster.accelerators}"
                )
        if self.generation_accelerators % cluster.tensor_parallel:
            raise ValueError(
                f"cluster.tensor_parallel must divide the {self.generation_accelerators} accelerators that generate, "
                f"got tensor_parallel={cluster.tensor_parallel}"
            )

    def _check_generation(self) -> None:
        given, engines = self.generation, self.num_engines + self.num_prefill_engines
        if given is not None and engines % (given.prefill + given.decode):
            raise ValueError(
                f"generation.prefill + generation.decode must divide the run's {engines} engines, got "
                f"prefill={given.prefill}, decode={given.decode}"
            )

    def _check_batches(self) -> None:
        scheduler, group = self.scheduler, self.workload.group_size
        batch = scheduler.train_batch_size
        if batch % group:
            raise ValueError(
                "scheduler.train_batch_size must be a multiple of workload.group_size, got "
                f"train_batch_size={batch}, group_size={group}"
            )
        micro = scheduler.micro_batch
        if batch % micro or micro % group:
            raise ValueError(
                "scheduler.micro_batch_size must divide train_batch_size and be a multiple of group_size, got "
                f"micro_batch_size={micro}, train_batch_size={batch}, group_size={group}"
            )
        if scheduler.filter_no_signal and group == 1:
            raise ValueError(
                "scheduler.filter_no_signal needs workload.group_size of at least 2, since one reward alone has no "
                "signal, got filter_no_signal=true, group_size=1"
            )
        if scheduler.filter_no_signal and self.train is not None and self.train.loss.teacher is not None:
            raise ValueError("scheduler.filter_no_signal must be false with a teacher, who grades all tokens, got true")
        if scheduler.ready_queue_limit < batch:
            raise ValueError(
                "scheduler.ready_queue_size must be at least train_batch_size, got "
                f"ready_queue_size={scheduler.ready_queue_limit}, train_batch_size={batch}"
            )

    def _check_plan(self) -> None:
        if self.plan is not None and self.plan.environments is not None and self.environment is None:
            raise ValueError(f"plan.environments needs a table [environment], got {self.plan.environments}")
        if self.plan is not None and self.plan.min_ess is not None and self.drift is None:
            raise ValueError(
                "plan.min_ess needs a [drift] table, which says how fast weights drift (`pipelinerl drift` fits one), "
                f"got min_ess={self.plan.min_ess:g}"
            )
        for size in (self.plan and self.plan.train_batch_size) or ():
            if size % self.workload.group_size:
                raise ValueError(
                    "plan.train_batch_size must hold multiples of workload.group_size, got "
                    f"{size}, group_size={self.workload.group_size}"
                )

    def _check_longest(self) -> None:
        capacity, longest = self.hardware.kv_cache_tokens, self.longest_rollout_tokens
        if capacity is not None and longest > capacity:
            prompt = "workload.prompt_tokens + " if longest > self.workload.length.max else ""
            key = f"{prompt}workload.length.max" if self.environment is None else "environment.turns.context_max"
            raise ValueError(
                f"hardware.kv_cache_tokens must hold the longest rollout, {key} = {longest} tokens, "
                f"got kv_cache_tokens={capacity}"
            )

    def _check_step_tokens(self) -> None:
        most, sequences = self.hardware.step_tokens, self.scheduler.generation_batch_size
        if most is not None and most < sequences:
            raise ValueError(
                f"hardware.step_tokens must be at least scheduler.generation_batch_size={sequences}, got {most}"
            )

    def _check_fleet(self) -> None:
        if self.fleet is None:
            return
        engines = sum(group.engines for group in self.fleet.groups if group.kind != "lent")
        if self.fleet.groups and self.colocated:
            raise ValueError(
                "fleet.groups needs a schedule whose engines have accelerators of their own, got "
                f"scheduler.kind={self.scheduler.kind!r}; fleet.trainer has failures of all its accelerators"
            )
        if self.fleet.groups and engines != self.num_engines:
            raise ValueError(f"fleet.groups must have the run's {self.num_engines} engines together, got {engines}")
        lent, most = self.fleet.lent, self.training_accelerators // self.cluster.tensor_parallel
        if lent is not None and lent.engines > most:
            raise ValueError(
                f"fleet.groups must lend at most the {most} engines that the accelerators that train have room for, "
                f"got {lent.engines}"
            )
        trainer = self.fleet.trainer
        if trainer is not None and trainer.mtbf_hours is not None:
            attempt_s = trainer.checkpoint_every_s + trainer.checkpoint_s + trainer.restart_s
            least_s, mean_s = LEAST_ATTEMPT * attempt_s, 3600 * trainer.mtbf_hours / self.training_accelerators
            if mean_s < least_s:
                raise ValueError(
                    f"fleet.trainer.mtbf_hours must leave {self.training_accelerators} accelerators a mean of at least "
                    f"{LEAST_ATTEMPT:g} (checkpoint_every_s + checkpoint_s + restart_s) = {least_s:g} s between "
                    f"failures, got {mean_s:g} s"
                )

    def _check_faults(self) -> None:
        limits = {"engine": self.num_engines, "rank": self.trainer_ranks, "step": self.optimizer_steps}
        for number, fault in enumerate(self.faults or ()):
            for name, limit in limits.items():
                value = getattr(fault, name)
                if value is not None and value >= limit:
                    raise ValueError(f"faults.{number}.{name} must be at most {limit - 1}, got {value}")

    def _check_environment(self) -> None:
        if self.environment is None:
            return
        context, prompt = self.environment.turns.context_max, self.workload.prompt_tokens
        if context <= prompt:
            raise ValueError(
                f"environment.turns.context_max must be above workload.prompt_tokens={prompt}, got {context}"
            )
        if prompt + self.environment.turns.max > context:  # a turn has a token at least
            raise ValueError(
                f"environment.turns.max must leave a token a turn in context_max={context} after "
                f"workload.prompt_tokens={prompt}, got {self.environment.turns.max}"
            )

    def _check_rollouts(self) -> None:
        scheduler, engines = self.scheduler, self.num_engines
        if self.num_slots > MOST_ROLLOUTS:
            raise ValueError(
                f"scheduler.generation_batch_size must give all engines at most {MOST_ROLLOUTS} sequences together, "
                f"got generation_batch_size={scheduler.generation_batch_size} on {engines} engines"
            )
        if self.rl_step_rollouts > MOST_ROLLOUTS:
            raise ValueError(
                f"scheduler.optimizer_steps_per_rl_step must give an RL step at most {MOST_ROLLOUTS} sequences, got "
                f"optimizer_steps_per_rl_step={self.rl_step_rollouts // scheduler.train_batch_size}, "
                f"train_batch_size={scheduler.train_batch_size}"
            )

    def _check_max_lag(self) -> None:
        scheduler, least, why = self.scheduler, self.least_max_lag, self.scheduler.schedule.least_lag_reason
        if scheduler.max_lag is not None and scheduler.max_lag < least:
            raise ValueError(f"scheduler.max_lag cannot be met: {why} = {least}, got max_lag={scheduler.max_lag}")


CHECK_STEPS = 4
"""Optimizer steps of a check (count): each of them trains, publishes, and, colocated, switches."""


def check_config(config: RunConfig) -> RunConfig:
    """Return a run's first steps, each an RL step of its own and published; batches, engines and split stay."""
    scheduler = config.scheduler.model_copy(update={"optimizer_steps_per_rl_step": 1, "publish_every": 1})
    train = config.train
    if train is not None:
        defaults = {"evaluation": type(train.evaluation)(), "checkpoint": type(train.checkpoint)()}
        train = train.model_copy(update=defaults)
    steps = min(CHECK_STEPS, config.optimizer_steps)
    return config.model_copy(
        update={"optimizer_steps": steps, "scheduler": scheduler, "train": train}
        | dict.fromkeys(("plan", "compare", "faults"))
    )


# ----------------------------------------------------------------------------- reading and writing


def load_run(
    path: str | Path,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    *,
    hardware: Path | None = None,
    faults: Path | None = None,
) -> RunConfig:
    """Read a run file, apply overrides in order, and check everything; paths in the result are absolute.

    Args:
        path: The TOML file.
        overrides: ``a.b=value`` each; the value is TOML, or else a plain string.
        seed: Replaces ``seed`` of the file.
        hardware: A file. Its table ``[hardware]`` replaces that of the run file; the overrides apply afterwards.
        faults: A file. Its tables ``[[faults]]`` replace those of the run file, likewise.

    Raises:
        ConfigError: If the file cannot be read or anything in it is wrong, one line per fault.
    """
    path = Path(path)
    tables = read_toml(path, "run file")
    if faults is not None:
        tables["faults"] = read_toml(faults, "--faults").get("faults", [])
    tables = completed(tables, overrides, seed, folder=path.parent, hardware=hardware)
    config = parse_run(tables, name=path.name)
    if config.compare is None:
        return config
    return config.model_copy(update={"compare": _with_absolute_paths(config.compare, path.parent)})


def read_hardware(path: Path, option: str) -> tuple[dict[str, Any], float | None]:
    """Return ``[hardware]`` of a file, paths absolute, and the mean acceptance of a run that `calibrate` has written.

    None: there is no acceptance. ConfigError, naming ``option``, if there is no valid table.
    """
    tables = read_toml(path, option)
    table = tables.get("hardware")
    if not isinstance(table, dict):
        raise ConfigError(f"{option} {path} must hold a table [hardware], as `calibrate` writes it")
    make_paths_absolute({"hardware": table}, path.parent)
    return table, flat(tables).get("engine.speculation.acceptance")


def completed(
    tables: Mapping[str, Any],
    overrides: Sequence[str] = (),
    seed: int | None = None,
    *,
    folder: Path,
    hardware: Path | None = None,
) -> dict[str, Any]:
    """Return the tables of a run file with overrides, seed, ``[hardware]`` of another file, and absolute paths.

    Raises ConfigError as ``with_overrides`` and ``read_hardware``, or if a path has a zero byte.
    """
    data = dict(tables) if seed is None else {**tables, "seed": seed}
    if hardware is not None:
        data["hardware"], measured = read_hardware(hardware, "--hardware")
        engine = data.get("engine")
        if measured is not None and isinstance(engine, dict) and isinstance(given := engine.get("speculation"), dict):
            data["engine"] = {**engine, "speculation": given | as_measured(measured)}
    data = with_overrides(data, overrides)
    make_paths_absolute(data, folder)
    return data


def parse_run(data: Mapping[str, Any], name: str = "run") -> RunConfig:
    """Check the tables of a run file; ConfigError, one line per fault of the input called ``name``."""
    with explaining(RunConfig, f"{name}: "):
        return RunConfig.model_validate_json(json.dumps(data, default=str))


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy with every ``a.b=value`` set in order; ConfigError without ``=``, or through a non-table."""
    result: dict[str, Any] = json.loads(json.dumps(data, default=str))
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not separator or not all(parts):
            raise ConfigError(f"--set must be KEY=VALUE with a dotted key, got {override!r}")
        try:
            tables = parse_toml(f"value = {text}", "--set")
        except ConfigError:
            tables = {}
        value: Any = tables["value"] if len(tables) == 1 else text
        table = result
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {override}: {part} is not a table")
        table[parts[-1]] = value
    return result


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by their dotted key."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def dump_run(config: RunConfig) -> str:
    """Return the configuration as TOML that ``load_run`` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


NAMES_OR_PATHS = (
    ("workload", "length", "source"),
    ("environment", "turns", "source"),
    ("hardware", "gpu"),
    ("hardware", "generation_gpu"),
    ("hardware", "model"),
)
"""Keys that hold a name, or the path of a file."""
MODELS = (("train", "model", "path"), ("train", "loss", "teacher"), ("engine", "speculation", "model"))
"""Keys that hold the folder of a model, or its id at Hugging Face."""
PATHS = (
    *NAMES_OR_PATHS,
    ("hardware", "decode", "table"),
    *MODELS,
    ("train", "weights_folder"),
    ("train", "task", "settings", "path"),
    ("train", "task", "settings", "held_out_path"),
    ("train", "evaluation", "settings", "path"),
    ("train", "evaluation", "settings", "held_out_path"),
    ("fleet", "groups", "capacity"),
)
"""Keys that hold a path, relative to the run file; of a list of tables, in each."""
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Of a model at Hugging Face."""


def make_paths_absolute(data: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Make relative paths absolute, in place; return each before and after. ConfigError if one has a zero byte."""
    changes = []
    for keys in PATHS:
        tables: list[Any] = [data]
        for key in keys[:-1]:
            inner = [table.get(key) for table in tables if isinstance(table, dict)]
            tables = [one for value in inner for one in (value if isinstance(value, list) else [value])]
        for table in tables:
            value = table.get(keys[-1]) if isinstance(table, dict) else None
            is_id = keys in MODELS and isinstance(value, str) and is_model_id(value, folder)
            if isinstance(value, str) and not is_id and (keys not in NAMES_OR_PATHS or _is_path(value, folder)):
                if "\0" in value:
                    raise ConfigError(f"{'.'.join(keys)} must be the path of a file, got {shown(value)}")
                table[keys[-1]] = os.path.realpath(folder / value)
                changes.append((value, table[keys[-1]]))
    return changes


def is_model_id(value: str, folder: Path = Path()) -> bool:
    """Return whether a key of ``MODELS`` is the id of a model at Hugging Face: it looks like one and is no folder."""
    return bool(_MODEL_ID.fullmatch(value)) and not (folder / value).exists()


def _is_path(value: str, folder: Path) -> bool:
    """Return whether a name or path is a path: by its ending, or because that folder is there."""
    if "\0" in value:
        return True  # and is refused as one
    return value.endswith((".csv", ".toml", ".json", ".jsonl", ".jsonl.gz")) or (
        "/" in value and (folder / value).is_dir()
    )


def _with_absolute_paths(compare: CompareConfig, folder: Path) -> CompareConfig:

    def changed(variants: list[Variant]) -> list[Variant]:
        return [one.model_copy(update={"set": [absolute(override) for override in one.set]}) for one in variants]

    def absolute(override: str) -> str:
        try:
            tables = with_overrides({}, [override])
        except ConfigError:
            return override  # the comparison reports the fault
        for before, now in make_paths_absolute(tables, folder):
            override = override.replace(before, now)
        return override

    return compare.model_copy(update={"arms": changed(compare.arms), "scenarios": changed(compare.scenarios)})
