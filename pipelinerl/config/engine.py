"""The tables ``[engine]`` and ``[generation]``: how engines generate, beside their speed."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import Speculation, acceptance_of
from pipelinerl.util.strict_model import Count, Seconds, StrictModel, Tokens


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
    """Simulated: time to draft one token for the whole batch / time of a plain decode step (no unit)."""
    off_above: Count | None = None
    """Sequences in the batch above which nothing is drafted (count). None: always drafted."""
    model: str | None = None
    """Real: folder or name of the drafter's weights, which no update changes. None: ``ngram`` and ``mtp`` need none."""

    def acceptance_of(self, version: int) -> float:
        """Return the acceptance of engines with a version of the policy, and the newest drafter published by then.

        It was refreshed when the trainer last had made a multiple of ``refresh_every`` optimizer steps. Raises
        ConfigError without ``acceptance``.
        """
        if self.acceptance is None:
            raise ConfigError("engine.speculation.acceptance is missing; a simulation needs it")
        distance = version if self.refresh_every is None else version % self.refresh_every
        return self.acceptance * self.decay**distance

    def refresh_after_s(self, version: int) -> float:
        """Return the time of the trainer for a refresh once it has made a version (s)."""
        return 0.0 if self.refresh_every is None or version % self.refresh_every else self.refresh_s

    def law(self, optimizer_steps: int) -> Speculation:
        """Return it as the formulas read it, with the versions of a run, or of one period of refreshes."""
        versions = 1 if self.decay == 1.0 else min(optimizer_steps, self.refresh_every or optimizer_steps)
        acceptances = tuple(self.acceptance_of(version) for version in range(versions))
        return Speculation(self.tokens, self.draft_cost, self.off_above, acceptances)

    def averaged(self, optimizer_steps: int) -> SpeculationConfig:
        """Return one whose every optimizer step is the mean of a run: a part of it then stands for the rest."""
        if self.decay == 1.0 and not self.refresh_s:
            return self
        steps, every = self.law(optimizer_steps).mean_steps, self.refresh_every
        mean = acceptance_of(1 / steps, self.tokens)
        refresh = {"refresh_every": every and 1, "refresh_s": self.refresh_s / (every or 1)}
        return self.model_copy(update={"acceptance": mean, "decay": 1.0, **refresh})

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.refresh_s and self.refresh_every is None:
            raise ValueError(f"refresh_every is missing; refresh_s={self.refresh_s:g} needs it")
        return self


def as_measured(acceptance: float) -> dict[str, float]:
    """Return the keys of the mean acceptance of a run, which has the decay in it."""
    return {"acceptance": acceptance, "decay": 1.0}


class EngineConfig(StrictModel):
    """How engines generate."""

    speculation: SpeculationConfig | None = None
    """Speculative decoding. None: a token per sequence and step."""


class GenerationConfig(StrictModel):
    """Simulated: prefill apart from decode (1 and 3: "1P3D"). Each request is prefilled on one engine for another."""

    prefill: Count
    """Engines that only prefill, of every ``prefill`` + ``decode`` engines of the run (count)."""
    decode: Count
    """Engines that decode, likewise; ``scheduler.generation_batch_size`` is that of each of these (count)."""
    transfer_s: Seconds = 0.0
    """Time to send a KV cache to its decode engine, whatever its length (s)."""
    transfer_token_s: Seconds | None = None
    """Time more per token of the cache (s). None: by the network of GPUs given by name, else 0."""
    cache_tokens: Tokens | None = None
    """Room of a prefill engine for caches of earlier turns, host memory included (tokens). None: its KV cache."""
