"""The table ``[environment]``: rollouts with turns, and what acts between them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelinerl.util.limits import LONGEST_S, Count, PositiveSeconds, Seconds, Tokens, TokensOrZero
from pipelinerl.util.strict_model import StrictModel


class PrefixCaching(StrEnum):
    """What becomes of the KV cache of a rollout between two turns."""

    SALTED = "salted"
    """It stays until its room is needed, or new weights come."""
    KEPT = "kept"
    """It stays until its room is needed; new weights go on with it (unless ``weight_update`` is ``recompute``)."""
    OFF = "off"
    """It is dropped: every turn prefills all that came before it."""


class TurnsConfig(StrictModel):
    """Turns of a rollout and what it observes between them."""

    kind: Literal["lognormal", "recorded"]
    """``lognormal``: by means; ``workload.length`` is the length of one turn. ``recorded``: whole episodes of
    ``source`` with their prompts, lengths and times, but for those that begin beyond ``context_max``;
    ``workload.length.max`` cuts each turn."""
    source: str | None = None
    """Recorded only: the name of a shipped set, the path of a JSONL file, or of a run, its folder or its
    trace.jsonl.gz, whose groups come in their order (paths are relative to the run file)."""
    mean: float | None = Field(default=None, ge=1)
    """Lognormal only: mean number of turns of a rollout, before the cuts (count)."""
    cv: float = Field(default=0.0, ge=0, le=100)
    """Lognormal only: standard deviation over mean of that number (no unit)."""
    group_share: float = Field(default=0.0, ge=0, le=1)
    """Lognormal only: share of the variance of its logarithm that is the problem's, one for a whole group (no unit).
    0: the problem does not decide how many turns it takes; 1: it alone does."""
    max: Count
    """Most turns of a rollout (count)."""
    observation_tokens: float = Field(default=0.0, ge=0)
    """Lognormal only: mean tokens of an observation, before the cut (tokens)."""
    observation_cv: float = Field(default=0.0, ge=0, le=100)
    """Lognormal only: standard deviation over mean of these (no unit)."""
    observation_max: TokensOrZero
    """Longest observation, where it is cut (tokens)."""
    context_max: Tokens
    """Tokens that a rollout can have, prompt and observations included: the last turn is cut there (tokens)."""

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
    """Environments there are: rollouts open at a time, at most (count)."""
    reset_s: Seconds = 0.0
    """Mean time to make one ready for a rollout (s)."""
    reset_cv: float = Field(default=0.0, ge=0, le=100)
    """Standard deviation over mean of that time, log-normal (no unit)."""
    step_s: Seconds = 0.0
    """Mean time in which one acts on a turn and answers; not of recorded turns, which have their own (s)."""
    step_cv: float = Field(default=0.0, ge=0, le=100)
    """Standard deviation over mean of that time, log-normal (no unit)."""
    step_max_s: Seconds = LONGEST_S
    """Longest time of a reset or a step, where it is cut (s)."""
    failure_rate: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a reset or a step fails, at the end of its time (no unit)."""
    reset_hang_rate: float = Field(default=0.0, ge=0, lt=1)
    """Simulated runs only: probability that a reset hangs until its time-out (no unit)."""
    step_hang_rate: float = Field(default=0.0, ge=0, lt=1)
    """Simulated runs only: probability that a step hangs until its time-out (no unit)."""
    retries: int = Field(default=0, ge=0, le=100)
    """Times that a reset that failed is made again before its rollout fails, and in simulated runs a step, too (count):
    in a real one it may have been half done. A recorded step takes as long again."""
    lifetime_s: PositiveSeconds | None = None
    """Longest time of a rollout from the start of its reset (s). What its environment does is cut off there, what an
    engine does is not; the rollout fails. None: no limit."""
    reset_timeout_s: PositiveSeconds = 600.0
    """Longest reset; it has failed then, and in a real run its environment's process is killed (s)."""
    step_timeout_s: PositiveSeconds = 60.0
    """Longest step; it has failed then, and in a real run its environment's process is killed (s)."""
    prefix_cache: PrefixCaching = Field(default=PrefixCaching.SALTED, strict=False)
    """What becomes of the KV cache of a rollout between two turns."""
    turns: TurnsConfig
    """Turns and observations."""
