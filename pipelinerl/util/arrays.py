"""Array types, and the check of an argument that all numeric modules share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
RealArray = npt.NDArray[np.integer[Any] | np.floating[Any]]


def check(holds: bool, rule: str, value: object) -> None:
    """Raise ``ValueError`` with the rule and the value, unless the rule holds."""
    if not holds:
        raise ValueError(f"{rule}, got {value}")
