"""Coefficients of the hardware model from measured seconds: their factors are found by changing them a little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipelinerl.calibration.least_squares import Column, Fit, fit
from pipelinerl.hardware.coefficients import SHARES_OF_PEAK, Coefficients
from pipelinerl.util.arrays import FloatArray

MUCH_BETTER = 0.8
"""Share of the error that further coefficients must fall below to be believed, for lives of rollouts (no unit)."""
QUIET_SHARE = 0.2
"""The same for engines that are always full: only times free of noise fall so far (no unit)."""
PROBE = 1e-4
"""Relative change by which the factor of a coefficient is found."""
ROUNDS = 10
"""Times that factors and coefficients are determined in turn, at most (count)."""


def fit_coefficients(
    names: Sequence[str],
    values: Coefficients,
    seconds: FloatArray,
    model_s: Callable[[Coefficients], FloatArray],
    others: Sequence[Column] = (),
) -> Fit:
    """Fit coefficients so that the hardware model gives measured seconds.

    Args:
        names: Coefficients to fit, the surest first.
        values: Where to begin, and what is kept where the data do not determine it.
        seconds: Measured, shape [rows].
        model_s: What the hardware model gives, same shape.
        others: What else the seconds hold, as surely as the first coefficient.

    Returns:
        The fit; its values are coefficients, not inverses.
    """
    now = values
    for _ in range(ROUNDS):
        now_R = base_R = model_s(now)
        columns = []
        for name in names:
            inverse = is_inverse(name)
            place, kept = (1 / one if inverse else one for one in (getattr(now, name), getattr(values, name)))
            change = PROBE * (place or 1e-3)
            moved = place + change
            moved_R = model_s(now.model_copy(update={name: 1 / moved if inverse else moved}))
            factor_R = (moved_R - now_R) / change
            factor_R[np.abs(factor_R * (place or 1e-3)) < 1e-9 * seconds] = 0.0
            columns.append(Column(name, factor_R, kept, 1.0 if inverse else 0.0))
            base_R = base_R - factor_R * place
        found = fit([*columns[:1], *others, *columns[1:]], seconds, base_R)
        fitted = {name: 1 / found.values[name] if is_inverse(name) else found.values[name] for name in names}
        close = all(abs(fitted[name] - getattr(now, name)) <= 1e-9 * max(fitted[name], 1e-6) for name in names)
        now = now.model_copy(update=fitted)
        if close:
            break
    return replace(found, values={**found.values, **fitted})


def simpler(simple: Fit, full: Fit, fitted: Sequence[str], *, always_full: bool) -> Fit:
    """Return the fit of fewer coefficients unless the error is much larger.

    On an engine that is always full, the tokens that others sample during a rollout are proportional to its time,
    whatever the cause of the time: where times are noisy the error falls and nothing is learned. So lives of rollouts
    alone must not attribute time to the others, and without need not on other engines either.
    """
    if full.mean_error < (QUIET_SHARE if always_full else MUCH_BETTER) * simple.mean_error:
        return full
    kept = {*fitted, "dispatch_s"}
    others = {
        name: "fitted, it explains the times hardly better: kept as given" for name in full.values if name not in kept
    }
    return replace(simple, undetermined={**others, **simple.undetermined})


def is_inverse(name: str) -> bool:
    """Return whether times are proportional to the inverse of a coefficient."""
    return name in SHARES_OF_PEAK
