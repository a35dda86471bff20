"""A mean that is kept while values come in."""

from __future__ import annotations

import math


class RunningMean:
    """Mean, least and largest of values, without keeping them (mutable, can be pickled)."""

    def __init__(self) -> None:
        """Start with no values."""
        self.num, self.total, self.min, self.max = 0, 0.0, math.inf, -math.inf

    def add(self, value: float) -> None:
        """Add a value."""
        self.num += 1
        self.total += value
        self.min, self.max = min(self.min, value), max(self.max, value)

    @property
    def mean(self) -> float:
        """Mean of the values; 0 without one."""
        return self.total / self.num if self.num else 0.0
