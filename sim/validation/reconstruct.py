"""A published run as a run of ours: which schedule, which cluster, which hardware, and what had to be assumed."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import parse_run
from pipelinerl.config.workload import WorkloadConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel, find_gpu, find_model, gpu_names, model_names
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import loading_s, training_cost
from pipelinerl.hardware.derive import derive_hardware
from pipelinerl.hardware.memory import kv_cache_tokens
from pipelinerl.hardware.tables import TrainingConfig
from pipelinerl.theory.paper import lengths_from
from pipelinerl.theory.steady_state import LengthStatistics
from sim.validation.records import DEFAULT_GROUP_SIZE, Mode, PublishedRun
from sim.workload import Workload

PROMPT_TOKENS = 150
"""Tokens of a prompt: what published tokens/s minus published answer lengths leave over in three systems (100-160)."""
LENGTH_CV = 1.0
"""Standard deviation over mean of the uncut answer lengths: between maths (0.8) and mixed tasks (0.9-1.5)."""
MEAN_OVER_LONGEST = 0.2
"""Mean answer over the longest, where no mean is published; published runs have 0.25 to 0.77, long limits less."""
LARGEST_MEAN = 0.95
"""Mean answer over the longest, at most: more is no distribution."""
DEFAULT_GPUS = 128
"""Where no count is published; only ratios are compared then."""
STAND_IN_GPU = "H100"
"""Where the GPU is not published or not catalogued."""
MAX_SLOTS = 256
"""Sequences on one engine, at most: vLLM's default for years."""
SAMPLE_SIZE = 8192
"""Answers drawn to know how long the longest of a batch is (count)."""
FEW_SEQUENCES = 1024
"""Sequences of one simulated RL step, about: larger clusters are simulated as a fraction of themselves."""

UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
"""Of the parameters in the name of a model."""


@dataclass(frozen=True, slots=True)
class ReconstructedRun:
    """A published run with everything that simulating it needs, given or assumed."""

    run: PublishedRun
    mode: Mode
    gpu: Gpu
    model: LanguageModel
    accelerators: int
    generating: int
    """Accelerators that generate; all of them when colocated."""
    sequences: int
    longest_tokens: int
    optimizer_steps: int
    """Of the simulation per RL step (count)."""
    tensor_parallel: int
    mean_tokens: float
    """Published, or the centre of what is likely."""
    mean_is_known: bool
    scale_is_known: bool
    """Whether seconds mean anything: not without the cluster's size, nor from the hours of a whole run alone, which
    hold evaluation, checkpoints and restarts. Then only the ratios of such rows are compared."""
    assumed: tuple[str, ...]
    """In words, for the report."""

    @property
    def colocated(self) -> bool:
        """Whether the same accelerators generate and train in turn."""
        return self.mode in (Mode.SYNC, Mode.PARTIAL)


def as_subject(run: PublishedRun, family: Sequence[PublishedRun]) -> ReconstructedRun:
    """Return what a row says, filled up from other rows of its family and from what is usual.

    Args:
        run: The row.
        family: Rows of the same software, hardware and model, itself included or not.

    Returns:
        The subject; ``assumed`` names all that was not published.

    Raises:
        ConfigError: If something that cannot be assumed is missing; the message says what.
    """
    assumed: list[str] = []
    schedule = run.schedule
    if schedule is None:
        where = " with generation and training on separate GPUs" if run.apart else ""
        raise ConfigError(f"mode {run.mode!r} names no schedule that is simulated{where}")
    run = _filled_from_family(run, family)
    if run.longest_tokens is None:
        raise ConfigError("max_len is not published: lengths are unknown")
    sequences = run.sequences_per_step
    if sequences is None:
        raise ConfigError("prompts_per_step is not published: the batch is unknown")
    if run.n_per_prompt is None and run.prompts_per_step is not None and run.prompts_per_step != sequences:
        assumed.append(f"{sequences // run.prompts_per_step} answers per prompt")
    gpu, model = _hardware_of(run, assumed)
    has_rate = any(one is not None for one in (run.step_s, run.tok_s_total, run.tok_s_per_gpu))
    accelerators = run.gpus or DEFAULT_GPUS
    scale_is_known = run.gpus is not None and has_rate
    if run.gpus is None:
        assumed.append(f"{accelerators} GPUs")
    mean_is_known = run.avg_len is not None
    mean = run.avg_len if run.avg_len is not None else MEAN_OVER_LONGEST * run.longest_tokens
    if not mean_is_known:
        by_tokens = run.measured_step_s is None and run.tokens_per_s is not None
        turned = f" of {mean:,.0f} tokens, by which tokens/s become seconds" if by_tokens else ""
        assumed.append(f"mean length{turned}")
    generating = _generating(run, accelerators, assumed)
    tensor_parallel = _tensor_parallel(
        gpu,
        model,
        generating=generating,
        in_flight=_in_flight(run, sequences),
        longest=PROMPT_TOKENS + run.longest_tokens,
        mean=mean,
    )
    rounded = generating // tensor_parallel * tensor_parallel
    if schedule not in (Mode.SYNC, Mode.PARTIAL):  # what an engine leaves over does not train
        accelerators = rounded + (run.gpus_train or accelerators - generating)
    return ReconstructedRun(
        run=run,
        mode=schedule,
        gpu=gpu,
        model=model,
        accelerators=accelerators,
        generating=rounded,
        sequences=sequences,
        longest_tokens=run.longest_tokens,
        # Apart, a pipeline that trains on the first batch at once would overlap what a synchronous run does not.
        optimizer_steps=1 if schedule is Mode.APART else run.optimizer_steps_per_rl_step,
        tensor_parallel=tensor_parallel,
        mean_tokens=min(mean, LARGEST_MEAN * run.longest_tokens),
        mean_is_known=mean_is_known,
        scale_is_known=scale_is_known,
        assumed=tuple(assumed),
    )


def as_run_config(
    subject: ReconstructedRun,
    *,
    generation: float,
    training: float,
    mean_tokens: float,
    rl_steps: int,
    training_given: bool,
) -> RunConfig:
    """Return the simulation of a subject with factors on its times.

    Args:
        subject: The published run.
        generation: Factor on all times of decoding and prefill (no unit).
        training: Factor on all times of training (no unit); of the published seconds, where they are.
        mean_tokens: Mean answer (tokens).
        rl_steps: RL steps to simulate (count).
        training_given: Whether training lasts the published seconds; else what the hardware model says.

    Returns:
        The run file's content; a large cluster and its batch are made smaller by the same divisor.

    Raises:
        ConfigError: If the hardware cannot hold the model, or the pieces do not fit together.
    """
    run, mode, colocated = subject.run, subject.mode, subject.colocated
    divisor = _divisor(subject)
    mean_tokens = min(mean_tokens, LARGEST_MEAN * subject.longest_tokens)
    accelerators, generating = subject.accelerators // divisor, subject.generating // divisor
    sequences, steps = subject.sequences // divisor, subject.optimizer_steps
    trained_by = accelerators if colocated else accelerators - generating
    group = math.gcd(run.n_per_prompt or DEFAULT_GROUP_SIZE, sequences // steps)
    staleness = 0.0 if mode is Mode.APART else run.staleness_rl_steps
    engines = max(1, generating // subject.tensor_parallel)
    slots = max(1, min(MAX_SLOTS, math.ceil(_in_flight(run, sequences) / engines)))
    hardware = _hardware(
        subject,
        generation=generation,
        training=training,
        mean_tokens=mean_tokens,
        divisor=divisor,
        trained_by=trained_by,
        training_given=training_given,
    )
    scheduler: dict[str, Any] = {
        "train_batch_size": sequences // steps,
        "generation_batch_size": slots,
        "optimizer_steps_per_rl_step": steps,
    }
    match mode:
        case Mode.SYNC:
            scheduler["kind"] = "conventional"
        case Mode.PARTIAL:
            scheduler |= {"kind": "conventional", "partial_rollouts": True}
        case Mode.ONE_STEP_OFF:
            scheduler["kind"] = "one_step_off"
        case Mode.ASYNC | Mode.APART:
            scheduler |= {"kind": "pipeline", "publish_every": steps, "weight_update": "recompute"}
            if staleness is not None:
                scheduler["max_lag"] = max(0, round(steps * (1 + staleness)) - 1)
            scheduler["ready_queue_size"] = math.ceil(sequences * (1 + min(staleness or 1.0, 4.0)))
    cluster = {"accelerators": accelerators, "tensor_parallel": subject.tensor_parallel}
    if not colocated:
        cluster["generation_accelerators"] = generating
    data = {
        "optimizer_steps": rl_steps * steps,
        "cluster": cluster,
        "scheduler": scheduler,
        "workload": {
            "group_size": group,
            "prompt_tokens": PROMPT_TOKENS,
            "length": {"kind": "lognormal", "mean": mean_tokens, "cv": LENGTH_CV, "max": subject.longest_tokens},
        },
        "hardware": hardware,
    }
    return parse_run(data, name=run.id)


def _extra_forward_passes(run: PublishedRun) -> float:
    """Return the forward passes besides the training pass: those published by themselves; else one, as is usual."""
    if run.update_s is None:
        return 1.0
    return float((run.old_logp_s is not None) + (run.ref_s is not None))


def _filled_from_family(run: PublishedRun, family: Sequence[PublishedRun]) -> PublishedRun:
    """Return the row with its missing workload taken over from the first other row that has it."""
    changes: dict[str, Any] = {}
    for name in ("prompts_per_step", "n_per_prompt", "max_len", "avg_len"):
        if getattr(run, name) is None:
            given = [getattr(other, name) for other in family if getattr(other, name) is not None]
            if name == "n_per_prompt" and re.search(r"\d sequences", run.note):
                continue  # the product is stated
            if given and (name != "prompts_per_step" or run.sequences_per_step is None):
                changes[name] = given[0]
    note = run.note
    for name in ("mini", "sp"):
        given = [value for other in family if (value := other.number_after(name)) is not None]
        if given and run.number_after(name) is None:
            note = f"{note} {name}={min(given):g}"
    return replace(run, **changes, note=note)


def _hardware_of(run: PublishedRun, assumed: list[str]) -> tuple[Gpu, LanguageModel]:
    """Return GPU and model; a GPU is found by a catalogue name in ``hw``, as in "8x H100 SXM", and else is an H100."""
    named = [name for name in gpu_names() if name.lower() in run.hw.lower()]
    name = max(named, key=len) if named else STAND_IN_GPU
    if not named:
        assumed.append(f"{name} for {run.hw}" if run.hw else name)
    return find_gpu(name), _model_of(run.model, assumed)


def _model_of(name: str, assumed: list[str]) -> LanguageModel:
    """Return the model of that name, or the one of the catalogue that is nearest in parameters, all and active."""
    try:
        return find_model(name)
    except ConfigError:
        # Not the 7B of 8x7B, which says how large neither all nor the active parameters are.
        size = r"(\d+(?:\.\d+)?[BT]|\d{3}M)\b"
        found = re.search(rf"(?<![\dx.]){size}(?:-A{size})?", name, re.IGNORECASE)
        if found is None:
            known = "is not in the catalogue and has no size in its name, such as 7B or 30B-A3B, to find the nearest by"
            raise ConfigError(f"model {name!r} {known}" if name else "model is not published") from None
    total, active = (float(one[:-1]) * UNITS[one[-1].upper()] for one in (found[1], found[2] or found[1]))

    def distance(model: LanguageModel) -> float:
        weight = 1.0 if found[2] else 0.01  # without an "A" in its name, a mixture of experts looks dense
        return abs(math.log(model.parameters / total)) + weight * abs(math.log(model.active_parameters / active))

    nearest = min((find_model(one) for one in model_names()), key=distance)
    assumed.append(f"{nearest.name} for {name}")
    return nearest


def _hardware(
    subject: ReconstructedRun,
    *,
    generation: float,
    training: float,
    mean_tokens: float,
    divisor: int,
    trained_by: int,
    training_given: bool,
) -> dict[str, Any]:
    """Return the hardware table: derived from GPU and model, times multiplied, training replaced where published."""
    run = subject.run
    derived = derive_hardware(
        subject.gpu,
        subject.model,
        tensor_parallel=subject.tensor_parallel,
        training_accelerators=trained_by * divisor,
        colocated=subject.colocated,
        coefficients=coefficients(
            Level.CENTRAL,
            {
                "extra_forward_passes": _extra_forward_passes(run),
                "sequence_accelerators": run.number_after("sp") or 1.0,
            },
        ),
    )
    tables = derived.model_dump(mode="json", exclude_none=True)
    if subject.colocated:  # what a step lasts besides is learned from published parts, not derived
        tables["weights"] = tables["switch"] = {}
    for name in ("bandwidth", "peak_flops"):
        tables["decode"][name] /= generation
    for name in tables["decode"]:
        if name.endswith("_s"):
            tables["decode"][name] *= generation
    tables["prefill"] = {name: value * generation for name, value in tables["prefill"].items()}
    if not training_given:
        # A fraction of a cluster has a fraction of the sequences, and a shorter longest one: so the wait for the
        # longest is that of the whole, in the mean, and not simulated.
        del tables["training"]["sequence_accelerators"]
        tables["training"]["step_s"] += _wait_s(
            derived.training,
            _answers(mean_tokens, subject.longest_tokens),
            accelerators=trained_by * divisor,
            sequences=subject.sequences // subject.optimizer_steps,
        )
        tables["training"] = {name: value * training for name, value in tables["training"].items()}
        if subject.mode is Mode.APART:  # all optimizer steps of an RL step are one
            for name in ("step_s", "micro_batch_s"):
                tables["training"][name] *= run.optimizer_steps_per_rl_step
    else:
        tokens = subject.sequences / divisor * (PROMPT_TOKENS + mean_tokens)
        assert run.train_s is not None
        tables["training"] = {"token_s": run.train_s * training * trained_by / tokens}
    return tables


def _wait_s(training: TrainingConfig, answers: LengthStatistics, *, accelerators: int, sequences: int) -> float:
    """Return by how much an optimizer step is longer because sequences are not divided."""
    whole_s, divided_s = (
        answers.training_s(
            training_cost(one, training_accelerators=accelerators), sequences=sequences, micro_batch=sequences
        )
        for one in (training, training.model_copy(update={"sequence_accelerators": None}))
    )
    return whole_s - divided_s


@functools.cache
def _answers(mean_tokens: float, longest_tokens: int) -> LengthStatistics:
    """Return the answers that a row is simulated with."""
    length = {"kind": "lognormal", "mean": mean_tokens, "cv": LENGTH_CV, "max": longest_tokens}
    workload = Workload(WorkloadConfig.model_validate({"length": length}), seed=0)
    drawn = [workload.group(index, index).lengths[0] for index in range(SAMPLE_SIZE)]
    return LengthStatistics(lengths_from(drawn), prompt_tokens=PROMPT_TOKENS)


def _tensor_parallel(
    gpu: Gpu, model: LanguageModel, *, generating: int, in_flight: float, longest: int, mean: float
) -> int:
    """Return the GPUs of one engine: the least whose KV cache holds all that is in flight, a node's at most.

    An engine larger than a node is used only where nothing smaller holds the model and its longest answer.
    """
    central = coefficients(Level.CENTRAL)
    fitting = 0
    for size in (1, 2, 4, 8, 16, 32, 64):
        if size > generating or (fitting and size > gpu.gpus_per_node):
            break
        capacity = kv_cache_tokens(gpu, model, tensor_parallel=size, coefficients=central)
        if capacity < longest:
            continue
        fitting = size
        if capacity >= min(MAX_SLOTS, in_flight / (generating // size)) * (PROMPT_TOKENS + mean):
            return size
    if not fitting:
        raise ConfigError(f"{model.name} with its KV cache does not fit on the {generating} {gpu.name} that generate")
    return fitting


def _generating(run: PublishedRun, accelerators: int, assumed: list[str]) -> int:
    if run.schedule in (Mode.SYNC, Mode.PARTIAL):
        return accelerators
    generating = run.gpus_gen
    if generating is None and run.gpus_train is not None:
        generating = accelerators - run.gpus_train
    if generating is None:
        generating = accelerators // 2
        assumed.append("half of the GPUs generate")
    if generating >= accelerators:
        raise ConfigError(f"gpus_gen must be below gpus_total={accelerators}, got {generating}")
    if generating < 1:
        raise ConfigError(f"no GPU is left to generate: gpus_total={accelerators}, gpus_train={run.gpus_train}")
    return generating


def _in_flight(run: PublishedRun, sequences: int) -> float:
    """Return the most sequences that are generated at a time: an RL step's, and as many more as staleness allows."""
    return sequences * (1 + (run.staleness_rl_steps or 0.0) if run.schedule is Mode.ASYNC else 1)


def _divisor(subject: ReconstructedRun) -> int:
    """Return the largest of 16, 8, 4, 2, 1 that divides cluster and batch and leaves enough sequences."""
    steps, size = subject.optimizer_steps, subject.run.n_per_prompt or DEFAULT_GROUP_SIZE
    for divisor in (16, 8, 4, 2):
        whole = [subject.sequences // steps, subject.accelerators, subject.generating // subject.tensor_parallel]
        groups = subject.sequences // steps // divisor
        enough = subject.sequences // divisor >= FEW_SEQUENCES and groups % size == 0
        if enough and all(number % divisor == 0 for number in whole):
            return divisor
    return 1


def overhead_s(run: PublishedRun, level: Level, *, colocated: bool) -> float:
    """Return the seconds of an RL step that are neither generation nor training: weights, pause, phase switch."""
    gpu, model = _hardware_of(run, [])
    derived = derive_hardware(
        gpu,
        model,
        tensor_parallel=1,
        training_accelerators=run.gpus_total or 8,
        colocated=colocated,
        coefficients=coefficients(level),
    )
    switch = derived.switch
    return loading_s(derived.weights) + switch.to_training_s + switch.to_generation_s


def measured_seconds(run: PublishedRun) -> float | None:
    """Return seconds per RL step; where only tokens/s are published, those of its answers."""
    if run.measured_step_s is not None:
        return run.measured_step_s
    rate = run.tokens_per_s
    if rate is None or run.sequences_per_step is None:
        return None
    mean = run.avg_len or MEAN_OVER_LONGEST * (run.longest_tokens or 0)
    return run.sequences_per_step * mean / rate if mean else None
