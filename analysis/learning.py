"""Figures of runs that have learned, real or simulated: effective sample size (ESS), reward, and means over seeds.

Runs without metrics are left out; the others keep their colour of the other figures. Runs of more than 150 steps are
drawn as a moving mean, over the value of each step in a lighter tone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.chart import INK, PAGE_IN, Axis, Chart, Mark, Series, SeriesStyle, drawn, handy_time, line, styled
from analysis.read import ESS_RAW, ESS_TRUNCATED, REWARD, Run, ess_by_lag
from pipelinerl.errors import ConfigError
from pipelinerl.util.arrays import FloatArray

Arms = Mapping[str, Sequence[Run]]

GRID_POINTS = 200
"""Times at which curves of seeds are averaged (count)."""
SMOOTHED_STEPS = 8
"""Optimizer steps in a trailing mean (count)."""
BAND_ALPHA = 0.18


def ess(runs: Sequence[Run]) -> list[Chart]:
    """Return the effective sample size of each optimizer step (paper Fig. 6), and its mean against token lag.

    ESS = (sum w)^2 / (N sum w^2) of the weights w = pi/mu of N tokens, as a share of them (eq. 6). It
    says little at a lag with few tokens, since it is at least 1/N. Solid: the weights as they are; dashed: truncated
    for the loss. Runs without ESS are left out; ConfigError if none has any.
    """
    shown = [(run, style) for run, style in styled(runs) if run.has_ess]
    if not shown:
        raise ConfigError(f"no effective sample size in {', '.join(run.name for run in runs)}")
    reach = _reach(run for run, _ in shown)
    by_step, by_lag, look = list[Series](), list[Series](), dict[str, Any]()
    for run, style in shown:
        step = _logged(run, run.steps.step)
        by_step += _steps(run.name, step, run.metrics[ESS_RAW], style, reach)
        if ESS_TRUNCATED in run.metrics:
            smooth = _moving_mean(run.metrics[ESS_TRUNCATED], reach)
            look = {"color": style.color, "dash": "--", "width": 0.9, "named": False}
            by_step.append(Series(label=run.name, x=step, y=smooth, **look))
        lags, values = ess_by_lag(run.metrics)
        look = {"color": style.color, "marker": style.marker, "marked": True, "width": 0.9}
        by_lag.append(Series(label=run.name, x=lags, y=values, **look))
    known = [float(np.nanmin(one.y)) for one in (*by_step, *by_lag) if len(one.y)]
    room = 0.04 * (1 - min(*known, 0.99))  # a line at 1 shows in full
    axis = Axis(
        label="effective sample size\n",
        unit="share of the tokens",
        start=min(known) - room,
        end=1 + room,
        values="0.000",
    )
    caption = "Measured, by optimizer step; solid: weights as they are, dashed: truncated, as the loss uses them."
    return [
        Chart(title="Effective sample size", caption=caption, x=x, y=axis, series=series, switch=None)
        for x, series in (
            (Axis(label="optimizer step", ticks=8, values="0"), by_step),
            (Axis(label="token lag", unit="optimizer steps", ticks=8, start=None, values="0"), by_lag),
        )
    ]


def ess_figure(runs: Sequence[Run]) -> Figure:
    """Draw ``ess`` in two panels that share the ESS axis."""
    charts = ess(runs)
    notes = [
        Line2D([], [], color=INK, label="importance weights as they are"),
        Line2D([], [], color=INK, linestyle="--", linewidth=0.9, label="truncated, as the loss uses them"),
        *_note_on_mean(_reach(run for run in runs if run.has_ess)),
    ]
    title = "Effective sample size, by step and by lag"
    return drawn(charts, width=PAGE_IN, title=title, notes=notes, columns=2, sharey=True, width_ratios=(3, 2))


def reward(runs: Sequence[Run]) -> list[Chart]:
    """Return mean reward of the rollouts trained on against steps, samples and time (paper Fig. 5), at a step's end.

    Runs without metrics are left out; ConfigError if none has any.
    """
    shown = [(run, style) for run, style in styled(runs) if run.metrics]
    if not shown:
        raise ConfigError(f"no metrics in {', '.join(run.name for run in runs)}")
    reach = _reach(run for run, _ in shown)
    scale, unit = handy_time(max(float(_logged(run, run.steps.time_s)[-1]) for run, _ in shown))
    lowest = min(float(np.nanmin(run.metrics[REWARD])) for run, _ in shown)
    y = Axis(label="mean reward", unit="per rollout", start=None if lowest < 0 else 0.0, values="0.000")
    places: tuple[tuple[Axis, Callable[[Run], FloatArray]], ...] = (
        (Axis(label="optimizer step", ticks=5, values="0"), lambda run: run.steps.step),
        (Axis(label="trained", unit="samples", handy=True, values="0,0"), lambda run: np.cumsum(run.steps.samples)),
        (Axis(label="time", unit=unit), lambda run: run.steps.time_s / scale),
    )
    charts, caption = [], "Measured, by optimizer step."
    for x, place in places:
        series = list[Series]()
        for run, style in shown:
            series += _steps(run.name, _logged(run, place(run)), run.metrics[REWARD], style, reach)
        charts.append(Chart(title="Mean reward", caption=caption, x=x, y=y, series=series, switch=None))
    return charts


def reward_figure(runs: Sequence[Run]) -> Figure:
    """Draw ``reward`` in three panels that share the reward axis."""
    charts, title = reward(runs), "Reward against steps, samples and time"
    notes = _note_on_mean(_reach(run for run in runs if run.metrics))
    return drawn(charts, width=PAGE_IN, height=1.8, title=title, notes=notes, columns=3, sharey=True)


def _steps(name: str, position: FloatArray, value: FloatArray, style: SeriesStyle, reach: int) -> list[Series]:
    """Return a value per optimizer step as a line; of a long run, its moving mean over the values in a lighter tone."""
    smooth = line(name, position, _moving_mean(value, reach), style)
    if not reach:
        return [smooth]
    each = Series(label=name, x=position, y=value, color=style.color, alpha=0.35, width=0.5, named=False)
    return [each, smooth]


def _logged(run: Run, column: FloatArray) -> FloatArray:
    return column[: len(run.metrics[REWARD])]


def _reach(runs: Iterable[Run]) -> int:
    """Return the steps on each side in a moving mean: none if all runs are short."""
    longest = max(len(run.metrics[REWARD]) for run in runs)
    return longest // 60 if longest > 150 else 0


def _moving_mean(value: FloatArray, reach: int) -> FloatArray:
    return _window_mean(value, reach, reach) if reach else value


def _window_mean(value: FloatArray, before: int, after: int) -> FloatArray:
    """Return the mean of each value and its neighbours, as many as there are; nan is left out."""
    known = np.isfinite(value)
    totals, counts = (np.concatenate([[0.0], np.cumsum(one)]) for one in (np.where(known, value, 0.0), known))
    index = np.arange(len(value))
    start, end = np.maximum(index - before, 0), np.minimum(index + after + 1, len(value))
    with np.errstate(invalid="ignore"):  # none known: 0 / 0 is nan
        return np.asarray((totals[end] - totals[start]) / (counts[end] - counts[start]))


def _note_on_mean(reach: int) -> list[Line2D]:
    if not reach:
        return []
    label = f"each step (thick: mean of {2 * reach + 1} steps)"
    return [Line2D([], [], color=INK, alpha=0.35, linewidth=0.5, label=label)]


# Several seeds of each arm together: means and confidence bands


def learning(arms: Arms) -> Figure:
    """Draw reward against time, reward against samples, and samples against time (Fig. 5) of arms that have metrics.

    Curves are trailing means of 8 optimizer steps, from the 8th on, averaged over seeds; bands are 95 % confidence
    intervals of that mean (Student's t) of three seeds or more, the range of two. A curve ends where its first seed
    does, and the time axis at three times the fastest run. The reward is that of the rollouts trained on, so of the
    policy that sampled them: conventional RL's is up to G steps ahead of it.
    """
    ends_s = [float(run.steps.time_s[-1]) for runs in arms.values() for run in runs]
    shown_s = min(max(ends_s), 3 * min(ends_s))
    scale, unit = handy_time(shown_s)
    by_time, by_samples, throughput = list[Series](), list[Series](), list[Series]()
    for (name, runs), style in _styled_arms(arms):
        time_S = [_from_eighth(run.steps.time_s / scale) for run in runs]
        samples_S = [_from_eighth(np.cumsum(run.steps.samples)) for run in runs]
        reward_S = [_from_eighth(_trailing_mean(run.metrics[REWARD])) for run in runs]
        by_time += _curve(name, time_S, reward_S, style)
        by_samples += _curve(name, samples_S, reward_S, style)
        throughput += _curve(name, time_S, samples_S, style)
    low, high = zip(_room(by_time), _room(by_samples), strict=True)  # one scale: they show the same rewards
    time = Axis(label="time", unit=unit, end=shown_s / scale)
    samples = Axis(label="trained", unit="samples", handy=True)
    rewards = Axis(label="mean reward", unit="per rollout", start=min(low), end=max(high))
    charts = [
        Chart(title="Learning: reward and samples over time", x=x, y=y, series=series)
        for x, y, series in ((time, rewards, by_time), (samples, rewards, by_samples), (time, samples, throughput))
    ]
    return drawn(charts, width=PAGE_IN, height=2.0, notes=_note(arms))


def lag_and_ess(arms: Arms) -> Figure:
    """Draw largest lag, mean lag and ESS of each optimizer step (Fig. 6) of arms with ESS, as ``learning`` does."""
    largest, mean, ess = list[Series](), list[Series](), list[Series]()
    for (name, runs), style in _styled_arms(arms):
        step_S = [_from_eighth(run.steps.step) for run in runs]
        largest += _curve(name, step_S, [_from_eighth(_trailing_max(run.steps.lag_max)) for run in runs], style)
        mean += _curve(name, step_S, [_from_eighth(_trailing_mean(run.steps.lag_mean)) for run in runs], style)
        ess += _curve(name, step_S, [_from_eighth(_trailing_mean(run.metrics[ESS_RAW])) for run in runs], style)
    step = Axis(label="optimizer step", ticks=5)
    charts = [
        Chart(title="Lag and effective sample size by optimizer step", x=step, y=y, series=series)
        for y, series in (
            (Axis(label="largest lag of 8 steps\n", unit="optimizer steps"), largest),
            (Axis(label="mean lag", unit="optimizer steps"), mean),
            (Axis(label="effective sample size\n", unit="share of the tokens", start=None, end=1.02), ess),
        )
    ]
    return drawn(charts, width=PAGE_IN, height=2.0, notes=_note(arms))


def mean_and_band(value_SN: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean over seeds and half width of its 95 % confidence interval, shapes [N], of values of shape [S, N].

    Two seeds have half their difference instead, since their interval would be thirteen times wider; one has nan.
    """
    seeds = len(value_SN)
    mean: FloatArray = value_SN.mean(axis=0)
    if seeds == 1:
        return mean, np.full_like(mean, math.nan)
    if seeds == 2:
        return mean, np.abs(value_SN[0] - value_SN[1]) / 2
    return mean, student_t(seeds - 1) * value_SN.std(axis=0, ddof=1) / math.sqrt(seeds)


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with ``freedom`` >= 1, which bounds a 95 % interval: by bisection.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: P(|T| < t) as a finite sum in the angle of t / sqrt(freedom).
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


def _styled_arms(arms: Arms) -> list[tuple[tuple[str, Sequence[Run]], SeriesStyle]]:
    firsts = [runs[0] for runs in arms.values()]
    return [(arm, style) for arm, (_, style) in zip(arms.items(), styled(firsts), strict=True)]


def _curve(name: str, x_S: Sequence[FloatArray], y_S: Sequence[FloatArray], style: SeriesStyle) -> list[Series]:
    """Return the mean of the seeds' curves over the range that all of them reach, and of several seeds its band."""
    start, end = max(float(x[0]) for x in x_S), min(float(x[-1]) for x in x_S)
    grid = np.linspace(start, max(start, end), GRID_POINTS)
    curves = [np.interp(grid, x[: len(y)], y) for x, y in zip(x_S, y_S, strict=True)]
    mean, half = mean_and_band(np.stack(curves))
    curve = line(name, grid, mean, style)
    if len(curves) == 1:
        return [curve]
    band: dict[str, Any] = {"mark": Mark.AREA, "alpha": BAND_ALPHA, "named": False}
    return [curve, Series(label=name, x=grid, y=mean - half, other=mean + half, color=style.color, **band)]


def _room(series: Sequence[Series]) -> tuple[float, float]:
    """Return limits that show every mean in full, and bands as far as they fit."""
    values = np.concatenate([one.y for one in series if one.mark is Mark.LINE])
    low, high = float(values.min()), float(values.max())
    margin = 0.25 * (high - low) or 0.1
    return low - margin, high + margin


def _trailing_mean(value: FloatArray) -> FloatArray:
    """Return the mean of each value and the 7 before it, as many as there are."""
    return _window_mean(value, SMOOTHED_STEPS - 1, 0)


def _trailing_max(value: FloatArray) -> FloatArray:
    padded = np.concatenate([np.full(SMOOTHED_STEPS - 1, -np.inf), value])
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, SMOOTHED_STEPS).max(axis=1))


def _from_eighth(value: FloatArray) -> FloatArray:
    """Drop the first 7 values, whose window is shorter; a run of up to 16 steps keeps all."""
    return value[SMOOTHED_STEPS - 1 :] if len(value) > 2 * SMOOTHED_STEPS else value


def _note(arms: Arms) -> list[Line2D]:
    seeds = min(len(runs) for runs in arms.values())
    if seeds == 1:
        return []
    label = "range of 2 seeds" if seeds == 2 else f"95 % interval of the mean, {seeds} seeds"
    return [Line2D([], [], color=INK, alpha=BAND_ALPHA, linewidth=5, label=label)]
