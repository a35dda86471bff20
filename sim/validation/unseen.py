"""Systems that nobody has measured: how far off the hardware model alone is, from families left out in turn.

Theory. The log of predicted over measured seconds of row i of family f is a sum, e_fi = c + b_f + w_fi: the error about
every system, about a family (software, GPU, model), and about one of its rows. Family effects scatter with a standard
deviation ``family_sd``, rows with ``row_sd``; a row of a new family is off by both. Estimates are by moments: c is the
mean of the family means, shrunk towards 0 by a prior of standard deviation ``CENTRE_SD``. The variance between families
is that of their means, less their rows' share of it. A prediction of a family is the hardware model's divided by
exp(c), with c and the spread of all *other* families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import Level
from pipelinerl.hardware.prior import END_SDS
from pipelinerl.util.arrays import FloatArray
from sim.validation.infer import Band, central_seconds
from sim.validation.reconstruct import ReconstructedRun, measured_seconds, reconstruct_run, rest_s
from sim.validation.rows import PublishedRun

Value = TypeVar("Value")

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

    @property
    def log_error(self) -> float:
        """Log of predicted over measured seconds."""
        return math.log(self.predicted_s / self.measured_s)


def truly_simulated(row: PublishedRun) -> ReconstructedRun | None:
    """Return a row as it is predicted alone, from its own inputs; None if they do not decide its seconds.

    An unpublished mean answer, limit or cluster size leaves the seconds open. So do hours of a whole run, which hold
    evaluation, checkpoints and restarts.
    """
    try:
        run = reconstruct_run(row, [row])
    except ConfigError:
        return None
    known = row.max_len is not None and run.mean_is_known and run.scale_is_known and measured_seconds(row) is not None
    return run if known else None


def alone_run(run: ReconstructedRun) -> AloneRun:
    """Simulate a row with the central coefficients; PipelineRLError if it cannot be simulated."""
    seconds = central_seconds(run)
    if run.schedule.colocated:
        seconds += rest_s(run.published, Level.CENTRAL)
    measured_s = measured_seconds(run.published)
    assert measured_s is not None
    return AloneRun(run.id, run.published.family, seconds, measured_s)


def unseen_bands(runs: Iterable[AloneRun]) -> dict[str, Band]:
    """Return seconds per RL step of each row alone, with a band from all families but its own."""
    rows = list(runs)
    bands = {}
    for row in rows:
        spread = spread_of(by_family((one.family, one.log_error) for one in rows if one.family != row.family))
        middle_s, factor = row.predicted_s / math.exp(spread.centre), math.exp(END_SDS * spread.sd)
        bands[row.id] = Band(middle_s / factor, middle_s, middle_s * factor)
    return bands


def by_family(pairs: Iterable[tuple[object, Value]]) -> dict[object, list[Value]]:
    """Return the values of each family, in order."""
    families: dict[object, list[Value]] = {}
    for family, value in pairs:
        families.setdefault(family, []).append(value)
    return families


def spread_of(log_errors: Mapping[object, Sequence[float]]) -> Spread:
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
