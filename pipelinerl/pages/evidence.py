"""Predictions beside measurements: published runs, as a page and as a Markdown table, and the log of a job."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pipelinerl.calibration.log import CalibratedLog, quantile
from pipelinerl.hardware.prior import CERTAIN
from pipelinerl.pages.page import Page, Place, Section, Table, markdown_table, short
from pipelinerl.records.plan_report import DiagnosisReport, Gain
from pipelinerl.records.validation_report import PredictedRow, SpeedUp, SpeedUpSummary, ValidationReport
from pipelinerl.util.arrays import grouped

TABLE_FILE = "validation.md"
COLUMNS = (
    "run", "unit", "measured", "predicted", "80 % band", "error", "alone", "inputs of the row itself", "assumed",
    "rows used",
)  # fmt: skip
PAIRS_TITLE = "Asynchronous against synchronous on equal GPUs, no row of the family used:"


def validation_cells(row: PredictedRow) -> list[str]:
    """Return the cells of a row, in the order of ``COLUMNS``."""
    error = f"{row.error:+.0%}" if row.is_relative else f"{row.error:+.2f}"
    band = "" if row.low is None or row.high is None else f"{row.low:,.4g}-{row.high:,.4g}"
    return [
        row.id,
        row.quantity,
        f"{row.measured:,.4g}",
        f"{row.predicted:,.4g}",
        band,
        error,
        "" if row.alone is None else f"{row.alone:,.4g}",
        ", ".join(row.inputs),
        "; ".join(row.assumed),
        str(len(row.fitted_to)),
    ]


def validation_markdown(report: ValidationReport) -> str:
    """Return the table of a validation in Markdown, as docs/validation.md has it."""
    lines = markdown_table(COLUMNS, [validation_cells(row) for row in report.rows])
    unusable = [f"- `{one.id}`: {one.reason}" for one in report.unusable]
    pairs = [f"- {speed_up_words(one)}" for one in report.speed_ups]
    return "\n".join(
        [*lines, "", "Not usable:", "", *unusable, "", PAIRS_TITLE, "", *pairs, "", validation_sentence(report), ""]
    )


def speed_up_words(one: SpeedUp) -> str:
    """Return a pair in a line: how many times as fast, and how probable it is that it is faster at all."""
    if one.probability >= CERTAIN:
        verdict = "faster"
    elif one.probability <= 1 - CERTAIN:
        verdict = "slower"
    else:
        verdict = f"not certain, by the {one.decided_by} most of all"
    return (
        f"{one.asynchronous} against {one.synchronous}: {one.predicted:.2f} times as fast ({one.low:.2f} to "
        f"{one.high:.2f}), measured {one.measured:.2f}; P(faster) {one.probability:.2f}: {verdict}"
    )


def validation_sentence(report: ValidationReport) -> str:
    """Return the errors of the predictions in a sentence."""
    summary = report.summary
    parts = [f"{summary.rows} rows predicted, {len(report.unusable)} not usable"]
    if summary.median_error is not None:
        parts.append(f"median error {summary.median_error:.0%}, 9 of 10 within {summary.p90_error:.0%}")
        parts.append(f"{summary.within_30_percent:.0%} within 30 %")
    if summary.median_error_simulated is not None:
        parts.append(f"of the simulated ones alone the median is {summary.median_error_simulated:.0%}")
    if (alone := summary.alone) is not None:
        naive = alone.naive_median_error
        beside = "" if naive is None else f"; {naive:.0%} by tokens per second and GPU of the others"
        parts.append(
            f"alone, {alone.rows} rows of {alone.families} systems that nobody has measured, corrected by the shipped "
            f"rows {'only' if report.others_only else 'and by these'}: median error "
            f"{alone.median_error:.0%} ({alone.median_error_low:.0%} to {alone.median_error_high:.0%}, families "
            f"resampled{beside}), "
            f"{alone.within_45_percent:.0%} within 45 %, {alone.within_band:.0%} inside the 80 % band"
        )
    if summary.pairs_in_order is not None:
        parts.append(f"{summary.pairs_in_order:.0%} of {summary.pairs} pairs in the right order")
    if (pairs := summary.speed_ups) is not None:
        parts.append(_pairs_words(pairs))
    if summary.largest_staleness_error is not None:
        parts.append(f"mean staleness off by {summary.largest_staleness_error:.2f} at most")
    return "; ".join(parts) + "."


def _pairs_words(pairs: SpeedUpSummary) -> str:
    return (
        f"{pairs.pairs} asynchronous runs beside synchronous ones on equal GPUs, {pairs.families} systems "
        f'({pairs.faster} faster): Brier score {pairs.brier:.2f} ({pairs.always_brier:.2f} by "always faster"; '
        f"difference {pairs.brier_difference_low:+.2f} to {pairs.brier_difference_high:+.2f}, families resampled), "
        f"{pairs.certain_right} of {pairs.certain} with P >= {CERTAIN:g} right; the ratio is off by "
        f"{pairs.median_error:.0%} in the median ({pairs.constant_median_error:.0%} by the median of the others; "
        f"difference {100 * pairs.error_difference_low:+.0f} to {100 * pairs.error_difference_high:+.0f} points), "
        f"{pairs.within_band:.0%} inside the 80 % band"
    )


def validation_page(report: ValidationReport) -> Page:
    """Return the page of a validation."""
    assumed = grouped((words, row.id) for row in report.rows for words in row.assumed)
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
    columns, rows = ("", "log", "simulated", "difference", "before"), list(_log_cells(result))
    return Page(
        title="A job beside its simulation",
        question="How far is the simulation from the log, before and after the calibration?",
        answer="",
        sections=[
            Section("job", [f"{log.num_steps} steps of a {kind} job{left_out}", *factors], Place.LINES),
            Section("assumed", [f"- {line}" for line in (*result.assumed, *result.fit.notes)], Place.LINES),
        ],
        tables=[Table(title="your run beside its simulation", columns=columns, rows=rows, sortable=False)],
    )


def diagnosis_page(report: DiagnosisReport) -> Page:
    """Return the page of a job's GPU time, and of the changes that gain most."""
    rows = [[one.part, f"{one.gpu_s:,.4g}", f"{one.share:.1%}", one.source] for one in report.gpu_time]
    changes = [line for one in report.gains for line in _gain_lines(one)] or [
        "none gains more than a tie within the limits"
    ]
    if report.asynchronous is not None and report.asynchronous not in report.gains:
        changes += _gain_lines(report.asynchronous)
    left_out = f", {report.num_left_out} left out (start, evaluations, checkpoints)" if report.num_left_out else ""
    return Page(
        title="A job's GPU time",
        question="Where does a job's GPU time go, and what would change it?",
        answer="",
        sections=[
            Section("changes that gain most, each alone (band: 80 % of the draws)", changes, Place.LIST),
            Section("steps", [f"{report.num_steps} steps read{left_out}"], Place.LINES),
            Section("notes", [f"- {line}" for line in report.notes], Place.LINES),
        ],
        tables=[
            Table(
                title=f"GPU-seconds of a step: {report.step_s:.4g} s on {report.accelerators} GPUs",
                columns=("", "GPU-s", "share", "source"),
                rows=rows,
                note="source: the log, the simulation of the calibrated job, or the rest; the tail is a part of the "
                "generation in the log",
                sortable=False,
            )
        ],
    )


def _gain_lines(one: Gain) -> list[str]:
    sets = " ".join(f"--set {shlex.quote(key)}" for key in one.set)
    times = f"{one.times:.2f} times as fast ({one.band.low:.2f} to {one.band.high:.2f})"
    return [f"{one.change}: {times}, mean lag {one.lag_mean:.2f}", f"  {sets}"]


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
    return "not known" if value is None else short(value)
