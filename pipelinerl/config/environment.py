"""The table ``[environment]``: rollouts with turns, and the environments that act between them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelinerl.util.strict_model import LONGEST_S, Count, PositiveSeconds, Seconds, StrictModel, Tokens, TokensOrZero


class PrefixCaching(StrEnum):
    """KV cache of a rollout between two turns."""

    SALTED = "salted"
    """It stays until its room is needed, or new weights come."""
    KEPT = "kept"
    """It stays until its room is needed; new weights go on with it (unless ``weight_update`` is ``recompute``)."""
    OFF = "off"
    """It is dropped: every turn prefills all that came before it."""


class TurnsConfig(StrictModel):
    """Turns of a rollout and the observations between them."""

    kind: Literal["lognormal", "recorded"]
    """``lognormal``: by means, each turn of ``workload.length``. ``recorded``: whole episodes of ``source``, turns cut
    at ``workload.length.max``."""
    source: str | None = None
    """recorded: a shipped set, a JSONL file, or, with groups in order, a run (its folder or trace.jsonl.gz) or another
    system's trace."""
    mean: float | None = Field(default=None, ge=1)
    """lognormal: mean turns of a rollout, before the cuts (count)."""
    cv: float = Field(default=0.0, ge=0, le=100)
    """lognormal: standard deviation over mean (no unit)."""
    group_share: float = Field(default=0.0, ge=0, le=1)
    """lognormal: share of the variance of its logarithm that is common to a group (no unit)."""
    max: Count
    """Most turns of a rollout (count)."""
    observation_tokens: float = Field(default=0.0, ge=0)
    """lognormal: mean observation, before the cut (tokens)."""
    observation_cv: float = Field(default=0.0, ge=0, le=100)
    """lognormal: standard deviation over mean (no unit)."""
    observation_max: TokensOrZero
    """Longest observation (tokens)."""
    context_max: Tokens
    """Longest rollout, prompt and observations included; the last turn is cut (tokens)."""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        if self.kind == "recorded":
            if self.source is None:
                raise ValueError("source is missing; kind='recorded' needs the name of a shipped set or a JSONL file")
            return self
        if self.mean is None:
            raise ValueError("mean is missing; kind='lognormal' needs the mean number of turns")
        if self.source is not None:
            raise ValueError(f"source is read by kind='recorded' only, got {self.source!r}")
        for name, mean, most in (
            ("mean", self.mean, self.max),
            ("observation_tokens", self.observation_tokens, self.observation_max),
        ):
            if mean > most:
                raise ValueError(f"{name} must be at most the {most} at which it is cut, got {mean:g}")
        return self


class EnvironmentConfig(StrictModel):
    """Environments: sandboxes, tools, simulators. A rollout has one from its start until it is scored."""

    count: Count
    """Environments: rollouts open at a time, at most (count)."""
    reset_s: Seconds = 0.0
    """Mean time of a reset (s)."""
    reset_cv: float = Field(default=0.0, ge=0, le=100)
    """Standard deviation over mean, log-normal (no unit)."""
    step_s: Seconds = 0.0
    """Mean time of a step; recorded turns have their own (s)."""
    step_cv: float = Field(default=0.0, ge=0, le=100)
    """Standard deviation over mean, log-normal (no unit)."""
    step_max_s: Seconds = LONGEST_S
    """Longest drawn reset or step (s)."""
    failure_rate: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a reset or a step fails at its end (no unit)."""
    reset_hang_rate: float = Field(default=0.0, ge=0, lt=1)
    """Simulated: probability that it hangs until its time-out (no unit)."""
    step_hang_rate: float = Field(default=0.0, ge=0, lt=1)
    """Simulated: probability that it hangs until its time-out (no unit)."""
    retries: int = Field(default=0, ge=0, le=100)
    """Times that a failed reset is repeated before its rollout fails; simulated: a step, too (count)."""
    lifetime_s: PositiveSeconds | None = None
    """Longest time of a rollout from its reset on, engines excepted (s). None: no limit."""
    reset_timeout_s: PositiveSeconds = 600.0
    """Time after which a reset has failed; real: its process is killed (s)."""
    step_timeout_s: PositiveSeconds = 60.0
    """Time after which a step has failed; real: its process is killed (s)."""
    prefix_cache: PrefixCaching = Field(default=PrefixCaching.SALTED, strict=False)
    """KV cache of a rollout between two turns."""
    turns: TurnsConfig
    """Turns and observations."""
