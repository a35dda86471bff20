"""Distance of the policy being trained from the policies that sampled: effective sample size and KL divergence.

Weights w = pi/mu come in as log ratios, log pi - log mu (nats), and stay logarithms until their largest is
subtracted: the product of the ratios of a long answer has no place in a float. All sums are in float64.

Truncated weights always read a higher ESS than raw ones (log-normal w, sigma 0.5: 0.78 raw, 0.93 truncated at
1.02), so the two carry different names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict

from pipelinerl.rl.config import LossConfig
from pipelinerl.util.arrays import RunningMean, check
from pipelinerl.util.strict_model import Report

# Legend of shapes: N flat tokens (or any samples); T tokens of one answer.

LAG_PREFIX = "ess/lag_"
"""Metrics of an optimizer step that hold the ESS of the tokens of a lag."""
TURN_PREFIX = "ess/turn_"
"""Of the tokens of turn 1, 2, ..."""


def ess_of_log_weights(log_weight_N: ArrayLike, *, truncation: float = math.inf) -> float:
    """Return the normalised effective sample size of weights w = pi/mu from their logarithms, shape [N]; in [1/N, 1].

    ESS = (sum w)^2 / (N * sum w^2): 1 when all weights are equal, 1/N when one dominates. -inf is a weight of zero;
    ``truncation`` is the largest weight, paper symbol c (infinite: raw weights, the ESS of eq. 6).
    Source: Piche et al. 2025 (arXiv:2509.19128), eq. 6; Kong 1992.
    Raises ValueError if the array is empty, not one-dimensional, all -inf, or has an entry that is NaN or +inf; if
    ``truncation`` is not above 0.
    """
    check(truncation > 0, "truncation must be above 0", truncation)
    log_weight = _flat("log_weight_N", log_weight_N)
    _check_all(log_weight < math.inf, log_weight, "log_weight_N must be below infinity")
    sums = _WeightSums()
    sums.add(np.minimum(log_weight, math.log(truncation)))
    check(sums.sum != 0, "log_weight_N must have a weight above 0", f"none of {sums.num}")
    return sums.ess


def kl_estimate(log_ratio_N: ArrayLike) -> float:
    """Return the estimate of KL(mu || pi) per token (nats): the mean of w - 1 - log w, which is never negative.

    ``log_ratio_N``: log pi - log mu of tokens sampled from mu, shape [N] (nats). There it has no bias: w - 1 has mean
    0, and -log w = log mu - log pi is the divergence. Infinite beyond the largest float.
    Source: Schulman 2020, "Approximating KL divergence", estimator k3.
    Raises ValueError if the array is empty, not one-dimensional, or has a non-finite entry.
    """
    log_ratio = finite("log_ratio_N", log_ratio_N)
    return _k3_sum(log_ratio) / log_ratio.size


class RatioStats:
    """Sums over the tokens of one optimizer step, for its ESS and KL divergence; add answers, then read.

    Its size grows with the number of different lags and turns only.
    """

    def __init__(self, loss: LossConfig) -> None:
        self._loss, self._log_truncation = loss, math.log(loss.truncation)
        self._raw, self._truncated, self._sequence = _WeightSums(), _WeightSums(), _WeightSums()
        self._by_lag: dict[int, _WeightSums] = {}
        self._by_turn: dict[int, _WeightSums] = {}
        self._num_truncated = self._num_masked = self._num_at_lag_0 = 0
        self._k3 = self._k3_at_lag_0 = self._abs_max_at_lag_0 = 0.0

    def add(self, log_ratio_T: ArrayLike, lag_T: ArrayLike, turn_T: NDArray[np.integer] | tuple[()] = ()) -> None:
        """Add one whole answer: shapes [T], turns from 1 on, none where answers have one.

        ``log_ratio_T``: log pi - log mu (nats), pi before the optimizer step; ``lag_T`` (optimizer steps).
        Raises ValueError, with nothing added, if the answer has no token, the shapes differ, a log ratio is not finite,
        or a lag is not a whole number of at least 0.
        """
        log_ratio = finite("log_ratio_T", log_ratio_T)
        lag = np.asarray(lag_T)
        check(lag.shape == log_ratio.shape, f"lag_T must have the shape of log_ratio_T, {log_ratio.shape}", lag.shape)
        check(np.issubdtype(lag.dtype, np.integer), "lag_T must be whole numbers", lag.dtype)
        _check_all(lag >= 0, lag, "lag_T must be at least 0")

        self._raw.add(log_ratio)
        log_weight = np.minimum(log_ratio, self._log_truncation)
        if self._loss.mask is not None:
            log_weight[self._loss.masked(log_ratio, log_ratio.sum(), len(log_ratio))] = -math.inf
            self._num_masked += int(np.count_nonzero(log_weight == -math.inf))
        self._truncated.add(log_weight)
        self._sequence.add(log_ratio.sum(keepdims=True))
        k3 = _k3_sum(log_ratio)
        self._k3 += k3
        self._num_truncated += int(np.count_nonzero(log_ratio > self._log_truncation))
        _add_by(lag, log_ratio, self._by_lag)
        if len(turn_T):
            _add_by(np.asarray(turn_T), log_ratio, self._by_turn)
        if not lag.any():
            self._num_at_lag_0 += log_ratio.size
            self._k3_at_lag_0 += k3
            self._abs_max_at_lag_0 = max(self._abs_max_at_lag_0, float(np.abs(log_ratio).max()))

    def ess_by_lag(self) -> dict[int, float]:
        """Return the raw token ESS of the tokens of each lag, in the order of lag (optimizer steps)."""
        return {lag: self._by_lag[lag].ess for lag in sorted(self._by_lag)}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step.

        ========================================  ==============================================================
        ``ess/token_raw``                         ESS of the token weights w = pi/mu (eq. 6)
        ``ess/token_truncated``                   ESS of min(c, w), 0 where masked: the weights that ``reinforce`` uses
        ``ess/sequence_raw``                      ESS of the products of w over each answer
        ``ess/lag_0``, ``ess/lag_1``, ...         ESS of w among the tokens of each lag that occurred
        ``ess/turn_1``, ``ess/turn_2``, ...       the same of each turn, where answers have turns
        ``mismatch/kl``                           estimate of KL(mu || pi) per token (nats)
        ``mismatch/truncated_share``              share of tokens with w > c
        ``mismatch/masked_share``                 share of tokens that the loss masks; absent without a mask
        ``mismatch/kl_at_lag_0``                  the same KL over answers all of whose tokens have lag 0: there pi and
                                                  mu are the same, so it is the floor set by numerical differences
        ``mismatch/log_ratio_abs_max_at_lag_0``   largest abs(log w) of the tokens of these answers (nats)
        ========================================  ==============================================================

        A token of lag 0 at the end of an answer that older weights began is not in the floor: unless the KV cache
        was recomputed, it was sampled on keys and values of the older weights, so its mu is not pi.
        Entries about a lag are absent when no token or answer had it; the dict is empty when no answer was added.
        """
        num = self._raw.num
        if num == 0:
            return {}
        result = {
            "ess/token_raw": self._raw.ess,
            "ess/token_truncated": self._truncated.ess,
            "ess/sequence_raw": self._sequence.ess,
            "mismatch/kl": self._k3 / num,
            "mismatch/truncated_share": self._num_truncated / num,
        }
        if self._loss.mask is not None:
            result["mismatch/masked_share"] = self._num_masked / num
        if self._num_at_lag_0:
            result["mismatch/kl_at_lag_0"] = self._k3_at_lag_0 / self._num_at_lag_0
            result["mismatch/log_ratio_abs_max_at_lag_0"] = self._abs_max_at_lag_0
        by_turn = {f"{TURN_PREFIX}{turn}": self._by_turn[turn].ess for turn in sorted(self._by_turn)}
        return result | {f"{LAG_PREFIX}{lag}": ess for lag, ess in self.ess_by_lag().items()} | by_turn


class EssReport(Report):
    """Effective sample size of the importance weights, normalised to [0, 1]; means over optimizer steps.

    0: all tokens are masked.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    mean: float
    """Mean over optimizer steps of (Σw)² / (N Σw²) over its N tokens (share)."""
    min: float
    """The least of any optimizer step (share)."""
    truncated_mean: float
    """The same for the truncated and masked weights of the loss (share)."""
    sequence_mean: float
    """The same for the product of the weights of each rollout (share)."""
    by_lag: dict[int, float]
    """By lag, each the mean over the optimizer steps that had some (share). At least 1/N for N tokens; below 1 at lag 0
    under ``keep``, whose tokens may stand behind an older KV cache."""
    by_turn: dict[int, float] | None = None
    """By turn 1, 2, 3, ... (share). Turns without an observation between them count as one."""


class MismatchReport(Report):
    """Distance of the trainer's probabilities from the engines' (nats per token); means over optimizer steps."""

    model_config = ConfigDict(allow_inf_nan=True)

    kl: float
    """Mean over optimizer steps of KL(mu, pi) per token, as the mean of w − 1 − log w (nats)."""
    kl_at_lag_0: float | None = None
    """The same over answers wholly of lag 0: the numerical difference of engine and trainer (nats). Absent if none."""
    log_ratio_abs_max_at_lag_0: float | None = None
    """Largest absolute log w of a token of these answers (nats)."""


class RatioMeans:
    """The ESS and the mismatch of a run, as means over its optimizer steps; add steps, then read (can be pickled)."""

    def __init__(self) -> None:
        self._by_name: dict[str, RunningMean] = {}  # each metric over the steps that had it

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step that come from ``RatioStats.metrics``."""
        for name, value in metrics.items():
            if name.startswith(("ess/", "mismatch/")):
                self._by_name.setdefault(name, RunningMean()).add(value)

    def summary(self) -> tuple[EssReport, MismatchReport] | tuple[None, None]:
        """Return ``ess`` and ``mismatch`` of summary.json; neither if no step had an answer."""
        if not self._by_name:
            return None, None
        means = {name: running.mean for name, running in self._by_name.items()}
        largest = self._by_name.get("mismatch/log_ratio_abs_max_at_lag_0")
        mismatch = MismatchReport(
            kl=means["mismatch/kl"],
            kl_at_lag_0=means.get("mismatch/kl_at_lag_0"),
            log_ratio_abs_max_at_lag_0=None if largest is None else largest.max,
        )
        ess = EssReport(
            mean=means["ess/token_raw"],
            min=self._by_name["ess/token_raw"].min,
            truncated_mean=means["ess/token_truncated"],
            sequence_mean=means["ess/sequence_raw"],
            by_lag=dict(sorted(ess_by_lag(means))),
            by_turn=dict(sorted(_numbered(means, TURN_PREFIX))) or None,
        )
        return ess, mismatch


def ess_by_lag(step: Mapping[str, float]) -> list[tuple[int, float]]:
    """Return each lag of a step's metrics with the ESS of its tokens."""
    return _numbered(step, LAG_PREFIX)


def _numbered(step: Mapping[str, float], prefix: str) -> list[tuple[int, float]]:
    return [(int(name.removeprefix(prefix)), ess) for name, ess in step.items() if name.startswith(prefix)]


class _WeightSums:
    """Sums of weights and of their squares, in units of the largest weight so far and of its square."""

    __slots__ = ("log_unit", "num", "sum", "sum_squares")

    def __init__(self) -> None:
        self.num = 0
        self.log_unit = -math.inf
        self.sum = self.sum_squares = 0.0

    def add(self, log_weight_N: NDArray[np.float64]) -> None:
        self.num += log_weight_N.size
        log_unit = max(self.log_unit, float(log_weight_N.max(initial=-math.inf)))
        if log_unit == -math.inf:  # zero weights only: there is no unit yet
            return
        change = math.exp(self.log_unit - log_unit)
        weight = np.exp(log_weight_N - log_unit)
        self.sum = self.sum * change + float(weight.sum())
        self.sum_squares = self.sum_squares * change**2 + float((weight**2).sum())
        self.log_unit = log_unit

    @property
    def ess(self) -> float:
        if not self.sum:  # all are masked
            return 0.0
        value = self.sum**2 / (self.num * self.sum_squares)
        return min(1.0, max(1 / self.num, value))  # these bounds hold but for rounding


def _add_by(key_T: NDArray[np.integer], log_ratio_T: NDArray[np.float64], sums: dict[int, _WeightSums]) -> None:
    """Add tokens to the sums of their lag or turn (key); most answers have one key."""
    first = int(key_T[0])
    keys = [first] if (key_T == first).all() else np.unique(key_T).tolist()
    for key in keys:
        chosen_T = log_ratio_T if len(keys) == 1 else log_ratio_T[key_T == key]
        sums.setdefault(key, _WeightSums()).add(chosen_T)


def _k3_sum(log_ratio_N: NDArray[np.float64]) -> float:
    with np.errstate(over="ignore"):
        k3_N = np.expm1(log_ratio_N) - log_ratio_N
        return float(np.maximum(k3_N, 0.0).sum())  # below 0 by rounding only


def _flat(name: str, value_N: ArrayLike) -> NDArray[np.float64]:
    value = np.asarray(value_N, dtype=np.float64)
    check(value.ndim == 1 and value.size > 0, f"{name} must be one-dimensional and not empty", f"shape {value.shape}")
    return value


def finite(name: str, value_N: ArrayLike) -> NDArray[np.float64]:
    """Return numbers as an array; ``ValueError``, with its name, if it is empty, not flat, or one is not finite."""
    value = _flat(name, value_N)
    _check_all(np.isfinite(value), value, f"{name} must be finite")
    return value


def _check_all(holds_N: NDArray[np.bool_], value_N: NDArray[np.generic], rule: str) -> None:
    if not holds_N.all():
        raise ValueError(f"{rule}, got {value_N[~holds_N][0]}")
