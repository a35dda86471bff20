"""Linear models of times: least squares with lower bounds, and which coefficients the data cannot determine.

A time is a sum of coefficients, each times something known: ``seconds = step_s * steps + sequence_s * sequences``.
What counts is the relative error. Rows are divided by their fitted seconds, not by the measured ones: those that
happened to be short would count more, and the fit would come out too low. No coefficient may be below its bound (times
are not negative); with a handful of coefficients the best solution is found by trying which of them stand at theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pipelinerl.util.arrays import FloatArray

COLLINEAR = 1e-6
"""Singular value, as a share of the largest, below which columns count as one (no unit)."""
UNSURE_SHARE = 0.1
"""A coefficient whose standard error is a larger share of the time than this is not determined (no unit)."""
TINY_SHARE = 0.01
"""A coefficient whose known value is a smaller share of the time is kept before the others (no unit)."""
ROUNDS = 5
"""Rounds of weighting the rows by the fitted times, at most (count)."""
LEAST_WEIGHED = 0.1
"""Lower limit of the fitted time that weights a row, as a share of the measured time (no unit)."""
NOT_WORSE = 1.05
"""Factor on the root mean square error up to which a kept value counts as no worse (no unit)."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One coefficient and its factor in every row."""

    name: str
    factors: FloatArray
    """Shape [rows]."""
    kept: float = 0.0
    """Its value where the data do not determine it."""
    least: float = 0.0
    """Its lower bound."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and how good they are."""

    rows: int
    """Measurements (count)."""
    values: dict[str, float]
    """Fitted or kept."""
    undetermined: dict[str, str]
    """Kept coefficients, each with the reason."""
    mean_error: float
    """Mean of |fitted / measured - 1| (no unit)."""
    max_error: float
    """Largest of them (no unit)."""
    held_out_error: float | None
    """Mean of |predicted / measured - 1| where each row is predicted from all others (no unit). None: too few rows."""


def fit(columns: Sequence[Column], seconds: FloatArray, base: FloatArray | None = None) -> Fit:
    """Fit coefficients to measured times by least squares on the relative error.

    A coefficient is not determined if its column is 0 everywhere, if a combination of columns is 0 everywhere (with
    all measurements at one context, the time of a sequence and that of its context cannot be separated), or if its
    standard error is more than a tenth of the time. Then one of the coefficients concerned is kept at ``kept`` and the
    others are fitted again. The last of the list is kept first; a coefficient whose known value is a negligible share
    of the time is kept before it, unless the error grows.

    Args:
        columns: At most a handful, the surest first.
        seconds: Measured times, above 0, shape [rows] (seconds). ValueError if there is none.
        base: The known part of these times, same shape (seconds). None: 0.
    """
    if not len(seconds):
        raise ValueError("seconds must have a row, got none")
    factors_RC = np.stack([column.factors for column in columns], axis=1)
    base_R = np.zeros(len(seconds)) if base is None else base
    scale_R = seconds
    for _ in range(ROUNDS):
        values_C, undetermined = _weighted(factors_RC / scale_R[:, None], (seconds - base_R) / scale_R, columns)
        fitted_R = base_R + factors_RC @ values_C
        last_R, scale_R = scale_R, np.maximum(fitted_R, LEAST_WEIGHED * seconds)
        if np.allclose(last_R, scale_R, rtol=1e-9):
            break
    error_R = np.abs(fitted_R / seconds - 1)
    kept = {index for index, column in enumerate(columns) if column.name in undetermined}
    return Fit(
        rows=len(seconds),
        values={column.name: float(value) for column, value in zip(columns, values_C, strict=True)},
        undetermined=undetermined,
        mean_error=float(error_R.mean()),
        max_error=float(error_R.max()),
        held_out_error=_held_out(
            factors_RC / seconds[:, None], (fitted_R - seconds) / seconds, values_C, columns, kept
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """Values that bring ``share @ values`` near ``goal``, with the rows reduced to one more than there are columns.

    The triangle of a QR factorisation of [share, goal] has the same squared error for all values as the rows have.
    """

    share_RC: FloatArray
    goal_R: FloatArray
    mean_C: FloatArray
    """Mean of each column over all rows: share of the time of a mean row, per unit."""
    num_rows: int

    @classmethod
    def of(cls, share_RC: FloatArray, goal_R: FloatArray) -> _Problem:
        mean_C = np.abs(share_RC).mean(axis=0)
        triangle: FloatArray = np.linalg.qr(np.concatenate([share_RC, goal_R[:, None]], axis=1)).R
        return cls(triangle[:, :-1], triangle[:, -1], mean_C, len(goal_R))

    def loss(self, values_C: FloatArray) -> float:
        return float(np.linalg.norm(self.share_RC @ values_C - self.goal_R) / np.sqrt(self.num_rows))


def _weighted(share_RC: FloatArray, goal_R: FloatArray, columns: Sequence[Column]) -> tuple[FloatArray, dict[str, str]]:
    """Return the coefficients nearest to ``goal_R``, and the reasons for kept ones."""
    kept = {index: column.kept for index, column in enumerate(columns) if not share_RC[:, index].any()}
    undetermined = {columns[index].name: "no measurement depends on it" for index in kept}
    problem = _Problem.of(share_RC, goal_R)
    values_C, loss = _bounded(problem, columns, kept)
    while together := _undecided(problem, loss, [index for index in range(len(columns)) if index not in kept]):
        tried = {index: _bounded(problem, columns, kept | {index: columns[index].kept}) for index in together}
        allowed = max(NOT_WORSE * loss, 1e-9)
        fitting = [one for one in together if tried[one][1] <= allowed]
        # One with a negligible share of the time would have to change by a large factor to make up for the others.
        tiny = [one for one in fitting if 0 < problem.mean_C[one] * columns[one].kept < TINY_SHARE]
        # If every kept value contradicts the measurements, the one that contradicts them least.
        index = [*fitting, *tiny][-1] if fitting else min(together, key=lambda one: tried[one][1])
        kept[index] = columns[index].kept
        others = [columns[one].name for one in together if one != index]
        undetermined[columns[index].name] = f"cannot be told from {' and '.join(others)}"
        values_C, loss = tried[index]
    return values_C, undetermined


def _bounded(problem: _Problem, columns: Sequence[Column], kept: dict[int, float]) -> tuple[FloatArray, float]:
    """Return the best coefficients not below their bounds, and their RMS error: all sets at bounds are tried."""
    base_C = np.array([kept.get(index, column.least) for index, column in enumerate(columns)])
    least_C = np.array([column.least for column in columns])
    free = [index for index in range(len(columns)) if index not in kept]
    best_C, best = base_C, problem.loss(base_C)
    for some in (list(chosen) for size in range(1, len(free) + 1) for chosen in combinations(free, size)):
        values_C = base_C.copy()
        values_C[some] = 0.0
        rest_R = problem.goal_R - problem.share_RC @ values_C
        some_RF = problem.share_RC[:, some]
        scale_F = np.abs(some_RF).max(axis=0)
        values_C[some] = np.linalg.lstsq(some_RF / scale_F, rest_R, rcond=None)[0] / scale_F
        loss = problem.loss(values_C)
        if (values_C[some] >= least_C[some]).all() and loss < best - 1e-15:
            best_C, best = values_C, loss
    return best_C, best


def _undecided(problem: _Problem, loss: float, free: list[int]) -> list[int]:
    """Return two or more coefficients that the data cannot separate; empty if there are none."""
    if not free:
        return []
    some_RF = problem.share_RC[:, free]
    norm_F = np.linalg.norm(some_RF, axis=0)
    _, singular, right_FF = np.linalg.svd(some_RF / norm_F, full_matrices=True)
    singular_F = np.zeros(len(free))
    singular_F[: len(singular)] = singular
    weak = singular_F < COLLINEAR * singular_F[0]
    if weak.any():
        direction_F = right_FF[np.flatnonzero(weak)[0]]
        return [index for index, part in zip(free, np.abs(direction_F), strict=True) if part > 1e-3]
    if problem.num_rows <= len(free):
        return []  # as many unknowns as equations: an exact solution, and no noise to judge by
    variance = loss**2 * problem.num_rows / (problem.num_rows - len(free))
    error_F = np.sqrt(variance * np.square(right_FF.T / singular_F).sum(axis=1)) / norm_F
    share_F = error_F * problem.mean_C[free]
    if share_F.max() <= UNSURE_SHARE or len(free) == 1:
        return []  # each is determined, or there is no other to be fitted again
    direction_F = np.abs(right_FF[singular_F.argmin()])
    direction_F[share_F.argmax()] = np.inf
    most = np.sort(direction_F)[-2]  # the coefficient that depends most on the least certain one
    return [index for index, part in zip(free, direction_F, strict=True) if part >= 0.5 * most]


def _held_out(
    share_RC: FloatArray, error_R: FloatArray, values_C: FloatArray, columns: Sequence[Column], kept: set[int]
) -> float | None:
    """Return the mean error of predicting each row from all others, with the same coefficients at their bounds."""
    inside = [index for index, column in enumerate(columns) if index not in kept and values_C[index] > column.least]
    if len(share_RC) < len(inside) + 2:
        return None
    if inside:
        some_RF = share_RC[:, inside]
        orthogonal_RF = np.linalg.qr(some_RF / np.linalg.norm(some_RF, axis=0))[0]
        leverage_R = np.square(orthogonal_RF).sum(axis=1)
        if (leverage_R > 1 - 1e-9).any():
            return None  # a coefficient depends on one row alone
        error_R = error_R / (1 - leverage_R)
    return float(np.abs(error_R).mean())
