"""Put the predictions together: every row, the pairs in order, and the errors in a few numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from pipelinerl.records.validation_report import (
    PredictedRow,
    RowPair,
    UnusableRow,
    ValidationReport,
    ValidationSummary,
)

SAME = 0.05
"""Logs of two measurements nearer than this say nothing about which is faster."""


def validation_report(predictions: Sequence[PredictedRow | UnusableRow]) -> ValidationReport:
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
        summary=_summary(rows, pairs),
    )


def _summary(rows: Sequence[PredictedRow], pairs: Sequence[RowPair]) -> ValidationSummary:
    relative = sorted(abs(one.error) for one in rows if one.is_relative)
    simulated = [abs(one.error) for one in rows if one.is_simulated]
    alone = [abs(one.alone / one.measured - 1) for one in rows if one.alone is not None]
    absolute = [abs(one.error) for one in rows if not one.is_relative]
    return ValidationSummary(
        rows=len(rows),
        median_error=_median(relative),
        median_error_simulated=_median(simulated),
        median_error_alone=_median(alone),
        p90_error=float(np.quantile(relative, 0.9)) if relative else None,
        within_30_percent=sum(one <= 0.3 for one in relative) / len(relative) if relative else None,
        largest_staleness_error=max(absolute) if absolute else None,
        pairs=len(pairs),
        pairs_in_order=sum(pair.in_order for pair in pairs) / len(pairs) if pairs else None,
    )


def _median(errors: Sequence[float]) -> float | None:
    return float(np.median(errors)) if errors else None
