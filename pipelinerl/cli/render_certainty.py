"""How sure a plan is, and which measurement would settle it, in words."""

from __future__ import annotations

from pipelinerl.records.certainty_report import AsynchronousOdds, CertaintyReport, MeasurementValue

NEARLY_ALL = 0.8
"""Share of the largest gain that a cheaper measurement must have to be the one to make."""


def certainty_lines(report: CertaintyReport) -> list[str]:
    """Return a line per thing that is said of how sure a plan is."""
    lines = [
        f"certainty: the recommendation is the fastest of {report.ways} within {report.tie:.0%} with probability "
        f"{report.right:.2f}, and loses {report.regret:.1%} on average to the fastest ({report.draws} draws of what "
        "is not measured)"
    ]
    if report.expected_faster > report.tie:
        lines.append(
            f"as things are expected {report.expected} is {report.expected_faster:.0%} faster, but it loses "
            f"{report.expected_regret:.1%} on average"
        )
    if report.keeps_limits is not None:
        lines.append(f"it keeps to the limits with probability {report.keeps_limits:.2f}")
    if report.asynchronous is not None:
        lines.append(_asynchronous(report.asynchronous))
    if report.fits is not None:
        lines.append(f"memory suffices with probability {report.fits:.2f}")
    return [*lines, *_measurements(report)]


def _asynchronous(odds: AsynchronousOdds) -> str:
    faster = f"asynchronous RL is faster than synchronous RL on these GPUs with probability {odds.faster:.2f}"
    if odds.certain:
        return faster
    return f"{faster}: not certain; {odds.decided_by} decides most, {odds.share:.0%} of the difference"


def _measurements(report: CertaintyReport) -> list[str]:
    if not report.measurements:
        return ["which measurement next: none, all that one would show is known"]
    settling = [one for one in report.measurements if one.settles]
    if not settling:
        return ["which measurement next: none would change the plan"]
    before = f"right with probability {report.right:.2f} before"
    lines = [f"which measurement next ({before}; throughput gained):"]
    lines += [f"  {_named(one)}: {_value(one)}" for one in report.measurements]
    best = max(settling, key=lambda one: one.gain)
    enough = [one for one in settling if one.gain >= NEARLY_ALL * best.gain and one.commands]
    if enough:
        lines += [f"  $ {command}" for command in min(enough, key=lambda one: len(one.commands)).commands]
    return lines


def _named(one: MeasurementValue) -> str:
    *some, last = one.measured
    return f"{', '.join(some)} and {last}" if some else last


def _value(one: MeasurementValue) -> str:
    if not one.settles:
        return "nothing"
    cost = "" if one.minutes is None else f" (about {one.minutes:.0f} minutes on {one.gpus} GPUs)"
    return f"{one.right:.2f}, {one.gain:+.1%}{cost}"
