"""The paper's utilisation curve U(h): how much of an accelerator a batch of h sequences keeps busy (appendix A)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from pydantic import Field

from pipelinerl.errors import ConfigError
from pipelinerl.util.arrays import FloatArray, RealArray, check
from pipelinerl.util.strict_model import StrictModel
from pipelinerl.util.table import read_table


@dataclass(frozen=True, slots=True)
class UtilisationCurve:
    """Cost of a decode step: U(h) of the paper, held as h/U(h), which is finite and never divides by 0."""

    cost: Callable[[FloatArray], FloatArray]
    """Flashes of a decode step with h > 0 sequences, elementwise."""

    def step_flashes(self, h: float | RealArray) -> FloatArray:
        """Return h/U(h), the flashes of one decode step of h >= 0 sequences on one accelerator; a fraction is a mean.

        Any shape. 0 sequences make no step and cost 0. Raises ValueError if any entry is negative or not finite.
        """
        batch = np.asarray(h, dtype=np.float64)
        check(bool(np.all((batch >= 0) & np.isfinite(batch))), "h must be finite and at least 0", h)
        return np.where(batch > 0, self.cost(batch), 0.0)

    def utilisation(self, h: float | RealArray) -> FloatArray:
        """Return U(h), the share of peak FLOP/s: tokens per flash; input, shape and errors as of ``step_flashes``."""
        batch = np.asarray(h, dtype=np.float64)
        share: FloatArray = batch / np.where(batch > 0, self.step_flashes(batch), 1.0)
        return share


class UtilisationRow(StrictModel):
    """A row of a measured curve."""

    batch: float = Field(ge=1)
    """Sequences per accelerator (count)."""
    utilisation: float = Field(gt=0, le=1)
    """Share of the peak FLOP/s (no unit)."""


def fitted_utilisation() -> UtilisationCurve:
    """Return the smooth curve fitted to the paper: h/U(h) = (a^p + (h/0.61)^p)^(1/p), a = 467.1 flashes, p = 3.41.

    The paper prints no table of U. a and p are fitted to two numbers of its case study (U(192) = 16.9/44 and
    the conventional generation rate of 18.3 tokens/flash); the plateau of 0.61 is assumed. That the case study
    comes out right is therefore a check of consistency, not independent evidence. Not fit for seconds: there is
    no KV-cache traffic in it, and the true curve has steps at multiples of 64 and 128.
    """
    return UtilisationCurve(partial(_fitted_cost, floor_flashes=467.1, plateau=0.61, sharpness=3.41))


def read_utilisation(path: str | Path) -> UtilisationCurve:
    """Read a measured curve from a CSV file of ``UtilisationRow``: a header, at least 2 rows, ``batch`` rising.

    The step cost h/U(h) is interpolated linearly between the rows. Below the first row it stays as there (a
    step costs the same however few sequences it holds); beyond the last row the utilisation stays as there.
    Raises ConfigError, one line with file, line and rule, if it cannot be read or breaks these rules.
    """
    table = read_table(Path(path), "utilisation table")
    rows = table.rows(UtilisationRow)
    for (_, before), (where, row) in pairwise(rows):
        if row.batch <= before.batch:
            raise ConfigError(f"{where}: batch must rise from row to row, got {row.batch:g} after {before.batch:g}")
    if len(rows) < 2:
        raise ConfigError(f"{table.path}: the table must have at least 2 rows, got {len(rows)}")
    batch, utilisation = np.array([(row.batch, row.utilisation) for _, row in rows]).T
    return UtilisationCurve(partial(_table_cost, batch=batch, utilisation=utilisation))


def _fitted_cost(h: FloatArray, *, floor_flashes: float, plateau: float, sharpness: float) -> FloatArray:
    """Blend a constant cost per step (few sequences) with a constant cost per sequence (many)."""
    # float_power is the same on every processor; ``**`` of an array is not.
    cost: FloatArray = np.float_power(floor_flashes**sharpness + np.float_power(h / plateau, sharpness), 1 / sharpness)
    return cost


def _table_cost(h: FloatArray, *, batch: FloatArray, utilisation: FloatArray) -> FloatArray:
    """Interpolate the step cost between the rows; outside them keep cost (below) or utilisation (above)."""
    return np.where(h > batch[-1], h / utilisation[-1], np.interp(h, batch, batch / utilisation))
