"""Finished rollouts that wait to be trained on, as the ledger knows them.

Their numbers are packed end to end: a large cluster's ledger stays in the processor's cache, and a micro-batch is
gathered without a loop. Numbers before the oldest waiting rollout are cut off: the size follows the waiting rollouts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.scheduler.events import VersionSpans

CUT_AT_BYTES = 2**16
"""Packed size from which on it is cut (bytes)."""

_REWARD = struct.Struct("=d")
_NUMBER = struct.Struct("=q")
_VERSION_AT, _COUNT_AT, _SPANS_AT = 1, 2, 3  # numbers of a rollout before each of these


class _Packers(dict[int, Callable[..., bytes]]):
    """The function that packs a rollout, by its number of spans."""

    def __missing__(self, num_spans: int) -> Callable[..., bytes]:
        self[num_spans] = pack = struct.Struct(f"=d{_SPANS_AT - 1 + 2 * num_spans}q").pack
        return pack


_PACKERS = _Packers()


class Gathered(NamedTuple):
    """The numbers of some rollouts, M in all, and of their version spans, N in all."""

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
    """The rollouts that have finished and are neither trained on nor removed."""

    def __init__(self) -> None:
        # Of each rollout: its reward (NaN: not yet known), the trainer's version, the number of its spans, the spans'
        # versions, the spans' ends; eight bytes each.
        self._packed = bytearray()
        self._cut_off = 0  # bytes cut off so far
        self._places: dict[int, int] = {}  # start of each rollout, in bytes since the start of the run

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, rollout_id: int) -> bool:
        return rollout_id in self._places

    def add(self, rollout_id: int, spans: VersionSpans, version: int, reward: float | None) -> None:
        """Add a rollout of at least a token, at the trainer's version (optimizer steps). Reward None: not yet known."""
        versions, ends = spans.versions, spans.ends
        packed, num_spans = self._packed, len(ends)
        self._places[rollout_id] = self._cut_off + len(packed)
        packed += _PACKERS[num_spans](math.nan if reward is None else reward, version, num_spans, *versions, *ends)

    def score(self, rollout_id: int, reward: float) -> None:
        """Note the reward of a rollout."""
        _REWARD.pack_into(self._packed, self._places[rollout_id] - self._cut_off, reward)

    def remove(self, rollout_id: int) -> int:
        """Remove a rollout and return its tokens (count)."""
        place = self._places.pop(rollout_id) - self._cut_off
        num_spans: int = self._number(place, _COUNT_AT)
        return self._number(place, _SPANS_AT + 2 * num_spans - 1)

    def take(self, rollout_ids: Sequence[int]) -> Gathered:
        """Take rollouts, at least one, to train on them."""
        place_M = np.fromiter(map(self._places.pop, rollout_ids), np.int64, len(rollout_ids))
        begin_M = (place_M - self._cut_off) // _NUMBER.size  # where its numbers begin: the reward comes first
        numbers = np.frombuffer(self._packed, np.int64)
        count_M = numbers[begin_M + _COUNT_AT]
        gathered_M = np.cumsum(count_M) - count_M  # where a rollout's spans begin among those gathered
        span_N = np.repeat(begin_M + _SPANS_AT - gathered_M, count_M) + np.arange(count_M.sum())
        version_N, end_N = numbers[span_N], numbers[span_N + np.repeat(count_M, count_M)]
        start_N = np.concatenate(([0], end_N[:-1]))
        start_N[gathered_M] = 0
        finish_version_N = np.repeat(numbers[begin_M + _VERSION_AT], count_M)
        rewards_M: list[float] = numbers.view(np.float64)[begin_M].tolist()
        del numbers  # a bytearray cannot be cut while an array views it
        self._cut()
        return Gathered(rewards_M, start_N, end_N, version_N, finish_version_N)

    def _number(self, place: int, index: int) -> int:
        number: int = _NUMBER.unpack_from(self._packed, place + index * _NUMBER.size)[0]
        return number

    def _cut(self) -> None:
        """Cut off all before the oldest waiting rollout, if that is at least half of the packed bytes."""
        size = len(self._packed)
        dead = next(iter(self._places.values()), self._cut_off + size) - self._cut_off
        if size >= CUT_AT_BYTES and 2 * dead >= size:
            del self._packed[:dead]
            self._cut_off += dead
