"""Finished rollouts that wait to be trained on, as the books know them.

What is known of them lies end to end in arrays: a fraction of the memory that objects take, so that the books of a
large cluster stay in the processor's cache, and a micro-batch is gathered without a loop over its version spans. What
lies before the oldest rollout that still waits is cut off now and then: the size follows what waits, not the run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.events import VersionSpans

CUT_AT = 1024
"""Rows from which on they are cut (count)."""


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
        self._rows: dict[int, int] = {}  # by rollout: its row, counted from the first one there ever was
        self._num_cut = 0  # rows cut off so far
        # A row is an entry in each of these.
        self._rewards = array("d")  # NaN: not yet known
        self._finish_versions = array("q")  # the trainer's version at its end
        self._firsts = array("q", [0])  # its first span; one more entry says where the next row's will be
        # A span is an entry in each of these.
        self._versions = array("q")
        self._ends = array("q")

    def __len__(self) -> int:
        """Return how many wait (count)."""
        return len(self._rows)

    def __contains__(self, rollout_id: int) -> bool:
        """Return whether a rollout waits."""
        return rollout_id in self._rows

    def add(self, rollout_id: int, spans: VersionSpans, version: int, reward: float | None) -> None:
        """Add a rollout that has finished.

        Args:
            rollout_id: The rollout.
            spans: Its tokens, at least one.
            version: The trainer's version now (optimizer steps).
            reward: Its reward. None: not yet known.
        """
        self._rows[rollout_id] = self._num_cut + len(self._rewards)
        self._rewards.append(math.nan if reward is None else reward)
        self._finish_versions.append(version)
        self._versions.extend(spans.versions)
        self._ends.extend(spans.ends)
        self._firsts.append(len(self._ends))

    def score(self, rollout_id: int, reward: float) -> None:
        """Note the reward of a rollout."""
        self._rewards[self._rows[rollout_id] - self._num_cut] = reward

    def remove(self, rollout_id: int) -> int:
        """Give a rollout up and return its tokens (count)."""
        row = self._rows.pop(rollout_id) - self._num_cut
        return self._ends[self._firsts[row + 1] - 1]

    def take(self, rollout_ids: Sequence[int]) -> Gathered:
        """Take rollouts, at least one, to train on them."""
        row_M = np.fromiter(map(self._rows.pop, rollout_ids), np.int64, len(rollout_ids)) - self._num_cut
        first_R = np.frombuffer(self._firsts, np.int64)
        first_M = first_R[row_M]
        count_M = first_R[row_M + 1] - first_M
        gathered_M = np.cumsum(count_M) - count_M  # where a rollout's spans begin among those gathered
        span_N = np.repeat(first_M - gathered_M, count_M) + np.arange(count_M.sum())
        end_N = np.frombuffer(self._ends, np.int64)[span_N]
        start_N = np.concatenate(([0], end_N[:-1]))
        start_N[gathered_M] = 0
        taken = Gathered(
            rewards_M=np.frombuffer(self._rewards)[row_M].tolist(),
            starts_N=start_N,
            ends_N=end_N,
            versions_N=np.frombuffer(self._versions, np.int64)[span_N],
            finish_versions_N=np.repeat(np.frombuffer(self._finish_versions, np.int64)[row_M], count_M),
        )
        del first_R  # what is looked at cannot be cut
        self._cut()
        return taken

    def _cut(self) -> None:
        """Cut off what lies before the oldest rollout that still waits, if that is most of what there is."""
        num_rows = len(self._rewards)
        oldest = next(iter(self._rows.values()), self._num_cut + num_rows) - self._num_cut
        if num_rows >= CUT_AT and 2 * oldest > num_rows:
            first = self._firsts[oldest]
            del self._rewards[:oldest], self._finish_versions[:oldest], self._firsts[:oldest]
            del self._versions[:first], self._ends[:first]
            self._firsts = array("q", [one - first for one in self._firsts])
            self._num_cut += oldest
