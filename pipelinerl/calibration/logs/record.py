"""A step of a job as its log tells it, whatever wrote the log; the columns of a plain CSV file of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from pipelinerl.errors import ConfigError
from pipelinerl.util.strict_model import StrictModel

WARM_UP_FROM = 4
"""Steps from which on the first is left out: it compiles and fills (count)."""
OUTLIER = 3.0
"""Times the median from which on a step is left out: it held an evaluation or a checkpoint (no unit)."""
OVERLAP = 1.02
"""Times the step that its parts last together from which on they ran side by side (no unit)."""


class LoggedStep(StrictModel):
    """One step of a log: from one weight update of the engines to the next. What the log does not tell is None."""

    step: int = Field(ge=0)
    """Number of the step."""
    step_s: float | None = Field(default=None, gt=0)
    """Seconds of the step, from its start to the next one's."""
    generation_s: float | None = Field(default=None, ge=0)
    """Seconds in which the engines generated the answers of the step, from the first request to the last token."""
    training_s: float | None = Field(default=None, ge=0)
    """Seconds in which the trainer worked: its update, log-probabilities, values, advantages."""
    sync_s: float | None = Field(default=None, ge=0)
    """Seconds of the weight synchronization."""
    wait_s: float | None = Field(default=None, ge=0)
    """Asynchronous jobs: seconds in which the trainer waited for answers."""
    tokens: float | None = Field(default=None, gt=0)
    """Tokens of the step's answers, prompts not counted."""
    total_tokens: float | None = Field(default=None, gt=0)
    """Tokens of the step's prompts and answers."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Tokens of answers per second of the step."""
    samples: float | None = Field(default=None, gt=0)
    """Answers trained on (count)."""
    samples_per_s: float | None = Field(default=None, gt=0)
    """Answers per second of the step."""
    length_mean: float | None = Field(default=None, gt=0)
    """Mean answer (tokens)."""
    length_p90: float | None = Field(default=None, gt=0)
    """Length that 90 % of the answers do not exceed (tokens)."""
    length_p95: float | None = Field(default=None, gt=0)
    """Length that 95 % of the answers do not exceed (tokens)."""
    length_max: float | None = Field(default=None, gt=0)
    """Longest answer (tokens)."""
    clipped_share: float | None = Field(default=None, ge=0, le=1)
    """Share of the answers that were cut at the longest allowed length."""
    prompt_mean: float | None = Field(default=None, ge=0)
    """Mean prompt (tokens)."""
    sequence_mean: float | None = Field(default=None, gt=0)
    """Mean of prompt and answer together (tokens)."""
    sequence_max: float | None = Field(default=None, gt=0)
    """Longest prompt and answer together (tokens)."""
    lag_mean: float | None = Field(default=None, ge=0)
    """Mean staleness of what was trained on (optimizer steps)."""
    lag_max: float | None = Field(default=None, ge=0)
    """Largest staleness (optimizer steps)."""
    accelerators: float | None = Field(default=None, gt=0)
    """Accelerators in all (count)."""
    generation_accelerators: float | None = Field(default=None, gt=0)
    """Accelerators that generate (count)."""
    training_accelerators: float | None = Field(default=None, gt=0)
    """Accelerators that train (count)."""

    @property
    def side_by_side(self) -> bool:
        """Whether generation and training overlapped: the trainer waited for answers, or the parts exceed the step."""
        parts_s = (self.generation_s or 0.0) + (self.training_s or 0.0) + (self.sync_s or 0.0)
        return self.wait_s is not None or (self.step_s is not None and parts_s > OVERLAP * self.step_s)

    def completed(self) -> LoggedStep:
        """Return the step with what follows from its own numbers."""
        now = {name: value for name, value in self if value is not None}

        def known(name: str, value: float | None) -> None:
            if name not in now and value is not None and value > 0:
                now[name] = value

        def quotient(above: float | None, below: float | None) -> float | None:
            return None if above is None or not below else above / below

        def difference(whole: float | None, *parts: float | None) -> float | None:
            return None if whole is None or None in parts else whole - sum(one or 0.0 for one in parts)

        def product(one: float | None, other: float | None) -> float | None:
            return None if one is None or other is None else one * other

        known("prompt_mean", difference(now.get("sequence_mean"), now.get("length_mean")))
        known("length_mean", difference(now.get("sequence_mean"), now.get("prompt_mean")))
        known("length_max", difference(now.get("sequence_max"), now.get("prompt_mean")))
        known("samples", product(now.get("samples_per_s"), now.get("step_s")))
        known("tokens", product(now.get("tokens_per_s"), now.get("step_s")))
        known("samples", quotient(now.get("tokens"), now.get("length_mean")))
        sequence = now.get("sequence_mean")
        if sequence is None and "length_mean" in now and "prompt_mean" in now:
            sequence = now["length_mean"] + now["prompt_mean"]
        known("samples", quotient(now.get("total_tokens"), sequence))
        known("tokens", product(now.get("samples"), now.get("length_mean")))
        known("length_mean", quotient(now.get("tokens"), now.get("samples")))
        known("tokens_per_s", quotient(now.get("tokens"), now.get("step_s")))
        if self.side_by_side and "training_s" in now and "wait_s" not in now:
            rest_s = difference(now.get("step_s"), now["training_s"], now.get("sync_s", 0.0))
            now["wait_s"] = max(0.0, rest_s or 0.0)
        return LoggedStep(**now)


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The steps of a log that count, and their mean."""

    num_steps: int
    """Steps that count (count)."""
    num_left_out: int
    """Steps left out: the first, and those that held something else besides (count)."""
    mean: LoggedStep
    """Means over the steps; ``step`` is the last one, ``lag_max`` the largest."""
    longest: float | None
    """Longest answer of all steps (tokens)."""

    @property
    def asynchronous(self) -> bool:
        """Whether generation and training ran side by side."""
        return self.mean.wait_s is not None or (self.mean.lag_max or 0.0) >= 1


def logged_run(steps: Sequence[LoggedStep]) -> LoggedRun:
    """Return the run that these steps are of.

    Args:
        steps: At least one, in order.

    Raises:
        ConfigError: If no step has seconds.
    """
    whole = [step.completed() for step in steps]
    timed = [step for step in whole if step.step_s is not None]
    if not timed:
        raise ConfigError("the log must tell the seconds of a step (step_s), got none")
    kept = timed[1:] if len(timed) >= WARM_UP_FROM else timed
    median_s = float(np.median([step.step_s for step in kept if step.step_s is not None]))
    kept = [step for step in kept if step.step_s is not None and step.step_s <= OUTLIER * median_s]
    values = {
        name: [value for step in kept if (value := getattr(step, name)) is not None]
        for name in LoggedStep.model_fields
        if name != "step"
    }
    means = {name: float(np.mean(some)) for name, some in values.items() if some}
    if "length_mean" not in means and "sequence_mean" in means:
        means["length_mean"] = means["sequence_mean"]
    if values["lag_max"]:
        means["lag_max"] = max(values["lag_max"])
    if "tokens" in means:
        means["tokens_per_s"] = means["tokens"] / means["step_s"]
    mean = LoggedStep(step=kept[-1].step, **means)
    return LoggedRun(len(kept), len(steps) - len(kept), mean, max(values["length_max"], default=None))
