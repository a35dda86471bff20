"""One function per figure: runs in, a matplotlib ``Figure`` out. Nothing is read or written.

Figures are plain ``Figure`` objects, not pyplot's, and the settings of matplotlib are put back after drawing, so
there is no global state. Widths are those of one column (86 mm) or of a page of a paper, where no text is smaller
than 7 pt. Lag is in optimizer steps, and weighted by token where it is a mean. "Fig." in a docstring is the figure
of the paper, arXiv 2509.19128.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.read import Run
from analysis.style import (
    ACTIVITY_COLORS,
    COLUMN_IN,
    INK,
    LIMIT,
    MUTED,
    PAGE_IN,
    SeriesStyle,
    add_legend,
    draw_limit,
    handy_scale,
    handy_time,
    house_style,
    make_panels,
    styled,
)
from pipelinerl.errors import ConfigError
from pipelinerl.records.profile_report import EngineTimeline, Timeline
from pipelinerl.records.reports import TrainerSeconds
from pipelinerl.util.arrays import FloatArray


@house_style
def lag_by_position(runs: Sequence[Run]) -> Figure:
    """Draw the mean lag of a token against its position in the answer (Fig. 3a): flat, or fresh at the end.

    Args:
        runs: At least one run.

    Returns:
        One panel, a line per run with its values at the middle of each bin.
    """
    figure, [[axes]] = make_panels(COLUMN_IN, 1.9)
    for run, style in styled(runs):
        bins = run.figure_data.lag_by_position
        middle_tokens = (np.arange(len(bins.lag_mean)) + 0.5) * bins.width_tokens
        axes.plot(middle_tokens, _array(bins.lag_mean), color=style.color, linestyle=style.dash, label=run.name)
    draw_limit(axes, (run.report.max_lag for run in runs), across=True)
    axes.set(xlabel="position in the answer (tokens)", ylabel="mean lag (optimizer steps)")
    axes.set(xlim=(0, None), ylim=(0, max(1.0, axes.get_ylim()[1])))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y")
    add_legend(figure, axes, "Lag of a token by its place in the answer")
    return figure


@house_style
def lag_by_step(runs: Sequence[Run]) -> Figure:
    """Draw mean and largest lag of each optimizer step (Fig. 6a), a row per run.

    Runs of more than 150 steps get two panels: the whole run, smoothed so that a sawtooth becomes its envelope
    (rolling mean, band from the least to the largest step mean, rolling maximum), and the last 100 steps as they are.
    A dotted line is the run's ``max_lag``.

    Args:
        runs: At least one run.

    Returns:
        A row of one or two panels per run, all on one lag axis, and on one step axis if the runs are equally long.
    """
    num_steps = max(len(run.steps.step) for run in runs)
    columns = 2 if num_steps > 150 else 1
    top = 1.05 * max(1.0, *(run.steps.lag_max.max() for run in runs))
    width = PAGE_IN if columns == 2 else COLUMN_IN
    same_steps = len({len(run.steps.step) for run in runs}) == 1
    height, sharex = 0.7 + 0.95 * len(runs), "col" if same_steps else False
    top = max([top, *(1.05 * run.report.max_lag for run in runs if run.report.max_lag is not None)])
    figure, panels = make_panels(width, height, rows=len(runs), columns=columns, sharex=sharex, sharey=True)
    for row, (run, style) in zip(panels, styled(runs), strict=True):
        row[0].set_title(run.name)
        if columns == 2:
            _draw_envelopes(row[0], run, style)
        _draw_each_step(row[-1], run, style, last=100 if columns == 2 else num_steps)
        for axes in row:
            draw_limit(axes, [run.report.max_lag], across=True)
            axes.set(ylim=(0, top))
            axes.grid(axis="y")
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    figure.supylabel("lag (optimizer steps)")
    panels[-1][0].set(xlabel="optimizer step")
    if columns == 2:
        panels[-1][1].set(xlabel="optimizer step, the last 100 in full")
    handles: list[Artist] = [
        Line2D([], [], color=INK, linewidth=0.6, label="largest lag of a token"),
        Line2D([], [], color=INK, label="mean lag"),
    ]
    if columns == 2:
        handles.append(Patch(color=MUTED, alpha=0.4, linewidth=0, label="range of the step means (left)"))
    if any(run.report.max_lag is not None for run in runs):
        handles.append(Line2D([], [], label="max_lag", **LIMIT))
    columns = len(handles) if columns == 2 else 2
    title = "Lag of each optimizer step"
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, title=title, alignment="left")
    return figure


@house_style
def lag_histogram(runs: Sequence[Run]) -> Figure:
    """Draw how the lag of the trained tokens is distributed, a row per run, all on the same scales.

    Args:
        runs: At least one run.

    Returns:
        A panel per run; its title has the mean lag, and the means of its two parts, which add up to it.
    """
    figure, panels = make_panels(COLUMN_IN, 0.5 + 0.95 * len(runs), rows=len(runs), sharex=True, sharey=True)
    for axes, (run, style) in zip(panels[:, 0], styled(runs), strict=True):
        histogram = run.figure_data.lag_histogram
        tokens = _array(histogram.total)
        mean, flying, queued = (_mean_lag(part) for part in (histogram.total, histogram.in_flight, histogram.in_queue))
        edges = np.arange(len(tokens) + 1) - 0.5
        axes.stairs(100 * tokens / tokens.sum(), edges, fill=True, color=style.color, linewidth=0)
        axes.set_title(f"{run.name}\nmean {mean:.2f} = {flying:.2f} in flight + {queued:.2f} in queue")
        draw_limit(axes, [run.report.max_lag], across=False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.grid(axis="y")
    panels[0][0].set(xlim=(-0.7, None), ylim=(0, None))
    figure.supxlabel("lag (optimizer steps)")
    figure.supylabel("trained tokens (%)")
    handles: list[Artist] = [Patch(color=MUTED, linewidth=0, label="trained tokens")]
    if any(run.report.max_lag is not None for run in runs):
        handles.append(Line2D([], [], label="max_lag", **LIMIT))
    title = "How old the trained tokens are"
    figure.legend(handles=handles, loc="outside upper left", ncols=2, title=title, alignment="left")
    return figure


@house_style
def generation_phase(runs: Sequence[Run]) -> Figure:
    """Draw sequences in progress and throughput over a generation phase (Fig. 2b, 2c): a drain, or none.

    Args:
        runs: Runs; those without a generation window are left out.

    Returns:
        Two panels above each other that share the time axis, a line per run with its values at the middle of each bin.

    Raises:
        ConfigError: If no run has a generation window.
    """
    shown = [(run, style) for run, style in styled(runs) if len(run.figure_data.generation_window.in_progress)]
    if not shown:
        raise ConfigError(f"no generation window in {', '.join(run.name for run in runs)}")
    windows = [run.figure_data.generation_window for run, _ in shown]
    time_scale, time_unit = handy_time(max(window.width_s * len(window.in_progress) for window in windows))
    rate_scale, word = handy_scale(max(max(window.tokens_per_s) for window in windows))
    figure, panels = make_panels(COLUMN_IN, 2.6, rows=2, sharex=True)
    upper, lower = panels.flat
    for (run, style), window in zip(shown, windows, strict=True):
        middle = (np.arange(len(window.in_progress)) + 0.5) * window.width_s / time_scale
        look = {"color": style.color, "linestyle": style.dash}
        upper.plot(middle, _array(window.in_progress), label=run.name, **look)
        lower.plot(middle, _array(window.tokens_per_s) / rate_scale, **look)
    upper.set(ylabel="in progress\n(sequences)", ylim=(0, None))
    lower.set(ylabel=f"generation\n({word}tokens/s)", ylim=(0, None))
    lower.set(xlabel=f"time from the start of generation ({time_unit})", xlim=(0, None))
    figure.align_ylabels()
    for axes in (upper, lower):
        axes.grid(axis="y")
    add_legend(figure, upper, "Generation, all engines together")
    return figure


@house_style
def samples_against_time(runs: Sequence[Run]) -> Figure:
    """Draw samples trained against time (Fig. 5c).

    Args:
        runs: At least one run.

    Returns:
        One panel, a line per run from the origin through the end of every optimizer step.
    """
    figure, [[axes]] = make_panels(COLUMN_IN, 1.9)
    time_scale, time_unit = handy_time(max(run.steps.time_s[-1] for run in runs))
    scale, word = handy_scale(max(run.steps.samples.sum() for run in runs))
    for run, style in styled(runs):
        time = np.concatenate([[0.0], run.steps.time_s]) / time_scale
        samples = np.concatenate([[0.0], np.cumsum(run.steps.samples)]) / scale
        axes.plot(time, samples, color=style.color, label=run.name)
    axes.set(xlabel=f"time ({time_unit})", ylabel=f"trained ({word}samples)", xlim=(0, None), ylim=(0, None))
    axes.grid()
    add_legend(figure, axes, "Samples trained over time")
    return figure


@house_style
def timeline(run: Run) -> Figure:
    """Draw an engine, the mean of the others, and the trainer over the first part of a run, event by event.

    Args:
        run: A run with a timeline.

    Returns:
        One panel: a row for the first engine, one for the mean of those others that are recorded (filled: sequences in
        progress; dark: pause, as high as the share of them that pauses), a row for the trainer (blocks; white:
        waiting), and a vertical line where a weight update was published.

    Raises:
        ConfigError: If the timeline holds no engine.
    """
    line = run.figure_data.timeline
    if not line.engines:
        raise ConfigError(f"no engine in the timeline of {run.name}")
    scale, unit = handy_time(line.until_s)
    full = max([1, *(count for engine in line.engines for count in engine.in_progress)])
    first, *others = line.engines
    rows = [(f"engine {first.engine}", [first])]
    if others:
        rows.append((f"engine {others[0].engine}" if len(others) == 1 else f"mean of {len(others)} others", others))
    figure, [[axes]] = make_panels(PAGE_IN, 1.1 + 0.4 * (len(rows) + 1))
    for bottom, (_, engines) in zip(range(len(rows), 0, -1), rows, strict=True):
        _draw_engines(axes, engines, bottom=bottom, full=full, until_s=line.until_s, scale=scale)
    for what in ("training", "publishing"):
        bars = [(start / scale, (end - start) / scale) for start, end, work in line.trainer if work == what]
        axes.broken_barh(bars, (0, 0.8), facecolor=ACTIVITY_COLORS[what], edgecolor="white", linewidth=0.2)
    _draw_updates(axes, line, scale, top=len(rows) + 0.9)
    axes.set(xlim=(0, line.until_s / scale), ylim=(-0.1, len(rows) + 0.9), xlabel=f"time ({unit})")
    axes.set_yticks(np.arange(len(rows), -1, -1) + 0.4, [*(name for name, _ in rows), "trainer"])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    handles: list[Artist] = [
        Patch(color=ACTIVITY_COLORS["generating"], linewidth=0, label=f"sequences in progress (full height: {full:g})"),
        Patch(color=ACTIVITY_COLORS["training"], linewidth=0, label="training"),
        Patch(color=ACTIVITY_COLORS["publishing"], linewidth=0, label="publishing"),
    ]
    if line.updates:
        handles.append(Line2D([], [], color=MUTED, linewidth=0.6, label="weights published, with version"))
    if any(engine.paused for engine in line.engines):
        handles.append(Patch(color=INK, linewidth=0, label="engine paused"))
    title = f"Engines and trainer over time: {run.name}"
    figure.legend(handles=handles, loc="outside upper left", ncols=5, title=title, alignment="left")
    return figure


@house_style
def time_split(runs: Sequence[Run]) -> Figure:
    """Draw where the trainer's wall time goes: a bar per run, its length the seconds per 1000 trained samples.

    Args:
        runs: At least one run with a trained sample.

    Returns:
        One panel; the share of the wall time in each part that is wide enough, and beside the bars the utilisation
        (busy fraction) of generation and training.
    """
    figure, [[axes]] = make_panels(PAGE_IN, 0.9 + 0.3 * len(runs))
    kinds = tuple(TrainerSeconds.model_fields)
    seconds = np.array([[getattr(run.report.seconds, what) for run in runs] for what in kinds])
    wall = seconds.sum(axis=0)
    lengths = seconds * 1000 / np.array([run.report.samples_trained for run in runs])
    longest = lengths.sum(axis=0).max()
    rows = np.arange(len(runs))
    starts = np.cumsum(lengths, axis=0) - lengths
    for what, length, start, spent in zip(kinds, lengths, starts, seconds, strict=True):
        bars = axes.barh(rows, length, 0.7, start, color=ACTIVITY_COLORS[what], label=what.replace("_", " "))
        texts = [
            f"{part:.0%}" if width > 0.05 * longest else "" for part, width in zip(spent / wall, length, strict=True)
        ]
        axes.bar_label(bars, texts, label_type="center", fontsize=7)
    for offset_pt, kind in ((35, "generation"), (85, "training")):
        column: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "annotation_clip": False}
        for row, run in enumerate(runs):
            share = getattr(run.report.utilisation, kind)
            axes.annotate(f"{share:.0%}", (longest, row), (offset_pt, 0), va="center", **column)
        axes.annotate(f"{kind}\nutilisation", (longest, -0.5), (offset_pt, 2), va="bottom", color=MUTED, **column)
    axes.set_yticks(rows, [run.name for run in runs])
    axes.set(xlabel="trainer's wall time (s per 1000 trained samples)", xlim=(0, longest), ylim=(len(runs) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    legend: dict[str, Any] = {"ncols": len(kinds), "title": "Where the time of the trainer goes", "alignment": "left"}
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", **legend)
    return figure


def _array(values: Sequence[float | None]) -> FloatArray:
    """Return values as an array, nan for None."""
    return np.array(values, dtype=np.float64)


def _draw_envelopes(axes: Axes, run: Run, style: SeriesStyle) -> None:
    """Draw a long run: windows hold whole sawteeth, so that they show as a band and not as a tangle."""
    step, mean, largest = (run.steps[key] for key in ("step", "lag_mean", "lag_max"))
    period = int(largest.max()) + 1
    size = max(min(period * math.ceil(len(step) / 30 / period), len(step) // 4), 1)
    steps, means, tops = (np.lib.stride_tricks.sliding_window_view(one, size) for one in (step, mean, largest))
    middle = steps.mean(axis=1)
    axes.fill_between(middle, means.min(axis=1), means.max(axis=1), color=style.color, alpha=0.25, linewidth=0)
    axes.plot(middle, means.mean(axis=1), color=style.color)
    axes.plot(middle, tops.max(axis=1), color=style.color, linewidth=0.6)


def _draw_each_step(axes: Axes, run: Run, style: SeriesStyle, last: int) -> None:
    step = run.steps.step[-last:]
    axes.plot(step, run.steps.lag_max[-last:], color=style.color, linewidth=0.6)
    axes.plot(step, run.steps.lag_mean[-last:], color=style.color)


def _draw_engines(
    axes: Axes, engines: Sequence[EngineTimeline], *, bottom: float, full: float, until_s: float, scale: float
) -> None:
    """Draw the mean of the sequences in progress, 0.8 high where they are ``full``, and the share that pauses."""
    starts = [0.0, *(time for engine in engines for time in engine.time_s)]
    times = np.unique([*starts, *(end for engine in engines for pause in engine.paused for end in pause)])
    filled, paused = np.zeros(len(times)), np.zeros(len(times))
    for engine in engines:
        counts = _array([0, *engine.in_progress])
        filled += counts[np.searchsorted(engine.time_s, times, side="right")]
        for start_s, end_s in engine.paused:
            paused += (start_s <= times) & (times < end_s)
    edges = np.append(times, until_s) / scale
    for values, color in ((filled / full, ACTIVITY_COLORS["generating"]), (paused, INK)):
        heights = 0.8 * np.append(values, values[-1]) / len(engines)
        if heights.any():
            axes.fill_between(edges, bottom, bottom + heights, step="post", color=color, linewidth=0)


def _mean_lag(tokens: Sequence[int]) -> float:
    """Return the mean of a histogram of lags (optimizer steps)."""
    return float(np.average(np.arange(len(tokens)), weights=tokens))


def _draw_updates(axes: Axes, line: Timeline, scale: float, top: float) -> None:
    """Draw a line per weight update, and the version above about ten of them."""
    every = math.ceil(len(line.updates) / 10) if line.updates else 1
    for index, update in enumerate(line.updates):
        axes.vlines(update.published_s / scale, 1.0, top, color=MUTED, linewidth=0.6)
        if index % every == 0:
            axes.text(
                update.published_s / scale, top, f"{update.version}", ha="center", va="bottom", color=MUTED, fontsize=7
            )
