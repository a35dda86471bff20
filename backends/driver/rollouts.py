"""The data of rollouts: prompt, generated tokens, reward. The scheduler sees only ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.interface import UNKNOWN, Generated, Sample
from pipelinerl.rl.problems import Problem
from pipelinerl.rl.segments import Segment, all_tokens, extended, leave_one_out
from pipelinerl.scheduler.events import NO_TOKENS, VersionSpans, joined

# Legend of shapes: T generated tokens of one answer; G rollouts of one group.


@dataclass(slots=True)
class RolloutData:
    """One rollout (mutable; owned by the driver)."""

    problem: Problem
    prompt_tokens: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    num_turns: int = 0
    """That have ended (count)."""
    turn_at: int = 0
    """Tokens after the prompt before the present turn (count)."""
    spans: VersionSpans = NO_TOKENS
    reward: float = math.nan
    """Of an environment: the sum over its turns so far."""
    reference_logprob_T: NDArray[np.float32] | None = None
    routed_NLK: NDArray[np.integer] | None = None
    """See ``Generated``: of each token as it was first computed with."""
    index: int = 0
    held_out: bool = False
    expires_s: float = math.inf
    """By the clock of the event loop."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """All tokens after the prompt."""
        return all_tokens(self.segments)

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt (count)."""
        return sum(len(one.tokens) for one in self.segments)

    @property
    def turn_tokens(self) -> NDArray[np.int64]:
        """Tokens of the turn it is in."""
        return self.tokens[self.turn_at :]

    def extend(self, generated: Generated) -> None:
        """Append generated tokens."""
        new = Segment.generated(
            np.asarray(generated.tokens_T, dtype=np.int64), np.asarray(generated.logprob_T, dtype=np.float32)
        )
        self.segments = extended(self.segments, new)
        self.spans = joined(self.spans, generated.spans)
        if generated.routed_NLK is not None:
            before_NLK = generated.routed_NLK[:0] if self.routed_NLK is None else self.routed_NLK
            self.routed_NLK = np.concatenate([before_NLK, generated.routed_NLK[len(before_NLK) :]])

    def observe(self, tokens: tuple[int, ...]) -> None:
        """Append an observation: the next turn begins."""
        self.segments = extended(self.segments, Segment.observed(np.array(tokens, dtype=np.int64)))
        self.turn_at = self.num_tokens

    def sample(self, rollout_id: int, advantage: float) -> Sample:
        """Return it as the trainer takes it."""
        return Sample(
            rollout_id=rollout_id,
            prompt_P=np.array(self.prompt_tokens, dtype=np.int64),
            segments=self.segments,
            reward=self.reward,
            advantage=advantage,
            reference_logprob_T=self.reference_logprob_T,
            routed_NLK=self._routed(),
        )

    def _routed(self) -> NDArray[np.int16] | None:
        """Return a row for each token."""
        if self.routed_NLK is None:
            return None
        known, rows = len(self.routed_NLK), len(self.prompt_tokens) + self.num_tokens
        routed_NLK = np.full((rows, *self.routed_NLK.shape[1:]), UNKNOWN, np.int16)
        routed_NLK[:known] = self.routed_NLK
        return routed_NLK


def lag_of_tokens(spans: VersionSpans, version: int) -> NDArray[np.int64]:
    """Return the lag of each token of one answer when trained at ``version`` (optimizer steps), shape [T]."""
    lengths = np.diff(np.array((0, *spans.ends)))
    return np.repeat(version - np.array(spans.versions, dtype=np.int64), lengths)


def samples_of(rollouts: dict[int, RolloutData], rollout_ids: tuple[int, ...], group_size: int) -> list[Sample]:
    """Return rollouts as samples with leave-one-out advantages; siblings are together in ``rollout_ids``."""
    samples = []
    for first in range(0, len(rollout_ids), group_size):
        ids = rollout_ids[first : first + group_size]
        advantage_G = leave_one_out(np.array([rollouts[one].reward for one in ids]))
        pairs = zip(ids, advantage_G.tolist(), strict=True)
        samples += [rollouts[rollout_id].sample(rollout_id, advantage) for rollout_id, advantage in pairs]
    return samples
