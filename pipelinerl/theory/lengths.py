"""Lengths of answers and turns of rollouts, and the means over them that the closed forms need."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipelinerl.hardware.costs import PrefillConfig, TrainingCost, prefill_s
from pipelinerl.util.arrays import FloatArray, IntArray, check

NUM_QUANTILES = 128
"""Gaps that stand for all (count)."""
DRAIN_PARTS = 256
"""Parts of the longest life of a rollout, in each of which as many are open (count)."""
DRAIN_ROUNDS = 8
"""Trials of how fast engines are in a drain."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The turns of one rollout; T of them."""

    before_T: IntArray
    """Context before each turn, its observation included (tokens)."""
    observed_T: IntArray
    """New tokens of this context: the prompt, then the observations."""
    generated_T: IntArray
    acting_T: FloatArray
    """Time in which the environment acts before each turn (s)."""


@dataclass(frozen=True, slots=True)
class TurnMeans:
    """Means over rollouts."""

    acting_s: float
    """Time in which the environment of a rollout acts, its reset included (s)."""
    reset_s: float
    """Of these, before the first turn (s)."""
    gap_s: float
    """Mean time in which it acts before a turn that is not the first (s)."""
    context: float
    """Context of a token that is generated (tokens)."""
    held: float
    """Context of a rollout between two turns, over time (tokens)."""
    held_sd: float
    """Its standard deviation (tokens)."""
    gap_quantiles: tuple[float, ...]
    """Gaps of equal probability, rising (s)."""
    observed: tuple[float, float, float]
    """Number, tokens and squared tokens of a rollout's prefills if its KV cache is kept."""
    whole: tuple[float, float, float]
    """The same without a cache: every turn prefills the whole context."""
    generated_R: FloatArray
    """Tokens that each rollout generates (count)."""
    acting_R: FloatArray
    """Time in which its environment acts (s)."""

    @classmethod
    def of(cls, rollouts: list[Turn]) -> TurnMeans:
        """Return the means over rollouts."""
        number = len(rollouts)
        before, observed, generated, acting = (
            np.concatenate([getattr(one, name) for one in rollouts]).astype(np.float64)
            for name in ("before_T", "observed_T", "generated_T", "acting_T")
        )
        first = np.concatenate([np.arange(len(one.before_T)) == 0 for one in rollouts])
        gaps = acting[~first]
        held = before - observed
        weight = np.where(first, 0.0, acting) / max(gaps.sum(), 1e-300)
        held_mean = float((held * weight).sum())
        places = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        return cls(
            acting_s=float(acting.sum()) / number,
            reset_s=float(acting[first].sum()) / number,
            gap_s=float(gaps.mean()) if len(gaps) else 0.0,
            context=float((generated * (before + generated / 2)).sum() / generated.sum()),
            held=held_mean,
            held_sd=math.sqrt(max(0.0, float((held**2 * weight).sum()) - held_mean**2)),
            gap_quantiles=tuple(np.quantile(gaps, places).tolist()) if len(gaps) else (0.0,),
            observed=(
                float((observed > 0).sum()) / number,
                float(observed.sum()) / number,
                float((observed * (before + held)).sum()) / number,
            ),
            whole=(float((before > 0).sum()) / number, float(before.sum()) / number, float((before**2).sum()) / number),
            generated_R=np.array([one.generated_T.sum() for one in rollouts], dtype=np.float64),
            acting_R=np.array([one.acting_T.sum() for one in rollouts], dtype=np.float64),
        )

    def lives_s(self, token_s: float) -> FloatArray:
        """Return the lives of rollouts, engine and environment together, by the seconds of a token, rising (s)."""
        return np.sort(self.generated_R * token_s + self.acting_R)

    def longest_s(self, number: int, token_s: float) -> float:
        """Return the mean of the longest of so many lives (s)."""
        life_R = self.lives_s(token_s)
        ended = np.arange(len(life_R)) / len(life_R)  # share of the lives before each, as it begins to be the shortest
        return float((np.diff(life_R, prepend=0.0) * (1 - ended**number)).sum())

    def drain_s(self, number: float, token_s: Callable[[float], float], *, refilled: bool) -> float:
        """Return the seconds until the last of ``number`` open rollouts has ended, while none begins.

        The tail is one of lives, engine and environment together: with S(t) the share of lives of at least t, that many
        of all are open after t if they begin together, and the integral of S from t on over its mean if they have begun
        one after the other (residual lives): ``refilled``. ``token_s``: of a token, by the rollouts that generate.
        """
        mean_s = token_s(number)
        for _ in range(DRAIN_ROUNDS):
            life_R = self.lives_s(mean_s)
            width_s = life_R[-1] / DRAIN_PARTS
            share = 1 - np.searchsorted(life_R, (np.arange(DRAIN_PARTS) + 0.5) * width_s) / len(life_R)
            if refilled:
                rest = share[::-1].cumsum()[::-1]
                share = (rest - share / 2) / rest[0]
            open_still = 1 - (1 - share) ** max(number, 1.0)
            working = 1 - self.acting_R.sum() / life_R.sum()  # share of a life
            speeds = [token_s(max(1.0, number * one * working)) for one in share.tolist()]
            mean_s = (mean_s + float((open_still * speeds).sum() / open_still.sum())) / 2
        return float(width_s * open_still.sum())

    def dropped(self, lost: FloatArray) -> FloatArray:
        """Return the share of turns whose KV cache was evicted, when idle caches lack a share ``lost`` of their room.

        The least recently used caches go first, so all in gaps longer than some T: with E[(gap - T)+] / E[gap] of the
        room lost, a share P(gap >= T) of the turns misses its own. Where many gaps are about equally long, a little
        lost room evicts nearly all of them. Source: Che, Tung and Wang 2002, of least recent use.
        """
        gone, share = _by_threshold(self.gap_quantiles)
        return np.where(lost > 0, np.interp(lost, gone, share), 0.0)

    def prefill_s(self, prefill: PrefillConfig, *, kept: float) -> float:
        """Return the prefill seconds of a rollout's turns, a share ``kept`` of which still have their KV cache."""
        number, tokens, squares = (
            kept * there + (1 - kept) * gone for there, gone in zip(self.observed, self.whole, strict=True)
        )
        return prefill_s(prefill, sequences=number, tokens=tokens, squares=squares)

    def held_up_s(self, prefill: PrefillConfig, *, kept: float, rate: float) -> float:
        """Return the seconds in which the turns of a rollout wait for the ends of prefills of others.

        A prefill holds up the whole engine. So a turn finds the engine in one for a share of the time, and waits for
        the rest of it: E[S^2] / (2 E[S]) of the lengths S that are met. Of lengths only two are told apart, by their
        means: with the cache (share ``kept`` of the turns) and without. ``rate``: rollouts that an engine ends (1/s).
        """
        squares_s = 0.0
        for share, (number, tokens, squares) in ((kept, self.observed), (1 - kept, self.whole)):
            if number:
                mean_s = prefill_s(prefill, sequences=number, tokens=tokens, squares=squares) / number
                squares_s += share * number * mean_s**2
        return self.whole[0] * rate * squares_s / 2


@functools.cache
def _by_threshold(gaps: tuple[float, ...]) -> tuple[FloatArray, FloatArray]:
    """Return the share of the time beyond each of some gaps, rising, and the share of gaps at least as long."""
    ahead = np.arange(len(gaps), 0, -1)
    beyond = np.cumsum(gaps[::-1])[::-1] - np.array(gaps) * ahead  # sum of (gap - T)+
    return (beyond / max(sum(gaps), 1e-300))[::-1], (ahead / len(gaps))[::-1]


# ----------------------------------------------------------------------------------------- answers

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
