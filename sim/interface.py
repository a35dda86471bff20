"""Interfaces of the simulated cluster: requests and their costs, engines, and a policy that learns.

A request with turns (``sim.episodes``) finishes with each turn and is submitted again with its observation as prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.environment import PrefixCaching
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import Decode, DecodeStep, PrefillConfig, Speculation
from pipelinerl.scheduler.events import NO_TOKENS, EngineSeconds, StartTraining, VersionSpans, WeightUpdate
from pipelinerl.util.strict_model import LONGEST_S
from sim.clock import TICKS_PER_S, to_ticks
from sim.workload import named_stream

# ------------------------------------------------------------- costs in ticks, tabulated once a run


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One decode step of b sequences with C tokens of context in all: ``batch_ticks[b] + context_ticks * C``."""

    batch_ticks: tuple[int, ...]
    """Ticks that depend on the number of sequences, for 0 .. H sequences."""
    context_ticks: int
    """Ticks per token of context."""
    draft_context_ticks: int = 0
    """The same on top, where a step drafts."""

    def slower(self, factor: float) -> DecodeCost:
        """Return the cost of an engine that takes longer by a factor."""
        context, drafts = round(factor * self.context_ticks), round(factor * self.draft_context_ticks)
        return DecodeCost(tuple(round(factor * one) for one in self.batch_ticks), context, drafts)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Filling the KV cache of one sequence: ``fixed + linear * n + square * n^2`` ticks for n tokens.

    The formula of ``pipelinerl.hardware.costs`` in ticks: coefficients are rounded, not results, so sums are exact in
    any order.
    """

    fixed_ticks: int
    linear_ticks: int
    square_ticks: int

    def slower(self, factor: float) -> PrefillCost:
        """Return the cost of an engine that takes longer by a factor."""
        return PrefillCost(*(round(factor * one) for one in (self.fixed_ticks, self.linear_ticks, self.square_ticks)))

    def ticks(self, tokens: int, cached: int = 0) -> int:
        """Return the ticks for one sequence of ``tokens`` tokens, the first ``cached`` of which are in the cache.

        The uncached tokens attend to the cached ones, so the square term is tokens² − cached². 0 if all are cached.
        """
        if tokens == cached:
            return 0
        return self.fixed_ticks + (self.linear_ticks + self.square_ticks * (tokens + cached)) * (tokens - cached)

    def more_ticks(self, tokens: int, cached: int) -> int:
        """Return the ticks of a further chunk: no fixed part."""
        return (self.linear_ticks + self.square_ticks * (tokens + cached)) * (tokens - cached)


def decode_cost(
    decode: Decode, *, tensor_parallel: int, num_slots: int, speculation: Speculation | None = None
) -> DecodeCost:
    """Return the decode cost of one engine; ConfigError if a table cannot be read, or makes steps too long."""
    step = DecodeStep(decode, tensor_parallel=tensor_parallel, most=num_slots, speculation=speculation)
    for sequences, seconds in enumerate(step.batch_s[1:], start=1):
        if not seconds <= LONGEST_S * (1 + sequences):  # as long as the largest coefficients of ``affine`` make it
            raise ConfigError(
                f"hardware.decode must give steps of at most {LONGEST_S:g} s and as much per sequence, "
                f"got {seconds:g} s for {sequences} sequences"
            )
    if not step.context_s <= LONGEST_S:
        raise ConfigError(
            f"hardware.decode must give steps of at most {LONGEST_S:g} s per token of context, got {step.context_s:g} s"
        )
    # A step lasts a tick at least: time must go on.
    batch_ticks = (max(1, to_ticks(seconds)) for seconds in step.batch_s[1 : num_slots + 1])
    return DecodeCost((0, *batch_ticks), to_ticks(step.context_s), to_ticks(step.draft_context_s))


def prefill_cost(config: PrefillConfig) -> PrefillCost:
    """Return the cost of filling the KV cache."""
    return PrefillCost(to_ticks(config.sequence_s), to_ticks(config.token_s), to_ticks(config.token_squared_s))


# ------------------------------------------------------------------------------ speculative decoding


class Drafting:
    """The tokens that steps with drafts give in a run, and a count of them (mutable; shared by its engines).

    Every number is a function of the seed, the rollout, its tokens when it joined a batch, and the step since then:
    whatever else happens, the same drafted token of the same step meets the same chance.
    """

    def __init__(self, config: SpeculationConfig, *, seed: int) -> None:
        self.acceptance_of, self.off_above = config.acceptance_of, config.off_above
        self.row_tokens = config.tokens + 1
        """Tokens of a sequence in a step, at most; a step has room for so many, whether it drafts or not (count)."""
        self._seed = seed
        self.num_steps = self.num_tokens = 0  # of sequences that have left a batch

    def chances(self, rollout_id: int, had: int, steps: int) -> NDArray[np.float32]:
        """Return a number in [0, 1) for each of so many steps of a rollout that joined a batch with ``had`` tokens."""
        return named_stream(self._seed, "drafts", rollout_id << 32 | had).random(steps, dtype=np.float32)

    def gains(self, rollout_id: int, had: int, steps: range, acceptance: float) -> NDArray[np.int64]:
        """Return the tokens that steps with drafts give: one, and the i-th drafted one if chance is below a^i."""
        chances = self.chances(rollout_id, had, steps.stop)[steps.start :]
        gains = np.ones(len(chances), dtype=np.int64)
        for accepted in range(1, self.row_tokens):
            gains += chances < acceptance**accepted
        return gains

    def count(self, request: Request, step: int) -> None:
        """Count the steps and tokens of a request that leaves a batch."""
        self.num_steps += step - request.start_step
        self.num_tokens += int(request.path[step - request.start_step])


# ------------------------------------------------------------------------------------ interfaces


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
    """Whether the KV cache of a rollout is kept between two turns."""
    counts_time: bool = True
    """Whether requests count the ticks of their prefill and decode."""
    version: int = 0
    """Version that it begins with."""
    step_tokens: int | None = None
    """Limit of a step (tokens), one per request that decodes; prefill is cut to the rest. None: it is not cut."""
    drafting: Drafting | None = None
    """Speculative decoding, counting time. None: a token per sequence and step."""


class Request:
    """A rollout and its true length (mutable; owned by the simulated cluster)."""

    __slots__ = (
        "cached_tokens",
        "decode_ticks",
        "first_load",
        "goes_on",
        "length",
        "num_known",
        "num_left",
        "path",
        "place",
        "prefill_ticks",
        "prompt_tokens",
        "reward",
        "rollout_id",
        "spans",
        "start_step",
        "tokens_to_prefill",
    )

    place: int  # in the order of admission of its engine
    start_step: int  # decode steps that its engine had done when it joined the batch
    first_load: int  # and versions that its engine had had
    path: NDArray[np.int64]  # speculative decoding: tokens it has got so many steps after it joined, up to its last

    def __init__(self, rollout_id: int, prompt_tokens: int, length: int, reward: float = 0.0) -> None:
        self.rollout_id = rollout_id
        self.prompt_tokens = prompt_tokens
        self.length = length  # tokens it will have when finished
        self.reward = reward
        self.goes_on = False  # whether another turn follows when it has finished
        self.num_known = 0  # tokens it had, in whole turns or kept after an abort, when it came to its engine
        self.spans = NO_TOKENS  # tokens it had when it joined the batch
        self.num_left = length  # tokens it still had to generate then; in a batch that drafts, steps
        self.tokens_to_prefill = prompt_tokens  # tokens whose keys and values had to be computed then
        # Ticks of prefill and decode of its engine while it was in the batch; while it is there, less those before.
        self.prefill_ticks = self.decode_ticks = 0
        self.cached_tokens = 0  # tokens of its turn's start that were in the KV cache

    def take_seconds(self) -> EngineSeconds:
        """Return and reset its seconds of prefill and decode; it must be in no batch."""
        seconds = EngineSeconds(self.prefill_ticks / TICKS_PER_S, self.decode_ticks / TICKS_PER_S)
        self.prefill_ticks = self.decode_ticks = 0
        return seconds

    @property
    def finish_step(self) -> int:
        """The engine's decode step in which it gets its last token; only while in a batch."""
        return self.start_step + self.num_left

    def keep(self, spans: VersionSpans) -> None:
        """Keep these tokens until it joins a batch again."""
        self.spans = spans
        self.num_left = self.length - spans.num_tokens
        self.tokens_to_prefill = self.prompt_tokens + spans.num_tokens

    def observe(self, num_tokens: int, length: int) -> None:
        """Add an observation of ``num_tokens``; the next turn ends at ``length`` generated tokens in all."""
        ends = self.spans.ends
        self.num_known = num_own = ends[-1] if ends else 0  # as ``keep``, without two calls per turn
        self.prompt_tokens = prompt_tokens = self.prompt_tokens + num_tokens
        self.length = length
        self.num_left = length - num_own
        self.tokens_to_prefill = prompt_tokens + num_own

    def finish_at(self, length: int) -> None:
        """Finish at ``length`` tokens, as a policy has decided."""
        self.length = length
        self.num_left = length - self.spans.num_tokens


class TokenSource(Protocol):
    """Decides lengths of rollouts, and whether another turn follows, while they are generated."""

    def begin(self, request: Request, version: int) -> None:
        """Set the length of a rollout that joins a batch now; idempotent."""

    def go_on(self, requests: Sequence[Request], num_tokens: Sequence[int], version: int, *, recompute: bool) -> None:
        """Set the lengths of rollouts that have ``num_tokens`` each and go on with other weights."""


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
        """Its answers, which give engines their lengths."""

    def finished(self, rollout_id: int, spans: VersionSpans) -> float:
        """Return the reward of a finished rollout."""

    def forget(self, rollout_id: int) -> None:
        """Forget a rollout that will not be trained on."""

    def publish(self, version: int, *, oldest: int) -> None:
        """Keep the trainer's weights for the engines; no engine has a version before ``oldest``."""

    def train(self, command: StartTraining) -> None:
        """Train on a micro-batch; raise RunFailedError if that diverges."""


class EngineHost(Protocol):
    """Receives the reports of engines, each at the tick at which it happens."""

    def rollout_finished(self, engine: int, request: Request, spans: VersionSpans) -> None:
        """A rollout has its last token; ``spans`` cover all its tokens."""

    def rollout_aborted(self, engine: int, request: Request) -> None:
        """A rollout has ended early; it keeps the tokens it has."""

    def rollout_preempted(self, engine: int, rollout_id: int, num_tokens: int) -> None:
        """A rollout has lost its place in the KV cache; its tokens so far are prefilled again when it is admitted."""

    def weights_loaded(self, engine: int, version: int, pause_ticks: int) -> None:
        """The engine samples with ``version`` from now on; it has made no step for ``pause_ticks``."""


class SimulatedEngine(Protocol):
    """An engine in simulated time. A call at tick t takes effect at its first step boundary after t."""

    @property
    def version(self) -> int:
        """Version it samples with."""

    def submit(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at``."""

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; no effect if it has ended."""

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""

    def suspend(self) -> None:
        """Stop decoding, with everything in progress kept, until new weights are loaded."""

    def disturb(self, still_ticks: int, settings: EngineSettings) -> None:
        """Stand still for so many ticks, then decode and prefill at the costs of ``settings``."""

    def kv_cache_share(self) -> float:
        """Return the share of the KV cache that requests in progress had at the last boundary."""

    def end(self) -> list[tuple[Request, VersionSpans]]:
        """Return the rollouts in progress, in order of id, each with the tokens it has at this tick."""


class DecodeEngine(SimulatedEngine, Protocol):
    """An engine that takes requests with their KV cache, too."""

    def receive(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at`` whose KV cache, unless ``recompute`` drops it, comes on admission."""
