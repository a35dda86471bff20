"""Rewards and preprocessing of finished rollouts."""

from __future__ import annotations

from heapq import heapreplace

from pipelinerl.hardware.tables import LatencyConfig
from sim.clock import to_ticks


class Scoring:
    """Who scores, and until when (mutable). Rewards are first come first served, preprocessing has no limit.

    Args:
        latency: The seconds, and how many rewards there are at a time.
    """

    def __init__(self, latency: LatencyConfig) -> None:
        self.takes_time = bool(to_ticks(latency.reward_s + latency.preprocess_s))
        self._ticks = to_ticks(latency.reward_s + latency.preprocess_s)
        self._reward_ticks = to_ticks(latency.reward_s)
        self._free = [0] * (latency.reward_workers or 0)  # heap: tick from which each worker is free

    def ticks(self, now: int) -> int:
        """Have a rollout that has finished now scored, and return the ticks until it is."""
        if not self._free:
            return self._ticks
        begins = max(now, self._free[0])
        heapreplace(self._free, begins + self._reward_ticks)
        return begins - now + self._ticks
