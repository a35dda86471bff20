"""Fit a drift model to runs that have learned, and compare its effective sample size with that of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.read import Run
from pipelinerl.errors import ConfigError
from pipelinerl.rl.drift import DriftModel, LearnedRun, fit_drift, modelled_ess


@dataclass(frozen=True, slots=True)
class DriftCheck:
    """Mean effective sample size of a run (share of the tokens)."""

    run: str
    """Name of the run."""
    modelled: float
    """By the drift model, for the lags of the run."""
    measured: float
    """Logged by the run."""
    error: float
    """Modelled less measured."""


def fit(runs: Sequence[Run]) -> DriftModel:
    """Return the drift model of runs: from each step's metrics, and the number of tokens of each lag.

    Raises:
        ConfigError: If they say nothing of drift.
    """
    return fit_drift([LearnedRun(_lines(run), run.figure_data.lag_histogram.total) for run in runs])


def check(model: DriftModel, run: Run) -> DriftCheck:
    """Return the modelled effective sample size of a run beside the measured one.

    Raises:
        ConfigError: If the run has not learned.
    """
    if not run.has_ess or run.report.ess is None:
        raise ConfigError(f"--check needs runs that learned, got {run.name}, whose metrics have no ESS")
    modelled, measured = modelled_ess(model, run.figure_data.lag_histogram.total).mean, run.report.ess.mean
    return DriftCheck(run.name, modelled, measured, modelled - measured)


def _lines(run: Run) -> list[dict[str, float]]:
    """Return the metrics of each step, without those that it did not log."""
    columns = run.metrics
    return [
        {name: float(one[row]) for name, one in columns.items() if one[row] == one[row]}  # not NaN
        for row in range(len(next(iter(columns.values()), ())))
    ]
