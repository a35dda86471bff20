"""The report of ``diagnose``: the content of diagnosis.json."""

from __future__ import annotations

from pipelinerl.records.plan_report import Band
from pipelinerl.util.strict_model import Report


class GpuTime(Report):
    """One part of the GPU-seconds of a step."""

    part: str
    gpu_s: float
    share: float
    """Share of all GPU-seconds; those of all parts make 1."""
    source: str
    """``log``, ``simulation`` of the calibrated job, or ``rest``: all that the other parts leave."""


class Gain(Report):
    """One change, made alone, against the job as it is."""

    change: str
    set: list[str]
    """Keys of the run file, ``key=value`` each."""
    times: float
    """Throughput over that of the job, each as ``plan`` gives it (ratio of tokens/s)."""
    band: Band
    """Its range over draws of all that is not measured, the same draws for both (ratio)."""
    lag_mean: float
    """Mean lag of a trained token (optimizer steps)."""


class DiagnosisReport(Report):
    """Where a job spends its GPU time, and what would change it."""

    num_steps: int
    """Steps of the log that are averaged (count)."""
    num_left_out: int
    """The first, and steps with other work (count)."""
    step_s: float
    """Seconds of a step, by the log."""
    accelerators: int
    gpu_time: list[GpuTime]
    asynchronous: Gain | None
    """The best asynchronous RL within the limits, of ``plan`` of the calibrated run file; null: none but the job."""
    gains: list[Gain]
    """At most three, the largest first; none that is a tie with the job."""
    notes: list[str]
    """What the log does not tell, and what is taken instead."""
