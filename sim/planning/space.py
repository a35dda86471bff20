"""The search space of a plan: run file, answers, memory, limits, and the choices that candidates differ in.

To add a choice, add its list to ``PlanConfig``, its ``Axis`` here, and, if not every kind of schedule has it, its name
to ``ScheduleKind.axes`` of the others. Candidates and their labels follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Any, Self, TypeVar

import numpy as np

from pipelinerl.calibration.measured import Measured
from pipelinerl.config.resolve import least_memory, named_engine, named_hardware, run_trainer_fits, sequence_parallel_of
from pipelinerl.config.run import PlanConfig, RunConfig, find_schedule
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import coefficients
from pipelinerl.hardware.derive import kv_cache_tokens
from pipelinerl.records.reports import Prices
from pipelinerl.rl.drift import DriftModel, ess_at_lag
from pipelinerl.scheduler.kinds import PARTIAL_ROLLOUTS, ScheduleKind
from pipelinerl.theory.lengths import LengthStatistics, Turn, TurnMeans, lengths_from
from pipelinerl.util.arrays import IntArray
from pipelinerl.util.strict_model import StrictModel
from sim.clock import TICKS_PER_S
from sim.episodes import Episodes
from sim.workload import Workload, grown_length

# ------------------------------------------------------------------------------------------- keys that are not searched

_LEARNING = "changes what is learnt"
_TASK = "the task's"
_TRAINER = "must fit the trainer you have: compare two plans"
NOT_SEARCHED = {
    "cluster.accelerators": "given; the answer says what 8 more would give",
    "scheduler.partial_rollouts": "the same as `partial_rollouts` in `plan.schedulers`",
    "scheduler.micro_batch_size": "moves little",
    "scheduler.weight_update": _LEARNING,
    "scheduler.on_stale": _LEARNING,
    "scheduler.on_full": _LEARNING,
    "scheduler.admission": "finds `generation_batch_size` itself",
    "scheduler.routing": "matters where turns outgrow the KV caches: compare two plans",
    "scheduler.filter_no_signal": _LEARNING,
    "scheduler.discard_limit": "only ends runs that stall",
    "workload.group_size": _LEARNING,
    "workload.prompt_tokens": _TASK,
    "workload.success_rate": _TASK,
    "workload.length": _TASK,
    "train.trainer.zero_stage": _TRAINER,
    "train.trainer.pack_tokens": _TRAINER,
    "train.trainer.activation_checkpointing": _TRAINER,
    **dict.fromkeys(("train.trainer.fused", "train.trainer.expert_parallel"), "not modelled"),
    "train.trainer.router_replay": _LEARNING,
    "train.transport": "`delta` stops neither side for long; the others are for where it cannot be had",
    "train.engine.gpu_memory_utilization": "set it as high as your engines bear",
    "hardware": "given, and drawn where it is not measured",
    "engine": "given",
    "generation": "left out",
    "fleet": "given, without groups",
    "faults": "left out",
}
"""Keys, or whole tables of them, that no axis searches, with the reason."""


SAMPLE_SIZE = 8192
"""Answers drawn for their distribution (count)."""
SAMPLE_EPISODES = 2048
"""Rollouts with turns drawn for the same (count)."""


Table = TypeVar("Table", bound=StrictModel)


class Reason(StrEnum):
    """Why a candidate is rejected."""

    TWO_KINDS = "accelerators of two kinds cannot generate and train in turn"
    """It is colocated, and ``hardware.generation_gpu`` names another kind for the engines."""
    HEADS = "the attention heads do not divide by tensor_parallel"
    ENGINE_MEMORY = "weights and the longest rollout do not fit into an engine"
    """An engine could never finish the longest rollout."""
    TRAINER_MEMORY = "training does not fit into the memory of the accelerators that train"
    """Weights, gradients, optimizer states and activations."""
    ROW = "the longest rollout does not fit into train.trainer.pack_tokens times sequence_parallel"
    ROLLOUTS = "more sequences at a time than a run file may hold"
    """In the slots of all engines, or in the batches of an RL step."""
    LAG = "lag_limit"
    """Some batch has a larger lag in any case."""
    MEAN_LAG = "mean_lag_limit"
    ESS = "min_ess"
    """By the drift model."""
    GPU_HOURS = "gpu_hours"
    BUDGET = "budget"


def with_values(config: Table, **tables: Mapping[str, Any]) -> Table:
    """Return a run file with other values in some of the tables that it has, named as ``train.trainer``."""
    changed: dict[str, Any] = {}
    for name, values in tables.items():
        table, _, inner = name.partition(".")
        own = getattr(config, table)
        changed[table] = with_values(own, **{inner: values}) if inner else own.model_copy(update=dict(values))
    return config.model_copy(update=changed)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that every candidate keeps to; None: no limit."""

    lag: int | None = None
    """Largest lag of any trained token (optimizer steps)."""
    mean_lag: float | None = None
    """Mean lag (optimizer steps)."""
    min_ess: float | None = None
    """Effective sample size, normalised."""
    drift: DriftModel | None = None
    gpu_hours: float | None = None
    """GPU-hours of the whole run."""
    budget: float | None = None
    """Cost of the whole run (USD)."""
    price: float | None = None
    """USD per GPU-hour, where known."""
    prices: Prices | None = None
    """Give the ``price`` of each candidate."""

    def at(self, config: RunConfig) -> Self:
        """Return the limits with the price of a candidate's GPU-hours, its environments included."""
        return self if self.prices is None else replace(self, price=self.prices.rates(config).usd_per_gpu_hour)

    def values(self, lag_mean: float, gpu_hours: float, *, ess: float | None = None) -> dict[Reason, float]:
        """Return the number that each limit but the largest lag bounds, in the order in which they are checked.

        ``ess`` is the effective sample size where more is known than the mean lag, which alone is a bit optimistic.
        """
        if ess is None:
            ess = 1.0 if self.drift is None else ess_at_lag(self.drift, lag_mean)
        cost = gpu_hours * (self.price or 0.0)
        return {Reason.MEAN_LAG: lag_mean, Reason.ESS: ess, Reason.GPU_HOURS: gpu_hours, Reason.BUDGET: cost}

    def broken(self, lag_mean: float, gpu_hours: float, *, ess: float | None = None) -> Reason | None:
        """Return the first limit that a mean lag and a number of GPU-hours break, if any; ``ess`` as in ``values``."""
        given = (self.mean_lag, self.min_ess, self.gpu_hours, self.budget)
        values = self.values(lag_mean, gpu_hours, ess=ess)
        for limit, (reason, value) in zip(given, values.items(), strict=True):
            if limit is not None and (value < limit if reason is Reason.ESS else value > limit):
                return reason
        return None


class Memory:
    """Memory of engines and trainer, with a longest rollout (tokens, prompt included).

    Without ``hardware.gpu`` and ``hardware.model`` only ``kv_cache_tokens`` of the run file limits.
    """

    def __init__(self, config: RunConfig, longest: int) -> None:
        self._config, self._longest = config, longest
        self.gpu: Gpu | None = None
        self.model: LanguageModel | None = None
        hardware = config.hardware
        if (named := named_hardware(hardware)) is not None:
            self.gpu, self.model = named
            self.engine_gpu, self._engine_model = named_engine(hardware, *named)
            self._coefficients = coefficients(hardware.level, hardware.named_coefficients)

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
        """Return whether every accelerator of an engine gets as many whole heads; True for an unknown model."""
        return self.model is None or self.model.divides_by(tensor_parallel)

    def excluded_because(self, config: RunConfig) -> Reason | None:
        """Return why the engines or the trainer of a candidate cannot run; None if they can."""
        if not self.heads_divide(config.cluster.tensor_parallel):
            return Reason.HEADS
        if not self.engine_fits(config.cluster.tensor_parallel):
            return Reason.ENGINE_MEMORY
        if not self.row_fits(shared := sequence_parallel_of(config)):
            return Reason.ROW
        return None if self.trainer_fits(config.training_accelerators, shared) else Reason.TRAINER_MEMORY

    def row_fits(self, shared: int) -> bool:
        """Return whether the longest rollout fits into a row of so many ranks; True if no trainer is stated."""
        train = self._config.train
        return train is None or self.least_pack(shared) <= train.trainer.pack_tokens

    def least_pack(self, shared: int) -> int:
        """Return the tokens of a rank with which the longest rollout fits into a row of so many ranks."""
        return -(-self._longest // shared)

    def needed_shares(self, config: RunConfig) -> list[float] | None:
        """Return the least memory of an engine and of a trainer over their memory; None if GPU or model are unknown."""
        if self.gpu is None or self.model is None:
            return None
        return least_memory(
            config,
            self.gpu,
            self.model,
            tensor_parallel=config.cluster.tensor_parallel,
            training_accelerators=config.training_accelerators,
            longest=self._longest,
        )

    def trainer_fits(self, accelerators: int, shared: int = 1) -> bool:
        """Return whether weights, gradients, optimizer states and activations fit, ``shared`` ranks to a row."""
        if self.gpu is None or self.model is None:
            return True
        config = self._config
        if config.train is not None:
            config = with_values(config, **{SHARING.table: {SHARING.name: shared}})
        return run_trainer_fits(config, self.gpu, self.model, training_accelerators=accelerators, longest=self._longest)


def answers_of(config: RunConfig) -> tuple[LengthStatistics, int]:
    """Return prompts and answers as the simulator will draw them first, and the longest rollout there can be (tokens).

    Growing answers are taken as they are in the middle of the run.
    """
    workload = Workload(config.workload, seed=config.seed)
    if config.environment is not None:
        return _turns_of(config, Episodes(config, workload)), config.longest_rollout_tokens
    length = config.workload.length
    grown = partial(grown_length, factor=(1 + length.growth) / 2, max_tokens=length.max)
    groups = [workload.group(index, index) for index in range(max(1, SAMPLE_SIZE // config.workload.group_size))]
    tokens_PA = np.array([[grown(one) for one in group.lengths] for group in groups], dtype=np.int64)
    prompt = float(np.mean([group.prompt_tokens for group in groups]))
    answers = LengthStatistics(lengths_from(tokens_PA.ravel()), prompt_tokens=prompt, group_wait=_group_wait(tokens_PA))
    return answers, workload.longest_rollout_tokens


def _group_wait(tokens_PA: IntArray) -> float:
    """Return the decode steps that a finished rollout waits for the longest of its group, mean over tokens."""
    return float((tokens_PA * (tokens_PA.max(axis=1, keepdims=True) - tokens_PA)).sum() / tokens_PA.sum())


def _turns_of(config: RunConfig, episodes: Episodes) -> LengthStatistics:
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
    tokens_PA = np.array([one.ends[-1] for one in drawn]).reshape(-1, size)
    observed_mean = float(np.mean([one.observed_T.sum() for one in rollouts]))
    return LengthStatistics(
        lengths_from(tokens_PA.ravel()), observed_mean, group_wait=_group_wait(tokens_PA), turns=TurnMeans.of(rollouts)
    )


def limits_of(config: RunConfig, plan: PlanConfig) -> Limits:
    """Return the limits of a plan; ConfigError if there is a budget and no price."""
    prices = Prices.of(config, assume=True)
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
        """Return the search space of a run file, into which ``measured`` has been merged.

        Raises ConfigError if a file it names is wrong, GPU or model are unknown, or there is a budget and no price.
        """
        plan = config.plan or PlanConfig()
        answers, longest = answers_of(config)
        memory = Memory(config, longest)
        return cls(config, plan, answers, memory, limits_of(config, plan), measured or Measured())

    def split_shown(self, generating: int) -> str:
        """Return the name of a split in tables: accelerators that generate and that train, with their kinds if two."""
        training = self.accelerators - generating
        if self.config.hardware.generation_gpu is None:
            return f"{generating}/{training}"
        assert self.memory.gpu is not None  # the run file is refused without it
        return f"{generating} {self.memory.engine_gpu.name}/{training} {self.memory.gpu.name}"

    @property
    def accelerators(self) -> int:
        """Accelerators of the cluster (count)."""
        return self.config.cluster.accelerators


# ------------------------------------------------------------- the choices, one table: an axis for every list of [plan]

BATCH_SIZES = tuple(size for k in range(4, 11) for size in (2**k, 3 * 2 ** (k - 1)) if size <= 1024)
"""H tried by default: 16, 24, 32, 48, ... 1024 (sequences per engine)."""
ENGINE_SIZES = (1, 2, 4, 8)
"""Sizes of an engine tried by default (accelerators)."""
LARGER_ENGINES = (16, 32, 64, 128, 256)
"""Sizes of which the two smallest that fit are tried where no default holds the model (accelerators)."""
RL_STEPS = (1, 2, 4, 8, 16, 32, 64)
"""G tried by default (optimizer steps per RL step)."""
PUBLISH_EVERY = (1, 2, 3, 4, 8)
"""Optimizer steps between publications tried by default (count)."""
SHARED_BY = (1, 2, 4, 8)
"""Ranks of a row, the fewest that are enough (count)."""
NUM_SPLITS = 32
"""Pieces that the accelerators are divided into by default (count)."""

Choice = dict[str, Any]
"""A value for every axis, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One choice that candidates differ in."""

    name: str
    """Its list in ``[plan]``."""
    key: str
    """Its table and key in a run file: ``scheduler.max_lag``."""
    values: Callable[[SearchSpace, Choice], Sequence[Any]]
    """Returns the values that go with a choice of the axes before it; one value if the kind does not have the axis."""
    shown: Callable[[Any, SearchSpace], str]
    """Returns its part of a candidate's label; empty where the value needs no mention."""
    every_kind: bool = False
    """Whether every kind of schedule has it; else the kinds that name it among their ``axes``."""
    is_layout: bool = False
    """Whether another value is another layout, and not another size of the same."""
    rule: Callable[[Any, SearchSpace], str | None] = lambda _value, _space: None
    """Returns the rule that a listed value in no candidate breaks; None if the value itself is correct."""
    unused_because: Callable[[SearchSpace], str] = lambda _: "nothing that goes with it is left"
    """Returns why a correct listed value is in no candidate."""

    @property
    def table(self) -> str:
        """Its table in a run file."""
        return self.key.rpartition(".")[0]

    def applies_to(self, schedule: ScheduleKind) -> bool:
        """Return whether a kind of schedule has this choice."""
        return self.every_kind or self.name in schedule.axes


def schedule_of(choice: Choice) -> ScheduleKind:
    """Return the kind of schedule of a choice."""
    return find_schedule(choice[SCHEDULE.name], key="plan.schedulers")


# ------------------------------------------------------------------------------------------------- values to try


def engine_sizes(space: SearchSpace) -> Sequence[int]:
    """Return the sizes of an engine to try (accelerators), whether or not a split goes with them."""
    plan, own, hardware = space.plan, space.config.cluster.tensor_parallel, space.config.hardware
    total, memory = space.accelerators, space.memory

    def there(sizes: Iterable[int]) -> list[int]:
        return [size for size in sizes if size <= total]

    if plan.tensor_parallel is not None:
        return there(plan.tensor_parallel)
    if hardware.decode is not None or hardware.kv_cache_tokens is not None:
        return there([own])
    sizes = [size for size in there(ENGINE_SIZES) if memory.heads_divide(size)]
    if not any(memory.engine_fits(size) for size in sizes):
        larger = [size for size in there(LARGER_ENGINES) if memory.heads_divide(size)]
        sizes = [size for size in larger if memory.engine_fits(size)][:2] or sizes
    return sorted({*there([own]), *sizes})


def whole_engines(accelerators: int, engine: int) -> int:
    """Return ``accelerators`` rounded down to whole engines; the others stand idle where all generate."""
    return accelerators // engine * engine


def train_batch_sizes(space: SearchSpace) -> Sequence[int]:
    """Return the numbers of sequences per optimizer step to try."""
    return space.plan.train_batch_size or [space.config.scheduler.train_batch_size]


def _splits(space: SearchSpace, choice: Choice) -> Sequence[int | None]:
    """Return numbers of accelerators that generate: whole engines, with some left to train."""
    total, engine, own = space.accelerators, choice[ENGINE.name], space.config.cluster.generation_accelerators
    if schedule_of(choice).colocated:
        return [own]  # not read
    values: Sequence[int] | None = space.plan.generation_accelerators
    if values is None:
        unit = math.ceil(max(1, total / NUM_SPLITS) / engine) * engine
        values = sorted({*range(unit, total, unit), *([] if own is None else [own])})
    return [value for value in values if value < total and value % engine == 0]


def _sharing(space: SearchSpace, choice: Choice) -> Sequence[int | None]:
    """Return numbers of ranks that share rows: listed or stated ones, else the fewest that hold the longest rollout."""
    train, listed, memory = space.config.train, space.plan.sequence_parallel, space.memory
    if train is None:
        return [None]
    if listed is None and SHARING.name in train.trainer.model_fields_set:
        listed = [train.trainer.sequence_parallel]
    training = space.accelerators - (0 if schedule_of(choice).colocated else choice[SPLIT.name])
    ranks = training // (choice[ENGINE.name] if schedule_of(choice).colocated else 1)
    possible = [size for size in listed or SHARED_BY if ranks % size == 0 and memory.heads_divide(size)]
    if listed is not None:
        return possible
    return next(([one] for one in possible if memory.row_fits(one) and memory.trainer_fits(training, one)), [1])


def _rl_steps(space: SearchSpace, choice: Choice) -> Sequence[int]:
    if not schedule_of(choice).has_rl_steps:
        return [space.config.scheduler.optimizer_steps_per_rl_step]
    own = space.config.scheduler.optimizer_steps_per_rl_step
    listed = space.plan.optimizer_steps_per_rl_step or sorted({own, *RL_STEPS})
    return [steps for steps in listed if steps <= space.config.optimizer_steps]


def _generation_batch_sizes(space: SearchSpace, choice: Choice) -> Sequence[int]:
    """Return numbers of sequences per engine; of the numbers that an RL step cannot fill, only the smallest."""
    schedule, engine = schedule_of(choice), choice[ENGINE.name]
    sizes: Sequence[int] | None = space.plan.generation_batch_size
    if sizes is None:
        held, context = space.memory.cache_tokens, space.answers.context
        own = space.config.scheduler.generation_batch_size
        fit = (size for size in {*BATCH_SIZES, own} if size * context <= held(engine, size) or size == BATCH_SIZES[0])
        sizes = sorted(fit)
    if not schedule.has_rl_steps or schedule.carries_over:
        return sizes
    generating = whole_engines(space.accelerators, engine) if schedule.colocated else choice[SPLIT.name]
    fillable = math.ceil(choice[TRAIN_BATCH.name] * choice[RL_STEP.name] * engine / generating)
    enough = next((size for size in sizes if size >= fillable), None)
    return sizes if enough is None else [size for size in sizes if size <= enough]


def _ready_queues(space: SearchSpace, choice: Choice) -> Sequence[int | None]:
    """Return sizes of the ready queue; the scheduler takes none below a batch."""
    batch, own = choice[TRAIN_BATCH.name], space.config.scheduler.ready_queue_size
    if not READY_QUEUE.applies_to(schedule_of(choice)):
        return [None]
    if space.plan.ready_queue_size is None:
        return [own if (own or 0) >= batch else None]
    return [size for size in space.plan.ready_queue_size if size >= batch]


def publish_every(space: SearchSpace) -> Sequence[int]:
    """Return the numbers of optimizer steps from one publication to the next to try."""
    own, most = space.config.scheduler.publish_every, space.config.optimizer_steps
    listed = space.plan.publish_every or sorted({own, *PUBLISH_EVERY})
    return [steps for steps in listed if steps <= most]


def _publish_every(space: SearchSpace, choice: Choice) -> Sequence[int]:
    return publish_every(space) if PUBLISH.applies_to(schedule_of(choice)) else [space.config.scheduler.publish_every]


def _environments(space: SearchSpace, _choice: Choice) -> Sequence[int | None]:
    own = space.config.environment
    return [None] if own is None else space.plan.environments or [own.count]


def _max_lags(space: SearchSpace, choice: Choice) -> Sequence[int | None]:
    """Return bounds on the lag; the scheduler takes none below the one step less between publications."""
    limit, listed, least = space.limits.lag, space.plan.max_lag, choice[PUBLISH.name] - 1
    if listed is None or not MAX_LAG.applies_to(schedule_of(choice)):
        return [limit]
    bounds = [lag for lag in listed if lag >= least]
    return sorted({lag if limit is None else min(lag, limit) for lag in bounds})


# ------------------------------------------------------------------- rules that a value itself has to keep


def _engine_rule(_value: int, space: SearchSpace) -> str:
    splits = space.plan.generation_accelerators
    if any(schedule.colocated for schedule in space.plan.schedules):
        return f"sizes of at most cluster.accelerators={space.accelerators}"
    if splits is not None:
        return f"divisors of a number of plan.generation_accelerators={splits}"
    return f"sizes below cluster.accelerators={space.accelerators}, as others have to train"


def _split_rule(value: int, space: SearchSpace) -> str:
    if value >= space.accelerators:
        return f"numbers below cluster.accelerators={space.accelerators}, as the others train"
    return f"multiples of an engine, {' or '.join(map(str, engine_sizes(space)))} accelerators"


def _steps_rule(value: int, space: SearchSpace) -> str | None:
    most = space.config.optimizer_steps
    return f"numbers of at most optimizer_steps={most}" if value > most else None


def _ready_queue_rule(value: int, space: SearchSpace) -> str | None:
    least = min(train_batch_sizes(space))
    return f"sizes of at least the train_batch_size, {least}" if value < least else None


def _sharing_rule(_value: int, space: SearchSpace) -> str | None:
    if space.config.train is None:
        return "nothing without the table [train], whose packs decide the memory"
    return "divisors of the attention heads and of a number of accelerators that train"


def _train_batch_rule(value: int, space: SearchSpace) -> str | None:
    queues = space.plan.ready_queue_size
    if queues is None or value <= max(queues):
        return None
    return f"sizes of at most the largest plan.ready_queue_size, {max(queues)}"


def _max_lag_rule(value: int, space: SearchSpace) -> str | None:
    least = min(publish_every(space), default=1) - 1
    return f"bounds of at least publish_every - 1 = {least}" if value < least else None


# ----------------------------------------------------------------------------------------------------- the table

SCHEDULE = Axis(
    name="schedulers",
    key="scheduler.kind",
    every_kind=True,
    is_layout=True,
    values=lambda space, _: list(dict.fromkeys(space.plan.schedulers)),
    shown=lambda value, _: find_schedule(value, key="plan.schedulers").name,
    unused_because=lambda _: "no split of the accelerators into engines and, where others train, a trainer is left",
)
ENGINE = Axis(
    name="tensor_parallel",
    key="cluster.tensor_parallel",
    every_kind=True,
    is_layout=True,
    values=lambda space, _: engine_sizes(space),
    shown=lambda value, _: f"TP={value}" if value > 1 else "",
    rule=_engine_rule,
)
TRAIN_BATCH = Axis(
    name="train_batch_size",
    key="scheduler.train_batch_size",
    every_kind=True,
    values=lambda space, _: train_batch_sizes(space),
    shown=lambda value, space: f"B={value}" if value != space.config.scheduler.train_batch_size else "",
    rule=_train_batch_rule,
)
SPLIT = Axis(
    name="generation_accelerators",
    key="cluster.generation_accelerators",
    is_layout=True,
    values=_splits,
    shown=lambda value, space: space.split_shown(value),
    rule=_split_rule,
)
SHARING = Axis(
    name="sequence_parallel",
    key="train.trainer.sequence_parallel",
    every_kind=True,
    is_layout=True,
    values=_sharing,
    shown=lambda value, _: f"sequence_parallel={value}" if (value or 1) > 1 else "",
    rule=_sharing_rule,
)
RL_STEP = Axis(
    name="optimizer_steps_per_rl_step",
    key="scheduler.optimizer_steps_per_rl_step",
    is_layout=True,
    values=_rl_steps,
    shown=lambda value, _: f"G={value}",
    rule=_steps_rule,
)
GENERATION_BATCH = Axis(
    name="generation_batch_size",
    key="scheduler.generation_batch_size",
    every_kind=True,
    values=_generation_batch_sizes,
    shown=lambda value, _: f"H={value}",
    unused_because=lambda _: "the same as a smaller one, whose slots are never all full",
)
READY_QUEUE = Axis(
    name="ready_queue_size",
    key="scheduler.ready_queue_size",
    values=_ready_queues,
    shown=lambda value, space: f"queue={value}" if value != space.config.scheduler.ready_queue_size else "",
    rule=_ready_queue_rule,
)
PUBLISH = Axis(
    name="publish_every",
    key="scheduler.publish_every",
    values=_publish_every,
    shown=lambda value, _: f"publish_every={value}" if value > 1 else "",
    rule=_steps_rule,
)
ENVIRONMENTS = Axis(
    name="environments",
    key="environment.count",
    every_kind=True,
    values=_environments,
    shown=lambda value, space: f"environments={value}" if space.plan.environments is not None else "",
)
MAX_LAG = Axis(
    name="max_lag",
    key="scheduler.max_lag",
    values=_max_lags,
    shown=lambda value, space: f"max_lag={value}" if space.plan.max_lag is not None else "",
    rule=_max_lag_rule,
    unused_because=lambda space: f"tried as the lag limit, {space.limits.lag}",
)
_LAST = (READY_QUEUE, PUBLISH, ENVIRONMENTS, MAX_LAG)
AXES = (SCHEDULE, ENGINE, TRAIN_BATCH, SPLIT, SHARING, RL_STEP, GENERATION_BATCH, *_LAST)
"""Every axis, after those that its values depend on. Candidates are listed in this order, the last axis fastest."""
_LABEL_ORDER = (SCHEDULE, SPLIT, GENERATION_BATCH, RL_STEP, ENGINE, SHARING, TRAIN_BATCH, *_LAST)
_REPORT_ORDER = (SCHEDULE, ENGINE, TRAIN_BATCH, GENERATION_BATCH, SPLIT, SHARING, RL_STEP, *_LAST)


def all_choices(space: SearchSpace) -> list[Choice]:
    """Return every combination of values that go together; by default the run file's own is among them."""
    choices: list[Choice] = [{}]
    for axis in AXES:
        choices = [{**choice, axis.name: value} for choice in choices for value in axis.values(space, choice)]
    return choices


def choice_of(config: RunConfig) -> Choice:
    """Return the choice that a run file makes."""
    scheduler = config.scheduler
    kind = PARTIAL_ROLLOUTS.name if scheduler.partial_rollouts else scheduler.kind
    tables = {ENVIRONMENTS: config.environment, SHARING: config.train}
    values = {one.name: attrgetter(one.key)(config) for one in AXES if tables.get(one, True) is not None}
    return {**{one.name: None for one in tables}, **values, SCHEDULE.name: kind}


def label_of(choice: Choice, space: SearchSpace) -> str:
    """Return the name of a choice in tables."""
    schedule = schedule_of(choice)
    parts = [axis.shown(choice[axis.name], space) for axis in _LABEL_ORDER if axis.applies_to(schedule)]
    return " ".join(part for part in parts if part)


def listed_axes(space: SearchSpace, *, tried: bool) -> Iterator[tuple[Axis, list[Any]]]:
    """Yield every list of the run file that some schedule ``tried`` uses, its values once, or that none uses."""
    for axis in _REPORT_ORDER:
        values: list[Any] | None = getattr(space.plan, axis.name)
        if values is not None and tried is any(axis.applies_to(schedule) for schedule in space.plan.schedules):
            yield axis, list(dict.fromkeys(values)) if tried else values


def values_of(axis: Axis, choices: Sequence[Choice]) -> set[Any]:
    """Return the values of an axis in choices whose schedule uses it."""
    return {choice[axis.name] for choice in choices if axis.applies_to(schedule_of(choice))}


def unused_values(space: SearchSpace, choices: Sequence[Choice]) -> Iterator[tuple[Axis, Any]]:
    """Yield every listed value that no choice has, except in lists that no schedule tried uses."""
    for axis, values in listed_axes(space, tried=True):
        used = values_of(axis, choices)
        yield from ((axis, value) for value in values if value not in used)


def check_lists(space: SearchSpace, choices: Sequence[Choice]) -> None:
    """Raise ConfigError if no candidate can have some listed value, a line per value: key, rule, value."""
    unused = [(axis, value, axis.rule(value, space)) for axis, value in unused_values(space, choices)]
    faults = [f"plan.{axis.name} must hold {rule}, got {value}" for axis, value, rule in unused if rule is not None]
    if faults:
        raise ConfigError(*faults)
