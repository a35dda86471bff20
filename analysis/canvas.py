"""What all figures share: panels in the house style, a look per run, legends, units that make numbers handy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.read import Run
from analysis.style import RC, SeriesStyle, series_styles

house_style = matplotlib.rc_context(RC)
"""As a decorator: the house style holds while the function runs, and matplotlib's settings are put back then."""


def make_panels(
    width_in: float, height_in: float, rows: int = 1, columns: int = 1, **keywords: Any
) -> tuple[Figure, Any]:
    """Return a figure and its panels, an array of shape [rows, columns]."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **keywords)


def styled(runs: Sequence[Run]) -> list[tuple[Run, SeriesStyle]]:
    """Return each run with its style, the same in every figure of these runs."""
    return list(
        zip(runs, series_styles([run.method for run in runs], [run.number("lag.max") for run in runs]), strict=True)
    )


def add_legend(figure: Figure, axes: Axes, notes: Sequence[Line2D] = ()) -> None:
    """Put a legend above the panels, in as many columns as its labels leave room for; the start of a long one goes.

    Args:
        figure: Made taller by the legend, so that the panels keep their size.
        axes: Every labelled artist of this panel gets an entry.
        notes: Further entries, after those.
    """
    handles, labels = axes.get_legend_handles_labels()
    handles, labels = [*handles, *notes], [*labels, *(str(note.get_label()) for note in notes)]
    room = int(17 * figure.get_figwidth())  # 17 letters of 7 pt per inch, 6 of them for the line and the gap
    labels = [label if len(label) <= room - 6 else "…" + label[7 - room :] for label in labels]
    for columns in range(len(labels), 0, -1):
        widths = [max(len(label) for label in column) + 6 for column in np.array_split(labels, columns)]
        if sum(widths) <= room:
            break
    figure.set_figheight(figure.get_figheight() + 0.15 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def handy_time(longest_s: float) -> tuple[float, str]:
    """Return the seconds of the unit in which this time is a handy number, and its symbol."""
    for seconds, symbol in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if longest_s >= 3 * seconds:
            return seconds, symbol
    return 1.0, "s"


def handy_scale(largest: float) -> tuple[float, str]:
    """Return what to divide values by, and the word that says so before their unit."""
    for factor, word in ((1e6, "million "), (1e3, "thousand ")):
        if largest >= 5 * factor:
            return factor, word
    return 1.0, ""
