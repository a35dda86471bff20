"""Figures of runs that have learned, real or simulated: effective sample size (ESS) and reward.

Other runs are left out, and those that are drawn keep the colours that they have beside them. Runs of more than 150
steps are drawn as a moving mean over each step in a lighter tone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.metrics import ESS_RAW, ESS_TRUNCATED, REWARD, ess_by_lag
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
from pipelinerl.errors import ConfigError
from pipelinerl.util.arrays import FloatArray

_TICK_STEPS = (1, 2, 5, 10)


@house_style
def ess(runs: Sequence[Run]) -> Figure:
    """Draw the effective sample size of each optimizer step (paper Fig. 6), and beside it its mean against token lag.

    ESS = (sum w)^2 / (N sum w^2) of the weights w = pi/mu of N tokens, as a share of them (eq. 6). At a lag that only
    few tokens have it says little: it is at least 1/N.

    Args:
        runs: Runs; those without ESS are left out.

    Returns:
        Two panels that share the ESS axis. Left: a solid line per run for the weights as they are, a dashed one for
        the truncated weights that the loss uses. Right: a marker per lag, the mean over the steps in which it occurred.

    Raises:
        ConfigError: If no run has ESS.
    """
    shown = [(run, style) for run, style in styled(runs) if run.has_ess]
    if not shown:
        raise ConfigError(f"no effective sample size in {', '.join(run.name for run in runs)}")
    reach = _reach(run for run, _ in shown)
    figure, [[left, right]] = make_panels(PAGE_IN, 1.9, columns=2, sharey=True, width_ratios=(3, 2))
    for run, style in shown:
        step = _logged(run, run.steps.step)
        _draw_steps(left, step, run.metrics[ESS_RAW], style, reach, label=run.name)
        if ESS_TRUNCATED in run.metrics:
            smooth = _moving_mean(run.metrics[ESS_TRUNCATED], reach)
            left.plot(step, smooth, color=style.color, linestyle="--", linewidth=0.9)
        right.plot(
            *ess_by_lag(run.metrics), color=style.color, marker=style.marker, markeredgecolor="white", linewidth=0.9
        )
    lowest = min(float(np.nanmin(line.get_ydata())) for line in (*left.lines, *right.lines) if len(line.get_ydata()))
    room = 0.04 * (1 - min(lowest, 0.99))  # a line at 1 shows in full
    left.set(ylim=(lowest - room, 1 + room), xlim=(0, None))
    left.set(xlabel="optimizer step", ylabel="effective sample size\n(share of the tokens)")
    right.set(xlabel="token lag (optimizer steps)")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=_TICK_STEPS))
        axes.grid(axis="y")
    notes = [
        Line2D([], [], color=INK, label="importance weights as they are"),
        Line2D([], [], color=INK, linestyle="--", linewidth=0.9, label="truncated, as the loss uses them"),
    ]
    add_legend(figure, left, "Effective sample size, by step and by lag", [*notes, *_note_on_mean(reach)])
    return figure


@house_style
def reward(runs: Sequence[Run]) -> Figure:
    """Draw the mean reward against optimizer steps, samples and time, side by side (paper Fig. 5).

    A step's reward is drawn at its end. It is that of the rollouts trained on, not of held-out problems.

    Args:
        runs: Runs; those without metrics are left out.

    Returns:
        Three panels that share the reward axis, a line per run in each.

    Raises:
        ConfigError: If no run has metrics.
    """
    shown = [(run, style) for run, style in styled(runs) if run.metrics]
    if not shown:
        raise ConfigError(f"no metrics in {', '.join(run.name for run in runs)}")
    reach = _reach(run for run, _ in shown)
    samples = {run.name: _logged(run, np.cumsum(run.steps.samples)) for run, _ in shown}
    scale, word = handy_scale(max(float(one[-1]) for one in samples.values()))
    time_scale, time_unit = handy_time(max(float(_logged(run, run.steps.time_s)[-1]) for run, _ in shown))
    figure, [panels] = make_panels(PAGE_IN, 1.8, columns=3, sharey=True)
    for run, style in shown:
        positions = (
            _logged(run, run.steps.step),
            samples[run.name] / scale,
            _logged(run, run.steps.time_s) / time_scale,
        )
        for axes, position in zip(panels, positions, strict=True):
            _draw_steps(axes, position, run.metrics[REWARD], style, reach, label=run.name, linestyle=style.dash)
    panels[0].set(ylabel="mean reward (per rollout)", ylim=(min(0.0, panels[0].get_ylim()[0]), None))
    names = ("optimizer step", f"trained ({word}samples)", f"time ({time_unit})")
    for axes, name in zip(panels, names, strict=True):
        axes.set(xlabel=name, xlim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=name == names[0], steps=_TICK_STEPS))
        axes.grid()
    add_legend(figure, panels[0], "Reward against steps, samples and time", _note_on_mean(reach))
    return figure


def _draw_steps(
    axes: Axes, position: FloatArray, value: FloatArray, style: SeriesStyle, reach: int, *, label: str, **look: Any
) -> None:
    """Draw a value per optimizer step as a line; a long run as its moving mean over each step in a lighter tone."""
    if reach:
        axes.plot(position, value, color=style.color, alpha=0.35, linewidth=0.5)
    axes.plot(position, _moving_mean(value, reach), color=style.color, label=label, **look)


def _logged(run: Run, column: FloatArray) -> FloatArray:
    """Return the part of a column of ``steps.csv`` that the metrics reach to."""
    return column[: len(run.metrics[REWARD])]


def _reach(runs: Iterable[Run]) -> int:
    """Return how many steps to each side a moving mean takes in: none where all runs are short."""
    longest = max(len(run.metrics[REWARD]) for run in runs)
    return longest // 60 if longest > 150 else 0


def _moving_mean(value: FloatArray, reach: int) -> FloatArray:
    """Return the mean of each value and up to ``reach`` at each of its sides, as many as there are; nan is left out."""
    if not reach:
        return value
    known = np.isfinite(value)
    totals, counts = (np.concatenate([[0.0], np.cumsum(one)]) for one in (np.where(known, value, 0.0), known))
    index = np.arange(len(value))
    start, end = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(value))
    with np.errstate(invalid="ignore"):  # none known: 0 / 0 is nan
        mean: FloatArray = (totals[end] - totals[start]) / (counts[end] - counts[start])
    return mean


def _note_on_mean(reach: int) -> list[Line2D]:
    """Return what a legend says of a moving mean, if there is one."""
    if not reach:
        return []
    label = f"each step (thick: mean of {2 * reach + 1} steps)"
    return [Line2D([], [], color=INK, alpha=0.35, linewidth=0.5, label=label)]
