"""Figures to look around in: hover, zoom, a legend that switches series off, linear or logarithmic. Drawn by Bokeh.

A run that is switched off in one figure is off in all of them. The numbers are those that ``analysis/figures.py`` and
its like draw on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource as Source
from bokeh.models import (
    DataTable,
    HoverTool,
    HTMLTemplateFormatter,
    Legend,
    LegendItem,
    NumeralTickFormatter,
    TableColumn,
    TabPanel,
    Tabs,
)
from bokeh.plotting import figure as new_figure

from analysis.metrics import ESS_RAW, REWARD
from analysis.read import Run
from analysis.style import ACTIVITY_COLORS, PALE, handy_time, series_styles, styled
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.page import Table, sort_values
from pipelinerl.records.reports import TrainerSeconds

HEIGHT = 360
"""Height of a figure (pixels)."""
MAX_POINTS = 1000
"""Points of a line; of more optimizer steps, every so many is shown (count)."""
ROW_HEIGHT = 26
"""Height of a row of a table (pixels)."""
LETTER_WIDTH = 7
"""Width of a letter in a table, about (pixels)."""
TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
MARKERS = {"o": "circle", "s": "square"}
"""Bokeh's names of the markers of the house style."""

Series = dict[str, list[Any]]
"""What belongs to each entry of a legend."""


@dataclass(frozen=True, slots=True)
class Interactive:
    """A figure with its words."""

    title: str
    """What it shows."""
    caption: str
    """How to read it."""
    model: Any
    """What Bokeh draws."""


def run_figures(runs: Sequence[Run], comparison: ComparisonReport | None = None) -> list[Interactive]:
    """Return the figures of runs side by side, or of the arms of a comparison.

    Args:
        runs: At least one.
        comparison: Adds the speed-ups where it has several scenarios.
    """
    switches: Series = {}
    made = []
    if len(runs) > 1:
        made.append(_throughput(runs, switches))
    if comparison is not None and len(comparison.scenarios) > 1:
        made.append(_speedups(comparison, switches))
    made += [_samples(runs, switches), _lag_by_step(runs, switches)]
    made += [_lag_by_position(runs, switches), _time_split(runs)]
    for key, title in ((REWARD, "Mean reward"), (ESS_RAW, "Effective sample size")):
        known = [run for run in runs if key in run.metrics]
        if known:
            made.append(_metric(known, key, title, switches))
    for renderers in switches.values():
        for one, other in pairwise([*renderers, renderers[0]]):
            one.js_link("visible", other, "visible")
    return made


def chart(
    title: str,
    caption: str,
    draw: Callable[[Any], Series],
    *,
    switches: Series | None = None,
    log: str | None = "y",
    **figure_options: Any,
) -> Interactive:
    """Return a figure; with ``log`` one with a linear and one with a logarithmic axis, to change between them."""
    tabs = []
    for scale in ("linear", "log") if log else ("linear",):
        options = figure_options | ({f"{log}_axis_type": scale} if log else {})
        axes = new_figure(height=HEIGHT, tools=TOOLS, toolbar_location="below", active_drag=None, **options)
        axes.sizing_mode = "stretch_width"
        axes.toolbar.logo = None
        axes.background_fill_alpha = axes.border_fill_alpha = 0.0
        axes.grid.grid_line_color = PALE
        series = draw(axes)
        for name, renderers in series.items() if switches is not None else ():
            assert switches is not None
            switches.setdefault(name, []).extend(renderers)
        items = [LegendItem(label=name, renderers=renderers) for name, renderers in series.items()]
        look = {"border_line_color": None, "background_fill_alpha": 0.0, "location": "left", "padding": 0}
        look |= {"ncols": 2, "spacing": 4, "label_text_font_size": "12px"}
        axes.add_layout(Legend(items=items, click_policy="hide", **look), "above")
        for axis in (
            one for key, one in (("x_range", axes.xaxis), ("y_range", axes.yaxis)) if log and key not in options
        ):
            axis.formatter = NumeralTickFormatter(format="0.[00]a")
        tabs.append(TabPanel(child=axes, title="linear" if scale == "linear" else "logarithmic"))
    return Interactive(title, caption, Tabs(tabs=tabs, sizing_mode="stretch_width") if log else tabs[0].child)


def hover(axes: Any, renderers: Iterable[Any], *tooltips: tuple[str, str], **options: Any) -> None:
    """Show a name and a text each where the mouse is."""
    axes.add_tools(HoverTool(renderers=list(renderers), tooltips=list(tooltips), **options))


def _lines(runs: Sequence[Run], points: Callable[[Run], dict[str, Any]], *shown: tuple[str, str]) -> Any:
    """Return what draws a line per run through the columns ``x`` and ``y`` of its points."""
    sources = [Source({**points(run), "run": [run.name] * len(points(run)["x"])}) for run in runs]

    def draw(axes: Any) -> Series:
        lines = {}
        for (run, style), source in zip(styled(runs), sources, strict=True):
            look = {"color": style.color, "line_dash": "solid" if style.dash == "-" else "dashed", "line_width": 2}
            lines[run.name] = [axes.line("x", "y", source=source, **look)]
        hover(axes, (one for line in lines.values() for one in line), ("", "@run"), *shown)
        return lines

    return draw


def _thin(values: Any) -> Any:
    """Return every so many values, the last one too."""
    step = -(-len(values) // MAX_POINTS)
    return np.asarray(values)[len(values) - 1 :: -step][::-1]


def _samples(runs: Sequence[Run], switches: Series) -> Interactive:
    scale, unit = handy_time(max(run.steps.time_s[-1] for run in runs))

    def points(run: Run) -> dict[str, Any]:
        return {"x": _thin(run.steps.time_s / scale), "y": _thin(np.cumsum(run.steps.samples))}

    draw = _lines(runs, points, ("time", f"@x{{0.00}} {unit}"), ("trained", "@y{0,0} samples"))
    labels: dict[str, Any] = {"x_axis_label": f"time ({unit})", "y_axis_label": "trained (samples)"}
    return chart("Samples against time", "Steeper is faster.", draw, switches=switches, **labels)


def _lag_by_step(runs: Sequence[Run], switches: Series) -> Interactive:
    def points(run: Run) -> dict[str, Any]:
        steps = run.steps
        return {"x": _thin(steps.step), "y": _thin(steps.lag_mean), "largest": _thin(steps.lag_max)}

    draw = _lines(runs, points, ("step", "@x"), ("mean lag", "@y{0.00}"), ("largest lag", "@largest"))
    caption = "Mean lag of the tokens of each optimizer step; hover for the largest."
    labels: dict[str, Any] = {"x_axis_label": "optimizer step", "y_axis_label": "mean lag (optimizer steps)"}
    return chart("Lag by optimizer step", caption, draw, switches=switches, **labels)


def _lag_by_position(runs: Sequence[Run], switches: Series) -> Interactive:
    def points(run: Run) -> dict[str, Any]:
        bins = run.figure_data.lag_by_position
        lag = np.array(bins.lag_mean, dtype=np.float64)
        return {"x": (np.arange(len(lag)) + 0.5) * bins.width_tokens, "y": lag}

    draw = _lines(runs, points, ("position", "@x{0,0} tokens"), ("mean lag", "@y{0.00}"))
    labels: dict[str, Any] = {
        "x_axis_label": "position in the answer (tokens)",
        "y_axis_label": "mean lag (optimizer steps)",
    }
    caption = "Where weights arrive while answers are generated, the end of an answer is fresher than its beginning."
    return chart("Lag by position in the answer", caption, draw, switches=switches, **labels)


def _metric(runs: Sequence[Run], key: str, title: str, switches: Series) -> Interactive:
    def points(run: Run) -> dict[str, Any]:
        return {"x": _thin(run.steps.step[: len(run.metrics[key])]), "y": _thin(run.metrics[key])}

    draw = _lines(runs, points, ("step", "@x"), (title.lower(), "@y{0.000}"))
    labels: dict[str, Any] = {"x_axis_label": "optimizer step", "y_axis_label": title.lower()}
    return chart(title, "Measured, by optimizer step.", draw, switches=switches, log=None, **labels)


def _throughput(runs: Sequence[Run], switches: Series) -> Interactive:
    def draw(axes: Any) -> Series:
        points: Series = {}
        for run, style in styled(runs):
            lag, rate = run.report.lag, run.report.tokens_per_s
            row = {"x": [lag.max], "y": [rate], "mean": [lag.mean], "run": [run.name]}
            look = {"color": style.color, "marker": MARKERS[style.marker], "size": 12}
            points[run.name] = [axes.scatter("x", "y", source=Source(row), **look)]
        texts = (("", "@run"), ("throughput", "@y{0,0} tokens/s"), ("largest lag", "@x"), ("mean lag", "@mean{0.00}"))
        hover(axes, (one for point in points.values() for one in point), *texts)
        return points

    labels: dict[str, Any] = {"x_axis_label": "largest lag (optimizer steps)", "y_axis_label": "throughput (tokens/s)"}
    caption = "Higher is faster, further left is closer to on-policy."
    return chart("Throughput against lag", caption, draw, switches=switches, **labels)


def _speedups(comparison: ComparisonReport, switches: Series) -> Interactive:
    names = list(dict.fromkeys(arm.name for arm in comparison.arms))
    kinds = {arm.name: arm.summary for arm in comparison.arms}
    styles = series_styles([kinds[name].scheduler for name in names], [kinds[name].lag.max for name in names])

    def draw(axes: Any) -> Series:
        points = {}
        for name, style in zip(names, styles, strict=True):
            found = [
                (scenario.name, arm.speedup)
                for scenario in comparison.scenarios
                for arm in scenario.arms
                if arm.name == name and arm.speedup is not None
            ]
            row = {"x": [x for x, _ in found], "y": [y for _, y in found], "run": [name] * len(found)}
            look = {"color": style.color, "marker": MARKERS[style.marker], "size": 10}
            points[name] = [axes.scatter("x", "y", source=Source(row), **look)]
        axes.xaxis.major_label_orientation = 0.6
        hover(axes, (p for one in points.values() for p in one), ("", "@run"), ("", "@x"), ("speed-up", "@y{0.00}"))
        return points

    labels: dict[str, Any] = {
        "y_axis_label": f"speed-up over {comparison.baseline}",
        "x_range": [scenario.name for scenario in comparison.scenarios],
    }
    return chart("Speed-up by scenario", "Above 1 is faster.", draw, switches=switches, **labels)


def _time_split(runs: Sequence[Run]) -> Interactive:
    names, kinds = [run.name for run in runs], tuple(TrainerSeconds.model_fields)
    data: dict[str, Any] = {"run": names}
    for kind in kinds:
        data[kind] = [getattr(run.report.seconds, kind) * 1000 / run.report.samples_trained for run in runs]

    def draw(axes: Any) -> Series:
        look = {"height": 0.7, "color": [ACTIVITY_COLORS[kind] for kind in kinds]}
        bars = axes.hbar_stack(kinds, y="run", source=Source(data), **look)
        hover(axes, bars, ("", "@run"), ("$name", "@$name{0.0} s"))
        return {kind.replace("_", " "): [bar] for kind, bar in zip(kinds, bars, strict=True)}

    labels: dict[str, Any] = {"x_axis_label": "s per 1000 trained samples", "y_range": names[::-1]}
    return chart("Where the trainer's time goes", "Shorter is faster.", draw, log=None, **labels)


def sortable(table: Table) -> Any:
    """Return a table that a click on the name of a column sorts by the numbers in it."""
    data: dict[str, Any] = {}
    columns = []
    for number, name in enumerate(table.columns):
        cells = [row[number] for row in table.rows]
        data |= {f"value{number}": sort_values(cells), f"text{number}": cells}
        shown = HTMLTemplateFormatter(template=f'<span title="<%- text{number} %>"><%- text{number} %></span>')
        width = LETTER_WIDTH * min(110, 3 + max(len(text) for text in (name, *cells)))
        columns.append(TableColumn(field=f"value{number}", title=name or " ", formatter=shown, width=width))
    height = ROW_HEIGHT * (len(table.rows) + 1) + 20
    size = {"width": sum(one.width for one in columns) + 20, "height": height, "row_height": ROW_HEIGHT}
    plain = {"index_position": None, "autosize_mode": "none", "reorderable": False}
    return DataTable(source=Source(data), columns=columns, **size, **plain)
