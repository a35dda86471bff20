"""The table ``[engine]``: how engines generate, beside their speed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelinerl.util.strict_model import Count, Seconds, StrictModel


class SpeculationConfig(StrictModel):
    """Speculative decoding: a drafter proposes tokens, and one step of the policy verifies them all."""

    method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]
    """The drafter, by vLLM's name. ``ngram`` looks its tokens up in the sequence itself: it has no weights."""
    tokens: int = Field(ge=1, le=64)
    """Tokens drafted per sequence and step (count). Symbol k."""
    acceptance: float | None = Field(default=None, ge=0, le=1)
    """Simulated: probability that a drafted token is accepted if those before it are, by a drafter of the policy's own
    version (no unit). Symbol a."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """Simulated: factor on ``acceptance`` per optimizer step between the drafter and the policy (no unit)."""
    refresh_every: Count | None = None
    """Simulated: optimizer steps from one refresh of the drafter to the next (count). None: never refreshed."""
    refresh_s: Seconds = 0.0
    """Simulated: time of the trainer for a refresh (s)."""
    draft_cost: float = Field(default=0.0, ge=0, le=1)
    """Simulated: time to draft a token for the whole batch, over that of a decode step without speculation (no
    unit)."""
    off_above: Count | None = None
    """Sequences in the batch above which nothing is drafted (count). None: always drafted."""
    model: str | None = None
    """Real: folder or name of the drafter's weights, which no update changes. None: ``ngram`` and ``mtp`` need none."""


class EngineConfig(StrictModel):
    """How engines generate."""

    speculation: SpeculationConfig | None = None
    """Speculative decoding. None: a token per sequence and step."""
