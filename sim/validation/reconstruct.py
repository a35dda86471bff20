"""A published run as a run of ours: which cluster, which hardware, which batch, and the assumptions behind it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.hardware import catalogue, prior
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import ResolvedHardware, loading_s
from pipelinerl.hardware.derive import derive_hardware, kv_cache_tokens
from sim.validation.rows import DEFAULT_GROUP_SIZE, PublishedRun, Schedule, precisions, unknown_words, unmodelled

PROMPT_TOKENS = 150
"""Tokens of a prompt: published tokens/s less published answer lengths in three systems (100-160)."""
MEAN_OVER_LONGEST = 0.2
"""Mean answer over the longest, where no mean is published; published runs have 0.10 to 0.78."""
LARGEST_MEAN = 0.95
"""Mean answer over the longest, at most."""
DEFAULT_GPUS = 128
"""GPUs where no count is published; then only ratios are compared."""
STAND_IN_GPU = "H100"
"""GPU where none is published."""
LIKE = 2.0
"""Parameters of a model over those of another that stands in for it, at most, without doubt."""
LARGEST_DENSE = 450e9
"""Parameters of a model whose name states no active ones, at most: a larger one is a mixture of experts (count)."""
MAX_SLOTS = 256
"""Sequences on one engine, at most: vLLM's default for years."""

LOG_MOST_MEAN = math.log(LARGEST_MEAN / MEAN_OVER_LONGEST)
"""Log of the largest mean answer over the assumed one."""
ROUNDING = 0.005
"""Logs of two measurements nearer than this, of rows that agree in all else, are one measurement, rounded."""

UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
"""Units of the parameters in the name of a model."""


@dataclass(frozen=True, slots=True)
class ReconstructedRun:
    """A published run with everything that a simulation of it needs, given or assumed."""

    published: PublishedRun
    """The row, filled up from its family."""
    schedule: Schedule
    gpu: catalogue.Gpu
    model: catalogue.LanguageModel
    accelerators: int
    generating: int
    """Accelerators that generate; all of them when colocated."""
    sequences: int
    """Answers per RL step (count)."""
    longest_tokens: int
    optimizer_steps: int
    """Optimizer steps of the simulation per RL step (count)."""
    tensor_parallel: int
    weights: catalogue.Precision
    cache: catalogue.Precision
    mean_tokens: float
    """Published, or the centre of the likely range."""
    mean_is_known: bool
    scale_is_known: bool
    """Whether seconds mean anything, or only ratios: not without the cluster's size, nor from the hours of a whole run,
    which hold evaluation, checkpoints and restarts.
    """
    assumed: tuple[str, ...]
    """Assumptions in words, for the report."""
    doubts: tuple[str, ...]
    """In words, what moves all seconds and is not known or not simulated."""

    @property
    def id(self) -> str:
        """Name of the row."""
        return self.published.id

    @property
    def spread_factor(self) -> float:
        """Factor on the deviations of its seconds."""
        return prior.DOUBT_FACTOR if self.doubts or self.tensor_parallel > self.gpu.gpus_per_node else 1.0

    @property
    def in_flight(self) -> float:
        """Most sequences that are generated at a time (count)."""
        return _in_flight(self.published, self.sequences)


def reconstruct_run(published: PublishedRun, family: Sequence[PublishedRun]) -> ReconstructedRun:
    """Return a row filled up from other rows of its family (itself included or not) and from usual values.

    ``assumed`` names all that was not published. Raises ConfigError, naming it, if a value without a default is
    missing.
    """
    assumed: list[str] = []
    schedule = published.schedule
    if schedule is None:
        where = " with generation and training on separate GPUs" if published.apart else ""
        raise ConfigError(f"mode {published.mode!r} names no schedule that is simulated{where}")
    row = _filled_from_family(published, family)
    row = _with_limit(row, assumed)
    sequences = row.sequences_per_step
    if sequences is None:
        raise ConfigError("prompts_per_step is not published: the batch is unknown")
    if row.n_per_prompt is None:
        assumed.append(f"{math.gcd(DEFAULT_GROUP_SIZE, sequences)} answers per prompt")
    gpu, model, doubts = system_of(row, assumed)
    weights, cache = precisions(row, assumed)
    has_rate = any(one is not None for one in (row.step_s, row.tok_s_total, row.tok_s_per_gpu))
    accelerators = row.gpus or DEFAULT_GPUS
    if row.gpus is None:
        assumed.append(f"{accelerators} GPUs")
    assert row.max_len is not None
    mean = _mean_tokens(row, row.max_len, assumed)
    generating = _generating(row, schedule, accelerators, assumed)
    tensor_parallel = row.gpus_per_engine or _tensor_parallel(
        *catalogue.in_engine(gpu, model, weights, cache),
        generating=generating,
        in_flight=_in_flight(row, sequences),
        longest=PROMPT_TOKENS + row.max_len,
        mean=mean,
    )
    rounded = generating // tensor_parallel * tensor_parallel
    if not schedule.colocated:  # the GPUs that make no whole engine do not train
        accelerators = rounded + (row.gpus_train or accelerators - generating)
    return ReconstructedRun(
        published=row,
        schedule=schedule,
        gpu=gpu,
        model=model,
        accelerators=accelerators,
        generating=rounded,
        sequences=sequences,
        longest_tokens=row.max_len,
        # Apart, a pipeline that trains on the first batch at once would overlap parts that follow in a synchronous run.
        optimizer_steps=1 if schedule is Schedule.SYNC_APART else row.optimizer_steps_per_rl_step,
        tensor_parallel=tensor_parallel,
        weights=weights,
        cache=cache,
        mean_tokens=min(mean, LARGEST_MEAN * row.max_len),
        mean_is_known=row.avg_len is not None,
        scale_is_known=row.gpus is not None and has_rate,
        assumed=(*assumed, *(f"no effect of {word!r}" for word in unknown_words(row)), *doubts),
        doubts=doubts,
    )


def _with_limit(row: PublishedRun, assumed: list[str]) -> PublishedRun:
    """Return a row with the longest answer, from its mean where that alone is published; ConfigError without both."""
    if row.max_len is not None:
        return row
    if row.avg_len is None:
        raise ConfigError("neither max_len nor avg_len is published: lengths are unknown")
    longest = math.ceil(row.avg_len / MEAN_OVER_LONGEST)
    assumed.append(f"limit of {longest:,} tokens")
    return row.model_copy(update={"max_len": longest})


def rest_s(row: PublishedRun, level: Level) -> float:
    """Return the seconds of an RL step that are neither generation nor training: weights and phase switch."""
    return weights_s(row, level) + switch_s(row, level)


def weights_s(row: PublishedRun, level: Level) -> float:
    """Return the seconds of an RL step that the weights take.

    At once with generation: the mean of the trainer, which waits for the weights, and of the engines, which pause; the
    longer side decides.
    """
    assert row.schedule is not None
    weights = _derived(row, level).weights
    return (weights.publish_s + weights.pause_s) / 2 if row.schedule.at_once else loading_s(weights)


def switch_s(row: PublishedRun, level: Level) -> float:
    """Return the seconds of the phase switches of an RL step, where it is colocated."""
    switch = _derived(row, level).switch
    return switch.to_training_s + switch.to_generation_s


def _derived(row: PublishedRun, level: Level) -> ResolvedHardware:
    assert row.schedule is not None
    gpu, model, _ = system_of(row, [])
    return derive_hardware(
        gpu,
        model,
        tensor_parallel=1,
        training_accelerators=row.gpus_total or 8,
        colocated=row.schedule.colocated,
        coefficients=coefficients(level),
    )


def measured_seconds(row: PublishedRun) -> float | None:
    """Return seconds per RL step; where only tokens/s are published, the seconds of its answers."""
    if row.measured_step_s is not None:
        return row.measured_step_s
    rate = row.tokens_per_s
    if rate is None or row.sequences_per_step is None:
        return None
    mean = row.avg_len or MEAN_OVER_LONGEST * (row.max_len or 0)
    return row.sequences_per_step * mean / rate if mean else None


def same_run(one: PublishedRun, other: PublishedRun) -> bool:
    """Return whether two rows report one and the same measurement."""
    if one.id == other.id:
        return True
    counts = ((one.gpus, other.gpus), (one.gpus_gen, other.gpus_gen), (one.gpus_train, other.gpus_train))
    conflict = any(mine is not None and theirs is not None and mine != theirs for mine, theirs in counts)
    asked = [(row.family, row.schedule, row.max_staleness) for row in (one, other)]
    seconds, theirs_s = measured_seconds(one), measured_seconds(other)
    if conflict or asked[0] != asked[1] or seconds is None or theirs_s is None:
        return False
    return abs(math.log(seconds / theirs_s)) < ROUNDING


def _filled_from_family(row: PublishedRun, family: Sequence[PublishedRun]) -> PublishedRun:
    """Return the row with its missing workload taken over from its family.

    Batch and limit are of the first row that has them, the division of answers is the finest. A mean answer is only the
    row's own: rows of one system with harder tasks have longer ones.
    """
    changes: dict[str, Any] = {}
    stated = {"prompts_per_step": row.sequences_per_step, "n_per_prompt": row.answers_per_step}
    finest = ("prompts_per_optimizer_step", "gpus_per_sequence")
    for name in ("prompts_per_step", "n_per_prompt", "max_len", *finest):
        given = [getattr(other, name) for other in family if getattr(other, name) is not None]
        if given and getattr(row, name) is None and stated.get(name) is None:
            changes[name] = min(given) if name in finest else given[0]
    return row.model_copy(update=changes)


def _mean_tokens(row: PublishedRun, longest: int, assumed: list[str]) -> float:
    if row.avg_len is not None:
        return row.avg_len
    mean = MEAN_OVER_LONGEST * longest
    by_tokens = row.measured_step_s is None and row.tokens_per_s is not None
    turned = f" of {mean:,.0f} tokens, by which tokens/s become seconds" if by_tokens else ""
    assumed.append(f"mean length{turned}")
    return mean


def system_of(row: PublishedRun, assumed: list[str]) -> tuple[catalogue.Gpu, catalogue.LanguageModel, tuple[str, ...]]:
    """Return GPU, model, and the doubts: in words, what moves all seconds and is not known or not simulated.

    A GPU is found by a catalogue name in ``hw``, as in "8x H100 SXM". Raises ConfigError if GPU, model or algorithm is
    of a kind that is not simulated.
    """
    critic = r"(?<!no )(?<!without )(?<!without a )\b(ppo|vapo|a2c|a3c|critic|value (model|network))\b(?!-free)"
    if found := re.search(critic, f"{row.algo}, {row.features}", re.IGNORECASE):
        raise ConfigError(f"{found[0]}: training and memory of a critic are not simulated")
    doubts = [f"{one} is not simulated" for one in unmodelled(row)]
    named = [name for name in catalogue.gpu_names() if re.search(rf"(?<![a-wyz]){name}(?!\d)", row.hw, re.IGNORECASE)]
    if row.hw and len(named) != 1:
        raise ConfigError(
            f"hw must name one GPU of the catalogue, or none if none is published, got {row.hw!r}; known: "
            f"{', '.join(catalogue.gpu_names())}"
        )
    if not named:
        doubts.append(f"{STAND_IN_GPU}, as no GPU is published")
    model = _model_of(row.model, assumed, doubts)
    words = tuple(f"{one}: simulated bands are {prior.DOUBT_FACTOR} times as wide" for one in doubts)
    return catalogue.find_gpu(named[0] if named else STAND_IN_GPU), model, words


SIZE = re.compile(r"(?<![\dx.])(\d+(?:\.\d+)?[BT]|\d{3}M)\b(?:-A(\d+(?:\.\d+)?[BT]|\d{3}M)\b)?", re.IGNORECASE)
"""All and active parameters in a name; not the 7B of 8x7B, which is the size of neither."""


def _model_of(name: str, assumed: list[str], doubts: list[str]) -> catalogue.LanguageModel:
    """Return the model of that name, or one of its kind that is nearest in parameters, all and active.

    A kind: dense, or a mixture of experts, which names its active parameters; and with linear attention or Mamba, if a
    model of its series in the catalogue has such layers.
    """
    try:
        return catalogue.find_model(name)
    except ConfigError:
        found = SIZE.search(name)
        if found is None:
            known = "is not in the catalogue and has no size in its name, such as 7B or 30B-A3B, to find the nearest by"
            raise ConfigError(f"model {name!r} {known}" if name else "model is not published") from None
    total, active = (float(one[:-1]) * UNITS[one[-1].upper()] for one in (found[1], found[2] or found[1]))
    if not found[2] and total > LARGEST_DENSE:
        raise ConfigError(f"model {name!r} names no active parameters, as in 1T-A32B, and no dense model is so large")
    models = [catalogue.find_model(one) for one in catalogue.model_names()]
    is_hybrid = any(one.state_bytes and SIZE.split(one.name)[0] == SIZE.split(name)[0] for one in models)
    kin = [one for one in models if (bool(one.experts), bool(one.state_bytes)) == (bool(found[2]), is_hybrid)]

    def distances(model: catalogue.LanguageModel) -> tuple[float, float]:
        return abs(math.log(model.parameters / total)), abs(math.log(model.active_parameters / active))

    nearest = min(kin, key=lambda model: sum(distances(model)))
    (assumed if max(distances(nearest)) <= math.log(LIKE) else doubts).append(f"{nearest.name} for {name}")
    return _of_size(nearest, total, active)


def _of_size(model: catalogue.LanguageModel, total: float, active: float) -> catalogue.LanguageModel:
    """Return a model of as many layers and experts with so many parameters, all and active (counts)."""
    used = active / model.active_parameters
    dense = (model.parameters - model.expert_parameters) * used
    wider = math.sqrt(used)
    return model.model_copy(
        update={
            "parameters": total,
            "active_parameters": active,
            "expert_parameters": max(0.0, total - dense) if model.experts else 0.0,
            "embedding_parameters": model.embedding_parameters * used,
            "width": round(model.width * wider),
            "attention_width": model.attention_width * wider,
            "feed_forward_width": model.feed_forward_width * wider,
            "kv_bytes_per_token": model.kv_bytes_per_token * wider,
            "state_bytes": model.state_bytes * wider,
        }
    )


def _tensor_parallel(
    gpu: catalogue.Gpu, model: catalogue.LanguageModel, *, generating: int, in_flight: float, longest: int, mean: float
) -> int:
    """Return the GPUs of one engine: the least whose KV cache holds all that is in flight, a node's at most.

    An engine larger than a node is used only where nothing smaller holds the model and its longest answer.
    """
    central = coefficients(Level.CENTRAL)
    fitting = 0
    for size in (1, 2, 4, 8, 16, 32, 64):
        if size > generating or (fitting and size > gpu.gpus_per_node):
            break
        slots = min(MAX_SLOTS, in_flight / (generating // size))
        capacity = kv_cache_tokens(
            gpu, model, tensor_parallel=size, coefficients=central, sequences=math.ceil(slots), longest=longest
        )
        if capacity < longest:
            continue
        fitting = size
        if capacity >= slots * (PROMPT_TOKENS + mean):
            return size
    if not fitting:
        raise ConfigError(f"{model.name} with its KV cache does not fit on the {generating} {gpu.name} that generate")
    return fitting


def _generating(row: PublishedRun, schedule: Schedule, accelerators: int, assumed: list[str]) -> int:
    if schedule.colocated:
        return accelerators
    generating = row.gpus_gen
    if generating is None and row.gpus_train is not None:
        generating = accelerators - row.gpus_train
    if generating is None:
        generating = accelerators // 2
        assumed.append("half of the GPUs generate")
    if generating >= accelerators:
        raise ConfigError(f"gpus_gen must be below gpus_total={accelerators}, got {generating}")
    if generating < 1:
        raise ConfigError(f"no GPU is left to generate: gpus_total={accelerators}, gpus_train={row.gpus_train}")
    return generating


def _in_flight(row: PublishedRun, sequences: int) -> float:
    """Return the most sequences generated at a time: an RL step's, and as many more as staleness allows."""
    return sequences * (1 + (row.max_staleness or 0.0) if row.schedule is Schedule.ASYNC else 1)
