"""The report of ``environments``: the content of environments.json."""

from __future__ import annotations

from pipelinerl.records.reports import Bottleneck, RolloutSeconds
from pipelinerl.util.strict_model import Report


class EnvironmentsRow(Report):
    """The run with so many environments."""

    count: int
    """Environments (count)."""
    rollouts_per_hour: float
    """Rollouts trained on in an hour of the steady state (1/h): of the second half of the optimizer steps."""
    in_use_mean: float
    """Mean number in use (environments)."""
    generation: float
    """Share of the engines' time in which they are busy."""
    training: float
    """Share of the trainer's time in which it trains."""
    lag_mean: float
    """Mean lag of a token trained in that half (optimizer steps)."""
    seconds: RolloutSeconds
    """Where the time of a rollout goes."""
    bottleneck: Bottleneck
    """The side that limits the throughput."""
    usd_per_1000_rollouts: float | None
    """Cost of 1000 rollouts, accelerators and environments together (USD); null without a price of a GPU-hour."""
    folder: str
    """Folder of the run, relative to that of the report."""


class EnvironmentsReport(Report):
    """Throughput against the number of environments: the content of environments.json."""

    accelerators: int
    """Accelerators of the cluster (count)."""
    slots: int
    """Rollouts that all engines can have in progress (count)."""
    rows: list[EnvironmentsRow]
    """The runs that have ended, by rising number of environments."""
    knee: int
    """Fewest environments whose rate is within 5 % of the largest (count)."""
    verdict: str
    """The answer in words."""
    failures: list[str]
    """A line per run that has failed."""
    complete: bool
    """Whether every run has ended without a failure."""
