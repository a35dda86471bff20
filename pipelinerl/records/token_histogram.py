"""Tokens counted by a whole number such as their lag."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
