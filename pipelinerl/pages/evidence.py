"""Pages of predictions beside measurements: published runs, and the log of a job."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.calibration.log import CalibratedLog, quantile
from pipelinerl.pages.page import Page, Place, Section, Table
from pipelinerl.records.validation_report import ValidationReport
from pipelinerl.records.validation_table import (
    COLUMNS,
    PAIRS_TITLE,
    speed_up_words,
    validation_cells,
    validation_sentence,
)


def validation_page(report: ValidationReport) -> Page:
    """Return the page of a validation."""
    assumed: dict[str, list[str]] = {}
    for row in report.rows:
        for words in row.assumed:
            assumed.setdefault(words, []).append(row.id)
    return Page(
        title="Predictions beside published runs",
        question="How far are predictions from what others have measured and published?",
        answer=validation_sentence(report),
        sections=[
            Section("assumed", [f"{words}: {', '.join(ids)}" for words, ids in assumed.items()], Place.LIST),
            Section("not usable", [f"{one.id}: {one.reason}" for one in report.unusable], Place.LIST),
            Section(PAIRS_TITLE.rstrip(":"), [speed_up_words(pair) for pair in report.speed_ups], Place.LIST),
        ],
        tables=[
            Table(
                title="each predicted from its inputs and from other rows, never from its own result",
                columns=COLUMNS,
                rows=[validation_cells(row) for row in report.rows],
                texts=("run", "unit"),
                terminal_columns=6,
            )
        ],
    )


_LOG_ROWS = {
    "step_s": "seconds per step",
    "generation_s": "  generation",
    "training_s": "  training",
    "sync_s": "  weight sync",
    "wait_s": "  trainer waits",
    "tokens_per_s": "tokens/s",
    "samples": "answers per step",
    "length_mean": "answer: mean",
    "length_p90": "  90 % up to",
    "length_p95": "  95 % up to",
    "length_max": "  longest",
    "lag_mean": "staleness: mean",
    "lag_max": "  largest",
}


def log_page(result: CalibratedLog) -> Page:
    """Return the page of a job beside its simulation, before and after the calibration."""
    log = result.log
    left_out = f", {log.num_left_out} left out (start, evaluations, checkpoints)" if log.num_left_out else ""
    kind = "asynchronous" if log.asynchronous else "synchronous"
    factors = [
        f"{name}: {factor:.3g} times as long as the hardware model says" for name, factor in result.fit.factors.items()
    ]
    return Page(
        title="A job beside its simulation",
        question="How far is the simulation from the log, before and after the calibration?",
        answer="",
        sections=[
            Section("job", [f"{log.num_steps} steps of a {kind} job{left_out}", *factors], Place.LINES),
            Section("assumed", [f"- {line}" for line in (*result.assumed, *result.fit.notes)], Place.LINES),
        ],
        tables=[
            Table(
                title="your run beside its simulation",
                columns=("", "log", "simulated", "difference", "before"),
                rows=list(_log_cells(result)),
                sortable=False,
            )
        ],
    )


def _log_cells(result: CalibratedLog) -> Iterator[list[str]]:
    length = result.run.workload.length
    drawn = {"length_max": float(length.max)}
    if length.kind == "lognormal":
        drawn |= {"length_p90": quantile(length, 0.9), "length_p95": quantile(length, 0.95)}
    for column, label in _LOG_ROWS.items():
        logged, before = getattr(result.log.mean, column), getattr(result.predicted, column)
        simulated = drawn.get(column, getattr(result.simulated, column))
        if column == "length_max":
            logged = result.log.longest
        unasked = column.startswith("length_p") or (column.startswith("lag_") and not result.log.asynchronous)
        if logged is None and (simulated is None or unasked):
            continue
        off = "" if not logged or simulated is None else f"{simulated / logged - 1:+.1%}"
        yield [label, *(_known(value) for value in (logged, simulated)), off, "" if before is None else _known(before)]


def _known(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
