"""What a run reports, typed: the content of summary.json and profile.json, for who writes and who reads them.

``RunReport`` holds the numbers of a run, ``FigureData`` what figures show beyond them. Both are frozen and strict.
``to_dict`` gives plain values for JSON; a key that is optional and absent is left out. Its inverse is ``from_dict``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import (
    ConfigDict,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from pipelinerl.errors import ConfigError
from pipelinerl.records.bottleneck import Bottleneck
from pipelinerl.records.steps import STEPS_FILE, StepRow, as_records, read_steps
from pipelinerl.scheduler.events import DiscardReason
from pipelinerl.util.strict_model import StrictModel


class Report(StrictModel):
    """A table of a report; a field that is None and has a default is a key that is left out."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    @model_serializer(mode="wrap")
    def _leave_out_absent_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {key: value for key, value in serialize(self).items() if value is not None or fields[key].is_required()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values as JSON has them, keys in the order of the file."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, name: str) -> Self:
        """Return the report that plain values hold.

        Args:
            data: As ``to_dict`` returns it.
            name: What messages call it, usually the file.

        Raises:
            ConfigError: If a key is missing, unknown or wrong; one line that names it.
        """
        return cls._parsed(json.dumps(data), name)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the report that a JSON file holds.

        Raises:
            ConfigError: As ``from_dict``, and if the file cannot be read.
        """
        try:
            return cls._parsed(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"cannot read {path}: {reason}") from None

    @classmethod
    def _parsed(cls, text: str, name: str) -> Self:
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(_complaint(error.errors(include_url=False)[0], name)) from None


def _complaint(fault: ErrorDetails, name: str) -> str:
    """Return the line that says what pydantic found wrong in the file ``name``."""
    key, kind, ctx = ".".join(map(str, fault["loc"])), fault["type"], fault.get("ctx", {})
    if kind == "json_invalid":
        return f"{name} is not valid JSON: {ctx['error']}"
    if not key:
        return f"{name} must hold a table, got {type(fault['input']).__name__}"
    match kind:
        case "missing":
            return f"{name}: {key} is missing"
        case "extra_forbidden":
            return f"{name}: {key} is an unknown key"
        case "value_error":
            return f"{name}: {key}.{ctx['error']}"
        case "float_type" | "finite_number":
            rule = "a number"
        case "int_type" | "int_from_float":
            rule = "a whole number"
        case "string_type":
            rule = "a string"
        case "bool_type":
            rule = "true or false"
        case "model_type" | "model_attributes_type" | "dict_type":
            rule = "a table"
        case "list_type":
            rule = "a list"
        case "tuple_type":
            rule = "a list"
        case _:
            return f"{name}: {key}: {fault['msg']}"
    return f"{name}: {key} must be {rule}, got {json.dumps(fault['input'])}"


# --------------------------------------------------------------------------------------- tables of summary.json


class LagReport(Report):
    """Lag of the trained tokens (optimizer steps), every token counted once."""

    mean: float
    """Mean."""
    p50: int
    """Median."""
    p95: int
    """95th percentile."""
    p99: int
    """99th percentile."""
    max: int
    """Largest."""
    in_flight_mean: float
    """Part of the mean from before the rollout finished."""
    in_queue_mean: float
    """Part of the mean from after the rollout finished."""


class RolloutCounts(Report):
    """Rollouts by what became of them (counts)."""

    started: int
    """Started; one that a weight update interrupted and that goes on counts once."""
    finished: int
    """Finished, trained on or not."""
    trained: int
    """Trained on."""
    discarded: int
    """Finished and given up."""
    aborted: int
    """Ended early by the scheduler."""
    failed: int
    """Lost with an engine, or with the computation of their reward."""
    unfinished: int
    """None of these at the end of the run."""
    interruptions: int
    """Times that a rollout was aborted by a weight update and started again."""
    preemptions: int | None = None
    """Times that an engine without room for its KV cache put a rollout off. Absent: written before it was counted."""


class TokenCounts(Report):
    """Generated tokens by what became of their rollouts (counts), prompts not counted."""

    generated: int
    """All that were generated by rollouts that have ended, finished or not."""
    trained: int
    """Trained on."""
    discarded: int
    """Of rollouts that were discarded."""
    aborted: int
    """Of rollouts that the scheduler ended early."""
    failed: int
    """Of finished rollouts whose reward could not be computed."""
    unfinished: int
    """None of these at the end of the run."""


class LengthReport(Report):
    """Mean length of answers (tokens)."""

    finished_mean: float
    """Of finished rollouts."""
    trained_mean: float
    """Of rollouts trained on; below the other if long ones are discarded."""


class Utilisation(Report):
    """Shares of the time in which each side is at work (0 to 1)."""

    generation: float
    """Engine-seconds with a rollout in progress that is not paused, over all engine-seconds."""
    training: float
    """Seconds of training over the seconds of the run."""


class TrainerSeconds(Report):
    """What the trainer's wall time is split into (s)."""

    generating: float
    """The accelerators generate; 0 unless the same ones train."""
    training: float
    """The trainer trains."""
    publishing: float
    """The trainer publishes weights."""
    waiting_for_data: float
    """The trainer has nothing to train on; 0 where the same accelerators generate."""


class EssModelled(Report):
    """Effective sample size per token that a drift model gives the lags of the run (share of the tokens)."""

    mean: float
    """Mean over optimizer steps."""
    low: float
    """Of a step that drifts fast."""
    high: float
    """Of a step that drifts slowly."""


class EssReport(Report):
    """Effective sample size of the importance weights, normalised to (0, 1]; means over optimizer steps."""

    model_config = ConfigDict(allow_inf_nan=True)

    mean: float
    """Per token, before truncation."""
    min: float
    """Least of an optimizer step, per token, before truncation."""
    truncated_mean: float
    """Per token, after truncation."""
    sequence_mean: float
    """Per rollout, before truncation."""
    by_lag: dict[int, float]
    """Per token, before truncation, by lag (optimizer steps)."""


class MismatchReport(Report):
    """How far the trainer's probabilities are from the engines' (nats per token); means over optimizer steps."""

    model_config = ConfigDict(allow_inf_nan=True)

    kl: float
    """Kullback-Leibler divergence of the trainer's policy from the engines'."""
    kl_at_lag_0: float | None = None
    """The same over tokens of lag 0: what the two programs differ by. Absent without such a token."""
    log_ratio_abs_max_at_lag_0: float | None = None
    """Largest absolute log-ratio of a token of lag 0 (nats). Absent without such a token."""


class Reached(Report):
    """When the mean reward reached a level."""

    time_s: float
    """Seconds since the start."""
    samples: float
    """Rollouts trained on until then (count)."""


class RewardReport(Report):
    """Mean reward of an optimizer step."""

    model_config = ConfigDict(allow_inf_nan=True)

    first: float
    """Of the first step."""
    last: float
    """Mean over the last tenth of the steps."""
    max: float
    """Of the best step."""
    reached: dict[str, Reached]
    """When the mean over a few steps first was at each level, by level."""


class UpdateReport(Report):
    """Weight updates of engines; means over updates (s)."""

    count: int
    """Updates (count)."""
    pause_s: float
    """From the request to pause until the engine stood still."""
    transfer_s: float
    """Transfer and loading of the weights."""
    resume_s: float
    """Until the engine went on."""


class EvaluationReport(Report):
    """Share of held-out problems that are solved (0 to 1)."""

    success_before: float | None = None
    """Before training. Absent: not evaluated then."""
    success_after: float | None = None
    """After training. Absent: the run did not come to it."""


class RunIdentity(Report):
    """Which run it is."""

    scheduler: str
    """Kind of scheduler."""
    seed: int
    """Seed of the run."""
    max_lag: int | None
    """Largest lag allowed (optimizer steps); null: no bound."""
    optimizer_steps_per_rl_step: int | None = None
    """Paper symbol G (count). Absent: the scheduler has no RL steps."""


class RunTotals(Report):
    """The numbers that follow from the trace of a run, and from nothing else but its configuration."""

    optimizer_steps: int
    """Optimizer steps done (count)."""
    duration_s: float
    """Time of the last event (s)."""
    samples_trained: int
    """Rollouts trained on (count)."""
    tokens_trained: int
    """Tokens trained on (count), prompts not counted."""
    samples_per_s: float
    """Rollouts trained on per second."""
    tokens_per_s: float
    """Trained tokens per second."""
    lag: LagReport
    """Token lag."""
    rollouts: RolloutCounts
    """Rollouts."""
    tokens: TokenCounts
    """Generated tokens."""
    discarded_by_reason: dict[DiscardReason, int]
    """Discarded rollouts by reason (counts)."""
    length: LengthReport
    """Length of answers."""
    utilisation: Utilisation
    """Shares of the time at work."""
    seconds: TrainerSeconds
    """The trainer's wall time."""
    bottleneck: Bottleneck
    """The side that limits the throughput."""
    complete: bool
    """Whether all optimizer steps were done."""
    tokens_per_flash: float | None = None
    """Trained tokens per flash. Absent: the cost of a decode step is not given in flashes."""
    ess_modelled: EssModelled | None = None
    """Modelled effective sample size. Absent without a drift model."""


class RunMeasurements(Report):
    """The numbers that only a run with a real or learning policy, or with real engines, has."""

    updates: UpdateReport | None = None
    """Weight updates. Absent in a simulation."""
    engine_restarts: int | None = None
    """Engines that were lost and started again (count). Absent in a simulation."""
    driver_s_per_rollout: float | None = None
    """Time of the driver's own work per rollout (s). Absent in a simulation."""
    ess: EssReport | None = None
    """Effective sample size. Absent without importance weights."""
    mismatch: MismatchReport | None = None
    """Difference between engines and trainer. Absent without importance weights."""
    reward: RewardReport | None = None
    """Mean reward. Only of a simulation with a policy that learns."""
    weights_sha256: str | None = None
    """SHA-256 of the trained weights. Only of a simulation with a policy that learns."""
    evaluation: EvaluationReport | None = None
    """Held-out problems. Absent without them."""


class RunReport(RunMeasurements, RunTotals, RunIdentity):  # pydantic orders fields from the last base to the first
    """The numbers of a run: the content of summary.json, and its steps for Python."""

    _steps: tuple[StepRow, ...] = PrivateAttr(())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the report in a summary.json, with the steps of the steps.csv beside it, if there is one.

        Raises:
            ConfigError: If one of the files is broken; one line that names file and key.
        """
        report, steps = super().read(path), path.with_name(STEPS_FILE)
        return report.with_steps(read_steps(steps)) if steps.exists() else report

    def with_steps(self, rows: list[StepRow]) -> Self:
        """Return this report with these steps."""
        report = self.model_copy()
        report._steps = tuple(rows)
        return report

    @property
    def steps(self) -> np.recarray[Any, Any]:
        """A record per optimizer step with the columns of steps.csv: ``report.steps.lag_mean`` is an array."""
        return as_records(self._steps)

    def steps_frame(self) -> Any:
        """Return the steps as a pandas data frame.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        return import_module("pandas").DataFrame(self.steps)


# --------------------------------------------------------------------------------------- tables of profile.json


class LagHistogram(Report):
    """Trained tokens with a lag of 0, 1, 2, ... optimizer steps (counts)."""

    total: list[int]
    """By lag from sampling to training."""
    in_flight: list[int]
    """By its part until the rollout finished."""
    in_queue: list[int]
    """By its part from then on."""


class LagByPosition(Report):
    """Mean lag of the trained tokens against their position in the answer."""

    width_tokens: int
    """Width of a bin (tokens)."""
    lag_mean: list[float | None]
    """Mean lag of each bin (optimizer steps), null where it holds no token."""
    tokens: list[int]
    """Tokens in each bin (count)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_lengths("tokens", self.tokens, self.lag_mean)
        return self


class GenerationWindow(Report):
    """Generation over all engines in bins of time: one generation phase, or the first rollouts of a pipeline."""

    start_s: float
    """Start of the first bin (s)."""
    width_s: float
    """Width of a bin (s)."""
    in_progress: list[float]
    """Mean rollouts in progress in each bin (count)."""
    tokens_per_s: list[float]
    """Generated tokens per second in each bin."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_lengths("tokens_per_s", self.tokens_per_s, self.in_progress)
        return self


class EngineTimeline(Report):
    """One engine over time."""

    engine: int
    """Its number."""
    time_s: list[float]
    """When its number of rollouts in progress changed (s)."""
    in_progress: list[int]
    """The number from each of these times on (count)."""
    paused: list[tuple[float, float]]
    """Start and end of each pause (s)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_lengths("in_progress", self.in_progress, self.time_s)
        return self


class WeightUpdateTimes(Report):
    """A weight update."""

    version: int
    """Version that was published (optimizer steps)."""
    published_s: float
    """When its publication began (s)."""
    loaded_s: float
    """When the last engine so far had loaded it (s)."""


class Timeline(Report):
    """The first part of a run, event by event."""

    until_s: float
    """Where it ends (s)."""
    trainer: list[tuple[float, float, Literal["training", "publishing"]]]
    """Start and end (s) of each interval in which the trainer worked, and at what."""
    engines: list[EngineTimeline]
    """The first few engines."""
    updates: list[WeightUpdateTimes]
    """The weight updates, in order of publication."""


class FigureData(Report):
    """What figures show beyond a row per step: the content of profile.json."""

    lag_histogram: LagHistogram
    """Tokens by lag."""
    lag_by_position: LagByPosition
    """Lag by position in the answer."""
    generation_window: GenerationWindow
    """Generation over time."""
    timeline: Timeline
    """Engines and trainer over time."""


def _check_lengths(key: str, values: Sequence[Any], others: Sequence[Any]) -> None:
    if len(values) != len(others):
        raise ValueError(f"{key} must have {len(others)} values, got {len(values)}")
