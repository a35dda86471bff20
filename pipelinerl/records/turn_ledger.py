"""Where the time of rollouts with turns goes, and how many environments are in use.

An open rollout is in one of four places. So its seconds in them add up to those from its start to its score, and the
mean number in a place is the rollout-seconds there over the seconds of the run (Little's law).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from pipelinerl.records.profile_report import PlacesOverTime, TurnsProfile
from pipelinerl.records.reports import EnvironmentReport, RolloutSeconds
from pipelinerl.records.step_ledger import Gathered
from pipelinerl.rl.drift import DriftModel, modelled_ess
from pipelinerl.scheduler.events import (
    AbortRollout,
    Command,
    DiscardRollouts,
    EngineSeconds,
    EnvironmentFailed,
    EnvironmentFault,
    Event,
    ObservationReady,
    OpenEnvironment,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    Stop,
    TurnFinished,
    VersionSpans,
)

MOST_POINTS = 1024
"""Points in time of ``places`` (count)."""


class Place(StrEnum):
    """Where an open rollout is."""

    ENVIRONMENT = "environment"
    """Its environment is made ready, or acts."""
    WAITING = "waiting"
    """For a slot."""
    ENGINE = "engine"
    SCORING = "scoring"


class TurnLedger:
    """Observes the places of open rollouts of ``count`` environments (mutable)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[int, tuple[Place, float]] = {}  # rollout -> where, and since when (s)
        self._aborting: set[int] = set()
        self._stopped = False
        self._seconds = dict.fromkeys(Place, 0.0)  # rollout-seconds
        self._prefill_s = self._decode_s = 0.0  # of the seconds on engines
        self._knows_work = False  # whether those two are known
        self._num_turns = 0
        self._faults = dict.fromkeys(EnvironmentFault, 0)
        self._num_retries = 0
        self._ends: dict[int, list[int]] = {}  # of a rollout to be trained on: its tokens by the end of each turn
        self._tokens: Counter[tuple[int, int]] = Counter()  # trained, by turn and lag
        self._trained: Counter[int] = Counter()  # rollouts by their number of turns
        self._dropped: Counter[int] = Counter()
        self._counts = dict.fromkeys(Place, 0)  # open rollouts by place
        self._places: list[tuple[float, ...]] = []  # time, and these counts: after every ``_every`` moves
        self._num_moves, self._every, self._next_point = 0, 1, 1

    def event(self, time_s: float, event: Event) -> None:
        """Record an event."""
        match event:
            case TurnFinished(rollout_id):
                self._aborting.discard(rollout_id)
                self._end_turn(rollout_id, event.spans)
                self._move(time_s, rollout_id, Place.ENVIRONMENT)
                self._worked(event.seconds)
            case ObservationReady(rollout_id):
                self._move(time_s, rollout_id, Place.WAITING)
            case RolloutFinished(rollout_id):
                self._aborting.discard(rollout_id)
                if event.engine is not None:
                    self._end_turn(rollout_id, event.spans)
                self._move(time_s, rollout_id, Place.SCORING if event.reward is None else None)
                self._worked(event.seconds)
            case RolloutScored(rollout_id):
                self._move(time_s, rollout_id, None)
            case RolloutAborted(rollout_id):
                self._worked(event.seconds)
                if self._stopped or rollout_id not in self._aborting:
                    self._move(time_s, rollout_id, Place.WAITING)
                else:
                    self._drop(time_s, rollout_id)
                self._aborting.discard(rollout_id)
            case RolloutFailed(rollout_id):
                self._aborting.discard(rollout_id)
                self._drop(time_s, rollout_id)
            case EnvironmentFailed():
                self._faults[event.fault] += 1
                self._num_retries += event.again

    def command(self, time_s: float, command: Command) -> None:
        """Record a command; ``trained`` records a micro-batch."""
        match command:
            case StartRollout(rollout_id):
                self._move(time_s, rollout_id, Place.ENGINE)
            case OpenEnvironment(rollout_id):
                self._begin(time_s, rollout_id)
            case DiscardRollouts(rollout_ids):
                for rollout_id in rollout_ids:
                    self._drop(time_s, rollout_id)
            case AbortRollout(rollout_id):
                self._aborting.add(rollout_id)
            case Stop():
                self._stopped = True

    def _begin(self, time_s: float, rollout_id: int) -> None:
        self._open[rollout_id] = (Place.ENVIRONMENT, time_s)
        self._counts[Place.ENVIRONMENT] += 1
        self._ends[rollout_id] = []
        self._num_moves += 1
        if self._num_moves == self._next_point:
            self._keep_point(time_s)

    def _end_turn(self, rollout_id: int, spans: VersionSpans) -> None:
        self._num_turns += 1
        self._ends[rollout_id].append(spans.ends[-1])

    def trained(self, rollout_ids: Sequence[int], taken: Gathered, version: int) -> None:
        """Record that rollouts are trained on at a version; ``taken`` are their spans."""
        firsts = [*np.flatnonzero(taken.starts_N == 0).tolist(), len(taken.starts_N)]
        for rollout_id, first, last in zip(rollout_ids, firsts, firsts[1:], strict=False):
            ends = self._ends.pop(rollout_id)
            span_ends = taken.ends_N[first:last]
            cuts = np.union1d(span_ends, ends)  # between two of them turn and lag are the same
            lags = version - taken.versions_N[first:last][np.searchsorted(span_ends, cuts)]
            pieces = zip(np.searchsorted(ends, cuts).tolist(), lags.tolist(), strict=True)
            for place, tokens in zip(pieces, np.diff(cuts, prepend=0).tolist(), strict=True):
                self._tokens[place] += tokens
            self._trained[len(ends)] += 1

    def _drop(self, time_s: float, rollout_id: int) -> None:
        self._move(time_s, rollout_id, None)
        if (ends := self._ends.pop(rollout_id, None)) is not None:
            self._dropped[len(ends)] += 1

    def profile(self, drift: DriftModel | None = None) -> TurnsProfile:
        """Return the data of figures; ``drift`` gives the modelled ESS."""
        num_turns = range(1 + max([*self._trained, *self._dropped], default=0))
        shape = [1 + max(one) for one in zip(*self._tokens, strict=True)] or (0, 1)
        tokens_KG = np.zeros(shape, dtype=np.int64)  # turns, lags
        for place, tokens in self._tokens.items():
            tokens_KG[place] = tokens
        tokens_K, lag_sums_K = tokens_KG.sum(1).tolist(), (tokens_KG @ np.arange(tokens_KG.shape[1])).tolist()
        modelled = None
        if drift is not None:
            modelled = [modelled_ess(drift, one).mean if one.any() else None for one in tokens_KG]
        over_time = {place.value: [int(row[1 + at]) for row in self._places] for at, place in enumerate(Place)}
        return TurnsProfile(
            lag_mean=[lags / tokens if tokens else None for lags, tokens in zip(lag_sums_K, tokens_K, strict=True)],
            tokens=tokens_K,
            ess_modelled=modelled,
            trained=[self._trained[number] for number in num_turns],
            dropped=[self._dropped[number] for number in num_turns],
            places=PlacesOverTime(time_s=[row[0] for row in self._places], **over_time),
        )

    def _worked(self, seconds: EngineSeconds | None) -> None:
        if seconds is not None:
            self._knows_work = True
            self._prefill_s += seconds.prefill
            self._decode_s += seconds.decode

    def _move(self, time_s: float, rollout_id: int, place: Place | None) -> None:
        """Record the place that a rollout enters; None: it is not open."""
        if rollout_id not in self._open:
            return
        before, since_s = self._open.pop(rollout_id)
        self._seconds[before] += time_s - since_s
        self._counts[before] -= 1
        if place is not None:
            self._open[rollout_id] = (place, time_s)
            self._counts[place] += 1
        self._num_moves += 1
        if self._num_moves == self._next_point:
            self._keep_point(time_s)

    def _keep_point(self, time_s: float) -> None:
        """Keep the numbers by place; of more than ``MOST_POINTS`` points every second one is dropped."""
        self._places.append((time_s, *self._counts.values()))
        if len(self._places) == MOST_POINTS:
            del self._places[::2]
            self._every *= 2
        self._next_point = (self._num_moves // self._every + 1) * self._every

    def report(self, duration_s: float, *, finished: int) -> EnvironmentReport:
        """Return the numbers of the run after so many seconds, with ``finished`` rollouts."""
        seconds = dict(self._seconds)
        for place, since_s in self._open.values():
            seconds[place] += duration_s - since_s
        finished = max(1, finished)
        parts = {place.value: one for place, one in seconds.items()}
        if self._knows_work:
            rest = max(0.0, seconds[Place.ENGINE] - self._prefill_s - self._decode_s)  # below 0 in the last digit only
            parts |= {"queue": rest, "prefill": self._prefill_s, "decode": self._decode_s}
        return EnvironmentReport(
            count=self._count,
            in_use_mean=sum(seconds.values()) / duration_s if duration_s else 0.0,
            turns_mean=self._num_turns / finished,
            timeouts=self._faults[EnvironmentFault.TIMEOUT],
            errors=self._faults[EnvironmentFault.ERROR],
            retries=self._num_retries,
            expired=self._faults[EnvironmentFault.EXPIRED],
            seconds=RolloutSeconds(**{name: one / finished for name, one in parts.items()}),
        )
