"""Log-normal lengths that are cut at 1 and at a longest length."""

from __future__ import annotations

import math
from collections.abc import Callable


def location_of_mean(mean: float, *, log_sd: float, longest: int) -> float:
    """Return the mean of log X for which drawn lengths have a given mean after the cuts at 1 and L = ``longest``.

    Rounding at random keeps the mean, and the cuts at 1 and at L are whole numbers, so a drawn length has mean
    E[max(1, min(X, L))] = 1 + E[min(X, L)] - E[min(X, 1)], which rises with the location.
    """

    def mean_at(location: float) -> float:
        cut_at_max = mean_of_cut(location, log_sd=log_sd, cut=longest)
        return 1.0 + cut_at_max - mean_of_cut(location, log_sd=log_sd, cut=1)

    # At 40 standard deviations below log 1 all lengths are 1, at 40 above log L all are L.
    return argument_nearest(mean_at, mean, low=-40 * log_sd, high=math.log(longest) + 40 * log_sd)


def log_sd_of(cv: float) -> float:
    """Return the standard deviation of log X of a log-normal X with a coefficient of variation."""
    return math.sqrt(math.log1p(cv**2))


def argument_nearest(function: Callable[[float], float], target: float, *, low: float, high: float) -> float:
    """Return where a non-decreasing function comes nearest to a target between ``low`` and ``high``.

    Bisection down to neighbouring floats; at a jump over the target, the side that is nearer.
    """
    while low < (middle := (low + high) / 2) < high:
        if function(middle) < target:
            low = middle
        else:
            high = middle
    return min((high, low), key=lambda argument: abs(function(argument) - target))


def mean_of_cut(location: float, *, log_sd: float, cut: float) -> float:
    """Return E[min(X, c)] = exp(m + s^2/2) Phi(a - s) + c Phi(-a) with a = (log c - m) / s, X log-normal(m, s)."""
    a = (math.log(cut) - location) / log_sd
    return math.exp(location + log_sd**2 / 2) * _normal_cdf(a - log_sd) + cut * _normal_cdf(-a)


def _normal_cdf(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2
