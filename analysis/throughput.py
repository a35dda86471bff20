"""Throughput against the largest lag (Fig. 9 of the paper), beside the analytic model, and the speed-ups of arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.read import Run
from analysis.style import COLUMN_IN, add_legend, draw_limit, handy_scale, house_style, make_panels, series_styles
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
"""Points of a curve (count)."""
MARKER_PT = 4.5
"""Size of a marker (points)."""
RIM_PT = 3.5
"""How much larger a marker is for each that would cover it: its rim shows (points)."""
COVERED = 0.03
"""How near two runs are whose markers cover each other (share of the largest lag, and of the largest throughput)."""


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Largest lag and throughput of one run."""

    name: str
    """Its name in figures."""
    method: str
    """The kind of its scheduler."""
    max_lag: float
    """Largest lag of any trained token (optimizer steps)."""
    rate: float
    """Trained tokens per second or flash."""
    bound: int | None = None
    """Its ``scheduler.max_lag``. None: it keeps none (optimizer steps)."""


@dataclass(frozen=True, slots=True, eq=False)
class RateCurves:
    """Throughput of both methods in the analytic model (paper, appendix A), at the same bounds on lag."""

    max_lag: FloatArray
    """Bounds g (optimizer steps)."""
    pipeline: FloatArray
    """Best rate of PipelineRL (tokens/flash), shape as ``max_lag``."""
    conventional: FloatArray
    """Rate of conventional RL with G = g + 1 (tokens/flash), shape as ``max_lag``."""


def rate_points(runs: Sequence[Run]) -> tuple[list[RatePoint], str]:
    """Return a point per run, in tokens/flash if all runs know it, else in tokens/s; and that unit."""
    flashes = [run.report.tokens_per_flash for run in runs]
    known = [rate for rate in flashes if rate is not None]
    unit = "tokens/flash" if len(known) == len(runs) else "tokens/s"
    rates = known if unit == "tokens/flash" else [run.report.tokens_per_s for run in runs]
    points = [
        RatePoint(run.name, run.method, run.report.lag.max, rate, run.report.max_lag)
        for run, rate in zip(runs, rates, strict=True)
    ]
    return points, unit


def analytic_curves(config: RunConfig, *, largest_lag: float) -> RateCurves | None:
    """Return the paper's Fig 9 for a run file: throughput in tokens/flash against max lag, both methods.

    Args:
        config: A run file in the paper's mode (``decode.kind = "utilisation"``), with fixed or uniform lengths.
        largest_lag: Where the curves end (optimizer steps).

    Returns:
        The curves, or None where appendix A does not describe the run.
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


@house_style
def throughput_against_max_lag(
    points: Sequence[RatePoint], curves: RateCurves | None = None, unit: str = "tokens/s"
) -> Figure:
    """Draw throughput against the largest lag (Fig. 9): a marker per run, and the curves of the analytic model.

    Args:
        points: Runs; nothing joins them, since they may differ in more than lag. May be empty if there are curves.
        curves: The analytic model, in tokens/flash.
        unit: Unit of the points; must be ``tokens/flash`` if there are curves.

    Raises:
        ConfigError: If there is nothing to draw, or points and curves have different units.
    """
    if curves is None and not points:
        raise ConfigError("throughput against lag needs a point or a curve, got none")
    if curves is not None and unit != "tokens/flash":
        raise ConfigError(f"points must be in tokens/flash to be drawn with analytic curves, got {unit}")
    figure, [[axes]] = make_panels(COLUMN_IN, 2.0)
    scale, word = handy_scale(max((point.rate for point in points), default=0.0))
    if curves is not None:
        for method, rate in (("pipeline", curves.pipeline), ("conventional", curves.conventional)):
            style = series_styles([method], [0.0])[0]
            axes.plot(curves.max_lag, rate / scale, color=style.color, linestyle=style.dash, label=f"{method}, model")
    styles = series_styles([point.method for point in points], [point.max_lag for point in points])
    for index, (point, style) in enumerate(zip(points, styles, strict=True)):
        axes.plot(
            point.max_lag,
            point.rate / scale,
            style.marker,
            color=style.color,
            markeredgecolor="white",
            markersize=MARKER_PT + RIM_PT * _covering(points, index),
            label=point.name,
        )
    draw_limit(axes, (point.bound for point in points), across=False)
    axes.margins(0.08)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set(
        xlabel="largest lag (optimizer steps)", ylabel=f"throughput ({word}{unit})", xlim=(0, None), ylim=(0, None)
    )
    axes.grid()
    add_legend(figure, axes, "Throughput against the largest lag")
    return figure


def _covering(points: Sequence[RatePoint], index: int) -> int:
    """Return how many points that are drawn later would cover this one (count)."""
    lag = COVERED * max(point.max_lag for point in points)
    rate = COVERED * max(point.rate for point in points)
    this = points[index]
    return sum(
        abs(other.max_lag - this.max_lag) <= lag and abs(other.rate - this.rate) <= rate
        for other in points[index + 1 :]
    )


@house_style
def speedup_by_scenario(comparison: ComparisonReport) -> Figure:
    """Draw the speed-up of every arm over the baseline, a row per scenario.

    Args:
        comparison: At least one arm in one scenario.

    Returns:
        One panel: a marker per arm in the row of its scenario; the baseline is the vertical line at 1.
    """
    scenarios = comparison.scenarios
    arms = {arm.name: arm.summary for arm in comparison.arms}
    styles = series_styles([one.scheduler for one in arms.values()], [one.lag.max for one in arms.values()])
    figure, [[axes]] = make_panels(COLUMN_IN, 0.5 + 0.2 * len(scenarios))
    for name, style in zip(arms, styles, strict=True):
        if name == comparison.baseline:
            axes.axvline(1.0, color=style.color, linestyle=style.dash, linewidth=0.9, label=f"{name} (baseline)")
            continue
        cells = [
            (arm.speedup, row)
            for row, scenario in enumerate(scenarios)
            for arm in scenario.arms
            if arm.name == name and arm.speedup is not None
        ]
        if cells:
            axes.plot(*zip(*cells, strict=True), style.marker, color=style.color, markeredgecolor="white", label=name)
    axes.set(xlabel="speed-up (ratio of trained tokens/s)", xlim=(0, None))
    axes.set(ylim=(len(scenarios) - 0.5, -0.5))
    axes.set_yticks(range(len(scenarios)), [scenario.name for scenario in scenarios])
    axes.tick_params(axis="y", length=0)
    axes.grid()
    add_legend(figure, axes, "Speed-up by scenario")
    return figure
