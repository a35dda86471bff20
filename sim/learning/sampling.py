"""Sample answers, many rows at a time.

The sampler works on ``ROWS`` rows of fixed sizes. The result of a row depends on its own content only, to the last
bit, and the random number of a token is a function of (seed, rollout, position). So an answer is a function of its
prompt, the weights that sample each of its tokens, and whether its KV cache was kept or computed again when they
changed. It does not depend on the other rows, on how many pieces it is generated in, or on how far ahead of simulated
time.

Keys and values of an answer of n tokens reach to token n - 2: token n - 1 is read in the step that samples token n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sim.learning.policy import Cache, PolicyShape, Weights, decode, forward, new_cache
from sim.learning.tasks import END

# Legend of shapes: M rows; L positions of an answer; T of prompt and answer; P of the prompt.

ROWS = 64
"""Answers sampled at a time (count)."""


class RowCache(NamedTuple):
    """One answer's keys and values, in a cache that it shares with others."""

    cache: Cache
    row: int


class Draft:
    """An answer: its tokens so far, and its further tokens under the present weights (mutable).

    An answer of several turns also holds the observations between them.
    """

    __slots__ = (
        "cache",
        "generated_L",
        "length",
        "limit",
        "logprob_L",
        "num_kept",
        "num_observed",
        "num_turns",
        "prompt",
        "rollout_id",
        "turn_start",
        "word_L",
    )

    def __init__(
        self, rollout_id: int, prompt: tuple[int, ...], max_tokens: int, longest_turn: int | None = None
    ) -> None:
        self.rollout_id = rollout_id
        self.prompt = prompt
        self.word_L: NDArray[np.int64] = np.zeros(max_tokens, dtype=np.int64)
        self.logprob_L: NDArray[np.float32] = np.zeros(max_tokens, dtype=np.float32)
        self.generated_L: NDArray[np.bool_] = np.ones(max_tokens, dtype=np.bool_)  # False: observed
        self.num_kept = 0  # tokens that the next call of the sampler leaves as they are
        self.length = 0  # tokens when its turn is finished
        self.limit = min(longest_turn or max_tokens, max_tokens)  # tokens at which its turn is cut
        self.num_observed = 0  # tokens among them that were observed, all before its turn
        self.num_turns = 1  # turns so far
        self.turn_start = 0  # tokens before its turn
        self.cache: RowCache | None = None  # None: the next weights compute it again

    @property
    def num_generated(self) -> int:
        """Tokens that weights have sampled, when its turn is finished (count)."""
        return self.length - self.num_observed

    def observe(self, words: Sequence[int], *, longest_turn: int) -> None:
        """Begin another turn after an observation; its first weights recompute the cache."""
        first, self.length = self.length, self.length + len(words)
        self.word_L[first : self.length] = words
        self.generated_L[first : self.length] = False
        self.num_observed += len(words)
        self.num_turns += 1
        self.turn_start, self.cache = self.length, None
        self.limit = min(self.length + longest_turn, len(self.word_L))


class Sampler:
    """Completes the turns of drafts, on prompts of ``prompt_tokens``; ``shape`` has positions for prompt and answer.

    With ``keep_caches`` completed drafts keep their keys and values.
    """

    def __init__(
        self, shape: PolicyShape, *, prompt_tokens: int, temperature: float, seed: int, keep_caches: bool
    ) -> None:
        self._shape = shape
        self._prompt_tokens = prompt_tokens
        self._max_tokens = shape.positions - prompt_tokens
        self.temperature = temperature
        self._seed = seed
        self._keep_caches = keep_caches

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is Any to mypy
    def complete(self, weights: Weights, drafts: Sequence[Draft]) -> None:
        """Sample each draft to the end of its turn, after the tokens it keeps."""
        rows = _Rows(self._shape, longest=self._max_tokens)
        pending = deque(drafts)
        while pending or rows.num_active:
            if pending and rows.num_active <= ROWS // 2:
                rows.harvest(keep_caches=self._keep_caches)
                free = rows.free()
                loaded = [pending.popleft() for _ in range(min(len(free), len(pending)))]
                self._load(weights, rows, free[: len(loaded)], loaded)
            logit_MV = decode(weights, self._shape, rows.cache, word_M=rows.word_M, position_M=rows.position_M)
            rows.sample((logit_MV / self.temperature).log_softmax(-1))
        rows.harvest(keep_caches=self._keep_caches)

    def _load(self, weights: Weights, rows: _Rows, free: list[int], drafts: list[Draft]) -> None:
        self._fill_caches(weights, rows.cache, free, drafts)
        rollout_R = np.array([draft.rollout_id for draft in drafts], dtype=np.uint64)
        kept_R = torch.tensor([draft.num_kept for draft in drafts])
        longest = self._max_tokens
        rows.uniform_ML[free, :longest] = torch.from_numpy(uniforms(self._seed, rollout_R, longest))
        rows.answer_ML[free, :longest] = torch.from_numpy(np.stack([draft.word_L for draft in drafts]))
        rows.logprob_ML[free, :longest] = torch.from_numpy(np.stack([draft.logprob_L for draft in drafts]))
        rows.word_M[free] = torch.tensor([int(([*one.prompt, *one.word_L[: one.num_kept]])[-1]) for one in drafts])
        rows.index_M[free] = kept_R
        rows.position_M[free] = self._prompt_tokens - 1 + kept_R
        rows.limit_M[free] = torch.tensor([draft.limit for draft in drafts])
        rows.active_M[free] = True
        for row, draft in zip(free, drafts, strict=True):
            rows.owners[row] = draft

    def _fill_caches(self, weights: Weights, cache: Cache, rows: list[int], drafts: list[Draft]) -> None:
        """Fill the cache of each row up to the step that samples the draft's next token."""
        fresh = [(row, draft) for row, draft in zip(rows, drafts, strict=True) if not draft.num_kept]
        again = [(row, one) for row, one in zip(rows, drafts, strict=True) if one.num_kept and one.cache is None]
        self._prefill(weights, cache, fresh, length=self._prompt_tokens)
        self._prefill(weights, cache, again, length=self._shape.positions)
        kept = [(row, one.cache) for row, one in zip(rows, drafts, strict=True) if one.num_kept and one.cache]
        if kept:
            places = [row for row, _ in kept]
            cache.key_KMHDT[:, places] = torch.stack([one.cache.key_KMHDT[:, one.row] for _, one in kept], 1)
            cache.value_KMHTD[:, places] = torch.stack([one.cache.value_KMHTD[:, one.row] for _, one in kept], 1)

    def _prefill(self, weights: Weights, cache: Cache, pairs: list[tuple[int, Draft]], *, length: int) -> None:
        """Compute the keys and values of prompts and kept tokens, ``length`` positions of always ``ROWS`` rows."""
        if not pairs:
            return
        word_MT = torch.zeros(ROWS, length, dtype=torch.int64)
        for place, (_, draft) in enumerate(pairs):
            words = [*draft.prompt, *draft.word_L[: draft.num_kept].tolist()]
            word_MT[place, : len(words)] = torch.tensor(words)
        _, computed = forward(weights, self._shape, word_MT)
        rows = [row for row, _ in pairs]
        cache.key_KMHDT[:, rows, ..., :length] = computed.key_KMHDT[:, : len(rows)]
        cache.value_KMHTD[:, rows, :, :length] = computed.value_KMHTD[:, : len(rows)]


class _Rows:
    """The answers that are being sampled, a row each, and the inputs of the next step (mutable).

    A row without an answer, or whose answer has ended, is computed like any other. Its results are written where
    nothing reads them: behind the longest answer, and at the last position, whose key and value no step reads.
    """

    def __init__(self, shape: PolicyShape, *, longest: int) -> None:
        self._longest, self._last = longest, shape.positions - 1
        self._row_M = torch.arange(ROWS)
        self._length_M = torch.zeros(ROWS, dtype=torch.int64)
        self.cache = new_cache(shape, rows=ROWS)
        self.owners: list[Draft | None] = [None] * ROWS
        self.num_active = 0
        self.active_M = torch.zeros(ROWS, dtype=torch.bool)
        self.limit_M = torch.full((ROWS,), longest)  # tokens at which it is cut
        self.word_M = torch.zeros(ROWS, dtype=torch.int64)  # read next
        self.position_M = torch.full((ROWS,), self._last)  # where it stands
        self.index_M = torch.full((ROWS,), longest)  # of the token of the answer that is sampled next
        self.answer_ML = torch.zeros(ROWS, longest + 1, dtype=torch.int64)
        self.logprob_ML = torch.zeros(ROWS, longest + 1)
        self.uniform_ML = torch.zeros(ROWS, longest + 1)

    def sample(self, logprob_MV: torch.Tensor) -> None:
        """Sample the next token of every row."""
        row_M, index_M = self._row_M, self.index_M
        below_MV = logprob_MV.exp().cumsum(-1)
        drawn_M = self.uniform_ML[row_M, index_M] * below_MV[:, -1]
        self.word_M = (below_MV <= drawn_M[:, None]).sum(-1)
        self.answer_ML[row_M, index_M] = self.word_M
        self.logprob_ML[row_M, index_M] = logprob_MV[row_M, self.word_M]
        ended_M = self.active_M & ((self.word_M == END) | (index_M == self.limit_M - 1))
        self._length_M = torch.where(ended_M, index_M + 1, self._length_M)
        self.active_M = self.active_M & ~ended_M
        self.index_M = torch.where(self.active_M, index_M + 1, self._longest)
        self.position_M = torch.where(self.active_M, self.position_M + 1, self._last)
        self.num_active = int(self.active_M.sum())

    def free(self) -> list[int]:
        """Return the rows without an answer."""
        return [row for row, owner in enumerate(self.owners) if owner is None]

    def harvest(self, *, keep_caches: bool) -> None:
        """Hand finished rows to their drafts and free them."""
        running = self.active_M.tolist()
        pairs = [(row, one) for row, one in enumerate(self.owners) if one is not None and not running[row]]
        if not pairs:
            return
        rows = [row for row, _ in pairs]
        saved = Cache(self.cache.key_KMHDT[:, rows], self.cache.value_KMHTD[:, rows]) if keep_caches else None
        lengths = self._length_M.tolist()
        word_RL, logprob_RL = self.answer_ML[rows].numpy(), self.logprob_ML[rows].numpy()
        for place, (row, draft) in enumerate(pairs):
            self.owners[row] = None
            draft.length = lengths[row]
            draft.word_L, draft.logprob_L = word_RL[place, :-1], logprob_RL[place, :-1]
            draft.cache = None if saved is None else RowCache(saved, place)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, rollout_R: NDArray[np.uint64], positions: int) -> NDArray[np.float32]:
    """Return random numbers in [0, 1), multiples of 2^-24, shape [R, positions]: a hash of (seed, rollout, position).

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64's mixing).
    """
    start = _mixed(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    rollout_start_R = _mixed(rollout_R * _GOLDEN + start)
    position_L = np.arange(1, positions + 1, dtype=np.uint64) * _GOLDEN
    bits_RL = _mixed(rollout_start_R[:, None] + position_L)
    uniform_RL: NDArray[np.float32] = (bits_RL >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return uniform_RL


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
