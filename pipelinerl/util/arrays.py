"""Array types, a running mean, quotients, groups, and the check of an argument that all numeric modules share."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RunningMean:
    """Mean, least and largest of values, without keeping them (mutable, can be pickled)."""

    def __init__(self) -> None:
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


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
RealArray = npt.NDArray[np.integer[Any] | np.floating[Any]]


def ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    """Return the quotients, 0 where the divisor is not above 0."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=np.float64), where=below > 0)


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def check(holds: bool, rule: str, value: object) -> None:
    """Raise ``ValueError`` with the rule and the value, unless the rule holds."""
    if not holds:
        raise ValueError(f"{rule}, got {value}")
