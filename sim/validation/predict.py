"""Predict published runs from their published settings and from other runs of the same system.

docs/validation.md says how a row is predicted. Theory: factors g and t on a system's times of generation and training,
one on the rest of a step, and an unpublished mean answer m are log-normal around the hardware model's central value
before any measurement; those of the *other* rows of a family sharpen that (Bayes' rule on a grid of simulations).

How far off is the hardware model alone, for a system that nobody has measured? The log of predicted over measured
seconds of row i of family f is a sum, e_fi = c + b_f + w_fi: the error about every system, about a family (software,
GPU, model), and about one of its rows. Family effects scatter with a standard deviation ``family_sd``, rows with
``row_sd``; a row of a new family is off by both. Estimates are by moments: c is the mean of the family means, shrunk
towards 0 by a prior of standard deviation ``CENTRE_SD``. The variance between families is the variance of their means,
less their rows' share of it. A prediction of a family is the hardware model's divided by exp(c), with c and the spread
of all *other* families.

Is asynchronous RL faster than synchronous RL on the same GPUs? The two runs of a pair are arms of one system
(``pipelinerl.hardware.prior``): factors on generation, training, mean answer and weights are common, so drawn once for
both; each arm has its own factor on its weights, on its phase switch, and its own run-to-run spread. An arm lasts
S(g, t, m) + weights + switch, S from its simulations. Draws are of the prior, without any measurement of the family.
The log of the ratio is less the mean error of the pairs of all other families, and as uncertain as draws and that error
together. The measured ratios of these other pairs count as evidence, as in ``plan`` (``prior.PAIRS_SD``): both normal,
so precisions add. The probability is that of an asynchronous step that is shorter.

Shapes: P hypotheses (g, t, m); R, M nodes of the simulations; K other rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import resources
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.config.run import RunConfig, WorkloadConfig, parse_run
from pipelinerl.errors import ConfigError, PipelineRLError
from pipelinerl.hardware import prior
from pipelinerl.hardware.catalogue import in_engine
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import PhaseSwitchConfig, TrainingConfig, training_cost
from pipelinerl.hardware.derive import derive_hardware
from pipelinerl.hardware.stack import stack_levels
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.validation_report import (
    AloneSummary,
    PredictedRow,
    Quantity,
    RowPair,
    SpeedUp,
    SpeedUpSummary,
    UnusableRow,
    ValidationReport,
    ValidationSummary,
)
from pipelinerl.theory.lengths import LengthStatistics, lengths_from
from pipelinerl.theory.paper import staleness_applied_compute
from pipelinerl.util.arrays import FloatArray, grouped
from sim.parallel import run_all
from sim.run import simulate_steps
from sim.validation.reconstruct import (
    LARGEST_MEAN,
    LOG_MOST_MEAN,
    MAX_SLOTS,
    PROMPT_TOKENS,
    ReconstructedRun,
    measured_seconds,
    reconstruct_run,
    rest_s,
    same_run,
    switch_s,
    system_of,
    weights_s,
)
from sim.validation.rows import DEFAULT_GROUP_SIZE, PublishedRun, Schedule, read_published_runs
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
    middle = _weighted_median(log_step_P, weight_P)
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


def _weighted_median(value_P: FloatArray, weight_P: FloatArray) -> float:
    order_P = np.argsort(value_P)
    return float(value_P[order_P][np.searchsorted(np.cumsum(weight_P[order_P]), 0.5)])


# ----------------------------------------------------------------------------------------------------------- the report

SAME = 0.05
"""Two measurements with logs nearer than this count as equally fast."""


def validation_report(
    predictions: Sequence[PredictedRow | UnusableRow], made: tuple[SpeedUp, ...] = (), *, others_only: bool = False
) -> ValidationReport:
    """Return the content of validation.json: every row, and how far off they are together."""
    rows = tuple(one for one in predictions if isinstance(one, PredictedRow))
    pairs = tuple(
        RowPair(rows=(one.id, other.id), in_order=(one.predicted < other.predicted) is (one.measured < other.measured))
        for one, other in itertools.combinations(rows, 2)
        if one.family == other.family
        and one.quantity == other.quantity
        and abs(math.log(one.measured / other.measured)) > SAME
    )
    return ValidationReport(
        rows=rows,
        unusable=tuple(one for one in predictions if isinstance(one, UnusableRow)),
        pairs=pairs,
        speed_ups=made,
        others_only=others_only,
        summary=_summary(rows, pairs, made),
    )


def _summary(rows: Sequence[PredictedRow], pairs: Sequence[RowPair], made: Sequence[SpeedUp]) -> ValidationSummary:
    relative = sorted(abs(one.error) for one in rows if one.is_relative)
    simulated = [abs(one.error) for one in rows if one.is_simulated]
    absolute = [abs(one.error) for one in rows if not one.is_relative]
    return ValidationSummary(
        rows=len(rows),
        median_error=_median(relative),
        median_error_simulated=_median(simulated),
        alone=_alone([one for one in rows if one.alone is not None]),
        speed_ups=speed_up_summary(made),
        p90_error=float(np.quantile(relative, 0.9)) if relative else None,
        within_30_percent=sum(one <= 0.3 for one in relative) / len(relative) if relative else None,
        largest_staleness_error=max(absolute) if absolute else None,
        pairs=len(pairs),
        pairs_in_order=sum(pair.in_order for pair in pairs) / len(pairs) if pairs else None,
    )


def _median(errors: Sequence[float]) -> float | None:
    return float(np.median(errors)) if errors else None


def _alone(rows: Sequence[PredictedRow]) -> AloneSummary | None:
    if not rows:
        return None
    ratios = [(row.family, row.alone / row.measured) for row in rows if row.alone is not None]
    log_errors = grouped((family, math.log(ratio)) for family, ratio in ratios)
    errors = grouped((family, abs(ratio - 1)) for family, ratio in ratios)
    every = [error for family in errors.values() for error in family]
    samples = [np.asarray(family) for family in errors.values()]
    low, high = family_interval(samples, lambda sample: float(np.median(np.concatenate(sample))))
    spread = spread_of(log_errors)
    return AloneSummary(
        rows=len(rows),
        families=len(errors),
        median_error=float(np.median(every)),
        median_error_low=low,
        median_error_high=high,
        p90_error=float(np.quantile(every, 0.9)),
        within_45_percent=sum(error <= 0.45 for error in every) / len(every),
        within_band=sum((row.alone_low or 0.0) <= row.measured <= (row.alone_high or 0.0) for row in rows) / len(rows),
        bias=float(np.mean([error for family in log_errors.values() for error in family])),
        family_sd=spread.family_sd,
        row_sd=spread.row_sd,
        naive_median_error=_naive(rows),
    )


def _naive(rows: Sequence[PredictedRow]) -> float | None:
    """Return the median error of the rule that all systems make as many tokens per second and GPU."""
    log_s = {
        row.id: math.log(row.measured * row.gpus / row.answer_tokens)
        for row in rows
        if row.gpus and row.answer_tokens and row.quantity == "s/step"
    }
    errors = []
    for row in rows:
        others = [log_s[one.id] for one in rows if one.family != row.family and one.id in log_s]
        if row.id in log_s and others:
            errors.append(abs(math.exp(float(np.median(others)) - log_s[row.id]) - 1))
    return _median(errors)


OWN_REST_SD = 0.7
"""Standard deviation of the log of a step's remaining seconds, between rows of one system (verl: 11 to 55 s)."""

IN_PARTS = (Schedule.SYNC, Schedule.SYNC_APART, Schedule.ONE_STEP_OFF)
"""Schedules whose step is a sum, or the longer, of generation and training."""

Job = tuple[ReconstructedRun, bool | None]
"""A row to simulate, and whether its training lasts the published seconds; None: alone, once."""


def validate(
    runs: Sequence[PublishedRun],
    *,
    others: Sequence[PublishedRun] = (),
    others_only: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> ValidationReport:
    """Predict every run from its published inputs and from the other rows of its family, ``others`` included.

    Rows of the same id count once. ``others_only``: the mean error of other families and its spread, for *alone* and
    for pairs, are of ``others`` as they are, and of no row of ``runs``. ``workers``: processes (None: one per core).
    ``on_progress`` gets the numbers of rows simulated and to simulate. Rows of the report are in order, its pairs are
    of ``runs``.
    """
    judges = None
    if others_only and others is not runs:  # rows of their own: a row of ``runs`` of the same id is another one
        judges = [run.model_copy(update={"id": f"{run.id} (of others)"}) for run in others]
    known, jobs, reasons = _jobs(runs, others, judges)
    grids: dict[tuple[str, bool], SimulationGrid] = {}
    alone: dict[str, AloneRun] = {}
    results = run_all(_simulated_job, jobs, workers=workers) if workers != 1 else (_simulated_job(job) for job in jobs)
    with closing(results):
        for done, result in enumerate(results, start=1):
            match result:
                case UnusableRow():
                    reasons[result.id] = result.reason
                case SimulationGrid():
                    grids[result.run.id, result.training_given] = result
                case AloneRun():
                    alone[result.id] = result
            on_progress(done, len(jobs))
    both = (known, known if judges is None else judges)  # in this order, whichever process was first
    bands = unseen_bands(*([alone[run.id] for run in rows if run.id in alone] for rows in both))
    asked = {run.id for run in runs}
    made = speed_ups(*([grids[run.id, False] for run in rows if (run.id, False) in grids] for rows in both))
    pairs = [one for one in made if asked >= {one.synchronous, one.asynchronous}]
    return validation_report(
        [_predicted(run, known, grids, bands, reasons) for run in runs], tuple(pairs), others_only=others_only
    )


def shipped_runs() -> list[PublishedRun]:
    """Return the published runs that come with the simulator (``published_runs/README.md`` names their sources)."""
    with resources.as_file(resources.files("sim.validation") / "published_runs" / "runs.csv") as path:
        return read_published_runs(path)


def _jobs(
    runs: Sequence[PublishedRun], others: Sequence[PublishedRun], judges: Sequence[PublishedRun] | None
) -> tuple[list[PublishedRun], list[Job], dict[str, str]]:
    """Return all rows, the simulations to make, and why some rows cannot be simulated."""
    ids = {run.id for run in runs}
    known = [*runs, *(run for run in others if run.id not in ids)]
    families = grouped((run.family, run) for run in known)
    wanted = {run.family for run in runs}
    needed = [(run, families[run.family]) for run in known if run.family in wanted]
    if any(_has_pair(families[one]) for one in wanted):
        theirs = grouped((run.family, run) for run in judges or ()).values()
        needed += [(run, rows) for rows in theirs if _has_pair(rows) for run in rows]
    rebuilt: list[ReconstructedRun] = []
    reasons: dict[str, str] = {}
    for run, family in needed:
        if _staleness(run) is None and _idle_share(run) is None:
            try:
                rebuilt.append(reconstruct_run(run, family))
            except ConfigError as error:
                reasons[run.id] = str(error)
    jobs: list[Job] = [(run, False) for run in rebuilt]
    jobs += [(run, True) for run in rebuilt if run.published.training_is_input and run.id in ids]
    alone = [run for run in map(truly_simulated, known if judges is None else (*runs, *judges)) if run is not None]
    compared = [run.published.family for run in alone if run.id in ids]  # a row alone is compared with other families
    jobs += [(run, None) for run in alone if run.id in ids or any(run.published.family != one for one in compared)]
    return known, jobs, reasons


def _has_pair(rows: Sequence[PublishedRun]) -> bool:
    return {True, False} <= {row.schedule.at_once for row in rows if row.schedule is not None}


def _simulated_job(job: Job) -> SimulationGrid | AloneRun | UnusableRow:
    run, training_given = job
    try:
        return alone_run(run) if training_given is None else simulation_grid(run, training_given=training_given)
    except PipelineRLError as error:
        return UnusableRow(id=run.id, reason=str(error))


def _predicted(
    run: PublishedRun,
    known: Sequence[PublishedRun],
    grids: Mapping[tuple[str, bool], SimulationGrid],
    bands: Mapping[str, Band],
    reasons: Mapping[str, str],
) -> PredictedRow | UnusableRow:
    """Return the prediction of one row, by the first way that its published numbers allow."""
    others = [other for other in known if not same_run(other, run)]
    alone = bands.get(run.id)
    try:
        closed = _staleness(run) or _idle_share(run) or _sum_of_parts(run, others, alone)
    except ConfigError as error:
        return UnusableRow(id=run.id, reason=str(error))
    if closed is not None:
        return closed
    grid = grids.get((run.id, run.training_is_input))
    if grid is None:
        return UnusableRow(id=run.id, reason=reasons[run.id])
    if measured_seconds(grid.run.published) is None:
        return UnusableRow(id=run.id, reason="neither seconds per step nor hours and steps nor tokens/s are published")

    def with_rest(grid: SimulationGrid) -> SimulationGrid:
        return replace(grid, rest_s=_rest(grid.run.published, others)[0].middle_s)

    siblings = [grids[one.id, False] for one in others if one.family == run.family and (one.id, False) in grids]
    references = [with_rest(one) for one in siblings if measured_seconds(one.run.published) is not None]
    alike = [one for one in references if one.run.scale_is_known is grid.run.scale_is_known]
    if not alike and run.gpus is not None and not grid.run.scale_is_known:
        # Hours alone: their steps stand for seconds, as nothing else is there.
        assumed = (*grid.run.assumed, "no time outside the steps")
        grid = replace(grid, run=replace(grid.run, scale_is_known=True, assumed=assumed))
        alike = [one for one in references if one.run.scale_is_known]
    inputs = grids[run.id, False] if grid.training_given else None
    return _from_simulations(with_rest(grid), alike, alone, inputs=inputs)


def _from_simulations(
    grid: SimulationGrid, references: Sequence[SimulationGrid], alone: Band | None, *, inputs: SimulationGrid | None
) -> PredictedRow | UnusableRow:
    run, row = grid.run, grid.run.published
    if not run.scale_is_known and not references:
        reason = "the cluster's size is not published, and no other row of its system to compare with"
        return UnusableRow(id=run.id, reason=reason)
    if not (run.mean_is_known or references or inputs):
        reason = "avg_len is not published: without the mean answer, or another row of its system, no seconds are known"
        return UnusableRow(id=run.id, reason=reason)
    unseen = alone if not references and inputs is None else None
    band = unseen or seconds_band(grid, references, inputs=inputs)
    measured_s = measured_seconds(row)
    assert measured_s is not None
    quantity: Quantity = "s/step"
    measured = measured_s
    if row.measured_step_s is None:  # tokens/s were measured, so tokens/s are reported
        assert row.tokens_per_s is not None
        quantity, measured = "tokens/s", row.tokens_per_s
        band = _inverse(band, measured * measured_s)
        alone = None if alone is None else _inverse(alone, measured * measured_s)
    return _row(
        row,
        quantity,
        measured,
        band,
        inputs=("training",) if grid.training_given else (),
        fitted_to=tuple(reference.run.id for reference in references),
        assumed=run.assumed,
        alone=alone,
    )


def _inverse(band: Band, tokens: float) -> Band:
    """Return tokens per second from seconds for that many tokens."""
    high, middle, low = (tokens / seconds for seconds in band)
    return Band(low, middle, high)


def _row(
    run: PublishedRun,
    quantity: Quantity,
    measured: float,
    band: Band | float,
    *,
    inputs: tuple[str, ...],
    fitted_to: tuple[str, ...] = (),
    assumed: tuple[str, ...] = (),
    alone: Band | None = None,
) -> PredictedRow:
    """Return a row of the report; the band is in the unit of ``quantity``, a number alone has none."""
    low, predicted, high = (None, band, None) if isinstance(band, float) else band
    alone_low, alone_middle, alone_high = alone or (None, None, None)
    error = predicted - measured
    answers, mean = run.sequences_per_step, run.avg_len
    is_time = quantity in ("s/step", "tokens/s")  # the closed forms are of asynchronous RL
    return PredictedRow(
        id=run.id,
        family=run.family_name,
        mode=(run.schedule if run.schedule and is_time else Schedule.ASYNC).label,
        quantity=quantity,
        gpus=run.gpus,
        answer_tokens=None if answers is None or mean is None else answers * mean,
        measured=measured,
        predicted=predicted,
        low=low,
        high=high,
        inputs=inputs,
        fitted_to=fitted_to,
        assumed=assumed,
        alone=alone_middle,
        alone_low=alone_low,
        alone_high=alone_high,
        error=error if quantity == "staleness" else error / measured,
    )


def _staleness(run: PublishedRun) -> PredictedRow | None:
    """Predict a published mean staleness from the published C, B, q, rho and tail, in closed form."""
    names = ("in_flight", "train_batch_size", "queue_batches", "rate_ratio", "tailness")
    given = {name: getattr(run, name) for name in names}
    if run.mean_staleness is None or None in given.values():
        return None
    predicted = staleness_applied_compute(**given).total
    return _row(run, "staleness", run.mean_staleness, predicted, inputs=("C", "B", "q", "rho", "Mtail"))


def _idle_share(run: PublishedRun) -> PredictedRow | None:
    """Predict the share of time in which a trainer waits from both sides' published samples per second."""
    trained, made, idle = run.trainer_samples_per_s, run.generator_samples_per_s, run.trainer_idle_share
    if trained is None or made is None or not idle:  # of nothing there is no relative error
        return None
    low, high = (max(0.0, 1 - rate / trained) for rate in (run.generator_samples_per_s_high or made, made))
    inputs = ("samples/s of trainer and generator",)
    return _row(run, "trainer idle", idle, Band(low, (low + high) / 2, high), inputs=inputs)


def _rest(run: PublishedRun, others: Sequence[PublishedRun]) -> tuple[Band, tuple[str, ...]]:
    """Return the seconds of an RL step beyond generation and training, and the rows they were learned from.

    Offloading, resharding and publishing weights, rewards, data: from colocated rows of the same family with published
    parts, else from the hardware model.
    """
    own = [
        (other.id, max(0.0, other.measured_step_s - other.generate_s - other.train_s))
        for other in others
        if run.schedule is not None
        and run.schedule.colocated
        and other.schedule is Schedule.SYNC
        and other.family == run.family
        and other.measured_step_s is not None
        and other.generate_s is not None
        and other.train_s is not None
    ]
    if own:
        middle = float(np.median([rest for _, rest in own]))
        factor = math.exp(prior.END_SDS * OWN_REST_SD)
        return Band(middle / factor, middle, middle * factor), tuple(name for name, _ in own)
    return Band(*(rest_s(run, level) for level in Level)), ()


def _sum_of_parts(run: PublishedRun, others: Sequence[PublishedRun], alone: Band | None) -> PredictedRow | None:
    """Predict a step from its published parts, in sequence or side by side, and the rest; ConfigError as system_of."""
    generate_s, train_s, measured = run.generate_s, run.train_s, run.measured_step_s
    if generate_s is None or train_s is None or measured is None or run.schedule not in IN_PARTS:
        return None
    both = max(generate_s, train_s) if run.schedule is Schedule.ONE_STEP_OFF else generate_s + train_s
    _, _, doubts = system_of(run, [])
    rest, learned_from = _rest(run, others)
    band, inputs = Band(*(both + one for one in rest)), ("generation", "training")
    return _row(run, "s/step", measured, band, inputs=inputs, fitted_to=learned_from, assumed=doubts, alone=alone)


# ----------------------------------------------------------------------------------------- rows alone, and families

ASSUMED_SD = 0.4
"""Standard deviation of the log error of a new family, where fewer than three others are known."""
CENTRE_SD = 0.3
"""Standard deviation of c before any family is known."""
RESAMPLES = 4000
"""Samples of families for an interval (count)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far off predictions of a new family are: log(predicted / measured)."""

    centre: float
    """c: mean over families, shrunk."""
    family_sd: float
    row_sd: float

    @property
    def sd(self) -> float:
        """Standard deviation of a row of a new family."""
        return math.hypot(self.family_sd, self.row_sd)


@dataclass(frozen=True, slots=True)
class AloneRun:
    """A row as the hardware model alone has it, and as it was measured."""

    id: str
    family: tuple[str, str, str]
    """Software, GPU and model."""
    predicted_s: float
    """Seconds per RL step, by the central coefficients."""
    measured_s: float
    """Seconds per RL step."""
    spread_factor: float = 1.0
    """Factor on the deviation of its own band."""


def truly_simulated(row: PublishedRun) -> ReconstructedRun | None:
    """Return a row as it is predicted alone, from its own inputs; None if they do not decide its seconds.

    An unpublished mean answer, limit, GPU or cluster size leaves the seconds open. So do hours of a whole run, which
    hold evaluation, checkpoints and restarts.
    """
    try:
        run = reconstruct_run(row, [row])
    except ConfigError:
        return None
    known = row.hw and row.max_len and run.mean_is_known and run.scale_is_known and measured_seconds(row) is not None
    return run if known else None


def alone_run(run: ReconstructedRun) -> AloneRun:
    """Simulate a row with the central coefficients; PipelineRLError if it cannot be simulated."""
    seconds = _simulated(run, ratio=0.0, log_mean=0.0, training_given=False, weights=True)[STEP]
    if run.schedule.colocated:
        seconds += rest_s(run.published, Level.CENTRAL)
    measured_s = measured_seconds(run.published)
    assert measured_s is not None
    factor = prior.DOUBT_FACTOR if run.doubts else 1.0
    return AloneRun(run.id, run.published.family, seconds, measured_s, factor)


def unseen_bands(runs: Iterable[AloneRun], judges: Sequence[AloneRun] | None = None) -> dict[str, Band]:
    """Return seconds per RL step of each row alone, with a band from all families of ``judges`` but its own."""
    rows, bands = list(runs), {}
    for row in rows:
        others = (one for one in (rows if judges is None else judges) if one.family != row.family)
        spread = spread_of(grouped((one.family, math.log(one.predicted_s / one.measured_s)) for one in others))
        factor = math.exp(prior.END_SDS * spread.sd * row.spread_factor)
        middle_s = row.predicted_s / math.exp(spread.centre)
        bands[row.id] = Band(middle_s / factor, middle_s, middle_s * factor)
    return bands


def spread_of(log_errors: Mapping[Any, Sequence[float]]) -> Spread:
    """Return the spread of log errors, given by family; each family has a row at least."""
    families = [np.asarray(errors, dtype=float) for errors in log_errors.values()]
    if len(families) < 3:
        return Spread(0.0, ASSUMED_SD, 0.0)
    means = np.array([errors.mean() for errors in families])
    sizes = np.array([len(errors) for errors in families])
    freedom = max(1, int(sizes.sum()) - len(families))
    row_variance = sum(float(((errors - errors.mean()) ** 2).sum()) for errors in families) / freedom
    row_share = row_variance * float((1 / sizes).mean())  # of the variance of a family's mean
    family_variance = max(0.0, float(means.var(ddof=1)) - row_share)
    of_mean = (family_variance + row_share) / len(families)  # variance of the mean of the means
    centre = float(means.mean()) * CENTRE_SD**2 / (CENTRE_SD**2 + of_mean)
    return Spread(centre, math.sqrt(family_variance), math.sqrt(row_variance))


def family_interval(
    families: Sequence[FloatArray], statistic: Callable[[list[FloatArray]], float]
) -> tuple[float, float]:
    """Return the 90 % interval of a statistic of one or more families, shape [rows, ...] each.

    ``statistic`` is of as many families, drawn with replacement; rows are never resampled.
    """
    picks = np.random.default_rng(0).integers(len(families), size=(RESAMPLES, len(families)))
    low, high = np.quantile([statistic([families[index] for index in pick]) for pick in picks], [0.05, 0.95])
    return float(low), float(high)


# ------------------------------------------------------------------------------ asynchronous against synchronous RL

DRAWS = 4000
SAME_WORK = 0.1
"""Largest difference of the logs of the tokens of two steps that are as much work."""
SYNCHRONOUS = (Schedule.SYNC, Schedule.SYNC_APART)


class Pair(NamedTuple):
    """Simulations of a synchronous and of an asynchronous run."""

    sync: SimulationGrid
    other: SimulationGrid

    @property
    def family(self) -> tuple[str, str, str]:
        """Software, GPU and model."""
        return self.sync.run.published.family

    @property
    def measured(self) -> float:
        """Synchronous over asynchronous seconds per step."""
        first, second = (measured_seconds(one.run.published) for one in self)
        assert first is not None
        assert second is not None
        return first / second


def speed_ups(grids: Sequence[SimulationGrid], judges: Sequence[SimulationGrid] | None = None) -> tuple[SpeedUp, ...]:
    """Return the predictions for pairs of runs of a family with equal GPUs and similar answers.

    The pairs of ``judges`` (None: ``grids``) give the mean error of the ratios, and the naive rule.
    """
    errors = [
        (pair, float(np.median(_log_ratio(pair, _drawn(pair)))) - math.log(pair.measured))
        for pair in _pairs(grids if judges is None else judges)
    ]
    made = []
    for pair in _pairs(grids):
        drawn = _drawn(pair)
        ratio_D = _log_ratio(pair, drawn)
        others = [(one, error) for one, error in errors if one.family != pair.family]
        measured = [one.measured for one, _ in others]
        error = spread_of(grouped((one.family, error) for one, error in others))
        modelled = (float(np.median(ratio_D)) - error.centre, math.hypot(float(ratio_D.std()), error.sd))
        middle, sd = _with_published(*modelled, grouped((one.family, math.log(one.measured)) for one, _ in others))
        spread = prior.END_SDS * sd
        made.append(
            SpeedUp(
                synchronous=pair.sync.run.id,
                asynchronous=pair.other.run.id,
                family=pair.sync.run.published.family_name,
                measured=pair.measured,
                predicted=math.exp(middle),
                low=math.exp(middle - spread),
                high=math.exp(middle + spread),
                probability=NormalDist().cdf(middle / sd),
                decided_by=_decided_by(drawn, ratio_D),
                constant=float(np.median(measured)) if measured else 1.0,
            )
        )
    return tuple(made)


def _with_published(middle: float, sd: float, log_ratios: Mapping[object, Sequence[float]]) -> tuple[float, float]:
    """Return mean and standard deviation of a log ratio in view of those of other families, by precision."""
    if not log_ratios:
        return middle, sd
    published = float(np.mean([np.mean(logs) for logs in log_ratios.values()]))
    own, theirs = sd**-2, prior.PAIRS_SD**-2
    return (own * middle + theirs * published) / (own + theirs), (own + theirs) ** -0.5


def speed_up_summary(made: Sequence[SpeedUp]) -> SpeedUpSummary | None:
    """Return how good the probabilities are, beside naive rules; None without pairs."""
    if not made:
        return None
    faster = np.array([one.measured > 1 for one in made], dtype=float)
    probability = np.array([one.probability for one in made])
    sure = (probability >= prior.CERTAIN) | (probability <= 1 - prior.CERTAIN)
    square, always = (probability - faster) ** 2, (1 - faster) ** 2
    error = np.array([abs(one.predicted / one.measured - 1) for one in made])
    constant = np.array([abs(one.constant / one.measured - 1) for one in made])
    brier_ends = family_interval(_by_family(made, square - always), _mean_of_means)

    def median_difference(families: Sequence[FloatArray]) -> float:
        first, second = np.median(np.concatenate(families), axis=0)
        return float(first - second)

    error_ends = family_interval(_by_family(made, np.column_stack([error, constant])), median_difference)
    return SpeedUpSummary(
        pairs=len(made),
        families=len({one.family for one in made}),
        faster=int(faster.sum()),
        median_error=float(np.median(error)),
        constant_median_error=float(np.median(constant)),
        error_difference_low=error_ends[0],
        error_difference_high=error_ends[1],
        within_band=_mean_of_means(_by_family(made, [float(one.low <= one.measured <= one.high) for one in made])),
        brier=_mean_of_means(_by_family(made, square)),
        always_brier=_mean_of_means(_by_family(made, always)),
        brier_difference_low=brier_ends[0],
        brier_difference_high=brier_ends[1],
        certain=int(sure.sum()),
        certain_right=int(((probability > 0.5) == (faster > 0.5))[sure].sum()),
    )


def _by_family(made: Sequence[SpeedUp], values: Sequence[float] | FloatArray) -> list[FloatArray]:
    """Return the data of each pair, shape [pairs, ...], by family."""
    families = grouped((one.family, index) for index, one in enumerate(made))
    return [np.asarray(values, dtype=float)[indices] for indices in families.values()]


def _mean_of_means(families: Sequence[FloatArray]) -> float:
    """Return the mean in which every family has the same weight, however many pairs it has."""
    return float(np.mean([family.mean() for family in families]))


def _pairs(grids: Sequence[SimulationGrid]) -> list[Pair]:
    rows = [one for one in grids if measured_seconds(one.run.published) is not None and one.run.published.gpus]
    distinct = [  # two rows of an asynchronous run are one measurement
        one
        for index, one in enumerate(rows)
        if not one.run.schedule.at_once
        or not any(same_run(one.run.published, other.run.published) for other in rows[:index])
    ]
    pairs = (Pair(one, other) for one, other in itertools.product(distinct, distinct))
    return [
        pair
        for pair in pairs
        if pair.sync.run.schedule in SYNCHRONOUS
        and pair.other.run.schedule.at_once
        and pair.family == pair.other.run.published.family
        and pair.sync.run.published.gpus == pair.other.run.published.gpus
        and pair.sync.run.mean_is_known is pair.other.run.mean_is_known
        and abs(math.log(_tokens(pair.sync) / _tokens(pair.other))) < SAME_WORK
    ]


def _tokens(grid: SimulationGrid) -> float:
    return grid.run.sequences * grid.run.mean_tokens


def _drawn(pair: Pair) -> dict[str, FloatArray]:
    """Return the logs of all factors, [draws], or [arms, draws] where each arm has its own; the same for every pair."""
    generator = np.random.default_rng(0)
    factor = spread_factor(pair)
    mean_sd = 0.0 if pair.sync.run.mean_is_known else prior.MEAN_SD
    sds = {"generation": prior.GENERATION_SD * factor, "training": prior.TRAINING_SD * factor, "mean answer": mean_sd}
    common = {name: generator.normal(0, 1, DRAWS) * sd for name, sd in sds.items()}
    common["mean answer"] = np.minimum(common["mean answer"], LOG_MOST_MEAN)
    return {
        **common,
        "weights": generator.normal(0, prior.SYNC_SD, DRAWS) + generator.normal(0, prior.SYNC_ARM_SD, (2, DRAWS)),
        "phase switch": generator.normal(0, prior.SWITCH_SD, (2, DRAWS)),
        "run-to-run spread": generator.normal(0, prior.RUN_SD, (2, DRAWS)),
    }


def _log_ratio(pair: Pair, drawn: dict[str, FloatArray]) -> FloatArray:
    """Return the log of the synchronous seconds over the asynchronous ones, [draws]."""
    sync_D, other_D = (
        np.log(
            np.exp(grid.at(drawn["generation"] - drawn["training"], drawn["mean answer"], STEP) + drawn["training"])
            + weights_s(grid.run.published, Level.CENTRAL) * np.exp(drawn["weights"][arm])
            + switch_s(grid.run.published, Level.CENTRAL) * np.exp(drawn["phase switch"][arm])
        )
        + drawn["run-to-run spread"][arm]
        for arm, grid in enumerate(pair)
    )
    return np.asarray(sync_D - other_D)


def _decided_by(drawn: dict[str, FloatArray], ratio_D: FloatArray) -> str:
    """Return the factor that explains most of the variance of the ratio, of both arms together."""

    def explained(values: FloatArray) -> float:
        rows = [one for one in np.atleast_2d(values) if one.std() > 0]
        return sum(float(np.corrcoef(one, ratio_D)[0, 1]) ** 2 for one in rows)

    return max(drawn, key=lambda name: explained(drawn[name]))
