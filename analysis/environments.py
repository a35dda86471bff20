"""The figure of ``environments``: throughput and cost against their number."""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis.style import BLUE, COLUMN_IN, MUTED, VERMILLION, add_legend, house_style, make_panels
from pipelinerl.records.environments_report import EnvironmentsReport


@house_style
def rollouts_against_environments(report: EnvironmentsReport) -> Figure:
    """Draw rollouts per hour against the number of environments, and the knee.

    Returns:
        One panel, or with prices two that share the number of environments: the lower one has the cost of a rollout.
    """
    costs = [row.usd_per_1000_rollouts for row in report.rows]
    priced = None not in costs
    figure, panels = make_panels(COLUMN_IN, 3.2 if priced else 2.0, rows=1 + priced, sharex=True)
    axes, counts = panels[0][0], [row.count for row in report.rows]
    axes.plot(counts, [row.rollouts_per_hour for row in report.rows], "o-", color=BLUE, label="rollouts per hour")
    axes.set(ylabel="trained (rollouts/h)", ylim=(0, None), xlim=(0, None), title="Throughput")
    if priced:
        lower = panels[1][0]
        lower.plot(counts, costs, "o-", color=BLUE, label="cost")
        lower.set(ylabel="USD per 1000 rollouts", ylim=(0, None), title="Cost, accelerators and environments")
    panels[-1][0].set(xlabel="environments")
    for panel in panels.flat:
        panel.axvline(report.knee, color=VERMILLION, linewidth=0.8, linestyle="--", label=f"knee: {report.knee}")
        panel.axvline(
            report.slots, color=MUTED, linewidth=0.8, linestyle=":", label=f"slots of engines: {report.slots}"
        )
        panel.grid(axis="y")
    add_legend(figure, axes, "What more environments give")
    return figure
