"""Rules that predictions of published runs must beat, on the same rows: one's error beside the other's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipelinerl.records.validation_report import PredictedRow, ValidationReport
from sim.validation.rows import PublishedRun


class Beside(NamedTuple):
    """Rows (count), and the rule's figure beside ours: a median error, or pairs in the right order (count)."""

    rows: int
    rule: float
    ours: float


def sum_of_parts(report: ValidationReport, runs: Sequence[PublishedRun]) -> Beside:
    """A step lasts as long as its published generation and training."""
    published = {run.id: run for run in runs}
    errors = []
    for row in report.rows:
        run = published[row.id]
        if "generation" in row.inputs:
            assert run.generate_s is not None
            assert run.train_s is not None
            errors.append((abs((run.generate_s + run.train_s) / row.measured - 1), abs(row.error)))
    return _medians(errors)


def as_much_per_gpu(report: ValidationReport) -> Beside:
    """Every GPU of a system makes as many tokens per second as in the system's other rows."""
    rows = [row for row in report.rows if row.quantity == "s/step" and row.gpus and row.answer_tokens]
    errors = []
    for row in rows:
        others = [one for one in rows if one.family == row.family and one.measured != row.measured]
        if others:
            rule = float(np.median([_log_per_gpu(one) for one in others])) - _log_per_gpu(row)
            errors.append((abs(math.exp(rule) - 1), abs(row.error)))
    return _medians(errors)


def more_apart_staler(report: ValidationReport, runs: Sequence[PublishedRun]) -> Beside:
    """More GPUs are faster; or else asynchronous RL is; or else the staler. Only pairs that this decides."""
    published = {run.id: run for run in runs}
    rows = {row.id: row for row in report.rows}
    right, decided, ours = 0, 0, 0
    for pair in report.pairs:
        keys = []
        for name in pair.rows:
            schedule = published[name].schedule
            assert schedule is not None
            keys.append((rows[name].gpus or 0, schedule.at_once, published[name].max_staleness or 0))
        speeds = [_speed(rows[name]) for name in pair.rows]
        if keys[0] != keys[1]:
            decided, ours = decided + 1, ours + pair.in_order
            right += (keys[0] > keys[1]) is (speeds[0] > speeds[1])
    return Beside(decided, right, ours)


def _log_per_gpu(row: PredictedRow) -> float:
    assert row.gpus is not None
    assert row.answer_tokens is not None
    return math.log(row.measured * row.gpus / row.answer_tokens)


def _speed(row: PredictedRow) -> float:
    return row.measured if row.quantity == "tokens/s" else -row.measured


def _medians(errors: Sequence[tuple[float, float]]) -> Beside:
    rule, ours = np.median(np.array(errors), axis=0)
    return Beside(len(errors), float(rule), float(ours))
