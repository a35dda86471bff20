"""How every figure looks: colours, sizes, fonts. Plain values; matplotlib is not needed here.

A method has one hue in all figures, and its runs go from light to dark with their largest lag. An activity
(generating, training, ...) has a colour that no method uses. All come from the palette of Okabe and Ito
(https://jfly.uni-koeln.de/color/), which stays distinct under the common kinds of colour blindness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
SKY, GREEN, YELLOW = "#56b4e9", "#009e73", "#f0e442"
INK, MUTED, PALE = "#222222", "#767676", "#dddddd"

METHOD_HUES = {"pipeline": BLUE, "conventional": VERMILLION}
"""Colour of a method; every other method is purple."""
METHOD_LINES = {"pipeline": ("-", "o")}
"""Dash and marker of a method; every other method is dashed, with squares."""
ACTIVITY_COLORS = {"generating": SKY, "training": GREEN, "publishing": YELLOW, "waiting_for_data": PALE}
"""Colour of what the trainer's time goes into; engines that generate have that of generating."""

COLUMN_IN, PAGE_IN = 3.4, 7.0
"""Width of a figure in one column of a paper, and across the page (inches)."""
DPI = 200
"""Resolution of the bitmaps (dots per inch)."""

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
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.4,
    "pdf.fonttype": 42,  # text stays text in the PDF
}
"""Settings of matplotlib that hold while a figure is drawn."""


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """How one run or arm is drawn in every figure."""

    color: str
    dash: str
    marker: str


def series_styles(methods: Sequence[str], max_lags: Sequence[float]) -> list[SeriesStyle]:
    """Return a style per series: hue by method, lightness by the rank of its largest lag within the method.

    Args:
        methods: Kind of scheduler of each series.
        max_lags: Largest lag of each series (optimizer steps), shape as ``methods``.

    Returns:
        The styles in the order given; equal lags keep that order from light to dark.
    """
    styles = []
    for index, method in enumerate(methods):
        siblings = [other for other, kind in enumerate(methods) if kind == method]
        rank = sorted(siblings, key=lambda other: max_lags[other]).index(index)
        shade = 2 * rank / (len(siblings) - 1) - 1 if len(siblings) > 1 else 0.0
        dash, marker = METHOD_LINES.get(method, ("--", "s"))
        styles.append(SeriesStyle(color=tone(METHOD_HUES.get(method, PURPLE), shade), dash=dash, marker=marker))
    return styles


def tone(color: str, shade: float) -> str:
    """Return a colour lightened (``shade`` -1) to darkened (1); 0 leaves it alone."""
    end, share = (255, 0.5) if shade < 0 else (0, 0.5)
    share *= abs(shade)
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (end - part)):02x}" for part in parts)
