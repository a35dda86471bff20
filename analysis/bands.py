"""Figures of runs that have learned, several seeds of each arm together: means and confidence bands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.metrics import ESS_RAW, REWARD
from analysis.read import Run
from analysis.style import (
    INK,
    PAGE_IN,
    SeriesStyle,
    add_legend,
    handy_scale,
    handy_time,
    house_style,
    make_panels,
    styled,
)
from pipelinerl.util.arrays import FloatArray

Arms = Mapping[str, Sequence[Run]]
"""The runs of each arm, one per seed, by name of the arm."""

GRID_POINTS = 200
"""Times at which curves of seeds are averaged (count)."""
SMOOTHED_STEPS = 8
"""Optimizer steps that a curve is a trailing mean of (count)."""


@house_style
def learning(arms: Arms) -> Figure:
    """Draw reward against time, reward against samples, and samples against time (Fig. 5).

    Curves are trailing means of 8 optimizer steps, from the 8th on, averaged over seeds; bands are 95 % confidence
    intervals of that mean (Student's t) of three seeds or more, the range of two. A curve ends where its first seed
    does, and the time axis at three times the fastest run. The reward is that of the rollouts trained on, so of the
    policy that sampled them: conventional RL's is up to G steps ahead of it.

    Args:
        arms: At least one arm of at least one run, all with metrics.

    Returns:
        Three panels, a line per arm in each.
    """
    ends_s = [float(run.steps.time_s[-1]) for runs in arms.values() for run in runs]
    shown_s = min(max(ends_s), 3 * min(ends_s))
    time_scale, unit = handy_time(shown_s)
    scale, word = handy_scale(max(float(run.steps.samples.sum()) for runs in arms.values() for run in runs))
    figure, [[by_time, by_samples, throughput]] = make_panels(PAGE_IN, 2.0, columns=3)
    for (name, runs), style in _styled(arms):
        time_S = [_from_eighth(run.steps.time_s / time_scale) for run in runs]
        samples_S = [_from_eighth(np.cumsum(run.steps.samples) / scale) for run in runs]
        reward_S = [_from_eighth(_trailing_mean(run.metrics[REWARD])) for run in runs]
        _draw(by_time, time_S, reward_S, style, name)
        _draw(by_samples, samples_S, reward_S, style, name)
        _draw(throughput, time_S, samples_S, style, name)
    by_time.set(xlabel=f"time ({unit})", ylabel="mean reward (per rollout)", xlim=(0, shown_s / time_scale))
    by_samples.set(xlabel=f"trained ({word}samples)", ylabel="mean reward (per rollout)", xlim=(0, None))
    throughput.set(xlabel=f"time ({unit})", ylabel=f"trained ({word}samples)", xlim=(0, shown_s / time_scale))
    throughput.set(ylim=(0, None))
    low, high = zip(_room(by_time), _room(by_samples), strict=True)
    for axes in (by_time, by_samples):  # one scale: they show the same rewards
        axes.set(ylim=(min(low), max(high)))
    for axes in (by_time, by_samples, throughput):
        axes.grid()
    add_legend(figure, by_time, "Learning: reward and samples over time", _note(arms))
    return figure


@house_style
def lag_and_ess(arms: Arms) -> Figure:
    """Draw largest lag, mean lag and effective sample size of each optimizer step (Fig. 6), as ``learning`` does.

    Args:
        arms: At least one arm of at least one run, all with ESS.

    Returns:
        Three panels, a line per arm in each.
    """
    figure, [[largest, mean, ess]] = make_panels(PAGE_IN, 2.0, columns=3)
    for (name, runs), style in _styled(arms):
        step_S = [_from_eighth(run.steps.step) for run in runs]
        _draw(largest, step_S, [_from_eighth(_trailing_max(run.steps.lag_max)) for run in runs], style, name)
        _draw(mean, step_S, [_from_eighth(_trailing_mean(run.steps.lag_mean)) for run in runs], style, name)
        _draw(ess, step_S, [_from_eighth(_trailing_mean(run.metrics[ESS_RAW])) for run in runs], style, name)
    largest.set(ylabel="largest lag of 8 steps\n(optimizer steps)", ylim=(0, None))
    mean.set(ylabel="mean lag (optimizer steps)", ylim=(0, None))
    ess.set(ylabel="effective sample size\n(share of the tokens)", ylim=(None, 1.02))
    for axes in (largest, mean, ess):
        axes.set(xlabel="optimizer step", xlim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid()
    add_legend(figure, largest, "Lag and effective sample size by optimizer step", _note(arms))
    return figure


def mean_and_band(value_SN: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the mean over seeds and the half width of its 95 % confidence interval.

    Of two seeds half their difference instead, since their interval would be thirteen times that; of one, nan.

    Args:
        value_SN: A value per seed and place, shape [S, N].

    Returns:
        Two arrays of shape [N].
    """
    seeds = len(value_SN)
    mean: FloatArray = value_SN.mean(axis=0)
    if seeds == 1:
        return mean, np.full_like(mean, math.nan)
    if seeds == 2:
        apart: FloatArray = np.abs(value_SN[0] - value_SN[1]) / 2
        return mean, apart
    half: FloatArray = student_t(seeds - 1) * value_SN.std(axis=0, ddof=1) / math.sqrt(seeds)
    return mean, half


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, which bounds a 95 % interval: by halving, of the distribution itself.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: P(|T| < t) as a finite sum in the angle of t / sqrt(freedom).

    Args:
        freedom: Degrees of freedom (count, at least 1).
    """
    odd, (low, high) = freedom % 2, (0.0, math.pi / 2)
    while (angle := (low + high) / 2) not in (low, high):
        sine, cosine = math.sin(angle), math.cos(angle)
        term, total = (cosine if odd else 1.0), 0.0
        for power in range(1 + odd, freedom, 2):
            total, term = total + term, term * cosine**2 * power / (power + 1)
        within = (angle + sine * total) * 2 / math.pi if odd else sine * total
        low, high = (angle, high) if within < 0.95 else (low, angle)
    return math.sqrt(freedom) * math.tan(angle)


def _styled(arms: Arms) -> list[tuple[tuple[str, Sequence[Run]], SeriesStyle]]:
    firsts = [runs[0] for runs in arms.values()]
    return [(arm, style) for arm, (_, style) in zip(arms.items(), styled(firsts), strict=True)]


def _draw(axes: Axes, x_S: Sequence[FloatArray], y_S: Sequence[FloatArray], style: SeriesStyle, name: str) -> None:
    """Draw the mean of the seeds' curves over what all of them reach, and its band."""
    start, end = max(float(x[0]) for x in x_S), min(float(x[-1]) for x in x_S)
    grid = np.linspace(start, max(start, end), GRID_POINTS)
    curves = [np.interp(grid, x[: len(y)], y) for x, y in zip(x_S, y_S, strict=True)]
    mean, half = mean_and_band(np.stack(curves))
    axes.plot(grid, mean, color=style.color, linestyle=style.dash, label=name)
    axes.fill_between(grid, mean - half, mean + half, color=style.color, alpha=0.18, linewidth=0)


def _room(axes: Axes) -> tuple[float, float]:
    """Return limits that show every mean in full, and of the bands what has room beside it."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    low, high = float(values.min()), float(values.max())
    margin = 0.25 * (high - low) or 0.1
    return low - margin, high + margin


def _trailing_mean(value: FloatArray) -> FloatArray:
    """Return the mean of each value and the 7 before it, as many as there are."""
    total = np.concatenate([[0.0], np.cumsum(value)])
    end = np.arange(1, len(value) + 1)
    start = np.maximum(end - SMOOTHED_STEPS, 0)
    mean: FloatArray = (total[end] - total[start]) / (end - start)
    return mean


def _trailing_max(value: FloatArray) -> FloatArray:
    """Return the largest of each value and the 7 before it, as many as there are."""
    padded = np.concatenate([np.full(SMOOTHED_STEPS - 1, -np.inf), value])
    largest: FloatArray = np.lib.stride_tricks.sliding_window_view(padded, SMOOTHED_STEPS).max(axis=1)
    return largest


def _from_eighth(value: FloatArray) -> FloatArray:
    """Return what has 8 optimizer steps behind it; of a run that is hardly longer, everything."""
    return value[SMOOTHED_STEPS - 1 :] if len(value) > 2 * SMOOTHED_STEPS else value


def _note(arms: Arms) -> list[Line2D]:
    seeds = min(len(runs) for runs in arms.values())
    if seeds == 1:
        return []
    label = "range of 2 seeds" if seeds == 2 else f"95 % interval of the mean, {seeds} seeds"
    return [Line2D([], [], color=INK, alpha=0.18, linewidth=5, label=label)]
