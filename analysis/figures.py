"""Figures of runs and reports, each a function: a ``Chart`` for files and pages, a ``Figure`` where marks are special.

Figures are plain ``Figure`` objects, not pyplot's, and matplotlib's settings are put back: there is no global state.
Widths are those of a paper's column (86 mm) or page; no text is smaller than 7 pt. Lag is in optimizer steps, means of
it are by token. "Fig." is a figure of the paper, arXiv 2509.19128. Figures of runs that have learned, real or
simulated, leave out runs without metrics; the others keep their colour. Runs of more than 150 steps are drawn as a
moving mean, over the value of each step in a lighter tone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.chart import (
    ACTIVITY_COLORS,
    BLUE,
    COLUMN_IN,
    GREEN,
    INK,
    LIMIT,
    MUTED,
    PAGE_IN,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Axis,
    Chart,
    Mark,
    Series,
    SeriesStyle,
    bars,
    drawn,
    handy_time,
    house_style,
    limits,
    line,
    make_panels,
    rule,
    series_styles,
    styled,
)
from analysis.read import ESS_RAW, ESS_TRUNCATED, REWARD, Run, ess_by_lag
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import UtilisationDecode
from pipelinerl.hardware.utilisation import fitted_utilisation, read_utilisation
from pipelinerl.records.comparison_report import ComparisonReport, EnvironmentsReport
from pipelinerl.records.plan_report import PlannedCandidate, PlanReport
from pipelinerl.records.profile_report import EngineTimeline, Timeline
from pipelinerl.records.reports import TrainerSeconds
from pipelinerl.records.validation_report import ValidationReport
from pipelinerl.theory import paper
from pipelinerl.theory.lengths import lengths_from, uniform_lengths
from pipelinerl.util.arrays import FloatArray, grouped

MOST_WINDOWS = 10_000
"""Windows of a run that smooth its lag (count)."""


def lag_by_position(runs: Sequence[Run]) -> Chart:
    """Return the mean lag of a token against its position in the answer (Fig. 3a): flat, or fresh at the end."""
    lines = []
    for run, style in styled(runs):
        bins = run.figure_data.lag_by_position
        middle = (np.arange(len(bins.lag_mean)) + 0.5) * bins.width_tokens
        lines.append(line(run.name, middle, _array(bins.lag_mean), style))
    top = max((float(np.nanmax(one.y)) for one in lines if np.isfinite(one.y).any()), default=0.0)
    return Chart(
        title="Lag of a token by its place in the answer",
        caption="Where weights arrive while answers are generated, the end of an answer is fresher than its beginning.",
        x=Axis(label="position in the answer", unit="tokens", values="0,0"),
        y=Axis(label="mean lag", unit="optimizer steps", ticks=6, end=1.0 if top == 0.0 else None),
        series=[*lines, *limits(runs, mark=Mark.RULE_Y)],
    )


def mean_lag_by_step(runs: Sequence[Run]) -> Chart:
    """Return the mean lag of each optimizer step as a single panel; files have ``lag_by_step``, with the envelopes."""
    return Chart(
        title="Lag by optimizer step",
        caption="Mean lag of the tokens of each optimizer step; hover for the largest.",
        x=Axis(label="optimizer step", values="0"),
        y=Axis(label="mean lag", unit="optimizer steps"),
        series=[
            line(run.name, run.steps.step, run.steps.lag_mean, style, hover={"largest lag": run.steps.lag_max})
            for run, style in styled(runs)
        ],
    )


@house_style
def lag_by_step(runs: Sequence[Run]) -> Figure:
    """Draw mean and largest lag of each optimizer step (Fig. 6a), a row per run; the dotted line is its ``max_lag``.

    Runs of more than 150 steps get two panels: the whole run, smoothed so that a sawtooth becomes its envelope
    (rolling mean, band from the least to the largest step mean, rolling maximum), and the last 100 steps as they are.
    """
    num_steps = max(len(run.steps.step) for run in runs)
    columns = 2 if num_steps > 150 else 1
    top = 1.05 * max(1.0, *(max(run.steps.lag_max.max(), run.report.max_lag or 0) for run in runs))
    width = PAGE_IN if columns == 2 else COLUMN_IN
    same_steps = len({len(run.steps.step) for run in runs}) == 1
    height, sharex = 0.7 + max(0.95 * len(runs), 1.3), "col" if same_steps else False
    figure, panels = make_panels(width, height, rows=len(runs), columns=columns, sharex=sharex, sharey=True)
    for row, (run, style) in zip(panels, styled(runs), strict=True):
        row[0].set_title(run.name)
        if columns == 2:
            _draw_envelopes(row[0], run, style)
        _draw_each_step(row[-1], run, style, last=100 if columns == 2 else num_steps)
        for axes in row:
            if run.report.max_lag is not None:
                axes.axhline(run.report.max_lag, **LIMIT)
            axes.set(ylim=(0, top))
            axes.grid(axis="y")
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    figure.supylabel("lag (optimizer steps)")
    panels[-1][0].set(xlabel="optimizer step" if columns == 1 else "optimizer step (smoothed)")
    if columns == 2:
        panels[-1][1].set(xlabel="optimizer step (the last 100, not smoothed)")
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
    """Draw trained tokens against lag, a row per run on the same scales; titles have the mean lag and its two parts."""
    figure, panels = make_panels(COLUMN_IN, 0.5 + max(0.95 * len(runs), 1.3), rows=len(runs), sharex=True, sharey=True)
    for axes, (run, style) in zip(panels[:, 0], styled(runs), strict=True):
        histogram = run.figure_data.lag_histogram
        tokens = _array(histogram.total)
        mean, flying, queued = (_mean_lag(part) for part in (histogram.total, histogram.in_flight, histogram.in_queue))
        edges = np.arange(len(tokens) + 1) - 0.5
        axes.stairs(100 * tokens / tokens.sum(), edges, fill=True, color=style.color, linewidth=0)
        axes.set_title(f"{run.name}\nmean {mean:.2f} = {flying:.2f} in flight + {queued:.2f} in queue")
        if run.report.max_lag is not None:
            axes.axvline(run.report.max_lag, **LIMIT)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.grid(axis="y")
    panels[0][0].set(xlim=(-0.7, None), ylim=(0, None))
    figure.supxlabel("lag (optimizer steps)")
    figure.supylabel("trained tokens (%)")
    handles: list[Artist] = [Patch(color=MUTED, linewidth=0, label="trained tokens")]
    if any(run.report.max_lag is not None for run in runs):
        handles.append(Line2D([], [], label="max_lag", **LIMIT))
    title = "Trained tokens by lag"
    figure.legend(handles=handles, loc="outside upper left", ncols=2, title=title, alignment="left")
    return figure


def generation_phase(runs: Sequence[Run]) -> list[Chart]:
    """Return sequences in progress and throughput in a generation phase (Fig. 2b, 2c); ConfigError if no run has it."""
    shown = [(run, style) for run, style in styled(runs) if len(run.figure_data.generation_window.in_progress)]
    if not shown:
        raise ConfigError(f"no generation window in {', '.join(run.name for run in runs)}")
    windows = [run.figure_data.generation_window for run, _ in shown]
    scale, unit = handy_time(max(window.width_s * len(window.in_progress) for window in windows))
    in_progress, generation = list[Series](), list[Series]()
    for (run, style), window in zip(shown, windows, strict=True):
        middle = (np.arange(len(window.in_progress)) + 0.5) * window.width_s / scale
        in_progress.append(line(run.name, middle, _array(window.in_progress), style))
        generation.append(line(run.name, middle, _array(window.tokens_per_s), style))
    time = Axis(label="time from the start of generation", unit=unit)
    return [
        Chart(title="Generation, all engines together", x=time, y=axis, series=series)
        for axis, series in (
            (Axis(label="in progress\n", unit="sequences", values="0"), in_progress),
            (Axis(label="generation\n", unit="tokens/s", handy=True, values="0,0"), generation),
        )
    ]


def samples_against_time(runs: Sequence[Run]) -> Chart:
    """Return samples trained against time (Fig. 5c), from the origin through the end of every optimizer step."""
    scale, unit = handy_time(max(run.steps.time_s[-1] for run in runs))
    return Chart(
        title="Samples trained over time",
        caption="Steeper is faster.",
        x=Axis(label="time", unit=unit),
        y=Axis(label="trained", unit="samples", handy=True, values="0,0"),
        series=[
            line(run.name, np.append(0.0, run.steps.time_s) / scale, np.append(0, np.cumsum(run.steps.samples)), style)
            for run, style in styled(runs)
        ],
    )


def time_split(runs: Sequence[Run]) -> Chart:
    """Return the trainer's wall time by activity: a bar per run, its length the seconds per 1000 trained samples."""
    names = {kind: kind.replace("_", " ") for kind in TrainerSeconds.model_fields}
    seconds = {kind: np.array([getattr(run.report.seconds, kind) for run in runs]) for kind in names}
    samples = np.array([run.report.samples_trained for run in runs])
    return bars(
        [run.name for run in runs],
        {name: seconds[kind] * 1000 / samples for kind, name in names.items()},
        {name: ACTIVITY_COLORS[kind] for kind, name in names.items()},
        title="Where the time of the trainer goes",
        caption="Shorter is faster.",
        x=Axis(label="trainer's wall time", unit="s per 1000 trained samples", values="0.0"),
    )


def time_split_figure(runs: Sequence[Run]) -> Figure:
    """Draw ``time_split`` with the shares of wide parts, and the utilisation (busy fraction) beside the bars."""
    chart = time_split(runs)
    figure = drawn(chart, width=PAGE_IN, height=0.6 + 0.3 * len(runs))
    (axes,) = figure.axes
    longest = float(np.max(chart.series[-1].x))
    axes.set(xlim=(0, longest))
    axes.grid(visible=False)
    for container, one in zip(axes.containers, chart.series, strict=True):
        assert isinstance(container, BarContainer)
        widths = one.x - one.other
        shares = widths / chart.series[-1].x
        texts = [f"{share:.0%}" if width > 0.05 * longest else "" for share, width in zip(shares, widths, strict=True)]
        axes.bar_label(container, texts, label_type="center", fontsize=7)
    column: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "annotation_clip": False, "fontsize": 7.5}
    for offset_pt, kind in ((35, "generation"), (85, "training")):
        for row, run in enumerate(runs):
            share = getattr(run.report.utilisation, kind)
            axes.annotate(f"{share:.0%}", (longest, row), (offset_pt, 0), va="center", **column)
        axes.annotate(f"{kind}\nutilisation", (longest, -0.5), (offset_pt, 2), va="bottom", color=MUTED, **column)
    return figure


@house_style
def timeline(run: Run) -> Figure:
    """Draw an engine, the mean of the others, and the trainer over the first part of a run, event by event.

    Filled areas are sequences in progress, dark ones the share of engines that pauses; blocks are the trainer's work,
    lines publications of weights. ConfigError if the timeline holds no engine.
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


PARTS = {
    "environment": ("environment acts", GREEN),
    "waiting": ("waits for a slot", PALE),
    "engine": ("on an engine", SKY),
    "queue": ("in an engine's queue", MUTED),
    "prefill": ("prefill", VERMILLION),
    "decode": ("decode", SKY),
    "scoring": ("is scored", PURPLE),
}
"""Name and colour of each part of a rollout's time, in the order of a turn."""
PLACES = ("environment", "waiting", "engine", "scoring")


def rollout_time(runs: Sequence[Run]) -> Chart:
    """Return the time of a rollout with turns by part: a bar per run, its length the seconds of a finished rollout."""
    parts = [run.report.environments.seconds.parts for run in runs if run.report.environments]
    known = [key for key in PARTS if any(key in of_run for of_run in parts)]
    return bars(
        [run.name for run in runs],
        {PARTS[key][0]: np.array([of_run.get(key, 0.0) for of_run in parts]) for key in known},
        {PARTS[key][0]: PARTS[key][1] for key in known},
        title="Where the time of a rollout goes",
        x=Axis(label="time of a rollout", unit="s"),
    )


def fleet_over_time(runs: Sequence[Run]) -> list[Chart]:
    """Return engines that are not leaving, and trained tokens/s of each step, of runs where engines come and go.

    None of both without such runs.
    """
    shown = [(run, style, run.figure_data.fleet) for run, style in styled(runs) if run.figure_data.fleet]
    scale, unit = handy_time(max((run.steps.time_s[-1] for run, *_ in shown), default=0.0))
    engines, speeds = list[Series](), list[Series]()
    for run, style, fleet in shown:
        at = _array(fleet.time_s) / scale
        engines.append(Series(label=run.name, mark=Mark.STEPS, x=at, y=fleet.engines, color=style.color))
        seconds = np.diff(run.steps.time_s, prepend=0.0)
        speed = np.divide(run.steps.tokens, seconds, out=np.full(len(seconds), math.nan), where=seconds > 0)
        speeds.append(line(run.name, run.steps.time_s / scale, speed, style))
    if not shown:
        return []
    time = Axis(label="time", unit=unit)
    return [
        Chart(
            title="Engines that have joined and are not leaving",
            x=time,
            y=Axis(label="not leaving\n", unit="engines", values="0", ticks=4),
            series=engines,
        ),
        Chart(
            title="Trained tokens per second of each optimizer step",
            x=time,
            y=Axis(label="trained\n", unit="tokens/s", handy=True, values="0,0"),
            series=speeds,
        ),
    ]


STATES = {
    "there": ("engines there", SKY),
    "starting": ("starting", YELLOW),
    "training": ("training", GREEN),
    "failed": ("failed", VERMILLION),
    "reclaimed": ("reclaimed", PALE),
}
"""Name and colour of each state of a place of a group."""
TRAINER_PARTS = {"training": GREEN, "checkpoints": MUTED, "restarts": INK, "work redone": PURPLE}


def fleet_seconds(runs: Sequence[Run]) -> Chart | None:
    """Return where the time of groups of engines, and of a trainer that fails, goes: a bar each. None without any."""
    rows = list[tuple[str, dict[str, float]]]()
    for run in runs:
        if (capacity := run.report.capacity) is None:
            continue
        of_run = f"{run.name}: " if len(runs) > 1 else ""
        for group in capacity.groups:
            states = {name: getattr(group, f"{key}_mean") / (group.engines or 1) for key, (name, _) in STATES.items()}
            rows.append((f"{of_run}{group.name}, {group.engines:,} engines", states))
        if (trainer := capacity.trainer) is not None:
            extra = (trainer.checkpoint_s, trainer.restart_s, trainer.redone_s)
            seconds = (max(0.0, run.report.seconds.training - sum(extra)), *extra)
            run_s = run.report.duration_s or 1.0
            shares = {name: one / run_s for name, one in zip(TRAINER_PARTS, seconds, strict=True)}
            rows.append((f"{of_run}trainer", shares))
    if not rows:
        return None
    colors = dict(STATES.values()) | TRAINER_PARTS
    known = [name for name in colors if any(name in shares for _, shares in rows)]
    return bars(
        [name for name, _ in rows],
        {name: np.array([100 * shares.get(name, 0.0) for _, shares in rows]) for name in known},
        colors,
        title="Where the time of engines and trainer goes",
        caption="The rest of the trainer's time it waits or publishes.",
        x=Axis(label="share of the time", unit="%", values="0.0"),
    )


def ess_by_turn(run: Run) -> dict[int, float]:
    """Return the effective sample size of the tokens of each turn: measured, else modelled, else none."""
    if run.report.ess is not None and run.report.ess.by_turn:
        return run.report.ess.by_turn
    modelled = run.figure_data.turns and run.figure_data.turns.ess_modelled
    return {turn: ess for turn, ess in enumerate(modelled or (), start=1) if ess is not None}


@house_style
def turns(run: Run) -> Figure:
    """Draw environments in use by activity, lag by turn (and ESS where known), and dropped rollouts by turns."""
    profile, report = run.figure_data.turns, run.report.environments
    assert profile is not None  # checked by the caller
    assert report is not None
    figure, [[left, middle, right]] = make_panels(PAGE_IN, 2.45, columns=3)
    scale, unit = handy_time(profile.places.time_s[-1])
    names, colors = zip(*(PARTS[place] for place in PLACES), strict=True)
    time = np.array(profile.places.time_s) / scale
    left.stackplot(time, [getattr(profile.places, place) for place in PLACES], colors=colors, labels=names, step="post")
    left.axhline(report.count, color=INK, linewidth=0.8, linestyle="--", label="environments")
    left.set(title="Environments in use", xlabel=f"time ({unit})", ylabel="rollouts", ylim=(0, 1.1 * report.count))
    lags = np.array(profile.lag_mean, dtype=np.float64)
    middle.plot(np.arange(1, len(lags) + 1), lags, color=BLUE, label="mean lag of a turn")
    middle.set(title="Lag by turn", xlabel="turn", ylabel="mean lag (optimizer steps)", ylim=(0, None))
    if ess := ess_by_turn(run):
        beside = middle.twinx()
        beside.plot(list(ess), list(ess.values()), color=PURPLE, linestyle="--", label="ESS of a turn")
        beside.set(ylabel="effective sample size", ylim=(0, 1.02))
    edges = np.unique(np.linspace(0, len(profile.trained), 21).astype(int))
    trained, dropped = (np.add.reduceat(one, edges[:-1]) for one in (profile.trained, profile.dropped))
    right.stairs(trained, edges, fill=True, color=MUTED, alpha=0.5, label="trained on")
    right.stairs(dropped, edges, color=VERMILLION, linewidth=1.3, label="dropped")
    right.set(title="Who is dropped", xlabel="turns so far", ylabel="rollouts", ylim=(0, None))
    figure.legend(loc="outside upper left", ncols=4, title=f"Rollouts with turns: {run.name}", alignment="left")
    return figure


def _array(values: Sequence[float | None]) -> FloatArray:
    return np.array(values, dtype=np.float64)


def _draw_envelopes(axes: Axes, run: Run, style: SeriesStyle) -> None:
    """Draw a long run: windows hold whole sawteeth, so that they show as a band and not as a tangle."""
    step, mean, largest = (run.steps[key] for key in ("step", "lag_mean", "lag_max"))
    period = int(largest.max()) + 1
    size = max(min(period * math.ceil(len(step) / 30 / period), len(step) // 4), 1)
    apart = 1 + len(step) // MOST_WINDOWS
    steps, means, tops = (np.lib.stride_tricks.sliding_window_view(one, size)[::apart] for one in (step, mean, largest))
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
    return float(np.average(np.arange(len(tokens)), weights=tokens))


def _draw_updates(axes: Axes, line: Timeline, scale: float, top: float) -> None:
    every = math.ceil(len(line.updates) / 10) if line.updates else 1
    for index, update in enumerate(line.updates):
        at = update.published_s / scale
        axes.vlines(at, 1.0, top, color=MUTED, linewidth=0.6)
        if index % every == 0:
            axes.text(at, top, f"{update.version}", ha="center", va="bottom", color=MUTED, fontsize=7)


# ---------------------------------------------- throughput against the largest lag (Fig. 9), beside the analytic model

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
    setting = paper.Setting(
        curve=fitted_utilisation() if decode.table is None else read_utilisation(decode.table),
        lengths=lengths,
        accelerators=config.cluster.accelerators,
        train_batch_size=config.scheduler.train_batch_size,
        training_flashes_per_token=resolved_hardware(config).training.token_s / decode.flash_s,
    )
    lags = np.unique(np.geomspace(1, max(2.0, largest_lag), NUM_LAGS).round().astype(int))
    points = paper.throughput_against_lag(setting, [int(lag) for lag in lags])
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
        caption=f"Trained tokens/s over the baseline, {comparison.baseline}; above 1 is faster.",
        x=Axis(label="speed-up", unit="ratio of trained tokens/s"),
        y=Axis(label="", rows=[scenario.name for scenario in scenarios]),
        series=series,
        switch=None,
    )


# ------------------------------------------------------------------------- plans, numbers of environments, validations

RATE = Axis(label="throughput", unit="tokens/s", handy=True, values="0,0")
SYSTEM_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, SKY, INK, MUTED)


def throughput_against_lag(report: PlanReport) -> Chart:
    """Return throughput against mean lag (Fig. 3b): every screened candidate, the simulated ones, their Pareto front.

    Bars through the recommendation and the run file hold 80 % of the draws.
    """
    screened = report.screened
    columns = zip(screened.family, screened.lag_mean, screened.tokens_per_s, screened.label, strict=True)
    simulated = ((one.family, one.lag_mean, one.tokens_per_s, one.label) for one in report.simulated)
    series = [*_by_family("screened", columns, mark=Mark.CLOUD, alpha=0.35), *_by_family("simulated", simulated)]
    known = {one.label: one for one in report.simulated}
    front = [known[label] for label in report.front]
    lags, rates = [one.lag_mean for one in front], [one.tokens_per_s for one in front]
    series.append(Series(label="Pareto front", mark=Mark.STEPS, x=lags, y=rates, color=MUTED, width=0.7))
    for one, marker, size, name in ((report.own, "D", 6.0, "run file"), (report.recommended, "*", 12.0, "recommended")):
        if one is not None:
            series += _with_band(name, one, one.lag_mean, color=INK, marker=marker, size=size)
    if report.run.mean_lag_limit is not None:
        series.append(rule("mean_lag_limit", report.run.mean_lag_limit, color=INK, dash=":"))
    caption = (
        "Small: screened, large: simulated, both with central values; the line is their Pareto front. Recommendation "
        "and run file are means of the draws, with a bar of 80 % of them."
    )
    return Chart(
        title="Throughput against mean lag of all candidates",
        caption=caption,
        x=Axis(label="mean lag", unit="optimizer steps", ticks=8),
        y=RATE,
        series=series,
    )


def _by_family(
    stage: str, candidates: Iterable[tuple[str, float, float, str]], *, mark: Mark = Mark.POINTS, alpha: float = 1.0
) -> list[Series]:
    """Return a series for each family of ``candidates``: family, mean lag, throughput, label."""
    series = []
    for family, places in grouped((family, place) for family, *place in candidates).items():
        style = series_styles([family], [0.0])[0]
        lags, rates, labels = zip(*places, strict=True)
        look: dict[str, Any] = {"mark": mark, "color": style.color, "marker": style.marker, "alpha": alpha}
        series.append(Series(label=f"{family}, {stage}", x=lags, y=rates, hover={"": labels}, **look))
    return series


def _with_band(label: str, one: PlannedCandidate, x: float, **look: Any) -> list[Series]:
    low, high = one.band_tokens_per_s
    bar: dict[str, Any] = {"color": look["color"], "width": 0.7, "named": False}
    return [
        Series(label=label, mark=Mark.POINTS, x=[x], y=[one.tokens_per_s], hover={"": [one.label]}, **look),
        Series(label=label, mark=Mark.UPWARDS, x=[x], y=[low], other=[high], **bar),
    ]


def throughput_against_split(report: PlanReport) -> Chart:
    """Return screened throughput against the split, with its band; the recommendation must not be colocated."""
    splits, chosen = report.splits, report.recommended.cluster.generation_accelerators
    assert chosen is not None
    across, band = splits.generation_accelerators, "80 % of the draws"
    return Chart(
        title="Throughput against the split",
        caption="Screened, with the other choices as recommended; the dashed line is the recommended split.",
        x=Axis(label="accelerators that generate", values="0"),
        y=RATE,
        series=[
            Series(label=band, mark=Mark.AREA, x=across, y=splits.low, other=splits.high, color=BLUE, alpha=0.2),
            Series(label="screened", x=across, y=splits.tokens_per_s, color=BLUE),
            rule("recommended", chosen),
        ],
    )


def plan_charts(report: PlanReport) -> dict[str, Chart]:
    """Return the charts of a plan by file name."""
    charts = {"plan_throughput_against_lag": throughput_against_lag(report)}
    if report.splits.generation_accelerators:
        charts["plan_throughput_against_split"] = throughput_against_split(report)
    return charts


def cases_charts(reports: Mapping[str, PlanReport]) -> list[Chart]:
    """Return the charts of the plans of several cases by name, with the name in each title."""
    charts = ((name, chart) for name, one in reports.items() for chart in plan_charts(one).values())
    return [replace(chart, title=f"{name}: {chart.title}") for name, chart in charts]


def environments_charts(report: EnvironmentsReport) -> list[Chart]:
    """Return rollouts per hour against the number of environments, and with prices the cost of a rollout."""
    counts = [row.count for row in report.rows]
    hover = {"bottleneck": [row.bottleneck.value for row in report.rows]}
    rates, costs = ([row.rollouts_per_hour for row in report.rows], [row.usd_per_1000_rollouts for row in report.rows])
    panels: list[tuple[str, str, Axis, Sequence[float | None]]] = [
        ("Throughput", "rollouts per hour", Axis(label="trained", unit="rollouts/h", values="0,0"), rates)
    ]
    if None not in costs:
        panels.append(("Cost", "cost", Axis(label="USD per 1000 rollouts", values="0,0"), costs))
    return [
        Chart(
            title=f"{title} against environments",
            caption="The knee: the fewest whose rate is within 5 % of the largest.",
            x=Axis(label="environments", values="0"),
            y=axis,
            series=[
                Series(label=label, x=counts, y=values, color=BLUE, marked=True, hover=hover),
                rule(f"knee: {report.knee}", report.knee, color=VERMILLION),
                rule(f"slots of engines: {report.slots}", report.slots, dash=":"),
            ],
        )
        for title, label, axis, values in panels
    ]


def validation_chart(report: ValidationReport) -> Chart | None:
    """Return predicted over measured by system, for rows with a relative error; None without such a row."""
    rows = [row for row in report.rows if row.is_relative]
    if not rows:
        return None
    series = [
        Series(label="1: as measured", mark=Mark.RULE_X, x=[1.0], y=[0.0], color=MUTED, width=0.8),
        *(replace(rule("30 % off", ratio, dash=":"), named=ratio < 1) for ratio in (0.7, 1.3)),
    ]
    families = dict.fromkeys(row.family for row in rows)
    for family, color in zip(families, cycle(SYSTEM_COLORS), strict=False):
        places = [place for place, row in enumerate(rows) if row.family == family]
        mine = [rows[place] for place in places]
        low, high = ([(getattr(row, end) or row.predicted) / row.measured for row in mine] for end in ("low", "high"))
        band: dict[str, Any] = {"mark": Mark.ACROSS, "width": 1.0, "named": False}
        series.append(Series(label=family, x=low, y=places, other=high, color=color, **band))
        hover = {
            "": [row.id for row in mine],
            "predicted": [f"{row.predicted:,.4g} {row.quantity}" for row in mine],
            "measured": [f"{row.measured:,.4g} {row.quantity}" for row in mine],
        }
        ratios = [row.predicted / row.measured for row in mine]
        series.append(Series(label=family, mark=Mark.POINTS, x=ratios, y=places, color=color, hover=hover))
    return Chart(
        title="Published runs, predicted over measured, by system",
        caption="1 is right; a line is the 80 % band. A click on a system in the legend takes it away.",
        x=Axis(label="predicted / measured", log=True),
        y=Axis(label="", rows=[row.id for row in rows]),
        series=series,
        switch=None,
    )


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
    does, and the time axis at three times the fastest run. The trained rollouts give the reward. An older policy has
    sampled them: in conventional RL it is up to G steps behind the trained one.
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
