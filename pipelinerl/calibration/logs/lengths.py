"""The distribution of answers from what a log says of them: mean, a quantile or the share that was cut, longest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from pipelinerl.calibration.logs.record import LoggedRun
from pipelinerl.config.workload import LengthConfig
from pipelinerl.util.lognormal import argument_nearest, location_of_mean, log_sd_of

USUAL_CV = 0.8
"""Standard deviation over mean where a log says nothing of the spread (no unit)."""
SPREADS = tuple(0.02 * 1.02**step for step in range(260))
"""Standard deviations of log X that are tried, 0.02 to 3.4 (no unit)."""
LONGER = 4.0
"""Times the mean that the longest answer is taken to be where a log does not say it (no unit)."""


def logged_lengths(log: LoggedRun) -> tuple[LengthConfig, str]:
    """Return log-normal lengths as a log has them, and what they were fitted to.

    Of the 95 % quantile, the 90 % quantile, the share of answers that were cut and the mean longest answer of a step,
    the first that is known decides the spread; the mean of the cut distribution is that of the log. The longest of n
    answers is taken to be the quantile (n - 0.375) / (n + 0.25) (Blom 1958).
    """
    mean, longest = log.mean.length_mean, log.longest
    assert mean is not None  # a log without it is refused
    most = math.ceil(max(longest or LONGER * mean, mean + 1.0))
    for what, share, target in _points(log):
        log_sd, reached = _log_sd(mean, most, share, target)
        missed = "" if reached else ", which no log-normal of this mean reaches: the nearest is taken"
        cv = math.sqrt(math.expm1(log_sd**2))
        return LengthConfig(kind="lognormal", mean=_short(mean), cv=_short(cv), max=most), f"{what}{missed}"
    return LengthConfig(
        kind="lognormal", mean=_short(mean), cv=USUAL_CV, max=most
    ), "the mean alone; the spread is assumed"


def quantile(length: LengthConfig, share: float) -> float:
    """Return the length that a share of log-normal answers does not exceed (tokens)."""
    assert length.mean is not None
    assert length.cv is not None
    return min(float(length.max), _uncut(length.mean, length.max, log_sd_of(length.cv), share))


def _points(log: LoggedRun) -> Iterator[tuple[str, float, float]]:
    """Return what is known of the spread: its name, the share of answers below, and the length."""
    mean = log.mean
    if mean.length_p95 is not None:
        yield "mean and 95 % quantile", 0.95, mean.length_p95
    if mean.length_p90 is not None:
        yield "mean and 90 % quantile", 0.90, mean.length_p90
    if mean.clipped_share and log.longest is not None:
        yield "mean and share of answers that were cut", 1.0 - mean.clipped_share, log.longest
    if mean.samples is not None and mean.samples > 1 and mean.length_max is not None:
        yield "mean and longest", (mean.samples - 0.375) / (mean.samples + 0.25), mean.length_max


def _uncut(mean: float, longest: int, log_sd: float, share: float) -> float:
    location = location_of_mean(mean, log_sd=log_sd, longest=longest)
    return math.exp(location + NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9)) * log_sd)


def _log_sd(mean: float, longest: int, share: float, target: float) -> tuple[float, bool]:
    """Return the least spread whose quantile is the target, and whether there is one; else the nearest."""
    below = SPREADS[0]
    misses: dict[float, float] = {}
    for spread in SPREADS:
        missing = target - _uncut(mean, longest, spread, share)
        if missing <= 0 and spread > SPREADS[0]:
            return argument_nearest(lambda one: _uncut(mean, longest, one, share), target, low=below, high=spread), True
        misses[spread] = abs(missing)
        below = spread
    return min(misses, key=misses.__getitem__), False


def _short(value: float) -> float:
    return float(f"{value:.4g}")
