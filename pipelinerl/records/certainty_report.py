"""How sure a plan is, and which measurement would settle it: a table of plan.json."""

from __future__ import annotations

from pipelinerl.util.report import Report


class AsynchronousOdds(Report):
    """Asynchronous against synchronous RL on these GPUs."""

    faster: float
    """Probability that asynchronous RL is faster."""
    certain: bool
    """Whether that, or the contrary, has a probability of 0.95 at least."""
    decided_by: str
    """What decides most of the difference between the two."""
    share: float
    """Share of the variance of that difference which it explains."""


class MeasurementValue(Report):
    """What a measurement is worth before the decision."""

    measured: list[str]
    """The times or tokens that become known."""
    right: float
    """Probability that what is chosen then is the fastest, within a tie."""
    regret: float
    """Throughput that it loses against the fastest (mean, relative)."""
    gain: float
    """Throughput that the measurement gains (mean, relative): the regret before it, less that after it."""
    settles: bool
    """Whether that is anything."""
    commands: list[str]
    """The commands that measure; the next plan takes what each writes, with ``--measured``. Empty: none measures it."""
    minutes: float | None
    """How long they take, estimated; null: not known."""
    gpus: int | None
    """GPUs that the largest of them takes; null: not known."""


class CertaintyReport(Report):
    """How sure the recommendation is, over draws that differ in all that is not known."""

    draws: int
    """Draws (count)."""
    ways: int
    """Candidates compared in them (count)."""
    tie: float
    """Difference in throughput up to which two are as fast (relative)."""
    right: float
    """Probability that the recommendation is the fastest of those within the limits, within a tie."""
    regret: float
    """Throughput that it loses against the fastest (mean, relative)."""
    least_regret: float
    """The least regret of them all; what measurements gain is counted from here."""
    expected: str
    """The candidate that would be recommended if all were as the central coefficients have it."""
    expected_faster: float
    """Its gain in throughput over the recommendation then (relative)."""
    expected_regret: float
    """Its regret."""
    keeps_limits: float | None
    """Probability that the recommendation keeps to the limits on mean lag, hours and money; null without any."""
    asynchronous: AsynchronousOdds | None
    """Asynchronous against synchronous RL; null if only one of them fits."""
    fits: float | None
    """Probability that the recommendation's memory suffices; null if GPU and model are not known."""
    unknown: dict[str, float]
    """What is not known: the standard deviation of the log of each factor."""
    measurements: list[MeasurementValue]
    """What measurements are worth: each alone, the best first; the best two; all that a command shows; all."""
