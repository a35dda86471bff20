"""Finished rollouts that wait to be trained on, as the books know them.

What is known of them is packed end to end: a fraction of the memory that objects take, so that the books of a large
cluster stay in the processor's cache, and a micro-batch is gathered without a loop over its version spans. What lies
before the oldest rollout that still waits is cut off now and then: the size follows what waits, not the run.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.events import VersionSpans

CUT_AT_BYTES = 2**15
"""Size of the rows from which on they are cut."""

_ROW = np.dtype([("reward", "f8"), ("finish_version", "i8"), ("first", "i8")])
_PACKED_ROW = struct.Struct("=dqq")
_REWARD = struct.Struct("=d")
_NUMBER = struct.Struct("=q")


class _Packers(dict[int, Callable[..., bytes]]):
    """What packs so many whole numbers, by their count."""

    def __missing__(self, count: int) -> Callable[..., bytes]:
        self[count] = pack = struct.Struct(f"={count}q").pack
        return pack


_PACKERS = _Packers()


class Gathered(NamedTuple):
    """What is known of some rollouts, M in all, and of their version spans, N in all."""

    rewards_M: list[float]
    """NaN: not yet known."""
    starts_N: NDArray[np.int64]
    """First position of each span (tokens)."""
    ends_N: NDArray[np.int64]
    """Position after it (tokens)."""
    versions_N: NDArray[np.int64]
    """Version that sampled it (optimizer steps)."""
    finish_versions_N: NDArray[np.int64]
    """Version of the trainer when its rollout finished (optimizer steps)."""


class FinishedRollouts:
    """The rollouts that have finished and are neither trained on nor given up."""

    def __init__(self) -> None:
        # Places count from the start of the run, in bytes; what lies before these has been cut off.
        self._rows_cut = self._numbers_cut = 0
        self._places: dict[int, int] = {}  # by rollout, the place of its row
        self._rows = bytearray()  # of each rollout a _ROW: reward (NaN: not yet known), trainer's version, first number
        self._numbers = bytearray()  # of each rollout the versions of its spans, then the ends of them

    def __len__(self) -> int:
        """Return how many wait (count)."""
        return len(self._places)

    def __contains__(self, rollout_id: int) -> bool:
        """Return whether a rollout waits."""
        return rollout_id in self._places

    def add(self, rollout_id: int, spans: VersionSpans, version: int, reward: float | None) -> None:
        """Add a rollout that has finished.

        Args:
            rollout_id: The rollout.
            spans: Its tokens, at least one.
            version: The trainer's version now (optimizer steps).
            reward: Its reward. None: not yet known.
        """
        versions, ends = spans.versions, spans.ends
        self._places[rollout_id] = self._rows_cut + len(self._rows)
        self._rows += _PACKED_ROW.pack(
            math.nan if reward is None else reward, version, self._numbers_cut + len(self._numbers)
        )
        self._numbers += _PACKERS[2 * len(ends)](*versions, *ends)

    def score(self, rollout_id: int, reward: float) -> None:
        """Note the reward of a rollout."""
        _REWARD.pack_into(self._rows, self._places[rollout_id] - self._rows_cut, reward)

    def remove(self, rollout_id: int) -> int:
        """Give a rollout up and return its tokens (count)."""
        next_row = self._places.pop(rollout_id) - self._rows_cut + _PACKED_ROW.size
        end = len(self._numbers)
        if next_row < len(self._rows):
            end = _PACKED_ROW.unpack_from(self._rows, next_row)[2] - self._numbers_cut
        num_tokens: int = _NUMBER.unpack_from(self._numbers, end - _NUMBER.size)[0]
        return num_tokens

    def take(self, rollout_ids: Sequence[int]) -> Gathered:
        """Take rollouts, at least one, to train on them."""
        place_M = np.fromiter(map(self._places.pop, rollout_ids), np.int64, len(rollout_ids))
        row_M = (place_M - self._rows_cut) // _PACKED_ROW.size
        rows, numbers = np.frombuffer(self._rows, _ROW), np.frombuffer(self._numbers, np.int64)
        first_R = np.append(rows["first"] - self._numbers_cut, len(self._numbers)) // _NUMBER.size
        first_M = first_R[row_M]
        count_M = (first_R[row_M + 1] - first_M) // 2
        gathered_M = np.cumsum(count_M) - count_M  # where a rollout's spans begin among those gathered
        span_N = np.repeat(first_M - gathered_M, count_M) + np.arange(count_M.sum())
        version_N, end_N = numbers[span_N], numbers[span_N + np.repeat(count_M, count_M)]
        start_N = np.concatenate(([0], end_N[:-1]))
        start_N[gathered_M] = 0
        finish_version_N = np.repeat(rows["finish_version"][row_M], count_M)
        rewards_M: list[float] = rows["reward"][row_M].tolist()
        del rows, numbers  # what is looked at cannot be cut
        self._cut()
        return Gathered(rewards_M, start_N, end_N, version_N, finish_version_N)

    def _cut(self) -> None:
        """Cut off what lies before the oldest rollout that still waits, if that is most of what there is."""
        size = len(self._rows)
        dead = next(iter(self._places.values()), self._rows_cut + size) - self._rows_cut
        if size < CUT_AT_BYTES or 2 * dead < size:
            return
        numbers_end = self._numbers_cut + len(self._numbers)
        first = _PACKED_ROW.unpack_from(self._rows, dead)[2] if dead < size else numbers_end
        del self._rows[:dead], self._numbers[: first - self._numbers_cut]
        self._rows_cut += dead
        self._numbers_cut = first
