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
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

COLLINEAR = 1e-6
"""Singular value, as a share of the largest, below which columns count as one (no unit)."""
UNSURE_SHARE = 0.1
"""A coefficient whose standard error is a larger share of the time than this is not determined (no unit)."""
ROUNDS = 5
"""Times that rows are weighted anew by what was fitted (count)."""
LEAST_WEIGHED = 0.1
"""Least that a fitted time counts as when it weighs a row, as a share of the measured one (no unit)."""
NOT_WORSE = 1.05
"""Factor on the root mean square error up to which keeping a value counts as no worse (no unit)."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One coefficient, and what it is multiplied with in every row."""

    name: str
    """What reports call the coefficient."""
    factors: FloatArray
    """What it is multiplied with, shape [rows]."""
    kept: float = 0.0
    """Its value where the data do not determine it."""
    least: float = 0.0
    """The least it may be."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and how good they are."""

    values: dict[str, float]
    """Every coefficient by name, fitted or kept."""
    undetermined: dict[str, str]
    """Coefficients that the data cannot determine and that were kept, each with the reason."""
    rows: int
    """Measurements (count)."""
    mean_error: float
    """Mean of |fitted / measured - 1| (no unit)."""
    max_error: float
    """Largest of them (no unit)."""
    held_out_error: float | None
    """Mean of |predicted / measured - 1| where each row is predicted from all others (no unit). None: too few rows."""


def fit(columns: Sequence[Column], seconds: FloatArray) -> Fit:
    """Fit coefficients to measured times by least squares on the relative error.

    A coefficient is not determined if its column is 0 everywhere, if a combination of columns is 0 everywhere (all
    measurements at one context: who says whether a sequence or its context took the time?), or if its standard error
    is more than a tenth of the time. Then one of those concerned is kept at ``kept``, and the others take up the
    rest; the last of the list is kept first, unless the error grows by that.

    Args:
        columns: At most a handful, the surest first.
        seconds: Measured times, above 0, shape [rows] (seconds).

    Returns:
        The fit.

    Raises:
        ValueError: If there is no row.
    """
    if not len(seconds):
        raise ValueError("seconds must have a row, got none")
    factors_RC = np.stack([column.factors for column in columns], axis=1)
    scale_R = seconds
    for _ in range(ROUNDS):
        values_C, undetermined = _weighted(factors_RC / scale_R[:, None], seconds / scale_R, columns)
        fitted_R = factors_RC @ values_C
        last_R, scale_R = scale_R, np.maximum(fitted_R, LEAST_WEIGHED * seconds)
        if np.allclose(last_R, scale_R, rtol=1e-9):
            break
    error_R = np.abs(fitted_R / seconds - 1)
    kept = {index for index, column in enumerate(columns) if column.name in undetermined}
    return Fit(
        values={column.name: float(value) for column, value in zip(columns, values_C, strict=True)},
        undetermined=undetermined,
        rows=len(seconds),
        mean_error=float(error_R.mean()),
        max_error=float(error_R.max()),
        held_out_error=_held_out(factors_RC / scale_R[:, None], values_C, seconds / scale_R, columns, kept),
    )


def _weighted(share_RC: FloatArray, goal_R: FloatArray, columns: Sequence[Column]) -> tuple[FloatArray, dict[str, str]]:
    """Return the coefficients that bring ``share_RC`` nearest to ``goal_R``, and those kept, with the reason."""
    kept: dict[int, float] = {}
    undetermined = {}
    for index, column in enumerate(columns):
        if not share_RC[:, index].any():
            kept[index] = column.kept
            undetermined[column.name] = "no measurement depends on it"
    values_C, loss = _bounded(share_RC, goal_R, columns, kept)
    while together := _undecided(share_RC, goal_R, values_C, sorted(set(range(len(columns))) - set(kept))):
        tried = {index: _bounded(share_RC, goal_R, columns, kept | {index: columns[index].kept}) for index in together}
        allowed = max(NOT_WORSE * loss, 1e-9)
        index = next((one for one in reversed(together) if tried[one][1] <= allowed), None)
        if index is None:  # every value to keep contradicts the measurements: the one that does so least
            index = min(together, key=lambda one: tried[one][1])
        kept[index] = columns[index].kept
        others = [columns[one].name for one in together if one != index]
        undetermined[columns[index].name] = (
            f"cannot be told from {' and '.join(others)}" if others else "its share of the time is within the noise"
        )
        values_C, loss = tried[index]
    return values_C, undetermined


def _bounded(
    share_RC: FloatArray, goal_R: FloatArray, columns: Sequence[Column], kept: dict[int, float]
) -> tuple[FloatArray, float]:
    """Return the best coefficients that are not below their bounds, and their root mean square error.

    At the solution some coefficients stand at their bound and the others solve the plain least-squares problem, so
    trying all sets of the others finds it.
    """
    base_C = np.array([kept.get(index, column.least) for index, column in enumerate(columns)])
    least_C = np.array([column.least for column in columns])
    free = [index for index in range(len(columns)) if index not in kept]
    best_C, best = base_C, _rms(share_RC @ base_C - goal_R)
    for size in range(1, len(free) + 1):
        for chosen in combinations(free, size):
            some = list(chosen)
            values_C = base_C.copy()
            values_C[some] = 0.0
            rest_R = goal_R - share_RC @ values_C
            scale = np.abs(share_RC[:, some]).max(axis=0)
            values_C[some] = np.linalg.lstsq(share_RC[:, some] / scale, rest_R, rcond=None)[0] / scale
            loss = _rms(share_RC @ values_C - goal_R)
            if (values_C[some] >= least_C[some]).all() and loss < best - 1e-15:
                best_C, best = values_C, loss
    return best_C, best


def _undecided(share_RC: FloatArray, goal_R: FloatArray, values_C: FloatArray, free: list[int]) -> list[int]:
    """Return coefficients that the data cannot tell apart, or one that is lost in the noise; empty if all is well."""
    if not free:
        return []
    some_RF = share_RC[:, free]
    unit_RF = some_RF / np.linalg.norm(some_RF, axis=0)
    _, singular, right_FF = np.linalg.svd(unit_RF, full_matrices=True)
    singular_F = np.zeros(len(free))
    singular_F[: len(singular)] = singular
    weak = singular_F < COLLINEAR * singular_F[0]
    if weak.any():
        direction_F = right_FF[np.flatnonzero(weak)[0]]
        return [index for index, part in zip(free, np.abs(direction_F), strict=True) if part > 1e-3]
    num_rows, num_free = some_RF.shape
    if num_rows <= num_free:
        return []  # as many unknowns as equations: an exact solution, and no noise to judge by
    variance = float(np.square(share_RC @ values_C - goal_R).sum()) / (num_rows - num_free)
    unit_variance_F = variance * np.square(right_FF.T / singular_F).sum(axis=1)
    # A unit column's coefficient c makes up c / norm * mean(column) of the time of a mean row.
    share_error_F = np.sqrt(unit_variance_F) * np.abs(unit_RF).mean(axis=0)
    if share_error_F.max() <= UNSURE_SHARE:
        return []
    worst = int(share_error_F.argmax())
    direction_F = np.abs(right_FF[singular_F.argmin()])
    partners = [index for index, part in zip(free, direction_F, strict=True) if part > 0.3 * direction_F.max()]
    return sorted({*partners, free[worst]})


def _held_out(
    share_RC: FloatArray, values_C: FloatArray, goal_R: FloatArray, columns: Sequence[Column], kept: set[int]
) -> float | None:
    """Return the mean error of predicting each row from all others, with the same coefficients at their bounds."""
    inside = [index for index, column in enumerate(columns) if index not in kept and values_C[index] > column.least]
    if len(share_RC) < len(inside) + 2:
        return None
    residual_R = share_RC @ values_C - goal_R
    if inside:
        some_RF = share_RC[:, inside]
        orthogonal_RF = np.linalg.qr(some_RF / np.linalg.norm(some_RF, axis=0))[0]
        leverage_R = np.square(orthogonal_RF).sum(axis=1)
        if (leverage_R > 1 - 1e-9).any():
            return None  # a coefficient hangs on one row alone
        residual_R = residual_R / (1 - leverage_R)
    return float(np.abs(residual_R / goal_R).mean())


def _rms(residual_R: FloatArray) -> float:
    return float(np.sqrt(np.square(residual_R).mean()))
