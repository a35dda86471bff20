"""Where the time of rollouts with turns goes, and how many environments are in use.

A rollout that is open is in one of four places at any time. So its seconds in them add up to those from its start to
its score, and the mean number in a place is the rollout-seconds there over the seconds of the run (Little's law).
"""

from __future__ import annotations

from enum import StrEnum

from pipelinerl.records.reports import EnvironmentReport, RolloutSeconds
from pipelinerl.scheduler.events import (
    AbortRollout,
    Command,
    DiscardRollouts,
    Event,
    ObservationReady,
    OpenEnvironment,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    TurnFinished,
)


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
        self._aborting: set[int] = set()
        self._seconds = dict.fromkeys(Place, 0.0)  # rollout-seconds
        self._num_turns = self._num_finished = 0

    def event(self, time_s: float, event: Event) -> None:
        """Record an event."""
        match event:
            case TurnFinished(rollout_id=rollout_id):
                self._num_turns += 1
                self._aborting.discard(rollout_id)
                self._move(time_s, rollout_id, Place.ENVIRONMENT)
            case ObservationReady(rollout_id=rollout_id):
                self._move(time_s, rollout_id, Place.WAITING)
            case RolloutAborted(rollout_id=rollout_id):
                self._move(time_s, rollout_id, None if rollout_id in self._aborting else Place.WAITING)
                self._aborting.discard(rollout_id)
            case RolloutFinished(rollout_id=rollout_id):
                self._num_turns += event.engine is not None
                self._num_finished += 1
                self._aborting.discard(rollout_id)
                self._move(time_s, rollout_id, Place.SCORING if event.reward is None else None)
            case RolloutScored(rollout_id=rollout_id) | RolloutFailed(rollout_id=rollout_id):
                self._move(time_s, rollout_id, None)

    def command(self, time_s: float, command: Command) -> None:
        """Record a command."""
        match command:
            case OpenEnvironment(rollout_id=rollout_id):
                self._open[rollout_id] = (Place.ENVIRONMENT, time_s)
            case StartRollout(rollout_id=rollout_id):
                self._move(time_s, rollout_id, Place.ENGINE)
            case AbortRollout(rollout_id=rollout_id):
                self._aborting.add(rollout_id)
            case DiscardRollouts():
                for rollout_id in command.rollout_ids:
                    self._move(time_s, rollout_id, None)

    def report(self, duration_s: float) -> EnvironmentReport:
        """Return the numbers of the run up to now."""
        seconds = dict(self._seconds)
        for place, since_s in self._open.values():
            seconds[place] += duration_s - since_s
        finished = max(1, self._num_finished)
        return EnvironmentReport(
            count=self._count,
            in_use_mean=sum(seconds.values()) / duration_s if duration_s else 0.0,
            turns_mean=self._num_turns / finished,
            seconds=RolloutSeconds(**{place.value: one / finished for place, one in seconds.items()}),
        )

    def _move(self, time_s: float, rollout_id: int, place: Place | None) -> None:
        """Record where a rollout is from now on; None: it is not open any more, or was not."""
        before = self._open.pop(rollout_id, None)
        if before is None:
            return
        self._seconds[before[0]] += time_s - before[1]
        if place is not None:
            self._open[rollout_id] = (place, time_s)
