"""Named random streams: the name of a stream and an id give every random number.

Two runs that differ in scheduler or hardware get the same random numbers (common random numbers). A new stream
changes none of the others.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from sim.clock import TICKS_PER_S, to_ticks

DRAWS_PER_BLOCK = 8192
"""Random numbers that a stream draws at once (count)."""
BLOCKS_KEPT = 4
"""Blocks of a stream that are kept, most recently used first (count)."""


def named_stream(seed: int, name: str, block: int) -> np.random.Generator:
    """Return a fresh generator of a block of a stream; ``seed`` and ``block`` are at least 0.

    Its bit generator is named here, since numpy's default may change.
    """
    key = (zlib.crc32(name.encode()), block)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


class DispatchDelays:
    """Delays of the rollouts of a group on the way to their engines, by random access.

    ``fixed_s`` for every rollout, and an exponential delay of mean ``jitter_s`` on top (s); 0 draws nothing.
    """

    def __init__(self, *, fixed_s: float, jitter_s: float, group_size: int, seed: int) -> None:
        self._fixed_ticks = to_ticks(fixed_s)
        self._jitter_s = jitter_s
        self._seed = seed
        self._shape = (max(1, DRAWS_PER_BLOCK // group_size), group_size)
        self._blocks = lru_cache(maxsize=BLOCKS_KEPT)(self._draw)

    def group(self, group_id: int) -> list[int]:
        """Return the delay of each rollout of a group (ticks)."""
        block, row = divmod(group_id, self._shape[0])
        return self._blocks(block)[row]

    def _draw(self, block: int) -> list[list[int]]:
        jitter_s = np.zeros(self._shape)
        if self._jitter_s:
            jitter_s = named_stream(self._seed, "dispatch", block).exponential(self._jitter_s, self._shape)
        delays: list[list[int]] = (self._fixed_ticks + np.rint(jitter_s * TICKS_PER_S).astype(np.int64)).tolist()
        return delays
