"""Trained tokens counted by lag, and by its two parts: in flight and in queue."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelinerl.records.profile_report import LagHistogram
from pipelinerl.records.reports import LagReport


class TokenHistogram:
    """Counts tokens by whole number (mutable, can be pickled)."""

    def __init__(self) -> None:
        self.counts: NDArray[np.float64] = np.zeros(1)

    def add(self, value_N: NDArray[np.int64], weight_N: NDArray[np.int64]) -> None:
        """Add weights (token counts, exact in float64) at values of at least 0."""
        added: NDArray[np.float64] = np.bincount(value_N, weight_N, len(self.counts)).astype(np.float64)
        added[: len(self.counts)] += self.counts
        self.counts = added

    def mean(self) -> float:
        """Return the mean over all tokens; 0 without one."""
        total = self.counts.sum()
        return float((self.counts * np.arange(len(self.counts))).sum() / total) if total else 0.0

    def quantile(self, share: float) -> int:
        """Return the least value with at least ``share`` of the weight at or below it."""
        below = np.cumsum(self.counts)
        return int(np.searchsorted(below, share * below[-1])) if below[-1] else 0

    def max(self) -> int:
        """Return the largest number that a token has; 0 without one."""
        return int(np.flatnonzero(self.counts)[-1]) if self.counts.any() else 0

    def as_list(self) -> list[int]:
        """Return the tokens of 0, 1, 2, ... (counts)."""
        return [int(count) for count in self.counts]


class LagCounts:
    """Counts the trained tokens of a run by lag (mutable, can be pickled)."""

    def __init__(self) -> None:
        self._total, self._in_flight, self._in_queue = TokenHistogram(), TokenHistogram(), TokenHistogram()

    def add(self, lag_N: NDArray[np.int64], queue_lag_N: NDArray[np.int64], tokens_N: NDArray[np.int64]) -> None:
        """Add version spans.

        Args:
            lag_N: Lag of each span (optimizer steps), of shape [N].
            queue_lag_N: Its part in queue (optimizer steps), of shape [N].
            tokens_N: Tokens of each span (counts), of shape [N].
        """
        self._total.add(lag_N, tokens_N)
        self._in_queue.add(queue_lag_N, tokens_N)
        self._in_flight.add(lag_N - queue_lag_N, tokens_N)

    def report(self) -> LagReport:
        """Return mean, quantiles and maximum (optimizer steps)."""
        total = self._total
        return LagReport(
            mean=total.mean(),
            p50=total.quantile(0.50),
            p95=total.quantile(0.95),
            p99=total.quantile(0.99),
            max=total.max(),
            in_flight_mean=self._in_flight.mean(),
            in_queue_mean=self._in_queue.mean(),
        )

    def by_lag(self) -> list[int]:
        """Return the tokens of lag 0, 1, 2, ... optimizer steps (counts)."""
        return self._total.as_list()

    def histogram(self) -> LagHistogram:
        """Return the tokens by lag and by each of its parts (counts)."""
        return LagHistogram(
            total=self._total.as_list(), in_flight=self._in_flight.as_list(), in_queue=self._in_queue.as_list()
        )
