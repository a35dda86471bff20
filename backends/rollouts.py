"""The data of rollouts: what they were asked, what was generated, what it earned. The scheduler sees only ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backends.interface import Generated, Sample
from pipelinerl.rl.advantages import leave_one_out
from pipelinerl.rl.tasks import Problem
from pipelinerl.scheduler.events import NO_TOKENS, VersionSpans, joined

# Legend of shapes: T tokens of one answer; G rollouts of one group.


@dataclass(slots=True)
class RolloutData:
    """One rollout (mutable; owned by the driver)."""

    problem: Problem
    prompt_tokens: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: VersionSpans = NO_TOKENS
    reward: float = math.nan
    reference_logprob_T: NDArray[np.float32] | None = None

    def extend(self, generated: Generated) -> None:
        """Append what an engine has generated."""
        self.tokens += generated.tokens_T.tolist()
        self.logprobs += generated.logprob_T.tolist()
        self.spans = joined(self.spans, generated.spans)

    def sample(self, rollout_id: int, advantage: float) -> Sample:
        """Return it as the trainer takes it."""
        return Sample(
            rollout_id=rollout_id,
            prompt_P=np.array(self.prompt_tokens, dtype=np.int64),
            answer_T=np.array(self.tokens, dtype=np.int64),
            behaviour_logprob_T=np.array(self.logprobs, dtype=np.float32),
            reward=self.reward,
            advantage=advantage,
            reference_logprob_T=self.reference_logprob_T,
        )


def lag_of_tokens(spans: VersionSpans, version: int) -> NDArray[np.int64]:
    """Return the lag of each token of one answer when trained at ``version`` (optimizer steps), shape [T]."""
    lengths = np.diff(np.array((0, *spans.ends)))
    return np.repeat(version - np.array(spans.versions, dtype=np.int64), lengths)


def samples_of(rollouts: dict[int, RolloutData], rollout_ids: tuple[int, ...], group_size: int) -> list[Sample]:
    """Return rollouts as samples, each with its leave-one-out advantage; siblings are together in ``rollout_ids``."""
    samples = []
    for first in range(0, len(rollout_ids), group_size):
        ids = rollout_ids[first : first + group_size]
        advantage_G = leave_one_out(np.array([rollouts[one].reward for one in ids]))
        pairs = zip(ids, advantage_G.tolist(), strict=True)
        samples += [rollouts[rollout_id].sample(rollout_id, advantage) for rollout_id, advantage in pairs]
    return samples
