"""Fit a drift model to runs that learned, and compare its effective sample size with a measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.read import Run
from pipelinerl.errors import ConfigError
from pipelinerl.rl.drift import DriftModel, LearnedRun, fit_drift, modelled_ess


@dataclass(frozen=True, slots=True)
class DriftCheck:
    """Mean effective sample size of a run (share of the tokens); the error is modelled less measured."""

    run: str
    modelled: float
    measured: float
    error: float


def fit(runs: Sequence[Run]) -> DriftModel:
    """Fit the drift model to the metrics of each step and the tokens at each lag; ConfigError without data on drift."""
    return fit_drift([LearnedRun(_lines(run), run.figure_data.lag_histogram.total) for run in runs])


def check(model: DriftModel, run: Run) -> DriftCheck:
    """Return the modelled effective sample size beside the measured one; ConfigError if the run did not learn."""
    if not run.has_ess or run.report.ess is None:
        raise ConfigError(f"--check needs runs that learned, got {run.name}, whose metrics have no ESS")
    modelled, measured = modelled_ess(model, run.figure_data.lag_histogram.total).mean, run.report.ess.mean
    return DriftCheck(run.name, modelled, measured, modelled - measured)


def _lines(run: Run) -> list[dict[str, float]]:
    columns = run.metrics
    return [
        {name: float(one[row]) for name, one in columns.items() if one[row] == one[row]}  # not NaN
        for row in range(len(next(iter(columns.values()), ())))
    ]
