"""A report in a notebook: a sentence, a table, and a figure drawn from the report alone."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from analysis.chart import DPI, drawn
from analysis.figures import throughput_against_lag, throughput_against_max_lag, time_split_figure
from analysis.read import Run
from pipelinerl.pages.page import Page, Table
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.profile_report import FigureData, GenerationWindow, LagByPosition, LagHistogram, Timeline
from pipelinerl.records.reports import RunReport

NOTHING = FigureData(
    lag_histogram=LagHistogram(total=[], in_flight=[], in_queue=[]),
    lag_by_position=LagByPosition(width_tokens=1, lag_mean=[], tokens=[]),
    generation_window=GenerationWindow(start_s=0.0, width_s=0.0, in_progress=[], tokens_per_s=[]),
    timeline=Timeline(until_s=0.0, trainer=[], engines=[], updates=[]),
)


def html_of(page: Page, report: RunReport | ComparisonReport | PlanReport) -> str:
    """Return a page as HTML for a notebook: answer, table, sections, and a figure of its report as a picture."""
    figure = _figure(report)
    lines = (f"{one.title}: {line}" for one in page.sections for line in one.lines)
    return "".join(
        [
            f"<p>{escape(page.answer)}</p>",
            *(_table(table) for table in page.tables),
            f"<p>{'<br/>'.join(escape(line) for line in lines)}</p>",
            "" if figure is None else _picture(figure),
        ]
    )


def _figure(report: RunReport | ComparisonReport | PlanReport) -> Figure | None:
    if isinstance(report, PlanReport):
        return drawn(throughput_against_lag(report), height=2.4)
    if isinstance(report, RunReport):
        return time_split_figure([_run(report.scheduler, report)]) if report.samples_trained else None
    arms = next((one.arms for one in report.scenarios if one.arms), [])
    runs = [_run(arm.name, arm.summary) for arm in arms]
    return drawn(throughput_against_max_lag(runs), height=2.0) if runs else None


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
