"""A rollout on an engine, and what engines and world say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipelinerl.scheduler.events import NO_TOKENS, VersionSpans, WeightUpdate


class Request:
    """A rollout as the simulator knows it, its true length included (mutable; owned by the world)."""

    __slots__ = (
        "first_update",
        "length",
        "num_left",
        "prompt_tokens",
        "reward",
        "rollout_id",
        "spans",
        "start_step",
        "tokens_to_prefill",
    )

    # Set when it joins a batch: the decode steps its engine had done, and the weight versions its engine had had.
    start_step: int
    first_update: int

    def __init__(self, rollout_id: int, prompt_tokens: int, length: int, reward: float = 0.0) -> None:
        self.rollout_id = rollout_id
        self.prompt_tokens = prompt_tokens
        self.length = length  # tokens it will have when finished
        self.reward = reward
        self.spans = NO_TOKENS  # tokens it had when it joined the batch
        self.num_left = length  # tokens it still had to generate then
        self.tokens_to_prefill = prompt_tokens  # tokens whose keys and values had to be computed then

    @property
    def finish_step(self) -> int:
        """Decode steps that its engine will have done when it has all its tokens; it is in a batch."""
        return self.start_step + self.num_left

    def keep(self, spans: VersionSpans) -> None:
        """Keep these tokens until it joins a batch again."""
        self.spans = spans
        self.num_left = self.length - spans.num_tokens
        self.tokens_to_prefill = self.prompt_tokens + spans.num_tokens

    def finish_at(self, length: int) -> None:
        """Have it finish with so many tokens: what a policy has decided."""
        self.length = length
        self.num_left = length - self.spans.num_tokens


class TokenSource(Protocol):
    """What decides the lengths of rollouts while they are generated: a policy. Without one they are known before."""

    def begin(self, request: Request, version: int) -> None:
        """Set the length of a rollout that joins a batch now; the same again if it is asked again."""

    def go_on(self, requests: Sequence[Request], num_tokens: Sequence[int], version: int, *, recompute: bool) -> None:
        """Set the lengths of the rollouts of a batch, with the tokens each has, that goes on with other weights."""


class EngineHost(Protocol):
    """What an engine reports, at the tick at which it happens."""

    def rollout_finished(self, engine: int, request: Request, spans: VersionSpans) -> None:
        """The last token of a rollout is there: these are all."""

    def rollout_aborted(self, engine: int, request: Request) -> None:
        """A rollout has ended early; it keeps the tokens it has."""

    def rollout_preempted(self, engine: int, rollout_id: int, num_tokens: int) -> None:
        """A rollout has lost its place in the KV cache; its tokens so far are prefilled again when it is admitted."""

    def weights_loaded(self, engine: int, version: int, pause_ticks: int) -> None:
        """The engine samples with ``version`` from now on, after standing still for so long."""


class SimulatedEngine(Protocol):
    """An engine in simulated time. What it is asked at tick t takes effect at its first step boundary after t."""

    version: int
    """Version it samples with."""

    def submit(self, request: Request, at: int) -> None:
        """Have a rollout arrive at tick ``at``."""

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; no effect if it has ended."""

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""

    def suspend(self) -> None:
        """Stop, with what is in progress, until new weights are loaded."""

    def end(self) -> list[tuple[int, VersionSpans]]:
        """Return the rollouts in progress, in order of id, each with the tokens it has at this tick."""
