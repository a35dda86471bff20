"""Named random streams: every number that chance decides is found by its stream's name and an id.

Two runs that differ in scheduler or hardware meet the same numbers (common random numbers), and a new
stream changes none of the others.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

DRAWS_PER_BLOCK = 8192
"""Random numbers that a stream draws at once (count)."""
BLOCKS_KEPT = 4
"""Blocks of a stream that are kept, most recently used first (count)."""


def named_stream(seed: int, name: str, block: int) -> np.random.Generator:
    """Return the generator of a block of a stream.

    Args:
        seed: Seed of the run, at least 0.
        name: Name of the stream.
        block: Number of the block, at least 0.

    Returns:
        A fresh generator; its bit generator is named here, since numpy's default may change.
    """
    key = (zlib.crc32(name.encode()), block)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


class ExponentialDelays:
    """Exponential delays by id.

    Args:
        name: Name of the stream.
        mean: Mean delay (any unit, at least 0); 0 gives 0 without a draw.
        seed: Seed of the run, at least 0.
    """

    def __init__(self, name: str, *, mean: float, seed: int) -> None:
        self._name = name
        self._mean = mean
        self._seed = seed
        self._blocks = lru_cache(maxsize=BLOCKS_KEPT)(self._draw)

    def __getitem__(self, index: int) -> float:
        """Return the delay of an id, in the unit of the mean."""
        if not self._mean:
            return 0.0
        block, place = divmod(index, DRAWS_PER_BLOCK)
        return self._blocks(block)[place]

    def _draw(self, block: int) -> list[float]:
        draws: list[float] = (
            named_stream(self._seed, self._name, block).exponential(self._mean, DRAWS_PER_BLOCK).tolist()
        )
        return draws
