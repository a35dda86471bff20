"""Probabilities in words, and which measurement would settle a plan."""

from __future__ import annotations

from pipelinerl.records.certainty_report import CertaintyReport, MeasurementValue

NEARLY_ALL = 0.8
"""Share of the largest gain that a cheaper measurement must have to be the one to make."""

ALMOST_ONE = 0.995
"""Probability from which on none is told as a number."""


def probability(value: float) -> str:
    """Return a probability found to two digits; it is never told as 0 or as 1."""
    return f"with probability {_number(value)}"


def _number(value: float) -> str:
    return "at least 0.995" if value >= ALMOST_ONE else "at most 0.005" if value <= 1 - ALMOST_ONE else f"{value:.2f}"


def measurement_to_make(report: CertaintyReport) -> MeasurementValue | None:
    """Return the measurement with the fewest commands that gains nearly all; None if nothing is gained.

    Where no command has nearly all, it is the one that gains the most of those with commands, or else of all.
    """
    settling = [one for one in report.measurements if one.settles]
    most = max((one.gain for one in settling), default=0.0)
    by_command = [one for one in settling if one.commands]
    enough = [one for one in by_command if one.gain >= NEARLY_ALL * most]
    if enough:
        return min(enough, key=lambda one: len(one.commands))
    return max(by_command or settling, key=lambda one: one.gain, default=None)


def measurement_lines(report: CertaintyReport) -> list[str]:
    """Return a line per measurement: what it gains, and how probable it is that what is chosen then is the fastest.

    Least is lost on average by what need not be the fastest most often, so a gain may leave that probability as it is.
    """
    if not any(one.settles for one in report.measurements):
        return []
    now = _number(report.right)
    return [
        f"throughput that a measurement gains on average, and the probability of the fastest, {now} now:",
        *(f"  {_gain(one, report.right)} {named(one)}{time_of(one)}" for one in report.measurements),
    ]


def named(one: MeasurementValue) -> str:
    """Return what becomes known, in words."""
    *some, last = one.measured
    return f"{', '.join(some)} and {last}" if some else last


def time_of(one: MeasurementValue) -> str:
    """Return how long a measurement takes, in brackets; nothing where that is not known or it gains nothing."""
    known = one.settles and one.minutes is not None
    return f" (about {one.minutes:.0f} minutes on {one.gpus} GPUs)" if known else ""


def _gain(one: MeasurementValue, now: float) -> str:
    if not one.settles:
        return "nothing:"
    surer = f", {_number(one.right)}" if round(one.right, 2) > round(now, 2) else ""
    return f"{one.gain:+.1%}{surer}:"
