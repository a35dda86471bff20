"""The report of a plan, typed: the content of plan.json, for its writer and its readers."""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import ValidationInfo, field_validator, model_validator

from pipelinerl.config.run import ClusterConfig
from pipelinerl.config.scheduler import SchedulerConfig
from pipelinerl.hardware.coefficients import Level
from pipelinerl.records.certainty_report import CertaintyReport
from pipelinerl.records.cost import CostReport
from pipelinerl.util.report import Report, data_frame

Value = float | int | str | bool | list[Any] | None
"""A value of a run file."""


class Instead(Report):
    """What the recommended kind of scheduler would give at its best if one key had another value, by the screening."""

    value: Value
    """The value; null: the key is left out."""
    throughput: float | None
    """Throughput over that with the value as it is (ratio); null: nothing would keep to the limits, or the key cannot
    change alone."""
    fastest: str | None
    """The kind of scheduler that turns the fastest if all else is as expected; null: the same as before."""


class Assumed(Report):
    """A key that nobody gave a value."""

    key: str
    """Table and key of the run file."""
    value: Value
    """What was assumed; null: the key is left out."""
    instead: list[Instead]
    """What it may as well be."""

    @property
    def largest(self) -> float:
        """The largest effect (log of the ratio)."""
        return max((abs(math.log(one.throughput)) for one in self.instead if one.throughput), default=0.0)


class Changed(Report):
    """A key that has another value than in the plan compared with."""

    key: str
    """Table and key of the run file."""
    before: Value
    """Its value there; null: left out."""
    alone: Instead
    """What its value here would change there, alone."""


class Against(Report):
    """Another plan, and what made the difference."""

    name: str
    """Its file or folder."""
    label: str
    """What it recommends."""
    family: str
    """The kind of scheduler of that."""
    tokens_per_s: float
    """Its throughput: trained tokens per second over the whole run."""
    lag_mean: float
    """Its mean lag (optimizer steps)."""
    cost: CostReport
    """Its cost."""
    verdict: str
    """Its bottleneck."""
    complete: bool
    """Whether all that it should have simulated was: it may have missed the best otherwise."""
    changed: list[Changed]
    """The keys that differ, the largest effect first."""


class PlannedRun(Report):
    """The part of the run file and its limits that the numbers refer to."""

    accelerators: int
    """Accelerators of the cluster (count)."""
    optimizer_steps: int
    """Optimizer steps of the whole run (count)."""
    price_per_gpu_hour: float | None
    """Price of a GPU-hour (USD), where known."""
    lag_limit: int | None
    """Largest lag allowed of any trained token (optimizer steps). None: unbounded."""
    mean_lag_limit: float | None = None
    """Mean lag allowed (optimizer steps). None: unbounded."""


class NotTried(Report):
    """A value listed in ``[plan]`` of which no candidate was left."""

    key: str
    """Key of the list."""
    value: int | str | list[int]
    """The value; the whole list if no kind of scheduler tried reads it."""
    why: str
    """The reason in words."""


class SearchReport(Report):
    """The search in numbers."""

    candidates: int
    """Combinations of the listed values (count)."""
    kept: int
    """Candidates that the screening kept (count)."""
    simulated: int
    """Candidates whose simulation ended (count)."""
    simulated_steps: int
    """Optimizer steps of each simulation, at most (count)."""
    within_limits: int
    """Those of them that keep to the limits of ``[plan]`` (count)."""
    lag_ratios: dict[str, float]
    """Simulated over screened mean lag by kind of scheduler, the median of those simulated."""
    complete: bool
    """Whether every simulation ended."""
    failures: list[str]
    """Simulations that failed, a line each."""
    not_tried: list[NotTried]
    """Listed values of which no candidate was left."""


class CandidateNumbers(Report):
    """The whole run of one candidate, by simulation."""

    label: str
    """Name of the candidate in tables."""
    family: str
    """Its kind of scheduler."""
    tokens_per_s: float
    """Trained tokens per second over the whole run."""
    step_s: float
    """Seconds per optimizer step in the steady state."""
    hours: float
    """Hours of the whole run."""
    cost: CostReport
    """Cost of the whole run."""
    lag_mean: float
    """Mean lag of a trained token in the steady state (optimizer steps)."""
    lag_max: int
    """Largest lag of any trained token (optimizer steps)."""
    ess: float | None
    """Modelled effective sample size, with a drift model."""
    training: float
    """Share of the trainer's time in which it trains."""
    publishing: float
    """Share in which it publishes weights."""
    waiting: float
    """Share in which it does neither."""


class PlannedCandidate(CandidateNumbers):
    """A candidate with its choices, its band and its bottleneck."""

    cluster: ClusterConfig
    """Its table ``[cluster]``."""
    scheduler: SchedulerConfig
    """Its table ``[scheduler]``."""
    environments: int | None = None
    """Its ``environment.count`` (environments). Absent where rollouts have one turn."""
    idle: int | None = None
    """Accelerators that are paid for and stand idle, as they make no whole engine (count). Absent where none does."""
    band: dict[Level, CandidateNumbers]
    """The same candidate by level of the hardware coefficients."""
    verdict: str
    """Its bottleneck, and what more GPUs would give."""

    @property
    def band_tokens_per_s(self) -> tuple[float, float]:
        """Least and largest throughput of the band (tokens/s)."""
        rates = [one.tokens_per_s for one in self.band.values()] or [self.tokens_per_s]
        return min(rates), max(rates)


class RunnerUp(PlannedCandidate):
    """The best candidate that differs from the recommendation in kind, split, size of engine or G."""

    why: str
    """Why it is not recommended."""


class OwnRun(PlannedCandidate):
    """The run file as it is."""

    keeps_to_limits: bool
    """Whether it keeps to the limits of ``[plan]``."""
    among_schedulers: bool
    """Whether its kind of scheduler is in ``plan.schedulers``."""
    recommended_over_own: float
    """Throughput of the recommendation over its own (ratio of tokens/s)."""


class Decision(Report):
    """The recommendation with other hardware coefficients, among the candidates simulated with them."""

    label: str
    """The candidate."""
    faster: float
    """Its gain in throughput there over the recommendation (relative)."""
    same: bool
    """Whether the decision stays as it is."""


class ScreenedColumns(Report):
    """The candidates that the screening kept, a column per number."""

    label: list[str]
    """Name of each candidate in tables."""
    family: list[str]
    """Kinds of scheduler."""
    tokens_per_s: list[float]
    """Screened throughput (tokens/s), to 4 digits."""
    lag_mean: list[float]
    """Screened mean lag (optimizer steps), to 4 digits."""
    lag_max: list[int]
    """Screened largest lag (optimizer steps)."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len({len(column) for column in self.__dict__.values()}) > 1:
            raise ValueError("columns must be equally long")
        return self


class CoefficientEffect(Report):
    """The effect of one coefficient at one end of its range."""

    value: int | float
    """The coefficient there."""
    throughput: float
    """Throughput of the recommendation over what it is with all coefficients as they are (ratio)."""
    instead: str | None
    """The candidate recommended instead, if another one is."""


class CoefficientEffects(Report):
    """The effect of one coefficient that is moved alone."""

    coefficient: str
    """Its name."""
    optimistic: CoefficientEffect | None = None
    """At its optimistic value, if that is another."""
    pessimistic: CoefficientEffect | None = None
    """At its pessimistic value, if that is another."""

    @property
    def effects(self) -> list[CoefficientEffect]:
        """The ends that differ from the value in use."""
        return [one for one in (self.optimistic, self.pessimistic) if one is not None]

    @property
    def largest(self) -> float:
        """The largest relative change of the throughput."""
        return max((abs(one.throughput - 1) for one in self.effects), default=0.0)

    @property
    def changes_decision(self) -> bool:
        """Whether something else would be recommended at one end."""
        return any(one.instead for one in self.effects)


class SplitCurve(Report):
    """Screened throughput of the recommendation at every split (tokens/s); empty if it is colocated."""

    generation_accelerators: list[float] | None = None
    """Accelerators that generate (count)."""
    optimistic: list[float] | None = None
    """With the optimistic coefficients."""
    central: list[float] | None = None
    """With the central coefficients."""
    pessimistic: list[float] | None = None
    """With the pessimistic coefficients."""

    @property
    def levels(self) -> dict[Level, list[float]]:
        """Throughput by level of the coefficients (tokens/s)."""
        curves = {level: getattr(self, level.value) for level in Level}
        return {level: curve for level, curve in curves.items() if curve is not None}

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        splits, curves = self.generation_accelerators, self.levels.values()
        if (splits is None) != (not curves) or any(len(curve) != len(splits or ()) for curve in curves):
            raise ValueError("columns must be equally long")
        return self


class PlanReport(Report):
    """The content of plan.json."""

    run: PlannedRun
    """The part of the run file that the numbers refer to."""
    asked: dict[str, Any]
    """The run file with overrides and measurements, without the keys that were left for the plan to find."""
    assumed: list[Assumed]
    """What nobody gave, the most influential first; empty where there was a run file."""
    against: Against | None = None
    """The plan that this one is compared with. Absent without ``--against``."""
    search: SearchReport
    """The search in numbers."""
    warnings: list[str]
    """What speaks against the recommended kind of scheduler, a line each."""
    recommended: PlannedCandidate
    """The recommendation."""
    certainty: CertaintyReport
    """How sure that is, and which measurement would settle it."""
    runner_up: RunnerUp | None
    """The best candidate that differs from it in kind, split, size of engine or G."""
    families: dict[str, PlannedCandidate | None]
    """The best candidate by kind of scheduler; null if none of a kind keeps to the limits."""
    own: OwnRun | None
    """The run file as it is, if it can run."""
    decisions: dict[Level, Decision]
    """The recommendation by level of the coefficients."""
    simulated: list[CandidateNumbers]
    """Every simulated candidate, the fastest first."""
    front: list[str]
    """Labels of the Pareto front of throughput against mean lag, by rising lag."""
    screened: ScreenedColumns
    """Every candidate that the screening kept."""
    sensitivity: list[CoefficientEffects]
    """The effect of each coefficient, the largest first."""
    splits: SplitCurve
    """Screened throughput of the recommendation at every split."""

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per simulated candidate, the fastest first.

        Raises:
            ConfigError: If pandas is not installed.
        """
        return data_frame([one.to_dict() for one in self.simulated])

    @field_validator("front")
    @classmethod
    def _check_front(cls, front: list[str], info: ValidationInfo) -> list[str]:
        known = [one.label for one in info.data.get("simulated", [])]
        if not set(front) <= set(known):
            raise ValueError(f"labels must be those of simulated candidates, got {front}")
        return front
