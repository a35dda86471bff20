"""Throughput against the largest lag (Fig. 9 of the paper), beside the analytic model, and the speed-ups of arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.chart import Axis, Chart, Mark, Series, limits, line, rule
from analysis.read import Run
from analysis.style import series_styles
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.tables import UtilisationDecode
from pipelinerl.hardware.utilisation import fitted_utilisation, read_utilisation
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.theory.lengths import lengths_from, uniform_lengths
from pipelinerl.theory.paper import Setting, throughput_against_lag
from pipelinerl.util.arrays import FloatArray

NUM_LAGS = 24
MARKER_PT = 4.5
RIM_PT = 3.5
"""How much larger a marker is for each that would cover it, so that its rim shows (points)."""
COVERED = 0.03
"""Distance of two runs whose markers cover each other (share of the largest lag, and of the largest throughput)."""


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Throughput (trained tokens per second or flash), largest and mean lag (optimizer steps) of one run."""

    name: str
    method: str
    max_lag: float
    rate: float
    bound: int | None = None
    """Its ``scheduler.max_lag``."""
    mean_lag: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RateCurves:
    """Throughput (tokens/flash) of both methods at the same bounds on lag in the analytic model (paper, appendix A)."""

    max_lag: FloatArray
    """Bounds g (optimizer steps)."""
    pipeline: FloatArray
    conventional: FloatArray
    """With G = g + 1."""


def rate_points(runs: Sequence[Run]) -> tuple[list[RatePoint], str]:
    """Return a point per run, in tokens/flash if all runs know it, else in tokens/s; and that unit."""
    flashes = [run.report.tokens_per_flash for run in runs]
    known = [rate for rate in flashes if rate is not None]
    unit = "tokens/flash" if len(known) == len(runs) else "tokens/s"
    rates = known if unit == "tokens/flash" else [run.report.tokens_per_s for run in runs]
    points = [
        RatePoint(run.name, run.method, run.report.lag.max, rate, run.report.max_lag, run.report.lag.mean)
        for run, rate in zip(runs, rates, strict=True)
    ]
    return points, unit


def analytic_curves(config: RunConfig, *, largest_lag: float) -> RateCurves | None:
    """Return the paper's Fig. 9 for a run file, up to a lag (optimizer steps); None where appendix A does not apply.

    It describes runs in the paper's mode (``decode.kind = "utilisation"``) with fixed or uniform lengths.
    """
    decode, length = config.hardware.decode, config.workload.length
    if not isinstance(decode, UtilisationDecode) or length.kind not in ("fixed", "uniform"):
        return None
    lengths = uniform_lengths(length.max) if length.kind == "uniform" else lengths_from([length.max])
    setting = Setting(
        curve=fitted_utilisation() if decode.table is None else read_utilisation(decode.table),
        lengths=lengths,
        accelerators=config.cluster.accelerators,
        train_batch_size=config.scheduler.train_batch_size,
        training_flashes_per_token=resolved_hardware(config).training.token_s / decode.flash_s,
    )
    lags = np.unique(np.geomspace(1, max(2.0, largest_lag), NUM_LAGS).round().astype(int))
    points = throughput_against_lag(setting, [int(lag) for lag in lags])
    return RateCurves(
        max_lag=np.array([point.max_lag for point in points], dtype=float),
        pipeline=np.array([point.pipeline.rates.total for point in points]),
        conventional=np.array([point.conventional.total for point in points]),
    )


def throughput_against_max_lag(
    points: Sequence[RatePoint], curves: RateCurves | None = None, unit: str = "tokens/s"
) -> Chart:
    """Return throughput against the largest lag (Fig. 9): a marker per run, and the curves of the analytic model.

    ConfigError if there is nothing to draw, or there are curves and the unit is not ``tokens/flash``.
    """
    if curves is None and not points:
        raise ConfigError("throughput against lag needs a point or a curve, got none")
    if curves is not None and unit != "tokens/flash":
        raise ConfigError(f"points must be in tokens/flash to be drawn with analytic curves, got {unit}")
    series = []
    if curves is not None:
        for method, rate in (("pipeline", curves.pipeline), ("conventional", curves.conventional)):
            series.append(line(f"{method}, model", curves.max_lag, rate, series_styles([method], [0.0])[0]))
    styles = series_styles([point.method for point in points], [point.max_lag for point in points])
    for index, (point, style) in enumerate(zip(points, styles, strict=True)):
        size = MARKER_PT + RIM_PT * _covering(points, index)
        look: dict[str, Any] = {"color": style.color, "marker": style.marker, "size": size}
        mean = {} if point.mean_lag is None else {"mean lag": [point.mean_lag]}
        series.append(Series(label=point.name, mark=Mark.POINTS, x=[point.max_lag], y=[point.rate], hover=mean, **look))
    return Chart(
        title="Throughput against the largest lag",
        caption="Higher is faster, further left is closer to on-policy.",
        x=Axis(label="largest lag", unit="optimizer steps", ticks=8, values="0"),
        y=Axis(label="throughput", unit=unit, handy=True, values="0,0" if unit == "tokens/s" else "0.00"),
        series=[*series, *limits([point.bound for point in points], mark=Mark.RULE_X)],
    )


def _covering(points: Sequence[RatePoint], index: int) -> int:
    lag = COVERED * max(point.max_lag for point in points)
    rate = COVERED * max(point.rate for point in points)
    this = points[index]
    return sum(
        abs(other.max_lag - this.max_lag) <= lag and abs(other.rate - this.rate) <= rate
        for other in points[index + 1 :]
    )


def speedup_by_scenario(comparison: ComparisonReport) -> Chart:
    """Return the speed-up of every arm over the baseline, a row per scenario."""
    scenarios = comparison.scenarios
    arms = {arm.name: arm.summary for arm in comparison.arms}
    styles = series_styles([one.scheduler for one in arms.values()], [one.lag.max for one in arms.values()])
    series = []
    for name, style in zip(arms, styles, strict=True):
        if name == comparison.baseline:
            series.append(rule(f"{name} (baseline)", 1.0, color=style.color, dash=style.dash))
            continue
        cells = [
            (arm.speedup, row)
            for row, scenario in enumerate(scenarios)
            for arm in scenario.arms
            if arm.name == name and arm.speedup is not None
        ]
        if cells:
            x, y = zip(*cells, strict=True)
            series.append(Series(label=name, mark=Mark.POINTS, x=x, y=y, color=style.color, marker=style.marker))
    return Chart(
        title="Speed-up by scenario",
        caption=f"Trained tokens/s over those of {comparison.baseline}: right of 1 is faster.",
        x=Axis(label="speed-up", unit="ratio of trained tokens/s"),
        y=Axis(label="", rows=[scenario.name for scenario in scenarios]),
        series=series,
        switch=None,
    )
