"""Put the predictions together: every row, the pairs in order, and the errors in a few numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from pipelinerl.records.validation_report import (
    AloneSummary,
    PredictedRow,
    RowPair,
    SpeedUp,
    UnusableRow,
    ValidationReport,
    ValidationSummary,
)
from sim.validation.pairs import speed_up_summary
from sim.validation.unseen import median_interval, spread_of

SAME = 0.05
"""Logs of two measurements nearer than this say nothing about which is faster."""


def validation_report(
    predictions: Sequence[PredictedRow | UnusableRow], made: tuple[SpeedUp, ...] = ()
) -> ValidationReport:
    """Return the content of validation.json: every row, and how far off they are together."""
    rows = tuple(one for one in predictions if isinstance(one, PredictedRow))
    pairs = tuple(
        RowPair(rows=(one.id, other.id), in_order=(one.predicted < other.predicted) is (one.measured < other.measured))
        for one, other in itertools.combinations(rows, 2)
        if one.family == other.family
        and one.quantity == other.quantity
        and abs(math.log(one.measured / other.measured)) > SAME
    )
    return ValidationReport(
        rows=rows,
        unusable=tuple(one for one in predictions if isinstance(one, UnusableRow)),
        pairs=pairs,
        speed_ups=made,
        summary=_summary(rows, pairs, made),
    )


def _summary(rows: Sequence[PredictedRow], pairs: Sequence[RowPair], made: Sequence[SpeedUp]) -> ValidationSummary:
    relative = sorted(abs(one.error) for one in rows if one.is_relative)
    simulated = [abs(one.error) for one in rows if one.is_simulated]
    absolute = [abs(one.error) for one in rows if not one.is_relative]
    return ValidationSummary(
        rows=len(rows),
        median_error=_median(relative),
        median_error_simulated=_median(simulated),
        alone=_alone([one for one in rows if one.alone is not None]),
        speed_ups=speed_up_summary(made),
        p90_error=float(np.quantile(relative, 0.9)) if relative else None,
        within_30_percent=sum(one <= 0.3 for one in relative) / len(relative) if relative else None,
        largest_staleness_error=max(absolute) if absolute else None,
        pairs=len(pairs),
        pairs_in_order=sum(pair.in_order for pair in pairs) / len(pairs) if pairs else None,
    )


def _median(errors: Sequence[float]) -> float | None:
    return float(np.median(errors)) if errors else None


def _alone(rows: Sequence[PredictedRow]) -> AloneSummary | None:
    """Return the errors of rows that are predicted alone; None if there are none."""
    if not rows:
        return None
    log_errors = _by_family([(row, math.log(_ratio(row))) for row in rows])
    errors = _by_family([(row, abs(_ratio(row) - 1)) for row in rows])
    every = [error for family in errors.values() for error in family]
    low, high = median_interval(errors)
    spread = spread_of(log_errors)
    return AloneSummary(
        rows=len(rows),
        families=len(errors),
        median_error=float(np.median(every)),
        median_error_low=low,
        median_error_high=high,
        p90_error=float(np.quantile(every, 0.9)),
        within_45_percent=sum(error <= 0.45 for error in every) / len(every),
        within_band=sum(_inside(row) for row in rows) / len(rows),
        bias=float(np.mean([error for family in log_errors.values() for error in family])),
        family_sd=spread.family_sd,
        row_sd=spread.row_sd,
        naive_median_error=_naive(rows),
    )


def _ratio(row: PredictedRow) -> float:
    """Return predicted over measured of a row alone."""
    assert row.alone is not None
    return row.alone / row.measured


def _inside(row: PredictedRow) -> bool:
    return row.alone_low is not None and row.alone_high is not None and row.alone_low <= row.measured <= row.alone_high


def _by_family(values: Sequence[tuple[PredictedRow, float]]) -> dict[object, list[float]]:
    families: dict[object, list[float]] = {}
    for row, value in values:
        families.setdefault(row.family, []).append(value)
    return families


def _naive(rows: Sequence[PredictedRow]) -> float | None:
    """Return the median error of the rule that all systems make as many tokens per second and GPU."""
    log_s = {
        row.id: math.log(row.measured * row.gpus / row.answer_tokens)
        for row in rows
        if row.gpus and row.answer_tokens and row.quantity == "s/step"
    }
    errors = []
    for row in rows:
        others = [log_s[one.id] for one in rows if one.family != row.family and one.id in log_s]
        if row.id in log_s and others:
            errors.append(abs(math.exp(float(np.median(others)) - log_s[row.id]) - 1))
    return _median(errors)
