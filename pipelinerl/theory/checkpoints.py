"""How often a job that fails at random should checkpoint."""

from __future__ import annotations

import math


def daly_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints for which a job ends soonest (seconds).

    With x = checkpoint_s / (2 mtbf_s): sqrt(2 checkpoint_s mtbf_s) (1 + sqrt(x) / 3 + x / 9) - checkpoint_s, and
    ``mtbf_s`` from x = 1 on. The time of a restart does not change it.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006) 303-312, doi:10.1016/j.future.2004.11.016.

    Args:
        checkpoint_s: Time of a checkpoint, in which no work is done (seconds).
        mtbf_s: Mean time between failures of the whole job, exponential (seconds).
    """
    x = checkpoint_s / (2 * mtbf_s)
    if x >= 1:
        return mtbf_s
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def daly_share(every_s: float, *, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time in which a job makes progress that lasts (0 to 1).

    every_s / (mtbf_s e^(restart_s / mtbf_s) (e^((every_s + checkpoint_s) / mtbf_s) - 1)): Daly's complete model.
    ``every_s``: work between two checkpoints; the others as in ``daly_interval`` (seconds).
    """
    return every_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + checkpoint_s) / mtbf_s))
