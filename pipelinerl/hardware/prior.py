"""Standard deviations of the logs of factors on the seconds of a system that nobody has measured, one home for all.

Theory. An *arm* is one way to run a system: a schedule on a cluster. Its step lasts S(g, t, m) + R, with factors on all
seconds of generation (g), on all seconds of training (t), on the mean answer where it is not known (m), and the rest R:
weights, and phase switch where colocated. The arms share software, GPU and model, so g, t, m and one factor on the
weights are common to all. Each has its own further factor on the weights and on the switch, since these differ between
a colocated and a separate trainer, and a run-to-run spread besides. All factors are log-normal about the central
coefficients. Coefficients that do not move all seconds alike are drawn between their levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pipelinerl.hardware.coefficients import Level
from pipelinerl.util.arrays import FloatArray

GENERATION_SD = 0.35
"""Of the factor on all seconds of generation: the decode model's absolute scale is uncertain by 40 %."""
ENGINE_SD = 0.2
"""The same where engine and version are named: its steps are known to 10 %, and prefill, tails and queues count too."""
TRAINING_SD = 0.5
"""Of the factor on all seconds of training: published training efficiencies range over a factor of 3."""
MEAN_SD = 0.8
"""Of the factor on the mean answer, where none is known."""
SYNC_SD = 1.1
"""Of the factor on the weights that the arms of a system share. 36 published synchronizations over the root of their GB
(without deltas, LoRA and disks) scatter by 1.2 between 7 systems, by 1.5 within, and, outliers left to the 10 % at each
end, by 1.6 in all: half of that variance for either."""
SYNC_ARM_SD = 1.1
"""Of each arm's own factor on the weights: the other half."""
SWITCH_SD = 0.7
"""Of each arm's own factor on the phase switch: 3 to 50 s beside the parts, in 11 published rows."""
RUN_SD = 0.15
"""Of each arm's seconds about the model: run-to-run spread, and effects that the model omits."""
PAIRS_MEAN = 0.43
"""Of the log of asynchronous over synchronous throughput on equal GPUs, in nine families of published pairs."""
PAIRS_SD = 0.45
"""Its standard deviation: 0.27 between these families, more by judgement, as those publish who won."""
REST_SD = 1.0
"""Of the factor on the weights and the switch of a row together, for rows of one system that inform each other."""
DOUBT_FACTOR = 2
"""Factor on the deviations of generation, training and rest where engines span nodes, on which nothing is published, or
the GPU, the model or a feature of the software is not known."""
ANSWERS_SD = 0.35
"""Of the factor on a mean answer that a run file states and no run of the task has measured: a judgement."""
MEMORY_SD = 0.1
"""Of the factor on the bytes that engines and trainer need (fragmentation, graphs, libraries): a judgement."""
MEASURED_SD = 0.05
"""Of the factor on measured or calibrated seconds (docs/calibration.md)."""
CERTAIN = 0.95
"""Probability from which on an order, such as of two schedules, counts as certain."""
END_SDS = 1.2816
"""Standard deviations from the central level to either end: the levels hold 80 % of a normal distribution."""


def between_levels(values: Mapping[Level, float], normal: FloatArray) -> FloatArray:
    """Return a coefficient at standard normal numbers, any shape: -1.28 is optimistic, 0 central, 1.28 pessimistic.

    Between them it is linear, in logs where all three are above 0; numbers beyond the ends count as the ends.
    """
    ends = [values[level] for level in (Level.OPTIMISTIC, Level.CENTRAL, Level.PESSIMISTIC)]
    if min(ends) > 0:
        logs = [math.log(one) for one in ends]
        return np.asarray(np.exp(np.interp(normal, [-END_SDS, 0.0, END_SDS], logs)))
    return np.asarray(np.interp(normal, [-END_SDS, 0.0, END_SDS], ends))
