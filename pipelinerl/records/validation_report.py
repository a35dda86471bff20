"""The report of ``validate``: the content of validation.json."""

from __future__ import annotations

from typing import Literal

from pipelinerl.util.strict_model import Report

Quantity = Literal["s/step", "tokens/s", "staleness", "trainer idle"]


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
    gpus: int | None
    """GPUs of the cluster (count). None: not published."""
    answer_tokens: float | None
    """Tokens of answers per RL step. None: batch or mean answer is not published."""
    measured: float
    """Published result."""
    predicted: float
    """Median of the likely values."""
    low: float | None
    """Lower end of an 80 % band, normal in logs. None: a closed form without one."""
    high: float | None
    """Upper end of that."""
    inputs: tuple[str, ...]
    """Published numbers of this row that went in, besides cluster, batch and lengths."""
    fitted_to: tuple[str, ...]
    """Other rows whose measurements were used, by id."""
    assumed: tuple[str, ...]
    """Unpublished numbers that the prediction rests on, in words."""
    alone: float | None
    """Prediction from the row's inputs by the hardware model and its mean error for other families, without its own
    parts and without any other row of its system. None: these inputs do not decide it."""
    alone_low: float | None
    """Lower end of an 80 % band of that, normal in logs, from the spread between other families."""
    alone_high: float | None
    """Upper end of that."""
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


class SpeedUp(Report):
    """Two rows of one family on equally many GPUs, synchronous and asynchronous, no row of the family used."""

    synchronous: str
    """Id of the synchronous row."""
    asynchronous: str
    """Id of the asynchronous row."""
    family: str
    """Software, GPU and model."""
    measured: float
    """Synchronous over asynchronous seconds per step."""
    predicted: float
    """The same, predicted: median of the draws."""
    low: float
    """Lower end of an 80 % band, normal in logs."""
    high: float
    """Upper end of that."""
    probability: float
    """Share of the draws in which the asynchronous step is the shorter one."""
    decided_by: str
    """The uncertain factor that explains most of the spread of the ratio, in words."""
    constant: float
    """The ratio by the naive rule: the median of the pairs of other families; 1 where there are none."""


class SpeedUpSummary(Report):
    """How good the probabilities of the pairs are, beside naive rules."""

    pairs: int
    """Pairs (count)."""
    families: int
    """Their families (count)."""
    faster: int
    """Pairs whose asynchronous run was measured faster (count)."""
    median_error: float
    """Median of the relative errors of the ratio (no unit)."""
    constant_median_error: float
    """The same of the naive rule ``constant`` (no unit)."""
    error_difference_low: float
    """5th percentile of ``median_error`` less ``constant_median_error``, families resampled (no unit)."""
    error_difference_high: float
    """95th percentile of that."""
    within_band: float
    """Share of the ratios inside their 80 % band, the mean of the families (no unit)."""
    brier: float
    """Squared distance of the probability from what happened, 0 or 1: mean of the means of the families (no unit)."""
    always_brier: float
    """The same of the naive rule "asynchronous is always faster" (no unit)."""
    brier_difference_low: float
    """5th percentile of ``brier`` less ``always_brier``, families resampled (no unit)."""
    brier_difference_high: float
    """95th percentile of that."""
    certain: int
    """Pairs with a probability of at least 0.95, of either order (count)."""
    certain_right: int
    """Of these, measured in that order (count)."""


class AloneSummary(Report):
    """Errors of rows predicted alone: systems that nobody has measured. Whole families are left out and resampled."""

    rows: int
    """Rows whose inputs decide their seconds (count)."""
    families: int
    """Their families (count)."""
    median_error: float
    """Median of the relative errors (no unit)."""
    median_error_low: float
    """5th percentile of that median, families resampled."""
    median_error_high: float
    """95th percentile of that median, families resampled."""
    p90_error: float
    """90th percentile of the relative errors (no unit)."""
    within_45_percent: float
    """Share of the relative errors up to 0.45 (no unit)."""
    within_band: float
    """Share of the rows inside their 80 % band, which other families made (no unit)."""
    bias: float
    """Mean of the log of predicted over measured (no unit)."""
    family_sd: float
    """Standard deviation of that log between families (no unit)."""
    row_sd: float
    """Standard deviation of that log between the rows of a family (no unit)."""
    naive_median_error: float | None
    """Median error of the naive rule: the tokens per second and GPU of the other families, whatever the model. None:
    there is no other family with a known number of GPUs."""


class ValidationSummary(Report):
    """Errors over all rows; None if no row counts."""

    rows: int
    """Rows predicted (count)."""
    median_error: float | None
    """Median of the relative errors (no unit)."""
    median_error_simulated: float | None
    """The same for the simulated rows."""
    alone: AloneSummary | None
    """The hardware model alone, of rows whose inputs decide their seconds."""
    speed_ups: SpeedUpSummary | None
    """Synchronous against asynchronous runs."""
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
    speed_ups: tuple[SpeedUp, ...]
    """Pairs of a synchronous and an asynchronous row."""
    others_only: bool = False
    """Whether the shipped rows alone judge."""
    summary: ValidationSummary
    """All errors together."""
