"""Charts of plans, numbers of environments and validations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from analysis.chart import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    PURPLE,
    SKY,
    VERMILLION,
    Axis,
    Chart,
    Mark,
    Series,
    rule,
    series_styles,
)
from pipelinerl.records.environments_report import EnvironmentsReport
from pipelinerl.records.plan_report import PlannedCandidate, PlanReport
from pipelinerl.records.validation_report import ValidationReport

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
    families: dict[str, list[tuple[float, float, str]]] = {}
    for family, lag, rate, label in candidates:
        families.setdefault(family, []).append((lag, rate, label))
    series = []
    for family, places in families.items():
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
