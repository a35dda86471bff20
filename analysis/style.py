"""Look of all figures: colours, sizes, fonts, panels, legends, handy units, and the files of a figure.

A method has one hue in all figures, and its runs go from light to dark with their largest lag. An activity has a colour
that no method uses. All come from the palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), which stays distinct
under the common kinds of colour blindness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.read import Run

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
