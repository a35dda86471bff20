"""Lengths of answers, and the means over them that the closed forms need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipelinerl.hardware.costs import TrainingCost
from pipelinerl.theory.turns import TurnMeans
from pipelinerl.util.arrays import FloatArray, check

GRID_POINTS = 1024
"""Positions, at most, at which the survivor function of the answer lengths is averaged."""
MIXED_MEANS = 4
"""Mean answers, at least, after which a slot ends one at any time with equal probability (count)."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Answer lengths, as a survivor function in whole sequences, so that no bound suffers from rounding."""

    unfinished: npt.NDArray[np.int64]
    """Sequences with at least l tokens, for l = 1..L (so the first entry counts them all), shape [L]."""

    @property
    def num_sequences(self) -> int:
        """Sequences (count)."""
        return int(self.unfinished[0])

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences (count): each decode step gives one to every unfinished sequence."""
        return int(self.unfinished.sum())

    @property
    def max_tokens(self) -> int:
        """Longest answer, L (tokens)."""
        return len(self.unfinished)

    @property
    def mean_tokens(self) -> float:
        """Mean answer, L̄ (tokens)."""
        return self.num_tokens / self.num_sequences

    @property
    def cv(self) -> float:
        """Standard deviation over mean (no unit)."""
        odd = np.arange(1, 2 * self.max_tokens, 2)  # n^2 is the sum of the first n odd numbers
        squares = int(odd @ self.unfinished)
        return math.sqrt((self.num_sequences * squares - self.num_tokens**2) / self.num_tokens**2)


def uniform_lengths(max_tokens: int) -> Lengths:
    """Return lengths equally likely on 1..L, exactly: h(l)/S = 1 - (l - 1)/L, mean (L + 1)/2; ValueError if L < 1."""
    check(max_tokens >= 1, "max_tokens must be at least 1", max_tokens)
    return Lengths(np.arange(max_tokens, 0, -1, dtype=np.int64))


def lengths_from(tokens: Sequence[int] | npt.NDArray[np.int64]) -> Lengths:
    """Return the lengths of given answers, shape [n], n at least 1; the longest of them is L (tokens).

    Raises ValueError if the array is empty, not one-dimensional, not of whole numbers, or has an entry below 1.
    """
    array = np.asarray(tokens)
    whole = array.ndim == 1 and array.size > 0 and np.issubdtype(array.dtype, np.integer)
    check(bool(whole and array.min() >= 1), "tokens must be a list of whole numbers, each at least 1", array)
    ending = np.bincount(array)[1:]
    return Lengths(ending[::-1].cumsum()[::-1].astype(np.int64))


@dataclass(frozen=True, eq=False)
class LengthStatistics:
    """Facts of prompts and answers that the steady state depends on."""

    lengths: Lengths
    prompt_tokens: float
    """Mean prompt (tokens)."""
    group_wait: float = 0.0
    """Decode steps that a token's rollout, once finished, waits for the longest of its group (mean over tokens)."""
    turns: TurnMeans | None = None
    """Of rollouts with turns: ``lengths`` are all tokens that one generates, ``prompt_tokens`` all that it observes."""

    @cached_property
    def width(self) -> int:
        """Tokens that a position of the grid stands for."""
        return math.ceil(self.lengths.max_tokens / GRID_POINTS)

    @cached_property
    def position(self) -> FloatArray:
        """Positions in the answer, in the middle of each piece of ``width`` tokens."""
        starts = np.arange(0, self.lengths.max_tokens, self.width, dtype=np.float64)
        return starts + (self.width + 1) / 2

    @cached_property
    def share(self) -> FloatArray:
        """Share of the answers that reach a position, by position."""
        pad = -self.lengths.max_tokens % self.width
        counts = np.concatenate([self.lengths.unfinished, np.zeros(pad)])
        share: FloatArray = counts.reshape(-1, self.width).mean(axis=1) / self.lengths.num_sequences
        return share

    @cached_property
    def begun(self) -> FloatArray:
        """Answers that a slot begins in each piece of the grid, the first at once, each where one ends (mean).

        A renewal process: at any time the shares of all begun answers that are not finished sum to 1.
        """
        begun = np.zeros(max(len(self.share), math.ceil(MIXED_MEANS * self.mean / self.width)))
        for piece in range(len(begun)):
            before = begun[max(0, piece - len(self.share) + 1) : piece]
            begun[piece] = (1 - before @ self.share[len(before) : 0 : -1]) / self.share[0]
        return begun

    @cached_property
    def mean(self) -> float:
        """Mean answer (tokens)."""
        return self.lengths.mean_tokens

    @cached_property
    def spread(self) -> float:
        """1 + cv^2: the mean remaining length over half the mean."""
        return 1 + self.lengths.cv**2

    @cached_property
    def context(self) -> float:
        """Mean tokens that a sequence holds in a stationary batch."""
        if self.turns is not None:
            return self.turns.context
        return self.prompt_tokens + self.spread * self.mean / 2

    def longest(self, number: int) -> float:
        """Return the mean of the longest of ``number`` answers (tokens)."""
        return self._moments(1 - (1 - self.share) ** number)[0]

    def training_s(self, cost: TrainingCost, *, sequences: int, micro_batch: int) -> float:
        """Return the seconds of an optimizer step on so many sequences, in micro-batches.

        The largest of the mean bounds on the fullest rank stands for the mean of the largest: too fast where two of
        them are about equal, by up to a tenth.
        """
        tokens, squares = self._with_prompt(self.mean, self.spread * self.mean**2)
        bounds_s = cost.bounds_s(
            (micro_batch * tokens, micro_batch * squares),
            longest=self._with_prompt(*self._moments(1 - (1 - self.share) ** micro_batch)),
            shortest=self._with_prompt(*self._moments(self.share**micro_batch)),
            sequences=micro_batch,
            fixed_s=cost.micro_batch_s,
        )
        return sequences / micro_batch * max(bounds_s) + cost.step_s

    def _with_prompt(self, tokens: float, squares: float) -> tuple[float, float]:
        prompt = self.prompt_tokens
        return prompt + tokens, prompt**2 + 2 * prompt * tokens + squares

    def _moments(self, share: FloatArray) -> tuple[float, float]:
        """Return mean and mean square of a length that has at least so many tokens with this probability."""
        return float(self.width * share.sum()), float(self.width * ((2 * self.position - 1) * share).sum())
