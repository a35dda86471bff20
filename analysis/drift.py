"""What runs that have learned tell a drift model, and how far off a model is on them."""

from __future__ import annotations

from typing import Any

from analysis.read import Run
from pipelinerl.errors import ConfigError
from pipelinerl.rl.drift import DriftModel, LearnedRun, modelled_ess


def learned_run(run: Run) -> LearnedRun:
    """Return what a drift model is fitted to: each step's metrics, and how many tokens had each lag."""
    columns = run.metrics
    steps = [
        {name: float(one[row]) for name, one in columns.items() if one[row] == one[row]}  # NaN: not there
        for row in range(len(next(iter(columns.values()), ())))
    ]
    return LearnedRun(steps, run.profile.lag_histogram.total.tolist())


def checked(model: DriftModel, run: Run) -> dict[str, Any]:
    """Return the modelled effective sample size of a run beside the measured one.

    Raises:
        ConfigError: If the run has not learned.
    """
    if not run.has_ess:
        raise ConfigError(f"--check needs runs that learned, got {run.name}, whose metrics have no ESS")
    modelled = modelled_ess(model, run.profile.lag_histogram.total).mean
    measured = run.number("ess.mean")
    return {"run": run.name, "modelled": modelled, "measured": measured, "error": modelled - measured}
