"""The figures of a plan: throughput against lag of every candidate (Fig. 3b of the paper), and against the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.style import (
    BLUE,
    COLUMN_IN,
    INK,
    LIMIT,
    MUTED,
    add_legend,
    handy_scale,
    house_style,
    make_panels,
    save_figure,
    series_styles,
)
from pipelinerl.hardware.coefficients import Level
from pipelinerl.records.plan_report import PlanReport


@house_style
def throughput_against_lag(report: PlanReport) -> Figure:
    """Draw throughput against mean lag (Fig. 3b): every screened candidate, the simulated ones, their Pareto front.

    Returns:
        One panel; bars through the recommendation and the run file reach from pessimistic to optimistic.
    """
    figure, [[axes]] = make_panels(COLUMN_IN, 2.4)
    scale, word = handy_scale(max(one.tokens_per_s for one in report.simulated))
    screened = report.screened
    families = np.array(screened.family)
    lags, rates = np.array(screened.lag_mean), np.array(screened.tokens_per_s) / scale
    dots: dict[str, Any] = {"markersize": 1.6, "alpha": 0.35, "markeredgewidth": 0}
    for family in dict.fromkeys(screened.family):
        style = series_styles([family], [0.0])[0]
        of_it = families == family
        axes.plot(lags[of_it], rates[of_it], ".", color=style.color, label=f"{family}, screened", **dots)
    look: dict[str, Any] = {"markeredgecolor": "white", "linestyle": "none"}
    for family in dict.fromkeys(one.family for one in report.simulated):
        style = series_styles([family], [0.0])[0]
        mine = [(one.lag_mean, one.tokens_per_s / scale) for one in report.simulated if one.family == family]
        axes.plot(*zip(*mine, strict=True), style.marker, color=style.color, label=f"{family}, simulated", **look)
    simulated = {one.label: (one.lag_mean, one.tokens_per_s / scale) for one in report.simulated}
    front = [simulated[label] for label in report.front]
    axes.plot(*zip(*front, strict=True), color=MUTED, linewidth=0.7, drawstyle="steps-post", label="Pareto front")
    for one, marker, name in ((report.own, "D", "run file"), (report.recommended, "*", "recommended")):
        if one is not None:
            low, high = one.band_tokens_per_s
            band = "their bands" if one is report.recommended else None
            axes.vlines(one.lag_mean, low / scale, high / scale, color=INK, linewidth=0.7, label=band)
            axes.plot(one.lag_mean, one.tokens_per_s / scale, marker, color=INK, markersize=7, label=name)
    if report.run.mean_lag_limit is not None:
        axes.axvline(report.run.mean_lag_limit, label="mean_lag_limit", **LIMIT)
    axes.set(xlabel="mean lag (optimizer steps)", ylabel=f"throughput ({word}tokens/s)", xlim=(0, None), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid()
    add_legend(figure, axes, "Throughput against mean lag of what was tried")
    return figure


@house_style
def throughput_against_split(report: PlanReport) -> Figure:
    """Draw the screened throughput of a recommendation that is not colocated against the split, with its band.

    Returns:
        One panel; the line is the central level or else the only one, the vertical line the recommended split.
    """
    figure, [[axes]] = make_panels(COLUMN_IN, 1.9)
    splits, chosen = report.splits, report.recommended.cluster.generation_accelerators
    across = splits.generation_accelerators
    assert across is not None
    assert chosen is not None
    levels = splits.levels
    scale, word = handy_scale(max(max(rates) for rates in levels.values()))
    curves = {level: np.array(rates) / scale for level, rates in levels.items()}
    if {Level.OPTIMISTIC, Level.PESSIMISTIC} <= curves.keys():
        low, high = curves[Level.PESSIMISTIC], curves[Level.OPTIMISTIC]
        axes.fill_between(across, low, high, color=BLUE, alpha=0.2, linewidth=0, label="pessimistic to optimistic")
    axes.plot(across, curves.get(Level.CENTRAL, next(iter(curves.values()))), color=BLUE, label="screened")
    axes.axvline(chosen, color=MUTED, linewidth=0.8, linestyle="--", label="recommended")
    axes.set(xlabel="accelerators that generate", ylabel=f"throughput ({word}tokens/s)", xlim=(0, None), ylim=(0, None))
    axes.grid()
    add_legend(figure, axes, "Throughput against the split")
    return figure


def save_plan(report: PlanReport, figures: str | Path) -> list[Path]:
    """Draw a plan.

    Args:
        report: The plan.
        figures: Folder of the figures; made if it does not exist.

    Returns:
        The files, two per figure.

    Raises:
        OSError: If a file cannot be written.
    """
    figures = Path(figures)
    figures.mkdir(parents=True, exist_ok=True)
    paths = save_figure(throughput_against_lag(report), figures, "plan_throughput_against_lag")
    if report.splits.generation_accelerators:
        paths += save_figure(throughput_against_split(report), figures, "plan_throughput_against_split")
    return paths
