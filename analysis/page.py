"""A page as one HTML file that loads nothing: text, sortable tables, Bokeh charts with linked legends."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib import resources
from typing import Any

import numpy as np
from bokeh.embed import file_html
from bokeh.models import ColumnDataSource as Source
from bokeh.models import HoverTool, Legend, LegendItem, NumeralTickFormatter, TabPanel, Tabs
from bokeh.plotting import figure as new_figure
from bokeh.resources import INLINE
from jinja2 import Environment

import pipelinerl
from analysis import figures
from analysis.chart import PALE, Axis, Chart, Mark, Series
from analysis.figures import ess, reward
from analysis.read import Run
from pipelinerl.pages.page import Page, Table, short, sort_values
from pipelinerl.records.comparison_report import ComparisonReport

HEIGHT, ROW_HEIGHT_OF_CHART = 360, 26
"""Height of a chart, and of each of its rows where it has rows (pixels)."""
MAX_POINTS = 1000
"""Most points of a line (count); longer lines are thinned out."""
CLOUD_SIZE, PIXELS_PER_PT = 4, 1.6
"""Size of a point of a cloud, and size of other points per pt of a file (pixels)."""
TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
MARKERS = {"o": "circle", "s": "square", "D": "diamond", "*": "star"}
DASHES = {"-": "solid", "--": "dashed", ":": "dotted"}


def run_charts(runs: Sequence[Run], comparison: ComparisonReport | None = None) -> list[Chart]:
    """Return the charts of runs side by side, or of a comparison's arms, with speed-ups if it has several scenarios."""
    charts = []
    if len(runs) > 1:
        charts.append(figures.throughput_against_max_lag(runs))
    if comparison is not None and len(comparison.scenarios) > 1:
        charts.append(figures.speedup_by_scenario(comparison))
    charts += [
        figures.samples_against_time(runs),
        figures.mean_lag_by_step(runs),
        figures.lag_by_position(runs),
        figures.time_split(runs),
    ]
    charts += [*figures.fleet_over_time(runs), *filter(None, [figures.fleet_seconds(runs)])]
    if any(run.metrics for run in runs):
        charts.append(reward(runs)[0])
    if any(run.has_ess for run in runs):
        charts.append(ess(runs)[0])
    return charts


def page_html(page: Page, charts: Sequence[Chart]) -> str:
    """Return the text of the file, with the charts below text and tables.

    The template escapes all text; Bokeh gets text only where it shows it as text: legends, rows of an axis, tooltips.
    Should that fail, the page's policy loads nothing, runs no script but Bokeh's and ours, known by their hashes, and
    evaluates none (hence no ``CustomJS``, no ``DataTable``). Bokeh makes its styles in the browser: they are allowed.
    """
    models = interactive(charts)
    template = Environment(autoescape=True).from_string((resources.files("analysis") / "page.html").read_text("utf-8"))
    for number, model in enumerate(models):
        model.name = f"figure{number}"
    link = "data:text/plain;base64," + b64encode((page.run_file or "").encode()).decode()
    words = {"page": page, "figures": charts, "run_file_link": link, "version": pipelinerl.__version__}
    words |= {"hashes": _hashes, "ranked": _ranked, "brief": short}
    text: str = file_html(models, INLINE, page.title, template=template, template_variables=words)
    return text


def _hashes(*scripts: str) -> str:
    """Return the sources of a content security policy that allow these script elements, and no other script."""
    bodies = re.findall("<script[^>]*>(.*?)</script>", "".join(scripts), re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(body.encode()).digest()).decode()}'" for body in bodies)


def _ranked(table: Table) -> list[list[tuple[str, int]]]:
    """Return each cell with its place when its column is sorted; cells without a number are last."""
    columns = []
    for cells in zip(*table.rows, strict=True):
        keys: list[Any] = [*sort_values([*cells])]
        places = {key: place for place, key in enumerate(sorted({one for one in keys if one is not None}))}
        columns.append([(cell, places.get(key, len(places))) for cell, key in zip(cells, keys, strict=True)])
    return [[*row] for row in zip(*columns, strict=True)]


def interactive(charts: Sequence[Chart]) -> list[Any]:
    """Return Bokeh's model of each chart; a series switched off in one is off in all."""
    switches: dict[str, list[Any]] = {}
    models = [_interactive(chart, switches) for chart in charts]
    for item in (one for model in models for one in model.select({"type": LegendItem})):
        item.renderers = switches[item.label.value]
    return models


def _interactive(chart: Chart, switches: dict[str, list[Any]]) -> Any:
    """Return a chart; with a ``switch``, two tabs: one with a linear and one with a logarithmic axis."""
    rows = list(chart.y.rows)
    height = max(HEIGHT, 120 + ROW_HEIGHT_OF_CHART * len(rows)) if rows else HEIGHT
    tabs = []
    for scale in ("linear", "log") if chart.switch else ("linear",):
        options: dict[str, Any] = {"x_axis_label": chart.x.text(), "y_axis_label": chart.y.text()}
        if chart.switch:
            options[f"{chart.switch}_axis_type"] = scale
        if chart.x.log:
            options["x_axis_type"] = "log"
        if rows:
            options |= {"y_range": rows[::-1], "y_axis_label": None}
        axes = new_figure(height=height, tools=TOOLS, toolbar_location="below", active_drag=None, **options)
        axes.sizing_mode = "stretch_width"
        axes.toolbar.logo = None
        axes.background_fill_alpha = axes.border_fill_alpha = 0.0
        axes.grid.grid_line_color = PALE
        for one in chart.series:
            switches.setdefault(one.label, []).append(_draw(axes, one, chart))
        items = [LegendItem(label=name) for name in dict.fromkeys(one.label for one in chart.series)]
        look = {"border_line_color": None, "background_fill_alpha": 0.0, "location": "left", "padding": 0}
        look |= {"ncols": 2, "spacing": 4, "label_text_font_size": "12px"}
        axes.add_layout(Legend(items=items, click_policy="hide", **look), "above")
        if not chart.x.log:
            axes.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
        if not rows:
            axes.yaxis.formatter = NumeralTickFormatter(format="0.[00]a")
        tabs.append(TabPanel(child=axes, title="linear" if scale == "linear" else "logarithmic"))
    return Tabs(tabs=tabs, sizing_mode="stretch_width") if chart.switch else tabs[0].child


def _draw(axes: Any, one: Series, chart: Chart) -> Any:
    names, keep = list(chart.y.rows), slice(None)
    if one.mark is Mark.LINE:
        keep = _kept(len(one.x))
    columns = {"x": one.x, "y": one.y, **({"other": one.other} if len(one.other) else {})}
    data: dict[str, Any] = {key: np.asarray(values)[keep] for key, values in columns.items()}
    if names and one.mark not in (Mark.RULE_X, Mark.RULE_Y):
        data["y"] = [names[int(row)] for row in data["y"]]
    data["name"] = [one.label] * len(data["x"])
    hover = {f"text{number}": np.asarray(texts)[keep] for number, texts in enumerate(one.hover.values())}
    source = Source(data | hover)
    look: dict[str, Any] = {"source": source, "color": one.color, "alpha": one.alpha}
    stroke = {"line_width": 1.5 * one.width, "line_dash": DASHES[one.dash]}
    match one.mark:
        case Mark.LINE:
            drawn = axes.line("x", "y", **look, **stroke)
            if one.marked:
                axes.scatter("x", "y", marker=MARKERS[one.marker], size=7, **look)
        case Mark.STEPS:
            return axes.step("x", "y", mode="after", **look, **stroke)
        case Mark.POINTS:
            drawn = axes.scatter("x", "y", marker=MARKERS[one.marker], size=PIXELS_PER_PT * (one.size + 2), **look)
        case Mark.CLOUD:
            drawn = axes.scatter("x", "y", size=CLOUD_SIZE, **look)
        case Mark.AREA:
            return axes.varea("x", "y", "other", **look)
        case Mark.ACROSS:
            return axes.segment("x", "y", "other", "y", **look)
        case Mark.UPWARDS:
            return axes.segment("x", "y", "x", "other", **look)
        case Mark.BARS:
            drawn = axes.hbar(y="y", left="other", right="x", height=0.7, **look)
        case Mark.RULE_X | Mark.RULE_Y:
            return _rule(axes, one, chart, stroke)
    title = "@text0" if "" in one.hover else "@name"
    texts = [(name, f"@text{number}") for number, name in enumerate(one.hover) if name]
    if one.mark is not Mark.BARS:
        numbers = [_number(chart.y, "y")] if not names else [("", "@y")]
        texts = [*numbers, _number(chart.x, "x"), *texts]
    axes.add_tools(HoverTool(renderers=[drawn], tooltips=[("", title), *texts]))
    return drawn


def _rule(axes: Any, one: Series, chart: Chart, stroke: dict[str, Any]) -> Any:
    """Draw a line across the range of the other series; unlike Bokeh's ``Span``, a legend can switch it off."""
    others = [other for other in chart.series if other.mark not in (Mark.RULE_X, Mark.RULE_Y) and len(other.y)]
    names = list(chart.y.rows)
    if one.mark is Mark.RULE_X and names:
        ends: Any = [names[-1], names[0]]
        return axes.line([one.x[0]] * 2, ends, color=one.color, **stroke)
    key = "y" if one.mark is Mark.RULE_X else "x"
    values = np.concatenate([np.asarray(getattr(other, key), dtype=float) for other in others] or [np.zeros(1)])
    ends = [float(np.nanmin(values)), float(np.nanmax(values))]
    across = {"x": ends, "y": [one.y[0]] * 2} if one.mark is Mark.RULE_Y else {"x": [one.x[0]] * 2, "y": ends}
    return axes.line(across["x"], across["y"], color=one.color, **stroke)


def _number(axis: Axis, column: str) -> tuple[str, str]:
    unit = f" {axis.unit}" if axis.unit and axis.values != "0" else ""
    return axis.label.strip(), f"@{column}{{{axis.values}}}{unit}"


def _kept(number: int) -> slice:
    """Return a slice of at most ``MAX_POINTS`` of so many values, the last one included."""
    step = max(1, -(-number // MAX_POINTS))
    return slice((number - 1) % step if number else 0, None, step)
