"""The tokens of a rollout after its prompt, as segments in the order of the text, with their loss mask.

A segment is *generated* by the policy or *observed* by it. The model reads both; the loss, importance weights and lags
are of generated tokens only. Without an environment a rollout is one generated segment. All generated tokens of a
rollout have one advantage, by the rewards of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipelinerl.rl.ess import finite

Number = TypeVar("Number", np.int64, np.float32)

# Legend of shapes: T generated tokens of one rollout; L all its tokens after the prompt;
# G rollouts of one group.


class SegmentKind(StrEnum):
    """Where the tokens of a segment come from."""

    GENERATED = "generated"
    """Sampled by an engine; trained on."""
    OBSERVED = "observed"
    """Put in by the environment; read by the model, never trained on."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one origin that follow each other."""

    kind: SegmentKind
    tokens: NDArray[np.int64]
    """At least one."""
    logprobs: NDArray[np.float32]
    """Log-probability of each under the weights that sampled it (nats); none where they are observed."""

    @classmethod
    def generated(cls, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> Self:
        """Return tokens that an engine has sampled."""
        return cls(SegmentKind.GENERATED, tokens, logprobs)

    @classmethod
    def observed(cls, tokens: NDArray[np.int64]) -> Self:
        """Return tokens that the environment has put in."""
        return cls(SegmentKind.OBSERVED, tokens, np.zeros(0, np.float32))


def extended(segments: Sequence[Segment], new: Segment) -> tuple[Segment, ...]:
    """Return segments with one more at the end; tokens of the same kind are one segment, and none adds nothing."""
    if not len(new.tokens):
        return tuple(segments)
    if not segments or segments[-1].kind is not new.kind:
        return (*segments, new)
    last = segments[-1]
    whole = Segment(new.kind, _joined([last.tokens, new.tokens]), _joined([last.logprobs, new.logprobs]))
    return (*segments[:-1], whole)


def all_tokens(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Return all tokens, shape [L]."""
    return _joined([one.tokens for one in segments]) if segments else np.zeros(0, np.int64)


def generated_tokens(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Return the generated tokens, shape [T]."""
    return all_tokens([one for one in segments if one.kind is SegmentKind.GENERATED])


def behaviour_logprobs(segments: Sequence[Segment]) -> NDArray[np.float32]:
    """Return the log-probabilities of the generated tokens under the weights that sampled them, shape [T] (nats)."""
    return _joined([one.logprobs for one in segments]) if segments else np.zeros(0, np.float32)


def loss_mask(segments: Sequence[Segment]) -> NDArray[np.bool_]:
    """Return whether each token is trained on, shape [L]."""
    kinds = np.array([one.kind is SegmentKind.GENERATED for one in segments], dtype=bool)
    return np.repeat(kinds, [len(one.tokens) for one in segments])


def turn_of_tokens(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Return the turn of each generated token, from 1 on, shape [T]; an observation ends a turn."""
    lengths = [len(one.tokens) for one in segments if one.kind is SegmentKind.GENERATED]
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


def _joined(parts: Sequence[NDArray[Number]]) -> NDArray[Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def leave_one_out(reward_G: ArrayLike) -> NDArray[np.float64]:
    """Return each rollout's reward minus the mean reward of the others of its group, shape [G].

    A_i = r_i - b_i with b_i = sum_{j != i} r_j / (n - 1), the same as n / (n - 1) * (r_i - mean r). The baseline
    does not depend on the rollout it is subtracted from, so it adds no bias. The advantages of a group sum to 0,
    and are exactly 0 when all rewards are equal. They are not divided by the standard deviation. In a group of 1 it is
    the reward itself (ServiceNow/PipelineRL gives 0, so that such groups do not train).
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free".
    Raises ValueError if the array is empty, not one-dimensional, or has a non-finite entry.
    """
    reward = finite("reward_G", reward_G)
    num = reward.size
    if num == 1:
        return reward.copy()
    difference = reward - reward[0]  # makes equal rewards exact zeros before anything is rounded
    advantage: NDArray[np.float64] = num / (num - 1) * (difference - difference.mean())
    return advantage
