"""A chart: its series, marks, axes and labels; matplotlib draws it into files (here), Bokeh into pages (page.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.read import Run
from analysis.style import COLUMN_IN, INK, MUTED, SeriesStyle, add_legend, handy_scale, house_style, make_panels
from pipelinerl.util.arrays import FloatArray
from pipelinerl.util.explain import printable

SMALL_PT = 1.6


class Mark(Enum):
    """Shape of a series."""

    LINE = "line"
    STEPS = "steps"
    POINTS = "points"
    CLOUD = "cloud"
    AREA = "area"
    """From ``y`` to ``other``."""
    ACROSS = "across"
    """Lines from ``x`` to ``other`` at each ``y``."""
    UPWARDS = "upwards"
    """Lines from ``y`` to ``other`` at each ``x``."""
    BARS = "bars"
    """Lying bars from ``other`` to ``x`` in the row ``y``."""
    RULE_X = "rule at x"
    RULE_Y = "rule at y"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Series:
    """A series of a chart; series with the same label share an entry of the legend."""

    label: str
    mark: Mark = Mark.LINE
    x: Any = ()
    y: Any = ()
    other: Any = ()
    color: str = INK
    dash: str = "-"
    """Of lines: ``-``, ``--`` or ``:``."""
    named: bool = True
    """Whether the legend of a file shows it: one series of each label."""
    marker: str = "o"
    """Of points and ``marked`` lines: ``o``, ``s``, ``D`` or ``*``."""
    marked: bool = False
    width: float = 1.3
    """Of lines (points)."""
    size: float = 4.5
    """Of points (points)."""
    alpha: float = 1.0
    hover: Mapping[str, Any] = field(default_factory=dict)
    """Texts that a page shows at each point beside its numbers, by name; the empty name holds the title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a chart."""

    label: str
    unit: str = ""
    handy: bool = False
    rows: Sequence[str] = ()
    """Names of the values 0, 1, 2, ..., the first on top."""
    ticks: int | None = None
    """Most ticks, at whole numbers (count)."""
    start: float | None = 0.0
    end: float | None = None
    values: str = "0.00"
    """Format of numbers on pages, as of numeral.js."""
    log: bool = False

    def text(self, word: str = "") -> str:
        """Return the label with its unit; ``word`` stands before the unit."""
        gap = "" if self.label.endswith("\n") else " "
        return f"{self.label}{gap}({word}{self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chart:
    """One panel; its texts are ``printable``."""

    title: str
    caption: str = ""
    x: Axis
    y: Axis
    series: Sequence[Series]
    switch: str | None = "y"
    """Axis that a page can turn logarithmic. None: neither."""

    def __post_init__(self) -> None:
        """Escape unseen characters."""
        for one in fields(self):
            object.__setattr__(self, one.name, printable(getattr(self, one.name)))


@house_style
def drawn(
    charts: Chart | Sequence[Chart],
    *,
    width: float = COLUMN_IN,
    height: float = 1.9,
    title: str | None = None,
    notes: Sequence[Artist] = (),
    **panels: Any,
) -> Figure:
    """Return charts as a figure, side by side or as ``panels`` of ``make_panels``; sizes in inches, without the legend.

    The first chart gives the entries of the legend, before ``notes``, and the title unless there is another.
    """
    several = [charts] if isinstance(charts, Chart) else charts
    panels = panels or {"columns": len(several)}
    figure, grid = make_panels(width, height, **panels)
    for chart, axes in zip(several, grid.flat, strict=True):
        draw(chart, axes)
    if panels.get("sharex") or panels.get("sharey"):
        for axes in grid.flat:
            axes.label_outer()
        figure.align_ylabels()
    add_legend(figure, grid.flat[0], several[0].title if title is None else title, notes)
    return figure


def draw(chart: Chart, axes: Axes) -> None:
    """Draw a chart into a panel of matplotlib."""
    scales, words = [1.0, 1.0], ["", ""]
    for place, (axis, values) in enumerate(((chart.x, "x"), (chart.y, "y"))):
        if axis.handy:
            largest = (np.max(getattr(one, values), initial=0.0) for one in chart.series if len(getattr(one, values)))
            scales[place], words[place] = handy_scale(max((float(one) for one in largest), default=0.0))
    for one in chart.series:
        _draw(axes, one, scales)
    axes.set(xlabel=chart.x.text(words[0]), ylabel=chart.y.text(words[1]))
    if chart.x.log:
        axes.set_xscale("log")
    else:
        axes.set(xlim=(chart.x.start, chart.x.end))
    if chart.y.rows:
        axes.set(ylim=(len(chart.y.rows) - 0.5, -0.5))
        axes.set_yticks(range(len(chart.y.rows)), chart.y.rows)
        axes.tick_params(axis="y", length=0)
    else:
        axes.set(ylim=(chart.y.start, chart.y.end))
    for drawn_axis, axis in ((axes.xaxis, chart.x), (axes.yaxis, chart.y)):
        if axis.ticks is not None:
            drawn_axis.set_major_locator(MaxNLocator(axis.ticks, integer=True))
    axes.grid()


def _draw(axes: Axes, one: Series, scales: Sequence[float]) -> None:
    x, y = np.asarray(one.x) / scales[0], np.asarray(one.y) / scales[1]
    look: dict[str, Any] = {"color": one.color, "label": one.label if one.named else None, "alpha": one.alpha}
    match one.mark:
        case Mark.LINE | Mark.STEPS:
            style = "steps-post" if one.mark is Mark.STEPS else "default"
            marker = one.marker if one.marked else None
            axes.plot(x, y, linestyle=one.dash, linewidth=one.width, drawstyle=style, marker=marker, **look)
        case Mark.CLOUD:
            axes.plot(x, y, ".", markersize=SMALL_PT, markeredgewidth=0, **look)
        case Mark.POINTS:
            axes.plot(x, y, one.marker, markeredgecolor="white", markersize=one.size, **look)
        case Mark.AREA:
            axes.fill_between(x, y, np.asarray(one.other) / scales[1], linewidth=0, **look)
        case Mark.ACROSS:
            axes.hlines(y, x, np.asarray(one.other) / scales[0], linewidth=one.width, **look)
        case Mark.UPWARDS:
            axes.vlines(x, y, np.asarray(one.other) / scales[1], linewidth=one.width, **look)
        case Mark.BARS:
            start = np.asarray(one.other) / scales[0]
            axes.barh(y, x - start, 0.7, start, **look)
        case Mark.RULE_X:
            axes.axvline(x[0], linestyle=one.dash, linewidth=one.width, **look)
        case Mark.RULE_Y:
            axes.axhline(y[0], linestyle=one.dash, linewidth=one.width, **look)


def limits(runs: Sequence[Run], *, mark: Mark) -> list[Series]:
    """Return a dotted line for each ``scheduler.max_lag``."""
    return [
        Series(label=f"max_lag = {limit}", mark=mark, x=[limit], y=[limit], dash=":", width=0.9)
        for limit in sorted({run.report.max_lag for run in runs if run.report.max_lag is not None})
    ]


def rule(label: str, at: float, *, color: str = MUTED, dash: str = "--") -> Series:
    """Return a thin vertical line."""
    return Series(label=label, mark=Mark.RULE_X, x=[at], y=[0.0], color=color, dash=dash, width=0.8)


def line(name: str, x: Any, y: Any, style: SeriesStyle, *, hover: Mapping[str, Any] | None = None) -> Series:
    """Return the line of a run."""
    return Series(label=name, x=x, y=y, color=style.color, dash=style.dash, hover=hover or {})


def bars(
    rows: Sequence[str],
    parts: Mapping[str, FloatArray],
    colors: Mapping[str, str],
    *,
    title: str,
    x: Axis,
    caption: str = "",
) -> Chart:
    """Return a bar per row, made of consecutive ``parts``: the length of each part in every row, shape [rows]."""
    ends, start = [], np.zeros(len(rows))
    for name, lengths in parts.items():
        ends.append((name, start, start + lengths))
        start = start + lengths
    places = np.arange(len(rows))
    series = [
        Series(label=name, mark=Mark.BARS, x=end, y=places, other=begin, color=colors[name], hover={name: end - begin})
        for name, begin, end in ends
    ]
    return Chart(title=title, caption=caption, x=x, y=Axis(label="", rows=rows), series=series, switch=None)
