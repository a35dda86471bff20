"""The figure of a validation: predicted against measured."""

from __future__ import annotations

from pathlib import Path

from matplotlib.lines import Line2D

from analysis.style import (
    BLUE,
    DPI,
    GREEN,
    INK,
    MUTED,
    PAGE_IN,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    add_legend,
    house_style,
    make_panels,
)
from pipelinerl.records.validation_report import ValidationReport

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, SKY, INK, MUTED)
"""One per system, in order of appearance; used again after seven."""
FIGURE_FILE = "validation.png"


@house_style
def save_validation_figure(report: ValidationReport, folder: Path) -> Path:
    """Draw predicted over measured for every row with a relative error, one line each, grouped by system.

    Args:
        report: The content of validation.json.
        folder: Where ``validation.png`` goes; made if need be.
    """
    rows = [row for row in report.rows if row.is_relative]
    figure, panels = make_panels(PAGE_IN, 1.0 + 0.14 * len(rows))
    axes = panels[0, 0]
    axes.axvspan(0.7, 1.3, color=PALE, linewidth=0, label="within 30 %")
    axes.axvline(1.0, color=MUTED, linewidth=0.8)
    families = list(dict.fromkeys(row.family for row in rows))
    for place, row in enumerate(rows):
        color = COLORS[families.index(row.family) % len(COLORS)]
        if row.low is not None and row.high is not None:
            ends = [row.low / row.measured, row.high / row.measured]
            axes.plot(ends, [place, place], color=color, linewidth=1.0)
        first = all(other.family != row.family for other in rows[:place])
        label = row.family if first else None
        axes.plot([row.predicted / row.measured], [place], "o", color=color, label=label)
    axes.set_yticks(range(len(rows)), [row.id for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1.0, 1.3, 2.0, 3.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("predicted / measured (log scale)")
    bands = Line2D([], [], color=INK, linewidth=1.0, label="80 % band")
    add_legend(figure, axes, "Published runs, predicted over measured, by system", [bands])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FIGURE_FILE
    figure.savefig(path, dpi=DPI)
    return path
