"""Seconds of a row from the measurements of its family: simulations on a grid, weighed by Bayes' rule.

Shapes: P hypotheses (g, t, m); R, M nodes of the simulations; K other rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.config.run import RunConfig, WorkloadConfig, parse_run
from pipelinerl.hardware import prior
from pipelinerl.hardware.catalogue import in_engine
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import PhaseSwitchConfig, TrainingConfig, training_cost
from pipelinerl.hardware.derive import derive_hardware
from pipelinerl.hardware.stack import stack_levels
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.theory.lengths import LengthStatistics, lengths_from
from pipelinerl.util.arrays import FloatArray
from sim.run import simulate_steps
from sim.validation.reconstruct import (
    LARGEST_MEAN,
    LOG_MOST_MEAN,
    MAX_SLOTS,
    PROMPT_TOKENS,
    ReconstructedRun,
    measured_seconds,
)
from sim.validation.rows import DEFAULT_GROUP_SIZE, PublishedRun, Schedule
from sim.workload import Workload

# ------------------------------------------------------- the run file of a reconstructed run, with factors on its times

ENGINE = "vllm-0.15"
"""Engine of published runs: they used vLLM 0.8 to 0.20, of which 0.15 was measured. The mean error of the other
families covers what their software adds to generation."""
LENGTH_CV = 1.0
"""Standard deviation over mean of the uncut answer lengths: between maths (0.8) and mixed tasks (0.9-1.5)."""
SAMPLE_SIZE = 8192
"""Answers drawn to find how long the longest of a batch is (count)."""
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
    """Return the run file of a row with factors on its times of generation and training, and a mean answer (tokens).

    ``training_given``: training takes the published seconds times its factor. ``weights``: their transfer takes time
    where GPUs are apart; colocated it is not simulated. A large cluster and its batch are divided by the same number.
    Raises ConfigError if the hardware cannot hold the model, or the pieces do not fit together.
    """
    row, divisor, colocated = run.published, _divisor(run), run.schedule.colocated
    mean_tokens = min(mean_tokens, LARGEST_MEAN * run.longest_tokens)
    accelerators, generating = run.accelerators // divisor, run.generating // divisor
    trained_by = accelerators if colocated else accelerators - generating
    sequences, steps = run.sequences // divisor, run.optimizer_steps
    engines = max(1, generating // run.tensor_parallel)
    slots = max(1, min(MAX_SLOTS, math.ceil(run.in_flight / divisor / engines)))
    derived = derive_hardware(
        run.gpu,
        run.model,
        tensor_parallel=run.tensor_parallel,
        training_accelerators=trained_by * divisor,
        colocated=colocated,
        engine=in_engine(run.gpu, run.model, run.weights, run.cache),
        sequences=slots,
        longest=PROMPT_TOKENS + run.longest_tokens,
        coefficients=coefficients(
            Level.CENTRAL,
            {
                **{name: levels[Level.CENTRAL] for name, levels in stack_levels(ENGINE, None).items()},
                "extra_forward_passes": _extra_forward_passes(row),
                "sequence_accelerators": float(row.gpus_per_sequence or 1),
            },
        ),
    )
    tables: dict[str, Any] = {
        "decode": derived.decode.on_slower_accelerators(generation),
        "prefill": derived.prefill.on_slower_accelerators(generation),
    }
    if colocated or not weights:
        tables |= {"weights": WeightTransferConfig(), "switch": PhaseSwitchConfig()}
    if training_given:
        assert row.train_s is not None
        tokens = run.sequences / divisor * (PROMPT_TOKENS + mean_tokens)
        tables["training"] = TrainingConfig(token_s=row.train_s * training * trained_by / tokens)
    else:
        whole = _training(run, derived.training, mean_tokens, accelerators=trained_by * divisor)
        tables["training"] = whole.on_slower_accelerators(training)
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
            "group_size": math.gcd(row.n_per_prompt or DEFAULT_GROUP_SIZE, sequences // steps),
            "prompt_tokens": PROMPT_TOKENS,
            "length": _length(mean_tokens, run.longest_tokens),
        },
        "hardware": derived.model_copy(update=tables).model_dump(mode="json", exclude_none=True),
    }
    return parse_run(data, name=run.id)


def _scheduler(run: ReconstructedRun, sequences: int) -> dict[str, Any]:
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
    """Return the forward passes beside the training pass that are published separately.

    Else the usual ones: old and reference log-probabilities for GRPO with its KL term, and the old ones for others.
    """
    if row.update_s is None:
        return 2.0 if row.algo.upper() == "GRPO" else 1.0
    return float((row.old_logp_s is not None) + (row.ref_s is not None))


def _training(
    run: ReconstructedRun, derived: TrainingConfig, mean_tokens: float, *, accelerators: int
) -> TrainingConfig:
    """Return the training of a whole cluster, for a fraction of it.

    A fraction has a fraction of the sequences, and a shorter longest one. So the wait for the longest is that of the
    whole, in the mean, and not simulated.
    """
    divided = derived.model_copy(update={"sequence_accelerators": None})
    sequences, answers = run.sequences // run.optimizer_steps, _answers(mean_tokens, run.longest_tokens)
    whole_s, divided_s = (
        answers.training_s(
            training_cost(one, training_accelerators=accelerators), sequences=sequences, micro_batch=sequences
        )
        for one in (derived, divided)
    )
    steps = run.published.optimizer_steps_per_rl_step if run.schedule is Schedule.SYNC_APART else 1
    step_s = (derived.step_s + (whole_s - divided_s)) * steps  # apart, all optimizer steps of an RL step are one
    return divided.model_copy(update={"step_s": step_s, "micro_batch_s": derived.micro_batch_s * steps})


def _length(mean_tokens: float, longest_tokens: int) -> dict[str, Any]:
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


_RATIO_NODES = np.linspace(-1.4, 1.4, 5)
_MEAN_NODES = np.linspace(-2.0, 1.2, 5)
_FINE = (25, 25, 25, 9)
RL_STEPS = 7
"""RL steps of one simulation."""
WARM_UP = 3
"""Of these, left out of the time per step of asynchronous runs."""


STEP, GENERATE, TRAIN = range(3)
"""Quantities of a simulation: seconds of an RL step; seconds in which the trainer waits for answers, in synchronous
runs the time of generation; seconds of training."""


@dataclass(frozen=True, slots=True)
class SimulationGrid:
    """Simulations of one row, by node of (log g - log t, or log g where training is given; log m)."""

    run: ReconstructedRun
    training_given: bool
    log_RMQ: FloatArray
    """Logs of step, generation and training seconds (Q) by node."""
    rest_s: float = 0.0
    """Seconds of a step beyond generation and training, before measurements."""

    def at(self, ratio_P: FloatArray, mean_P: FloatArray, quantity: int) -> FloatArray:
        """Return the logs at any points, linear in between the nodes."""
        nodes_R, nodes_M = _RATIO_NODES, _mean_nodes(self.run)
        log_RM = self.log_RMQ[:, :, quantity]
        r_P, fr_P = _cell(ratio_P, nodes_R)
        if len(nodes_M) == 1:
            return np.asarray(log_RM[r_P, 0] * (1 - fr_P) + log_RM[r_P + 1, 0] * fr_P)
        m_P, fm_P = _cell(mean_P, nodes_M)
        low_P = log_RM[r_P, m_P] * (1 - fr_P) + log_RM[r_P + 1, m_P] * fr_P
        high_P = log_RM[r_P, m_P + 1] * (1 - fr_P) + log_RM[r_P + 1, m_P + 1] * fr_P
        return np.asarray(low_P * (1 - fm_P) + high_P * fm_P)


def _mean_nodes(run: ReconstructedRun) -> FloatArray:
    """Return logs of factors on the mean answer."""
    return np.zeros(1) if run.mean_is_known else _MEAN_NODES


def _cell(value_P: FloatArray, nodes: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
    """Return the cell of each value and the fraction of the way through it."""
    cell_P = np.clip(np.searchsorted(nodes, value_P) - 1, 0, len(nodes) - 2)
    return cell_P, (value_P - nodes[cell_P]) / (nodes[cell_P + 1] - nodes[cell_P])


class Hypotheses(NamedTuple):
    """Log g, t, m and rest of every hypothesis, and the log of its probability before measurements."""

    generation_P: FloatArray
    training_P: FloatArray
    mean_P: FloatArray
    rest_P: FloatArray
    log_prior_P: FloatArray


def spread_factor(grids: Sequence[SimulationGrid]) -> float:
    """Return the factor on the deviations that these rows share: the largest."""
    return max(one.run.spread_factor for one in grids)


def hypotheses_for(grids: Sequence[SimulationGrid]) -> Hypotheses:
    """Return the hypotheses to weigh for these rows."""
    factor = spread_factor(grids)
    mean_is_known = all(one.run.mean_is_known for one in grids)
    has_rest = any(one.rest_s for one in grids)
    sds = (factor * prior.GENERATION_SD, factor * prior.TRAINING_SD, prior.MEAN_SD, factor * prior.REST_SD)
    needed = (True, True, not mean_is_known, has_rest)
    highest = (3 * sds[0], 3 * sds[1], min(3 * sds[2], LOG_MOST_MEAN), 3 * sds[3])
    axes = [
        np.linspace(-3 * sd, high, num) if wanted else np.zeros(1)
        for sd, high, num, wanted in zip(sds, highest, _FINE, needed, strict=True)
    ]
    g_P, t_P, m_P, s_P = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    values = zip((g_P, t_P, m_P, s_P), sds, strict=True)
    log_prior_P = -0.5 * np.sum([(value_P / sd) ** 2 for value_P, sd in values], axis=0)
    return Hypotheses(g_P, t_P, m_P, s_P, log_prior_P)


def _log_seconds(grid: SimulationGrid, hypotheses: Hypotheses, quantity: int) -> FloatArray:
    """Return the log of the seconds that a row's step, generation or training would last, by hypothesis."""
    scale_P = 0.0 if grid.training_given else hypotheses.training_P
    log_P = grid.at(hypotheses.generation_P - scale_P, hypotheses.mean_P, quantity) + scale_P
    if quantity != STEP or not grid.rest_s:
        return log_P
    return np.asarray(np.log(np.exp(log_P) + grid.rest_s * np.exp(hypotheses.rest_P)))


def _simulated(
    run: ReconstructedRun, *, ratio: float, log_mean: float, training_given: bool, weights: bool = False
) -> tuple[float, float, float]:
    """Return the seconds of an RL step: STEP, GENERATE, TRAIN."""
    num_steps, first = (3, 1) if run.schedule is Schedule.SYNC else (RL_STEPS, WARM_UP)
    config = run_config(
        run,
        generation=math.exp(ratio),
        training=1.0,
        mean_tokens=run.mean_tokens * math.exp(log_mean),
        rl_steps=num_steps,
        training_given=training_given,
        weights=weights,
    )
    before, *rows = simulate_steps(config)[first * run.optimizer_steps - 1 :]
    num = len(rows) / run.optimizer_steps
    waited_s, trained_s = sum(row.wait_s for row in rows), sum(row.train_s for row in rows)
    return (rows[-1].time_s - before.time_s) / num, max(waited_s / num, 1e-3), trained_s / num


def central_seconds(run: ReconstructedRun) -> float:
    """Return the seconds of a row's RL step by the hardware model's central values; colocated, without the rest.

    Raises PipelineRLError if the row cannot be simulated.
    """
    return _simulated(run, ratio=0.0, log_mean=0.0, training_given=False, weights=True)[STEP]


def simulation_grid(run: ReconstructedRun, *, training_given: bool) -> SimulationGrid:
    """Return the simulations of a row on all nodes, made in seconds; PipelineRLError if it cannot be simulated."""

    def node(ratio: float, log_mean: float) -> list[float]:
        seconds = _simulated(run, ratio=ratio, log_mean=log_mean, training_given=training_given)
        return [math.log(one) for one in seconds]

    return SimulationGrid(run, training_given, np.array([[node(r, m) for m in _mean_nodes(run)] for r in _RATIO_NODES]))


class Band(NamedTuple):
    """Likely seconds: median, and ends of a band that holds 80 %."""

    low_s: float
    middle_s: float
    high_s: float


def seconds_band(
    grid: SimulationGrid, references: Sequence[SimulationGrid], *, inputs: SimulationGrid | None = None
) -> Band:
    """Return the seconds of a row's RL step, given other rows of its family: at least one if its scale is not known.

    ``inputs``: its simulations with free training, if its training seconds are published, which depend on its mean
    answer.
    """
    hypotheses = hypotheses_for([grid, *references])
    log_P = hypotheses.log_prior_P.copy()
    log_step_P = _log_seconds(grid, hypotheses, STEP)
    observed = [] if inputs is None else [(inputs, TRAIN, inputs.run.published.train_s)]
    if grid.run.scale_is_known:
        observed += [(one, quantity, seconds) for one in references for quantity, seconds in _observed(one)]
    for one, quantity, seconds in observed:
        log_P -= 0.5 * (_residual(one, hypotheses, quantity, seconds) / prior.RUN_SD) ** 2
    if not grid.run.scale_is_known:  # only the ratios of the rows mean anything
        known = [(one, measured_seconds(one.run.published)) for one in references]
        residual_KP = np.array([_residual(one, hypotheses, STEP, seconds) for one, seconds in known])
        offset_P = residual_KP.mean(axis=0)
        log_P -= 0.5 * (((residual_KP - offset_P) / prior.RUN_SD) ** 2).sum(axis=0)
        log_step_P = log_step_P - offset_P
    weight_P = np.exp(log_P - log_P.max())
    weight_P /= weight_P.sum()
    middle = _median(log_step_P, weight_P)
    variance = float((weight_P * (log_step_P - (weight_P * log_step_P).sum()) ** 2).sum())
    of_offset = 0.0 if grid.run.scale_is_known else 1 / len(references)  # the scale is a mean of measurements
    spread = 1.28 * math.sqrt(variance + prior.RUN_SD**2 * (1 + of_offset))
    return Band(math.exp(middle - spread), math.exp(middle), math.exp(middle + spread))


def _residual(grid: SimulationGrid, hypotheses: Hypotheses, quantity: int, measured_s: float | None) -> FloatArray:
    """Return the log of predicted over measured seconds, by hypothesis."""
    assert measured_s is not None
    return _log_seconds(grid, hypotheses, quantity) - math.log(measured_s)


def _observed(grid: SimulationGrid) -> list[tuple[int, float]]:
    """Return the measurements of a row that inform others: its training, and its generation or else its step."""
    run = grid.run.published
    observed = [] if run.train_s is None else [(TRAIN, run.train_s)]
    if run.schedule in (Schedule.SYNC, Schedule.SYNC_APART) and run.generate_s is not None:
        return [*observed, (GENERATE, run.generate_s)]
    seconds = measured_seconds(run)
    return observed if seconds is None else [*observed, (STEP, seconds)]


def _median(value_P: FloatArray, weight_P: FloatArray) -> float:
    order_P = np.argsort(value_P)
    return float(value_P[order_P][np.searchsorted(np.cumsum(weight_P[order_P]), 0.5)])
