"""Where the time of rollouts with turns goes, and how many environments are in use.

A rollout that is open is in one of four places at any time. So its seconds in them add up to those from its start to
its score, and the mean number in a place is the rollout-seconds there over the seconds of the run (Little's law).
"""

from __future__ import annotations

from enum import StrEnum

from pipelinerl.records.reports import EnvironmentReport, RolloutSeconds
from pipelinerl.scheduler.events import EnvironmentFault


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

    def open(self, time_s: float, rollout_id: int) -> None:
        """Record that an environment is made ready for a rollout."""
        self._open[rollout_id] = (Place.ENVIRONMENT, time_s)

    def end_turn(self, time_s: float, rollout_id: int, place: Place | None) -> None:
        """Record that an engine has generated a turn of a rollout, and where that is from now on."""
        self._num_turns += 1
        self.move(time_s, rollout_id, place)

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
