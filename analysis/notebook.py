"""What a notebook shows of a report: a sentence, a table, and a figure that needs nothing but the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from analysis.figures import time_split
from analysis.planning import throughput_against_lag
from analysis.read import Run
from analysis.style import DPI
from analysis.throughput import rate_points, throughput_against_max_lag
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.page import Table
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.profile_report import FigureData, GenerationWindow, LagByPosition, LagHistogram, Timeline
from pipelinerl.records.reports import RunReport

NOTHING = FigureData(
    lag_histogram=LagHistogram(total=[], in_flight=[], in_queue=[]),
    lag_by_position=LagByPosition(width_tokens=1, lag_mean=[], tokens=[]),
    generation_window=GenerationWindow(start_s=0.0, width_s=0.0, in_progress=[], tokens_per_s=[]),
    timeline=Timeline(until_s=0.0, trainer=[], engines=[], updates=[]),
)
"""Of a run of which only the report is at hand."""


def html_of(
    report: RunReport | ComparisonReport | PlanReport, table: Table, answer: str, lines: Sequence[str] = ()
) -> str:
    """Return a report as HTML for a notebook: the answer in a sentence, its table, its figure as a picture.

    Args:
        report: What the figure shows.
        table: Its numbers.
        answer: Its sentence; may be empty.
        lines: What else is to know, below the table.
    """
    figure = _figure(report)
    said = f"<p>{'<br/>'.join(escape(line) for line in lines)}</p>" if lines else ""
    return f"<p>{escape(answer)}</p>{_table(table)}{said}{'' if figure is None else _picture(figure)}"


def _figure(report: RunReport | ComparisonReport | PlanReport) -> Figure | None:
    """Return throughput against lag of a plan or comparison, the trainer's time of a run; None without a step."""
    if isinstance(report, PlanReport):
        return throughput_against_lag(report)
    if isinstance(report, RunReport):
        return time_split([_run(report.scheduler, report)]) if report.samples_trained else None
    arms = next((one.arms for one in report.scenarios if one.arms), [])
    points, unit = rate_points([_run(arm.name, arm.summary) for arm in arms])
    return throughput_against_max_lag(points, unit=unit) if points else None


def _run(name: str, report: RunReport) -> Run:
    return Run(name=name, report=report, steps=report.steps, figure_data=NOTHING, metrics={})


def _table(table: Table) -> str:
    rows: Sequence[Sequence[str]] = table.rows
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    note = f"<p><small>{escape(table.note)}</small></p>" if table.note else ""
    caption = f"<caption>{escape(table.title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _picture(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="figure" width="{96 * figure.get_figwidth() * 1.5:.0f}" src="data:image/png;base64,{data}"/>'
