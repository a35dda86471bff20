"""Figures to look around in of plans, numbers of environments, and validations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bokeh.models import ColumnDataSource as Source

from analysis.interactive import HEIGHT, MARKERS, Interactive, Series, chart, hover
from analysis.style import BLUE, INK, MUTED, VERMILLION, series_styles
from pipelinerl.hardware.coefficients import Level
from pipelinerl.records.environments_report import EnvironmentsReport
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.validation_report import ValidationReport


def plan_figures(report: PlanReport) -> list[Interactive]:
    """Return the figures of a plan: throughput against lag of every candidate, and against the split."""
    labels: dict[str, Any] = {"x_axis_label": "mean lag (optimizer steps)", "y_axis_label": "throughput (tokens/s)"}
    caption = (
        "Small: screened. Large: simulated. The line is the Pareto front, a bar the band from pessimistic to "
        "optimistic coefficients."
    )
    if report.certainty.expected_faster > report.certainty.tie:
        caption += " What stands above the recommendation is faster only if all is as expected."
    made = [chart("Throughput against lag", caption, lambda axes: _draw_candidates(axes, report), **labels)]
    if report.splits.generation_accelerators:
        labels = {"x_axis_label": "accelerators that generate", "y_axis_label": "throughput (tokens/s)"}
        caption = "Screened, with the other choices as recommended; the dashed line is the recommended split."
        made.append(chart("Throughput against the split", caption, lambda axes: _draw_splits(axes, report), **labels))
    return made


def case_figures(reports: Mapping[str, PlanReport]) -> list[Interactive]:
    """Return the figure of plans of several cases: throughput against cost of each recommendation, with its band."""
    costs = {name: one.recommended.cost for name, one in reports.items()}
    priced = all(one.usd_per_million_tokens is not None for one in costs.values())
    rates = {
        name: one.usd_per_million_tokens if priced else one.gpu_hours_per_million_tokens for name, one in costs.items()
    }

    def draw(axes: Any) -> Series:
        series: Series = {}
        for (name, report), style in zip(reports.items(), styles, strict=True):
            best = report.recommended
            low, high = best.band_tokens_per_s
            data = {"name": [name], "label": [best.label], "x": [rates[name]], "y": [best.tokens_per_s]}
            look = {"marker": MARKERS[style.marker], "color": style.color, "size": 12}
            bar = axes.segment([rates[name]], [low], [rates[name]], [high], color=style.color)
            series[f"{name}: {best.family}"] = [axes.scatter("x", "y", source=Source(data), **look), bar]
        texts = (("", "@name"), ("", "@label"), ("throughput", "@y{0,0} tokens/s"), (unit, "@x{0.000}"))
        hover(axes, [found[0] for found in series.values()], *texts)
        return series

    styles = series_styles([one.recommended.family for one in reports.values()], range(len(reports)))
    unit = f"{'USD' if priced else 'GPU-hours'} per million trained tokens"
    labels: dict[str, Any] = {"x_axis_label": unit, "y_axis_label": "throughput (tokens/s)"}
    caption = (
        "Higher is faster, further left is cheaper; a bar is the band from pessimistic to optimistic coefficients."
    )
    return [chart("Throughput against cost", caption, draw, **labels)]


def environments_figures(report: EnvironmentsReport) -> list[Interactive]:
    """Return the figures of numbers of environments: throughput, and with prices the cost of a rollout."""
    counts = [row.count for row in report.rows]
    shown: list[tuple[str, str, list[float | None]]] = [
        ("Throughput", "trained (rollouts/h)", [row.rollouts_per_hour for row in report.rows]),
        ("Cost", "USD per 1000 rollouts", [row.usd_per_1000_rollouts for row in report.rows]),
    ]

    def drawn(values: list[float], what: str) -> Callable[[Any], Series]:
        def draw(axes: Any) -> Series:
            source = Source({"x": counts, "y": values, "bottleneck": [row.bottleneck.value for row in report.rows]})
            found = [axes.line("x", "y", source=source, color=BLUE, line_width=2)]
            found.append(axes.scatter("x", "y", source=source, color=BLUE, size=9))
            hover(axes, found[1:], ("environments", "@x"), (what, "@y{0,0}"), ("bottleneck", "@bottleneck"))
            ends = [min(values), max(values)]
            knee = axes.line([report.knee] * 2, ends, color=VERMILLION, line_dash="dashed")
            slots = axes.line([report.slots] * 2, ends, color=MUTED, line_dash="dotted")
            return {what: found, f"knee: {report.knee}": [knee], f"slots of engines: {report.slots}": [slots]}

        return draw

    made = []
    for title, what, values in shown:
        known = [one for one in values if one is not None]
        if len(known) == len(counts):
            labels: dict[str, Any] = {"x_axis_label": "environments", "y_axis_label": what}
            caption = "The knee: the fewest whose rate is within 5 % of the largest."
            made.append(chart(f"{title} against environments", caption, drawn(known, what), **labels))
    return made


def _draw_candidates(axes: Any, report: PlanReport) -> Series:
    series: Series = {}
    screened = report.screened
    points = zip(screened.label, screened.family, screened.lag_mean, screened.tokens_per_s, strict=True)
    simulated = [(one.label, one.family, one.lag_mean, one.tokens_per_s) for one in report.simulated]
    looks = (("screened", {"size": 4, "alpha": 0.35}, list(points)), ("simulated", {"size": 9}, simulated))
    for what, look, rows in looks:
        for family in dict.fromkeys(row[1] for row in rows):
            style = series_styles([family], [0.0])[0]
            mine = [row for row in rows if row[1] == family]
            data = {"label": [row[0] for row in mine], "x": [row[2] for row in mine], "y": [row[3] for row in mine]}
            shape = {"marker": MARKERS[style.marker], "color": style.color}
            series[f"{family}, {what}"] = [axes.scatter("x", "y", source=Source(data), **shape, **look)]
    known = {label: (lag, rate) for label, _, lag, rate in simulated}
    front = [known[label] for label in report.front]
    lags, rates = [lag for lag, _ in front], [rate for _, rate in front]
    series["Pareto front"] = [axes.step(lags, rates, mode="after", color=MUTED)]
    for one, name, marker in ((report.own, "run file", "diamond"), (report.recommended, "recommended", "star")):
        if one is not None:
            low, high = one.band_tokens_per_s
            data = {"label": [one.label], "x": [one.lag_mean], "y": [one.tokens_per_s]}
            bar = axes.segment([one.lag_mean], [low], [one.lag_mean], [high], color=INK)
            series[name] = [axes.scatter("x", "y", source=Source(data), marker=marker, color=INK, size=16), bar]
    points_drawn = [one for name, found in series.items() if name != "Pareto front" for one in found[:1]]
    hover(axes, points_drawn, ("", "@label"), ("throughput", "@y{0,0} tokens/s"), ("mean lag", "@x{0.00}"))
    return series


def _draw_splits(axes: Any, report: PlanReport) -> Series:
    splits, series = report.splits, Series()
    assert splits.generation_accelerators is not None
    across, levels = splits.generation_accelerators, splits.levels
    if {Level.OPTIMISTIC, Level.PESSIMISTIC} <= levels.keys():
        low, high = levels[Level.PESSIMISTIC], levels[Level.OPTIMISTIC]
        series["pessimistic to optimistic"] = [axes.varea(across, low, high, color=BLUE, alpha=0.2)]
    middle = levels.get(Level.CENTRAL, next(iter(levels.values())))
    line = axes.line("x", "y", source=Source({"x": across, "y": middle}), color=BLUE, line_width=2)
    hover(axes, [line], ("generate", "@x"), ("throughput", "@y{0,0} tokens/s"), mode="vline")
    chosen = report.recommended.cluster.generation_accelerators
    ends = [min(min(rates) for rates in levels.values()), max(max(rates) for rates in levels.values())]
    series["screened"] = [line]
    series["recommended"] = [axes.line([chosen, chosen], ends, color=MUTED, line_dash="dashed")]
    return series


def validation_figures(report: ValidationReport) -> list[Interactive]:
    """Return the figure of a validation: predicted over measured of every row with a relative error."""
    rows = [row for row in report.rows if row.is_relative]

    def draw(axes: Any) -> Series:
        axes.height = HEIGHT + 16 * len(rows)
        axes.hbar([rows[0].id], width=0, height=0, alpha=0)  # the range is categorical
        series: Series = {}
        for family in dict.fromkeys(row.family for row in rows):
            mine = [row for row in rows if row.family == family]
            data = {
                "id": [row.id for row in mine],
                "x": [row.predicted / row.measured for row in mine],
                "low": [(row.low or row.predicted) / row.measured for row in mine],
                "high": [(row.high or row.predicted) / row.measured for row in mine],
                "predicted": [f"{row.predicted:,.4g} {row.quantity}" for row in mine],
                "measured": [f"{row.measured:,.4g} {row.quantity}" for row in mine],
            }
            source = Source(data)
            bar = axes.segment("low", "id", "high", "id", source=source, color=VERMILLION)
            series[family] = [axes.scatter("x", "id", source=source, size=8, color=VERMILLION), bar]
        axes.line([1, 1], [rows[0].id, rows[-1].id], color=MUTED)
        points = [found[0] for found in series.values()]
        hover(axes, points, ("", "@id"), ("predicted", "@predicted"), ("measured", "@measured"), ("ratio", "@x{0.00}"))
        return series

    labels: dict[str, Any] = {"x_axis_label": "predicted / measured", "y_range": [row.id for row in rows][::-1]}
    caption = "1 is right; a line is the 80 % band. A click on a system in the legend takes it away."
    return [chart("Predicted over measured", caption, draw, log="x", **labels)] if rows else []
