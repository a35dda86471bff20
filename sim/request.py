"""A rollout on an engine, and the interfaces of the simulated cluster: to its engines and to a policy that learns.

Where rollouts have turns (``sim.episodes``), a request finishes with each, observes, and is submitted again: to its
engine what it observed is prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipelinerl.config.environment import PrefixCaching
from pipelinerl.scheduler.events import NO_TOKENS, EngineSeconds, StartTraining, VersionSpans, WeightUpdate
from sim.clock import TICKS_PER_S
from sim.costs import DecodeCost, PrefillCost


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Speed and size of an engine."""

    decode: DecodeCost
    prefill: PrefillCost
    kv_cache_tokens: int | None
    """Capacity (tokens); None: unlimited."""
    pause_ticks: int
    """Ticks that the engine pauses to load weights."""
    tokens: TokenSource | None = None
    """Decides lengths while they are generated; None: requests come with their lengths."""
    prefix_cache: PrefixCaching = PrefixCaching.OFF
    """What becomes of the KV cache of a rollout between two turns."""
    step_tokens: int | None = None
    """Tokens of a step at most, one per request that decodes; prefill is cut to what is left. None: it is not cut."""


class Request:
    """A rollout and its true length (mutable; owned by the simulated cluster)."""

    __slots__ = (
        "decode_ticks",
        "first_update",
        "goes_on",
        "length",
        "num_left",
        "prefill_ticks",
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
        self.goes_on = False  # whether another turn follows when it has finished
        self.spans = NO_TOKENS  # tokens it had when it joined the batch
        self.num_left = length  # tokens it still had to generate then
        self.tokens_to_prefill = prompt_tokens  # tokens whose keys and values had to be computed then
        # How long its engine has filled caches, its own or others', and made steps while it was in the batch; as long
        # as it is there, less what its engine had done before.
        self.prefill_ticks = self.decode_ticks = 0

    def take_seconds(self) -> EngineSeconds:
        """Return where its time on its engine has gone since this was asked last; it is in no batch."""
        seconds = EngineSeconds(self.prefill_ticks / TICKS_PER_S, self.decode_ticks / TICKS_PER_S)
        self.prefill_ticks = self.decode_ticks = 0
        return seconds

    @property
    def finish_step(self) -> int:
        """Decode steps that its engine will have done when it has all its tokens; it is in a batch."""
        return self.start_step + self.num_left

    def keep(self, spans: VersionSpans) -> None:
        """Keep these tokens until it joins a batch again."""
        self.spans = spans
        self.num_left = self.length - spans.num_tokens
        self.tokens_to_prefill = self.prompt_tokens + spans.num_tokens

    def observe(self, num_tokens: int, length: int) -> None:
        """Have it go on after an observation of so many tokens, and finish its turn with so many of its own in all."""
        ends = self.spans.ends
        num_own = ends[-1] if ends else 0  # as ``keep``, without two calls per turn
        self.prompt_tokens = prompt_tokens = self.prompt_tokens + num_tokens
        self.length = length
        self.num_left = length - num_own
        self.tokens_to_prefill = prompt_tokens + num_own

    def finish_at(self, length: int) -> None:
        """Have it finish with so many tokens, as a policy has decided."""
        self.length = length
        self.num_left = length - self.spans.num_tokens


class TokenSource(Protocol):
    """Decides the lengths of rollouts while they are generated, as a policy does. Without one they are known before.

    With the length of a rollout it sets whether another turn follows.
    """

    def begin(self, request: Request, version: int) -> None:
        """Set the length of a rollout that joins a batch now; the same again if it is asked again."""

    def go_on(self, requests: Sequence[Request], num_tokens: Sequence[int], version: int, *, recompute: bool) -> None:
        """Set the lengths of the rollouts of a batch, with the tokens each has, that goes on with other weights."""


class PolicyAnswers(TokenSource, Protocol):
    """A token source that knows which prompt a rollout answers."""

    def ask(self, rollout_id: int, prompt_id: int) -> None:
        """Note a rollout that is on its way to an engine."""

    def end_turn(self, rollout_id: int) -> int | None:
        """Have the environment answer a turn; return the tokens of its answer. None: the rollout has finished."""


class LearningPolicy(Protocol):
    """A policy that learns during the run (``sim.learning.loop.Learner``; not imported here: it needs torch)."""

    @property
    def answers(self) -> PolicyAnswers:
        """The answers it gives, from which engines have their lengths."""

    def finished(self, rollout_id: int, spans: VersionSpans) -> float:
        """Return the reward of a rollout whose last token is there."""

    def forget(self, rollout_id: int) -> None:
        """Forget a rollout that will not be trained on."""

    def publish(self, version: int, *, oldest: int) -> None:
        """Keep the trainer's weights for the engines; no engine has a version before ``oldest``."""

    def train(self, command: StartTraining) -> None:
        """Train on a micro-batch; raise RunFailedError if that diverges."""


class EngineHost(Protocol):
    """Receives the reports of engines, each at the tick at which it happens."""

    def rollout_finished(self, engine: int, request: Request, spans: VersionSpans) -> None:
        """A rollout has its last token; ``spans`` are those of all its tokens."""

    def rollout_aborted(self, engine: int, request: Request) -> None:
        """A rollout has ended early; it keeps the tokens it has."""

    def rollout_preempted(self, engine: int, rollout_id: int, num_tokens: int) -> None:
        """A rollout has lost its place in the KV cache; its tokens so far are prefilled again when it is admitted."""

    def weights_loaded(self, engine: int, version: int, pause_ticks: int) -> None:
        """The engine samples with ``version`` from now on; it has made no step for ``pause_ticks``."""


class SimulatedEngine(Protocol):
    """An engine in simulated time. A call at tick t takes effect at its first step boundary after t."""

    version: int
    """Version it samples with."""

    def submit(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at``."""

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; no effect if it has ended."""

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""

    def suspend(self) -> None:
        """Stop decoding, with everything in progress kept, until new weights are loaded."""

    def end(self) -> list[tuple[Request, VersionSpans]]:
        """Return the rollouts in progress, in order of id, each with the tokens it has at this tick."""
