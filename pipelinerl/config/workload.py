"""The table ``[workload]``: prompts, answers, rewards."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelinerl.util.limits import MOST, Count, Tokens, TokensOrZero
from pipelinerl.util.strict_model import StrictModel


class LengthConfig(StrictModel):
    """Lengths of the answers (tokens)."""

    kind: Literal["fixed", "uniform", "lognormal", "empirical"]
    """``fixed``: always ``max``. ``uniform``: 1 .. ``max``. ``lognormal``: ``mean`` and ``cv``, cut at ``max``.
    ``empirical``: whole groups of real answers from ``source``, scaled to ``mean``, cut at ``max``."""
    max: Tokens
    """Longest answer, where generation is cut (tokens). Paper symbol L."""
    mean: float | None = Field(default=None, gt=0)
    """Mean length after the cut (tokens): needed by lognormal; empirical: None keeps the lengths of the source."""
    cv: float | None = Field(default=None, gt=0)
    """Standard deviation over mean before the cut (no unit), lognormal only."""
    source: str | None = None
    """Empirical only: the name of a shipped set, the path of a CSV file, or of a run without turns, its folder or its
    trace.jsonl.gz, whose groups come in their order (paths are relative to the run file)."""
    growth: float = Field(default=1.0, gt=0, le=MOST)
    """Factor on all lengths at the last optimizer step, reached linearly from 1 at the first (no unit)."""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        if self.kind == "lognormal":
            for name in ("mean", "cv"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is missing; kind='lognormal' needs mean and cv")
        if self.kind == "empirical" and self.source is None:
            raise ValueError("source is missing; kind='empirical' needs the name of a shipped set or a CSV file")
        if self.kind in ("lognormal", "empirical") and self.mean is not None and self.mean >= self.max:
            raise ValueError(f"mean must be below max, got mean={self.mean:g}, max={self.max}")
        return self


class WorkloadConfig(StrictModel):
    """The workload: prompts, answers, rewards."""

    group_size: Count = 1
    """Rollouts per prompt (count)."""
    prompt_tokens: TokensOrZero = 0
    """Length of every prompt (tokens); a length source that has its own prompt lengths is not asked for them."""
    success_rate: float = Field(default=0.5, ge=0, le=1)
    """Probability that a rollout is rewarded with 1 and not 0, where the length source does not say."""
    length: LengthConfig
    """Lengths of the answers."""
