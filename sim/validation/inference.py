"""Seconds of a row from the measurements of its family: simulations on a grid, weighed by Bayes' rule.

Shapes: P hypotheses (g, t, m); R, M nodes of the simulations; K other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.hardware.prior import (
    GENERATION_SD,
    MEAN_SD,
    REST_SD,
    RUN_SD,
    SEVERAL_NODES_FACTOR,
    TRAINING_SD,
)
from pipelinerl.util.arrays import FloatArray
from sim.run import simulate_steps
from sim.validation.reconstruct import LOG_MOST_MEAN, ReconstructedRun, measured_seconds
from sim.validation.records import PublishedRun, Schedule
from sim.validation.run_config import run_config

_RATIO_NODES = np.linspace(-1.4, 1.4, 5)
_MEAN_NODES = np.linspace(-2.0, 1.2, 5)
_FINE = (25, 25, 25, 9)
RL_STEPS = 7
"""RL steps of one simulation."""
WARM_UP = 3
"""Of these, left out of the time per step of asynchronous runs."""


class Steady(NamedTuple):
    """Seconds of one RL step of a simulation."""

    step_s: float
    generate_s: float
    """Seconds in which the trainer waited for answers: of synchronous runs the time of generation."""
    train_s: float


@dataclass(frozen=True, slots=True)
class SimulationGrid:
    """Simulations of one row, by node of (log g - log t, or log g where training is given; log m)."""

    run: ReconstructedRun
    training_given: bool
    log_RMQ: FloatArray
    """Logs of step, generation and training seconds (Q) by node."""
    rest_s: float = 0.0
    """What a step lasts beyond generation and training, before measurements (seconds)."""

    def at(self, ratio_P: FloatArray, mean_P: FloatArray, quantity: int) -> FloatArray:
        """Return the logs at any points, linear in between the nodes."""
        nodes_R, nodes_M = _RATIO_NODES, self.mean_nodes
        log_RM = self.log_RMQ[:, :, quantity]
        r_P, fr_P = _cell(ratio_P, nodes_R)
        if len(nodes_M) == 1:
            return np.asarray(log_RM[r_P, 0] * (1 - fr_P) + log_RM[r_P + 1, 0] * fr_P)
        m_P, fm_P = _cell(mean_P, nodes_M)
        low_P = log_RM[r_P, m_P] * (1 - fr_P) + log_RM[r_P + 1, m_P] * fr_P
        high_P = log_RM[r_P, m_P + 1] * (1 - fr_P) + log_RM[r_P + 1, m_P + 1] * fr_P
        return np.asarray(low_P * (1 - fm_P) + high_P * fm_P)

    @property
    def mean_nodes(self) -> FloatArray:
        """Logs of factors on the mean answer."""
        return np.zeros(1) if self.run.mean_is_known else _MEAN_NODES


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


def across_nodes(grids: Sequence[SimulationGrid]) -> bool:
    """Return whether an engine of one of these rows spans nodes."""
    return any(one.run.tensor_parallel > one.run.gpu.gpus_per_node for one in grids)


def hypotheses_for(grids: Sequence[SimulationGrid]) -> Hypotheses:
    """Return the hypotheses to weigh for these rows."""
    factor = SEVERAL_NODES_FACTOR if across_nodes(grids) else 1
    mean_is_known = all(one.run.mean_is_known for one in grids)
    has_rest = any(one.rest_s for one in grids)
    sds = (factor * GENERATION_SD, factor * TRAINING_SD, MEAN_SD, factor * REST_SD)
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


STEP, GENERATE, TRAIN = range(3)


def _log_seconds(grid: SimulationGrid, hypotheses: Hypotheses, quantity: int) -> FloatArray:
    """Return the log of the seconds that a row's step, generation or training would last, by hypothesis."""
    if grid.training_given:
        log_P = grid.at(hypotheses.generation_P, hypotheses.mean_P, quantity)
    else:
        log_P = (
            grid.at(hypotheses.generation_P - hypotheses.training_P, hypotheses.mean_P, quantity)
            + hypotheses.training_P
        )
    if quantity != STEP or not grid.rest_s:
        return log_P
    return np.asarray(np.log(np.exp(log_P) + grid.rest_s * np.exp(hypotheses.rest_P)))


def _simulated(
    run: ReconstructedRun, *, ratio: float, log_mean: float, training_given: bool, weights: bool = False
) -> Steady:
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
    each = run.optimizer_steps
    rows = simulate_steps(config)[first * each - 1 :]
    num = (len(rows) - 1) / each
    waited_s = sum(row.wait_s for row in rows[1:]) / num
    return Steady(
        step_s=(rows[-1].time_s - rows[0].time_s) / num,
        generate_s=max(waited_s, 1e-3),
        train_s=sum(row.train_s for row in rows[1:]) / num,
    )


def central_seconds(run: ReconstructedRun) -> float:
    """Return the seconds of a row's RL step by the hardware model's central values; colocated, without the rest.

    Raises:
        PipelineRLError: If the row cannot be simulated.
    """
    return _simulated(run, ratio=0.0, log_mean=0.0, training_given=False, weights=True).step_s


def simulation_grid(run: ReconstructedRun, *, training_given: bool) -> SimulationGrid:
    """Return the simulations of a row on all nodes (seconds of a core or two).

    Raises:
        PipelineRLError: If the row cannot be simulated.
    """
    means = np.zeros(1) if run.mean_is_known else _MEAN_NODES

    def node(ratio: float, log_mean: float) -> list[float]:
        seconds = _simulated(run, ratio=ratio, log_mean=log_mean, training_given=training_given)
        return [math.log(one) for one in seconds]

    return SimulationGrid(run, training_given, np.array([[node(r, m) for m in means] for r in _RATIO_NODES]))


class Band(NamedTuple):
    """Seconds: the median of the likely ones, and the ends of a band that holds 80 % of them."""

    low_s: float
    middle_s: float
    high_s: float


def seconds_band(
    grid: SimulationGrid, references: Sequence[SimulationGrid], *, inputs: SimulationGrid | None = None
) -> Band:
    """Return the seconds of a row's RL step, given the measurements of other rows of its family.

    Args:
        grid: The row's simulations.
        references: Those of the other rows; at least one if the row's scale is not known.
        inputs: The row's simulations with free training, if its training seconds are published: these say something
            about its mean answer.
    """
    hypotheses = hypotheses_for([grid, *references])
    log_P = hypotheses.log_prior_P.copy()
    log_step_P = _log_seconds(grid, hypotheses, STEP)
    if inputs is not None and inputs.run.published.train_s is not None:
        residual_P = _log_seconds(inputs, hypotheses, TRAIN) - math.log(inputs.run.published.train_s)
        log_P -= 0.5 * (residual_P / RUN_SD) ** 2
    if grid.run.scale_is_known:
        for reference in references:
            for quantity, seconds in _observed(reference.run.published):
                residual_P = _log_seconds(reference, hypotheses, quantity) - math.log(seconds)
                log_P -= 0.5 * (residual_P / RUN_SD) ** 2
    else:  # only the ratios of the rows mean anything
        residual_KP = np.array([_log_residual(one, hypotheses) for one in references])
        offset_P = residual_KP.mean(axis=0)
        log_P -= 0.5 * (((residual_KP - offset_P) / RUN_SD) ** 2).sum(axis=0)
        log_step_P = log_step_P - offset_P
    weight_P = np.exp(log_P - log_P.max())
    weight_P /= weight_P.sum()
    middle = _median(log_step_P, weight_P)
    variance = float((weight_P * (log_step_P - (weight_P * log_step_P).sum()) ** 2).sum())
    of_offset = 0.0 if grid.run.scale_is_known else 1 / len(references)  # the scale is a mean of measurements
    spread = 1.28 * math.sqrt(variance + RUN_SD**2 * (1 + of_offset))
    return Band(math.exp(middle - spread), math.exp(middle), math.exp(middle + spread))


def _log_residual(grid: SimulationGrid, hypotheses: Hypotheses) -> FloatArray:
    """Return the log of simulated over measured seconds of a step, by hypothesis."""
    measured_s = measured_seconds(grid.run.published)
    assert measured_s is not None
    return _log_seconds(grid, hypotheses, STEP) - math.log(measured_s)


def _observed(run: PublishedRun) -> list[tuple[int, float]]:
    """Return the measurements of a row that inform others: its training, and its generation or else its step."""
    observed = [] if run.train_s is None else [(TRAIN, run.train_s)]
    if run.schedule in (Schedule.SYNC, Schedule.SYNC_APART) and run.generate_s is not None:
        return [*observed, (GENERATE, run.generate_s)]
    seconds = measured_seconds(run)
    return observed if seconds is None else [*observed, (STEP, seconds)]


def _median(value_P: FloatArray, weight_P: FloatArray) -> float:
    order_P = np.argsort(value_P)
    return float(value_P[order_P][np.searchsorted(np.cumsum(weight_P[order_P]), 0.5)])
