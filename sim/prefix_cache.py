"""KV caches that an engine keeps of rollouts between two turns.

What a turn leaves in the KV cache stays until its room is needed: before each step that would not fit otherwise, whole
caches are dropped, those least recently left first. (vLLM drops blocks, the ends of a sequence first.) A rollout that
comes back prefills only what its cache has not. What has the room is counted here, what is running in the batch.
"""

from __future__ import annotations


class PrefixCache:
    """The caches of one engine (mutable).

    Args:
        capacity: Of the whole KV cache, what is running included (tokens).
    """

    __slots__ = ("_capacity", "_tokens", "kept")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = 0
        self.kept: dict[int, int] = {}
        """Tokens of each rollout, in the order in which they were left."""

    def keep(self, rollout_id: int, tokens: int) -> None:
        """Keep the cache of a rollout whose turn has ended."""
        self._tokens += tokens - self.kept.pop(rollout_id, 0)
        self.kept[rollout_id] = tokens

    def take(self, rollout_id: int) -> int:
        """Give the cache of a rollout to the batch that it joins, and return its tokens; 0: there is none."""
        tokens = self.kept.pop(rollout_id, 0)
        self._tokens -= tokens
        return tokens

    def has_room(self, used: int) -> bool:
        """Return whether the caches and the tokens used by what is running fit."""
        return self._tokens + used <= self._capacity

    def make_room(self, used: int) -> None:
        """Drop caches until they and the tokens used by what is running fit."""
        while self.kept and self._tokens + used > self._capacity:
            self.take(next(iter(self.kept)))

    def clear(self) -> None:
        """Drop all caches: they are of other weights."""
        self.kept.clear()
        self._tokens = 0
