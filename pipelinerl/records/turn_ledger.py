"""Where the time of rollouts with turns goes, and how many environments are in use.

A rollout that is open is in one of four places at any time. So its seconds in them add up to those from its start to
its score, and the mean number in a place is the rollout-seconds there over the seconds of the run (Little's law).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from pipelinerl.records.profile_report import PlacesOverTime, TurnsProfile
from pipelinerl.records.reports import EnvironmentReport, RolloutSeconds
from pipelinerl.records.rollout_buffer import Gathered
from pipelinerl.scheduler.events import EnvironmentFault

MOST_POINTS = 1024
"""Points in time of which it is kept where the open rollouts are (count)."""


class Place(StrEnum):
    """Where an open rollout is."""

    ENVIRONMENT = "environment"
    """Its environment is made ready, or acts."""
    WAITING = "waiting"
    """It waits for a slot."""
    ENGINE = "engine"
    """It has a slot: in a queue of the engine, in prefill or in decode."""
    SCORING = "scoring"
    """It is being scored."""


class TurnLedger:
    """Keeps the places of open rollouts (mutable).

    Args:
        count: Environments there are (count).
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[int, tuple[Place, float]] = {}  # rollout -> where, and since when (s)
        self._seconds = dict.fromkeys(Place, 0.0)  # rollout-seconds
        self._num_turns = 0
        self._faults = dict.fromkeys(EnvironmentFault, 0)
        self._num_retries = 0
        self._ends: dict[int, list[int]] = {}  # of a rollout to be trained on: its tokens by the end of each turn
        self._lag_sums: Counter[int] = Counter()  # by turn: lags of its trained tokens, added up
        self._tokens: Counter[int] = Counter()  # by turn
        self._trained: Counter[int] = Counter()  # rollouts by their number of turns
        self._dropped: Counter[int] = Counter()
        self._counts = dict.fromkeys(Place, 0)  # open rollouts by place
        self._places: list[tuple[float, ...]] = []  # time, and these counts: after every ``_every`` moves
        self._every, self._num_moves = 1, 0

    def open(self, time_s: float, rollout_id: int) -> None:
        """Record that an environment is made ready for a rollout."""
        self._open[rollout_id] = (Place.ENVIRONMENT, time_s)
        self._ends[rollout_id] = []
        self._moved(time_s, None, Place.ENVIRONMENT)

    def end_turn(self, time_s: float, rollout_id: int, place: Place | None, num_tokens: int | None) -> None:
        """Record that a turn of a rollout has ended, with so many tokens in all, and where the rollout is from now on.

        ``num_tokens`` is None for what an environment ends after a turn that has been recorded.
        """
        if num_tokens is not None:
            self._num_turns += 1
            self._ends[rollout_id].append(num_tokens)
        self.move(time_s, rollout_id, place)

    def trained(self, rollout_ids: Sequence[int], taken: Gathered, version: int) -> None:
        """Record that rollouts are trained on at a version; ``taken`` are their spans."""
        firsts = [*np.flatnonzero(taken.starts_N == 0).tolist(), len(taken.starts_N)]
        for rollout_id, first, last in zip(rollout_ids, firsts, firsts[1:], strict=False):
            ends = self._ends.pop(rollout_id)
            span_ends = np.concatenate([[0], taken.ends_N[first:last]])
            lag_sums = np.cumsum(np.diff(span_ends) * (version - taken.versions_N[first:last]))
            # The sum of the lags of the first tokens is linear within a span.
            sums = np.interp([0, *ends], span_ends, np.concatenate([[0], lag_sums]))
            for turn, (lag_sum, tokens) in enumerate(
                zip(np.diff(sums).tolist(), np.diff([0, *ends]).tolist(), strict=True)
            ):
                self._lag_sums[turn] += lag_sum
                self._tokens[turn] += tokens
            self._trained[len(ends)] += 1

    def drop(self, rollout_id: int) -> None:
        """Record that a rollout will never be trained on."""
        if (ends := self._ends.pop(rollout_id, None)) is not None:
            self._dropped[len(ends)] += 1

    def profile(self) -> TurnsProfile:
        """Return the data of figures."""
        num_turns = range(1 + max([*self._trained, *self._dropped], default=0))
        turns = range(1 + max(self._tokens, default=-1))
        over_time = {place.value: [int(row[1 + at]) for row in self._places] for at, place in enumerate(Place)}
        return TurnsProfile(
            lag_mean=[self._lag_sums[turn] / self._tokens[turn] if self._tokens[turn] else None for turn in turns],
            tokens=[self._tokens[turn] for turn in turns],
            trained=[self._trained[number] for number in num_turns],
            dropped=[self._dropped[number] for number in num_turns],
            places=PlacesOverTime(time_s=[row[0] for row in self._places], **over_time),
        )

    def fault(self, fault: EnvironmentFault, *, again: bool) -> None:
        """Record that an environment has not answered, and whether it is asked again."""
        self._faults[fault] += 1
        self._num_retries += again

    def move(self, time_s: float, rollout_id: int, place: Place | None) -> None:
        """Record where a rollout is from now on; None: it is not open any more, or was not."""
        before = self._open.pop(rollout_id, None)
        if before is None:
            return
        self._seconds[before[0]] += time_s - before[1]
        if place is not None:
            self._open[rollout_id] = (place, time_s)
        self._moved(time_s, before[0], place)

    def _moved(self, time_s: float, before: Place | None, place: Place | None) -> None:
        """Count a move; of more than ``MOST_POINTS`` points every second one is dropped."""
        if before is not None:
            self._counts[before] -= 1
        if place is not None:
            self._counts[place] += 1
        self._num_moves += 1
        if self._num_moves % self._every == 0:
            self._places.append((time_s, *self._counts.values()))
            if len(self._places) == MOST_POINTS:
                del self._places[::2]
                self._every *= 2

    def report(self, duration_s: float, *, finished: int) -> EnvironmentReport:
        """Return the numbers of the run up to now.

        Args:
            duration_s: Time of the run (s).
            finished: Rollouts that have finished (count).
        """
        seconds = dict(self._seconds)
        for place, since_s in self._open.values():
            seconds[place] += duration_s - since_s
        finished = max(1, finished)
        return EnvironmentReport(
            count=self._count,
            in_use_mean=sum(seconds.values()) / duration_s if duration_s else 0.0,
            turns_mean=self._num_turns / finished,
            timeouts=self._faults[EnvironmentFault.TIMEOUT],
            errors=self._faults[EnvironmentFault.ERROR],
            retries=self._num_retries,
            expired=self._faults[EnvironmentFault.EXPIRED],
            seconds=RolloutSeconds(**{place.value: one / finished for place, one in seconds.items()}),
        )
