"""Throughput against the largest lag (Fig. 9 of the paper), beside the analytic model, and the speed-ups of arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.chart import Axis, Chart, Mark, Series, limits, line, rule, series_styles, styled
from analysis.read import Run
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import UtilisationDecode
from pipelinerl.hardware.utilisation import fitted_utilisation, read_utilisation
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.theory.lengths import lengths_from, uniform_lengths
from pipelinerl.theory.paper import Setting, throughput_against_lag
from pipelinerl.util.arrays import FloatArray

NUM_LAGS = 24
MARKER_PT = 4.5
RIM_PT = 3.5
"""Growth of a marker for each later one that covers it, so that its rim shows (points)."""
COVERED = 0.03
"""Largest distance at which markers cover each other (share of the largest lag and throughput)."""


@dataclass(frozen=True, slots=True, eq=False)
class RateCurves:
    """Throughput (tokens/flash) of both methods at the same bounds on lag in the analytic model (paper, appendix A)."""

    max_lag: FloatArray
    """Bounds g (optimizer steps)."""
    pipeline: FloatArray
    conventional: FloatArray
    """With G = g + 1."""


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


def throughput_against_max_lag(runs: Sequence[Run], curves: RateCurves | None = None) -> Chart:
    """Return throughput against the largest lag (Fig. 9): a marker per run, and the curves of the analytic model.

    The unit is tokens/flash if all runs know it, else tokens/s; ConfigError if there are curves and it is tokens/s.
    """
    flashes = [run.report.tokens_per_flash for run in runs]
    rates = [rate for rate in flashes if rate is not None]
    unit = "tokens/flash"
    if len(rates) < len(runs):
        unit, rates = "tokens/s", [run.report.tokens_per_s for run in runs]
        if curves is not None:
            raise ConfigError("runs must know their tokens/flash to be drawn with analytic curves, got tokens/s")
    series = []
    if curves is not None:
        for method, curve in (("pipeline", curves.pipeline), ("conventional", curves.conventional)):
            series.append(line(f"{method}, model", curves.max_lag, curve, series_styles([method], [0.0])[0]))
    places = [(run.report.lag.max, rate) for run, rate in zip(runs, rates, strict=True)]
    for index, (run, style) in enumerate(styled(runs)):
        size = MARKER_PT + RIM_PT * _num_covering(places, index)
        look: dict[str, Any] = {"color": style.color, "marker": style.marker, "size": size}
        lag, rate = places[index]
        mean = {"mean lag": [run.report.lag.mean]}
        series.append(Series(label=run.name, mark=Mark.POINTS, x=[lag], y=[rate], hover=mean, **look))
    return Chart(
        title="Throughput against the largest lag",
        caption="Higher is faster, further left is closer to on-policy.",
        x=Axis(label="largest lag", unit="optimizer steps", ticks=8, values="0"),
        y=Axis(label="throughput", unit=unit, handy=True, values="0,0" if unit == "tokens/s" else "0.00"),
        series=[*series, *limits(runs, mark=Mark.RULE_X)],
    )


def _num_covering(places: Sequence[tuple[float, float]], index: int) -> int:
    """Return how many later markers cover this one."""
    lag, rate = places[index]
    reach_lag, reach_rate = (COVERED * max(values) for values in zip(*places, strict=True))
    return sum(abs(x - lag) <= reach_lag and abs(y - rate) <= reach_rate for x, y in places[index + 1 :])


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
