"""The report of ``validate``: published runs, predicted beside measured. The content of validation.json."""

from __future__ import annotations

from typing import Literal

from pipelinerl.util.report import Report

Quantity = Literal["s/step", "tokens/s", "staleness", "trainer idle"]
"""The predicted quantity of a row."""


class PredictedRow(Report):
    """One row, predicted beside measured, both in the unit of ``quantity``."""

    id: str
    """Name of the row."""
    family: str
    """Software, GPU and model, which other rows may share."""
    mode: str
    """The schedule in words."""
    quantity: Quantity
    """The predicted quantity."""
    measured: float
    """Published result."""
    predicted: float
    """Median of what is likely."""
    low: float
    """10th percentile of what is likely."""
    high: float
    """90th percentile of what is likely."""
    inputs: tuple[str, ...]
    """Published numbers of this row that went in, besides cluster, batch and lengths."""
    fitted_to: tuple[str, ...]
    """Other rows whose measurements were used, by id."""
    assumed: tuple[str, ...]
    """Unpublished numbers that the prediction rests on, in words."""
    alone: float | None
    """Prediction of the hardware model without any other row. None: it is not asked, or knows no seconds."""
    error: float
    """Relative error; absolute for staleness."""

    @property
    def is_relative(self) -> bool:
        """Whether the error is relative."""
        return self.quantity != "staleness"

    @property
    def is_simulated(self) -> bool:
        """Whether a simulation predicts it, and not a sum of its own parts or a closed form."""
        return self.quantity in ("s/step", "tokens/s") and "generation" not in self.inputs


class UnusableRow(Report):
    """A row that cannot be predicted."""

    id: str
    """Name of the row."""
    reason: str
    """The reason in words."""


class RowPair(Report):
    """Two rows of one family that were measured more than 5 % apart."""

    rows: tuple[str, str]
    """Their ids."""
    in_order: bool
    """Whether they are predicted in the order in which they were measured."""


class ValidationSummary(Report):
    """Sizes of the errors of all rows together; None where there is no such row."""

    rows: int
    """Rows predicted (count)."""
    median_error: float | None
    """Median of the relative errors (no unit)."""
    median_error_simulated: float | None
    """The same for the simulated rows."""
    median_error_alone: float | None
    """The same for the hardware model without any other row."""
    p90_error: float | None
    """90th percentile of the relative errors (no unit)."""
    within_30_percent: float | None
    """Share of the relative errors up to 0.3 (no unit)."""
    largest_staleness_error: float | None
    """Largest error of a mean staleness (optimizer steps)."""
    pairs: int
    """Pairs of rows to put in order (count)."""
    pairs_in_order: float | None
    """Share of them that are in order (no unit)."""


class ValidationReport(Report):
    """The content of validation.json."""

    rows: tuple[PredictedRow, ...]
    """Rows predicted."""
    unusable: tuple[UnusableRow, ...]
    """The other rows."""
    pairs: tuple[RowPair, ...]
    """Pairs of the rows."""
    summary: ValidationSummary
    """All errors together."""
