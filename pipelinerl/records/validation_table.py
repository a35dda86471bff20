"""A validation in words: the cells of its table, the table as Markdown, and a sentence."""

from __future__ import annotations

from pipelinerl.hardware.prior import CERTAIN
from pipelinerl.records.validation_report import PredictedRow, SpeedUp, SpeedUpSummary, ValidationReport

TABLE_FILE = "validation.md"
COLUMNS = (
    "run", "unit", "measured", "predicted", "80 % band", "error", "alone", "inputs of the row itself", "assumed",
    "rows used",
)  # fmt: skip


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
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(validation_cells(row) for row in report.rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    unusable = [f"- `{one.id}`: {one.reason}" for one in report.unusable]
    pairs = [f"- {speed_up_words(one)}" for one in report.speed_ups]
    return "\n".join(
        [*lines, "", "Not usable:", "", *unusable, "", PAIRS_TITLE, "", *pairs, "", validation_sentence(report), ""]
    )


PAIRS_TITLE = "Asynchronous against synchronous on equal GPUs, no row of the family used:"


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
        naive = (
            ""
            if alone.naive_median_error is None
            else (f"; {alone.naive_median_error:.0%} by tokens per second and GPU of the others")
        )
        parts.append(
            f"alone, {alone.rows} rows of {alone.families} systems that nobody has measured: median error "
            f"{alone.median_error:.0%} ({alone.median_error_low:.0%} to {alone.median_error_high:.0%}, families "
            f"resampled{naive}), "
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
