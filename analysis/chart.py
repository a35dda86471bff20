"""Charts and their look.

A chart: its series, marks, axes and labels; matplotlib draws it into files (here), Bokeh into pages (page.py). The look
of all figures: colours, sizes, fonts, panels, legends, handy units, and the files of a figure.

A method has one hue in all figures, and its runs go from light to dark with their largest lag. An activity has a colour
that no method uses. All come from the palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), which stays distinct
under the common kinds of colour blindness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.read import Run
from pipelinerl.util.arrays import FloatArray
from pipelinerl.util.explain import printable

BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
SKY, GREEN, YELLOW, ORANGE = "#56b4e9", "#009e73", "#f0e442", "#e69f00"
INK, MUTED, PALE = "#222222", "#767676", "#dddddd"

METHOD_HUES = {"pipeline": BLUE, "conventional": VERMILLION, "one_step_off": PURPLE, "partial_rollouts": ORANGE}
FREE_HUES = ("#8c564b", "#5b4b9a", "#7f7f00", "#b22a5b", "#17706e")
"""Colours of other kinds of schedule, chosen by their name."""
METHOD_LINES = {"pipeline": ("-", "o")}
"""Dash and marker of a method; every other method is dashed, with squares."""
ACTIVITY_COLORS = {"generating": SKY, "training": GREEN, "publishing": YELLOW, "waiting_for_data": PALE}

COLUMN_IN, PAGE_IN = 3.4, 7.0
"""Width of a figure in one column of a paper, and across the page (inches)."""
DPI = 200

RC: Any = {  # Any: matplotlib 3.11 types the keys, earlier ones do not
    "font.family": "DejaVu Sans",  # ships with matplotlib, so figures are the same everywhere
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 7.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 3.0,
    "axes.labelpad": 2.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.labelsize": 7.5,
    "text.color": INK,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "grid.color": "#ececec",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "legend.fontsize": 7.0,
    "legend.title_fontsize": 8.0,  # the title of a figure stands above its legend
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.4,
    "pdf.fonttype": 42,  # text stays text in the PDF
}

house_style = matplotlib.rc_context(RC)
"""Decorator: the house style holds while the function runs."""

LIMIT: Any = {"color": INK, "linewidth": 0.9, "linestyle": ":"}

_METADATA = {  # no date and no program: the same figure gives the same bytes
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """Style of one run or arm in every figure."""

    color: str
    dash: str
    marker: str


def series_styles(methods: Sequence[str], max_lags: Sequence[float]) -> list[SeriesStyle]:
    """Return a style per series: hue by kind of scheduler, lightness by the rank of its largest lag within the kind."""
    styles = []
    for index, method in enumerate(methods):
        siblings = [other for other, kind in enumerate(methods) if kind == method]
        rank = sorted(siblings, key=lambda other: max_lags[other]).index(index)
        shade = 2 * rank / (len(siblings) - 1) - 1 if len(siblings) > 1 else 0.0
        dash, marker = METHOD_LINES.get(method, ("--", "s"))
        styles.append(SeriesStyle(color=tone(hue(method), shade), dash=dash, marker=marker))
    return styles


def hue(method: str) -> str:
    """Return the colour of a kind of schedule; an unknown kind has one by its name."""
    return METHOD_HUES.get(method, FREE_HUES[crc32(method.encode()) % len(FREE_HUES)])


def tone(color: str, shade: float) -> str:
    """Return a colour lightened (``shade`` -1) to darkened (1); 0 leaves it alone."""
    end, share = 255 if shade < 0 else 0, abs(shade) / 2
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (end - part)):02x}" for part in parts)


def make_panels(
    width_in: float, height_in: float, rows: int = 1, columns: int = 1, **keywords: Any
) -> tuple[Figure, Any]:
    """Return a figure and its panels, an array of shape [rows, columns]."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **keywords)


def styled(runs: Sequence[Run]) -> list[tuple[Run, SeriesStyle]]:
    """Return each run with its style, the same in every figure of these runs."""
    return list(
        zip(runs, series_styles([run.method for run in runs], [run.report.lag.max for run in runs]), strict=True)
    )


SEEN = 4.0
"""Smallest mark in a legend (points): a dot of a cloud stands alone there."""


def add_legend(figure: Figure, axes: Axes, title: str, notes: Sequence[Artist] = ()) -> None:
    """Put title and legend above the panels, in as many columns as fit; the figure gets taller.

    Every labelled artist of ``axes`` gets an entry, then ``notes``; a long label loses its start.
    """
    handles, labels = axes.get_legend_handles_labels()
    handles, labels = [*handles, *notes], [*labels, *(str(note.get_label()) for note in notes)]
    room = int(17 * figure.get_figwidth())  # 17 letters of 7 pt per inch, 6 of them for the line and the gap
    labels = [label if len(label) <= room - 6 else "…" + label[7 - room :] for label in labels]
    for columns in range(len(labels), 0, -1):
        widths = [max(len(label) for label in column) + 6 for column in np.array_split(labels, columns)]
        if sum(widths) <= room:
            break
    figure.set_figheight(figure.get_figheight() + 0.15 * (1 + math.ceil(len(labels) / columns)))
    legend = figure.legend(handles, labels, loc="outside upper left", ncols=columns, title=title, alignment="left")
    for mark in legend.get_lines():
        if mark.get_marker() not in ("None", "none", "") and mark.get_markersize() < SEEN:
            mark.set(markersize=SEEN, alpha=0.6)


def handy_time(longest_s: float) -> tuple[float, str]:
    """Return the unit in which this time is a handy number: its seconds and symbol."""
    for seconds, symbol in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if longest_s >= 3 * seconds:
            return seconds, symbol
    return 1.0, "s"


def handy_scale(largest: float) -> tuple[float, str]:
    """Return a divisor for values, and the word for it before their unit."""
    for factor, word in ((1e6, "million "), (1e3, "thousand ")):
        if largest >= 5 * factor:
            return factor, word
    return 1.0, ""


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG to look at and PDF to print, laid out once; the same figure gives the same bytes."""
    paths = [folder / f"{name}.{kind}" for kind in _METADATA]
    with matplotlib.rc_context(RC):
        for path, metadata in zip(paths, _METADATA.values(), strict=True):
            figure.savefig(path, dpi=DPI, metadata=metadata)
            figure.set_layout_engine(None)  # keep this layout; "none" would draw the next file twice
    return paths


# ------------------------------------------------------------------------------------------ charts

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
