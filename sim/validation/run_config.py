"""The run file of a reconstructed run, with factors on its times."""

from __future__ import annotations

import functools
import math
from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import parse_run
from pipelinerl.config.workload import WorkloadConfig
from pipelinerl.hardware.catalogue import in_engine
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import training_cost
from pipelinerl.hardware.derive import derive_hardware
from pipelinerl.hardware.tables import PhaseSwitchConfig, TrainingConfig, WeightTransferConfig
from pipelinerl.theory.lengths import LengthStatistics, lengths_from
from sim.validation.reconstruct import LARGEST_MEAN, MAX_SLOTS, PROMPT_TOKENS, ReconstructedRun
from sim.validation.records import DEFAULT_GROUP_SIZE, PublishedRun, Schedule
from sim.workload import Workload

LENGTH_CV = 1.0
"""Standard deviation over mean of the uncut answer lengths: between maths (0.8) and mixed tasks (0.9-1.5)."""
SAMPLE_SIZE = 8192
"""Answers drawn to know how long the longest of a batch is (count)."""
FEW_SEQUENCES = 1024
"""Sequences of one simulated RL step, about: larger clusters are simulated as a fraction of themselves."""


def run_config(
    run: ReconstructedRun,
    *,
    generation: float,
    training: float,
    mean_tokens: float,
    rl_steps: int,
    training_given: bool,
    weights: bool,
) -> RunConfig:
    """Return the simulation of a run with factors on its times.

    Args:
        run: The published run.
        generation: Factor on all times of decoding and prefill (no unit).
        training: Factor on all times of training (no unit); of the published seconds, where they are.
        mean_tokens: Mean answer (tokens).
        rl_steps: RL steps to simulate (count).
        training_given: Whether training lasts the published seconds; else the hardware model says how long.
        weights: Whether weights of GPUs apart take their time; what a colocated step lasts besides is not simulated.

    Returns:
        The run file's content; a large cluster and its batch are made smaller by the same divisor.

    Raises:
        ConfigError: If the hardware cannot hold the model, or the pieces do not fit together.
    """
    divisor = _divisor(run)
    mean_tokens = min(mean_tokens, LARGEST_MEAN * run.longest_tokens)
    accelerators, generating = run.accelerators // divisor, run.generating // divisor
    sequences, steps = run.sequences // divisor, run.optimizer_steps
    colocated = run.schedule.colocated
    engines = max(1, generating // run.tensor_parallel)
    slots = max(1, min(MAX_SLOTS, math.ceil(run.in_flight / divisor / engines)))
    hardware = _hardware(
        run,
        generation=generation,
        training=training,
        mean_tokens=mean_tokens,
        divisor=divisor,
        trained_by=accelerators if colocated else accelerators - generating,
        training_given=training_given,
        weights=weights,
        slots=slots,
    )
    cluster = {"accelerators": accelerators, "tensor_parallel": run.tensor_parallel}
    if not colocated:
        cluster["generation_accelerators"] = generating
    data = {
        "optimizer_steps": rl_steps * steps,
        "cluster": cluster,
        "scheduler": {
            "train_batch_size": sequences // steps,
            "generation_batch_size": slots,
            "optimizer_steps_per_rl_step": steps,
            **_scheduler(run, sequences),
        },
        "workload": {
            "group_size": math.gcd(run.published.n_per_prompt or DEFAULT_GROUP_SIZE, sequences // steps),
            "prompt_tokens": PROMPT_TOKENS,
            "length": _length(mean_tokens, run.longest_tokens),
        },
        "hardware": hardware,
    }
    return parse_run(data, name=run.id)


def _scheduler(run: ReconstructedRun, sequences: int) -> dict[str, Any]:
    """Return the keys of ``[scheduler]`` that are the schedule's own."""
    match run.schedule:
        case Schedule.SYNC:
            return {"kind": "conventional"}
        case Schedule.PARTIAL_ROLLOUTS:
            return {"kind": "partial_rollouts"}
        case Schedule.ONE_STEP_OFF:
            return {"kind": "one_step_off"}
        case Schedule.ASYNC | Schedule.SYNC_APART:
            steps = run.optimizer_steps
            staleness = 0.0 if run.schedule is Schedule.SYNC_APART else run.published.max_staleness
            bound = {} if staleness is None else {"max_lag": max(0, round(steps * (1 + staleness)) - 1)}
            return {
                "kind": "pipeline",
                "publish_every": steps,
                "weight_update": "recompute",
                "ready_queue_size": math.ceil(sequences * (1 + min(staleness or 1.0, 4.0))),
                **bound,
            }


def _extra_forward_passes(row: PublishedRun) -> float:
    """Return the forward passes besides the training pass: those published by themselves.

    Else, as is usual, old and reference log-probabilities for GRPO with its KL term, and the old ones for others.
    """
    if row.update_s is None:
        return 2.0 if row.algo.upper() == "GRPO" else 1.0
    return float((row.old_logp_s is not None) + (row.ref_s is not None))


def _hardware(
    run: ReconstructedRun,
    *,
    generation: float,
    training: float,
    mean_tokens: float,
    divisor: int,
    trained_by: int,
    training_given: bool,
    weights: bool,
    slots: int,
) -> dict[str, Any]:
    """Return the hardware table: derived from GPU and model, times multiplied, training replaced where published."""
    row = run.published
    derived = derive_hardware(
        run.gpu,
        run.model,
        tensor_parallel=run.tensor_parallel,
        training_accelerators=trained_by * divisor,
        colocated=run.schedule.colocated,
        engine=in_engine(run.gpu, run.model, run.weights, run.cache),
        sequences=slots,
        longest=PROMPT_TOKENS + run.longest_tokens,
        coefficients=coefficients(
            Level.CENTRAL,
            {
                "extra_forward_passes": _extra_forward_passes(row),
                "sequence_accelerators": float(row.gpus_per_sequence or 1),
            },
        ),
    )
    tables: dict[str, Any] = {
        "decode": derived.decode.on_slower_accelerators(generation),
        "prefill": derived.prefill.on_slower_accelerators(generation),
    }
    if run.schedule.colocated or not weights:
        tables |= {"weights": WeightTransferConfig(), "switch": PhaseSwitchConfig()}
    if training_given:
        assert row.train_s is not None
        tokens = run.sequences / divisor * (PROMPT_TOKENS + mean_tokens)
        tables["training"] = TrainingConfig(token_s=row.train_s * training * trained_by / tokens)
    else:
        # A fraction of a cluster has a fraction of the sequences, and a shorter longest one: so the wait for the
        # longest is that of the whole, in the mean, and not simulated.
        wait_s = _wait_s(
            derived.training,
            _answers(mean_tokens, run.longest_tokens),
            accelerators=trained_by * divisor,
            sequences=run.sequences // run.optimizer_steps,
        )
        whole = {"sequence_accelerators": None, "step_s": derived.training.step_s + wait_s}
        trainer = derived.training.model_copy(update=whole).on_slower_accelerators(training)
        if run.schedule is Schedule.SYNC_APART:  # all optimizer steps of an RL step are one
            steps = row.optimizer_steps_per_rl_step
            fixed = {"step_s": trainer.step_s * steps, "micro_batch_s": trainer.micro_batch_s * steps}
            trainer = trainer.model_copy(update=fixed)
        tables["training"] = trainer
    return derived.model_copy(update=tables).model_dump(mode="json", exclude_none=True)


def _wait_s(training: TrainingConfig, answers: LengthStatistics, *, accelerators: int, sequences: int) -> float:
    """Return by how much an optimizer step is longer because sequences are not divided."""
    whole_s, divided_s = (
        answers.training_s(
            training_cost(one, training_accelerators=accelerators), sequences=sequences, micro_batch=sequences
        )
        for one in (training, training.model_copy(update={"sequence_accelerators": None}))
    )
    return whole_s - divided_s


def _length(mean_tokens: float, longest_tokens: int) -> dict[str, Any]:
    """Return the answer lengths that a row is simulated with, as a run file has them."""
    return {"kind": "lognormal", "mean": mean_tokens, "cv": LENGTH_CV, "max": longest_tokens}


@functools.cache
def _answers(mean_tokens: float, longest_tokens: int) -> LengthStatistics:
    workload = Workload(WorkloadConfig.model_validate({"length": _length(mean_tokens, longest_tokens)}), seed=0)
    drawn = [workload.group(index, index).lengths[0] for index in range(SAMPLE_SIZE)]
    return LengthStatistics(lengths_from(drawn), prompt_tokens=PROMPT_TOKENS)


def _divisor(run: ReconstructedRun) -> int:
    """Return the largest of 16, 8, 4, 2, 1 that divides cluster and batch and leaves enough sequences."""
    steps, size = run.optimizer_steps, run.published.n_per_prompt or DEFAULT_GROUP_SIZE
    for divisor in (16, 8, 4, 2):
        whole = [run.sequences // steps, run.accelerators, run.generating // run.tensor_parallel]
        groups = run.sequences // steps // divisor
        enough = run.sequences // divisor >= FEW_SEQUENCES and groups % size == 0
        if enough and all(number % divisor == 0 for number in whole):
            return divisor
    return 1
