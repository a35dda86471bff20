"""The ledger of a run: from time-stamped events and commands to numbers, simulated or real.

A ``RunLedger`` and, for rollouts with turns, its ``TurnLedger`` observe every event and command. They keep sums, whose
size does not grow with the run, and a row per optimizer step. A recorded trace gives the same numbers again.

Lag of a token = version it is trained at - version that sampled it (optimizer steps): *in flight* until its rollout
finished (by the trainer's version then), *in queue* from then on. All lags are weighted by tokens.

An engine is *there* from its joining until it has left, and *busy* while it has a rollout in progress and is not paused
for a weight update. *Utilisation* of generation: busy seconds over the seconds that engines are there. *Utilisation* of
training: the seconds in which the trainer works over the seconds of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from pipelinerl.records import reports
from pipelinerl.records.figure_data import FigureRecorder
from pipelinerl.records.profile_report import EnginesOverTime, FigureData, PlacesOverTime, TurnsProfile
from pipelinerl.records.step_ledger import Admission, FinishedRollouts, Gathered, TrainingLedger, find_bottleneck
from pipelinerl.records.steps import StepRow
from pipelinerl.rl.drift import DriftModel, modelled_ess
from pipelinerl.scheduler import events


class RunLedger:
    """Keeps the ledger of one run, which begins with engines 0 to below ``num_engines``.

    ``longest`` bounds an answer (tokens); ``on_step`` gets each row as soon as its step is done; without
    ``environments`` rollouts have one turn. ``scorers_s``: time of all reward workers that a rollout takes.
    """

    def __init__(
        self,
        *,
        num_engines: int,
        colocated: bool,
        longest: int,
        on_step: Callable[[StepRow], None] | None = None,
        admission: Admission | None = None,
        environments: int | None = None,
        scorers_s: float = 0.0,
    ) -> None:
        self._admission, self._scorers_s = admission, scorers_s
        self.profile = FigureRecorder(engine_ids=range(num_engines), colocated=colocated, longest=longest)
        self._colocated = colocated
        self.on_step = on_step
        self._time_s = 0.0
        self._version = 0
        self._stop: str | None = None
        # Rollouts.
        self._finished = FinishedRollouts()
        self._interrupted: dict[int, int] = {}  # rollout that a weight update aborted -> tokens it has
        self.turns = None if environments is None else TurnLedger(environments)
        self._between_turns: dict[int, int] = {}  # the same of one whose environment acts, or has answered
        self._aborting: set[int] = set()
        self._num_started = self._num_finished = 0
        self._tokens_finished = self._tokens_cut_short = 0  # tokens of finished rollouts, of those that ended early
        self._ended = dict.fromkeys(("trained", "discarded", "aborted", "failed"), 0)
        self._tokens = dict.fromkeys(self._ended, 0)
        self._reasons = dict.fromkeys(events.DiscardReason, 0)
        self._num_interruptions = self._num_preemptions = 0
        # By id of an engine that is there.
        self._engine_rollouts = dict.fromkeys(range(num_engines), 0)
        self._busy_since_s = dict.fromkeys(range(num_engines), 0.0)
        self._busy_s = dict.fromkeys(range(num_engines), 0.0)
        self.fleet = FleetLedger(num_engines)
        # Colocated, in the training phase: since when the rollouts in progress stand still.
        self._training_since_s: float | None = None
        self._trainer = TrainingLedger()

    @property
    def steps(self) -> list[StepRow]:
        """The row of every optimizer step that is done."""
        return self._trainer.rows

    # --------------------------------------------------------------------------------------- events

    def event(self, time_s: float, event: events.Event) -> None:
        """Record an event that was reported at ``time_s``."""
        self._time_s = time_s
        # These three come once per rollout or turn; `match` would cost three times as much as `isinstance`.
        if isinstance(event, events.RolloutFinished):
            rollout_id, num_tokens = event.rollout_id, event.spans.ends[-1]
            if event.engine is None:
                self._tokens_cut_short -= self._between_turns.pop(rollout_id)
                self.profile.rollout_ended(time_s, rollout_id, num_tokens)
            else:
                self._leave_engine(rollout_id, event.engine, num_tokens)
            self._num_finished += 1
            self._tokens_finished += num_tokens
            self._finished.add(rollout_id, event.spans, self._version, event.reward)
            if event.reward is None:
                self._trainer.open_step.num_scoring += 1
            if self._aborting:
                self._aborting.discard(rollout_id)  # it was faster
            return
        if isinstance(event, events.RolloutScored):
            self._finished.score(event.rollout_id, event.reward)
            self._trainer.open_step.num_scoring -= 1
            return
        if isinstance(event, events.TurnFinished):
            self._turn_finished(event)
            return
        match event:
            case events.RolloutAborted():
                self._aborted(event)
            case events.RolloutFailed():
                self._failed(event)
            case events.RolloutPreempted():
                self._num_preemptions += 1
            case events.TrainingFinished():
                self._trained(event)
            case events.WeightsPublished():
                self._trainer.published(time_s, event.publish_s, self.profile)
            case events.WeightsLoaded():
                self._loaded(event)
            case events.EngineJoined():
                self.fleet.joined(time_s, event.engine)
                self._engine_rollouts[event.engine] = 0
                self._busy_since_s[event.engine] = self._busy_s[event.engine] = 0.0
            case events.EngineLeaving():
                self.fleet.begins_to_leave(time_s, event.engine)
            case events.EngineLeft():
                self.fleet.left(time_s, event, busy_s=self._busy_s.pop(event.engine))
                del self._engine_rollouts[event.engine], self._busy_since_s[event.engine]

    def command(self, time_s: float, command: events.Command) -> None:
        """Record a command that was given at ``time_s``."""
        self._time_s = time_s
        if isinstance(command, events.StartRollout):  # comes once per rollout
            rollout_id, engine = command.rollout_id, command.engine
            if self._interrupted and rollout_id in self._interrupted:
                self._tokens_cut_short -= self._interrupted.pop(rollout_id)
                self._num_interruptions += 1
            elif self._between_turns and rollout_id in self._between_turns:
                self._tokens_cut_short -= self._between_turns.pop(rollout_id)
            else:
                self._num_started += 1
                if not time_s:
                    self.profile.num_first += 1
            self._engine_rollouts[engine] = in_progress = self._engine_rollouts[engine] + 1
            if in_progress == 1:
                self._busy_since_s[engine] = time_s
            if self.profile.watching:
                self.profile.rollout_started(time_s, rollout_id, engine, in_progress)
            return
        match command:
            case events.OpenEnvironment():
                self._num_started += 1
                self.profile.num_first += time_s == 0.0
                self._between_turns[command.rollout_id] = 0
            case events.StartTraining():
                self._training_started(command)
            case events.PublishWeights():
                self.profile.published(time_s, command.version)
            case events.DiscardRollouts():
                self._discarded(command)
            case events.AbortRollout():
                self._aborting.add(command.rollout_id)
            case events.Stop():
                self._stop = command.reason.value

    def _leave_engine(self, rollout_id: int, engine: int, num_tokens: int, *, goes_on: bool = False) -> None:
        self._engine_rollouts[engine] = in_progress = self._engine_rollouts[engine] - 1
        if not in_progress:
            end_s = self._time_s if self._stop is None else self._busy_until_s()
            self._busy_s[engine] += end_s - self._busy_since_s[engine]
        if self.profile.watching:
            if not goes_on:
                self.profile.rollout_ended(self._time_s, rollout_id, num_tokens)
            self.profile.turn_ended(self._time_s, engine, in_progress)

    def _turn_finished(self, event: events.TurnFinished) -> None:
        rollout_id, num_tokens = event.rollout_id, event.spans.ends[-1]
        self._leave_engine(rollout_id, event.engine, num_tokens, goes_on=True)
        self._between_turns[rollout_id] = num_tokens
        self._tokens_cut_short += num_tokens
        self._aborting.discard(rollout_id)

    def _aborted(self, event: events.RolloutAborted) -> None:
        rollout_id, num_tokens = event.rollout_id, event.spans.num_tokens
        self._leave_engine(rollout_id, event.engine, num_tokens)
        self._tokens_cut_short += num_tokens
        if self._stop is None and rollout_id in self._aborting:
            self._ended["aborted"] += 1
            self._tokens["aborted"] += num_tokens
        else:
            self._interrupted[rollout_id] = num_tokens
            if self.fleet.leaving and event.engine in self.fleet.leaving and self._stop is None:
                self.fleet.num_moved += 1
                self.fleet.moved_tokens += num_tokens
        self._aborting.discard(rollout_id)

    def _failed(self, event: events.RolloutFailed) -> None:
        self._ended["failed"] += 1
        self._aborting.discard(event.rollout_id)
        if event.engine is not None:
            self._leave_engine(event.rollout_id, event.engine, 0)
        elif event.rollout_id in self._between_turns:
            num_tokens = self._between_turns.pop(event.rollout_id)
            self._tokens["failed"] += num_tokens
            self.profile.rollout_ended(self._time_s, event.rollout_id, num_tokens)
        else:
            self._trainer.open_step.num_scoring -= 1
            self._tokens["failed"] += self._finished.remove(event.rollout_id)

    def _discarded(self, command: events.DiscardRollouts) -> None:
        for rollout_id in command.rollout_ids:
            unfinished = self._interrupted if rollout_id in self._interrupted else self._between_turns
            if rollout_id in unfinished:
                num_tokens = unfinished.pop(rollout_id)
                self._ended["aborted"] += 1
                self._tokens["aborted"] += num_tokens
                self.profile.rollout_ended(self._time_s, rollout_id, num_tokens)
            else:
                self._ended["discarded"] += 1
                self._tokens["discarded"] += self._finished.remove(rollout_id)
                self._reasons[command.reason] += 1

    def _loaded(self, event: events.WeightsLoaded) -> None:
        engine, time_s = event.engine, self._time_s
        self._training_since_s = None
        if self._engine_rollouts[engine]:
            # Its rollouts stood still; the pause counts only as far back as it had any.
            self._busy_s[engine] -= min(event.pause_s, time_s - self._busy_since_s[engine])
        self.profile.loaded(time_s, engine, event.version, event.pause_s)

    # ------------------------------------------------------------------------------------- training

    def _training_started(self, command: events.StartTraining) -> None:
        if self._colocated and self._training_since_s is None:
            self._training_since_s = self._time_s
        taken = self._finished.take(command.rollout_ids)
        self._trainer.begin(taken, command.version)
        if self.turns is not None:
            self.turns.trained(command.rollout_ids, taken, command.version)

    def _trained(self, event: events.TrainingFinished) -> None:
        self._trainer.trained(self._time_s, event, self.profile)
        if event.version == self._version:
            return  # a micro-batch that did not complete its step
        self._version = event.version
        in_progress = sum(self._engine_rollouts.values())
        row = self._trainer.end_step(
            self._time_s, event.version, self.profile, in_progress=in_progress, ready=len(self._finished)
        )
        self._ended["trained"] += row.samples
        self._tokens["trained"] += row.tokens
        self.profile.step_done(self._time_s, event.version)
        if self.on_step is not None:
            self.on_step(row)

    # -------------------------------------------------------------------------------------- results

    def busy_engine_s(self) -> float:
        """Return the busy seconds of all engines, added up."""
        busy_s = sum(self._busy_s.values()) + self.fleet.gone_busy_s
        for engine, rollouts in self._engine_rollouts.items():
            busy_s += (self._busy_until_s() - self._busy_since_s[engine]) if rollouts else 0.0
        return busy_s

    def _busy_until_s(self) -> float:
        return self._time_s if self._training_since_s is None else self._training_since_s

    def ended(self) -> dict[str, int]:
        """Return the rollouts that have ended so far, by how they ended (counts)."""
        return dict(self._ended)

    def summary(self) -> reports.RunTotals:
        """Return the numbers of the run so far that follow from its trace and its configuration."""
        duration_s, ended, tokens = self._time_s, self._ended, self._tokens
        generated = self._tokens_finished + self._tokens_cut_short
        training_s, publishing_s = self._trainer.training_s, self._trainer.publishing_s
        rest_s = max(0.0, duration_s - training_s - publishing_s)
        engine_s = self.fleet.there_s(duration_s)
        environments = None if self.turns is None else self.turns.report(duration_s, finished=self._num_finished)
        return reports.RunTotals(
            optimizer_steps=self._version,
            duration_s=duration_s,
            samples_trained=ended["trained"],
            tokens_trained=tokens["trained"],
            samples_per_s=ended["trained"] / duration_s if duration_s else 0.0,
            tokens_per_s=tokens["trained"] / duration_s if duration_s else 0.0,
            lag=self._trainer.lag.report(),
            rollouts=reports.RolloutCounts(
                started=self._num_started,
                finished=self._num_finished,
                **ended,
                unfinished=self._num_started - sum(ended.values()),
                interruptions=self._num_interruptions,
                preemptions=self._num_preemptions,
            ),
            tokens=reports.TokenCounts(generated=generated, **tokens, unfinished=generated - sum(tokens.values())),
            discarded_by_reason=self._reasons,
            length=reports.LengthReport(
                finished_mean=self._tokens_finished / self._num_finished if self._num_finished else 0.0,
                trained_mean=tokens["trained"] / ended["trained"] if ended["trained"] else 0.0,
            ),
            utilisation=reports.Utilisation(
                generation=self.busy_engine_s() / engine_s if engine_s else 0.0,
                training=training_s / duration_s if duration_s else 0.0,
            ),
            seconds=reports.TrainerSeconds(
                generating=rest_s if self._colocated else 0.0,
                training=training_s,
                publishing=publishing_s,
                waiting_for_data=0.0 if self._colocated else rest_s,
            ),
            bottleneck=find_bottleneck(
                self.steps,
                colocated=self._colocated,
                duration_s=duration_s,
                training_s=training_s,
                waiting_s=rest_s,
                admission=self._admission,
                scoring=self._trainer.scoring_mean,
                in_use=environments.in_use_mean if environments is not None else 0.0,
                prefill=environments.seconds.prefill_share if environments is not None else 0.0,
                scorers_s=self._scorers_s * (self._num_finished - self._trainer.open_step.num_scoring),
                given_up=sum(ended.values()) - ended["trained"],
            ),
            environments=environments,
            fleet=self.fleet.report(duration_s, self.steps),
            complete=self._stop == "done",
        )

    def tokens_by_lag(self) -> list[int]:
        """Return the trained tokens of lag 0, 1, 2, ... optimizer steps (counts)."""
        return self._trainer.lag.by_lag()

    @property
    def num_engines(self) -> int:
        """Engines that are there (count)."""
        return len(self._engine_rollouts)

    def figure_data(self, drift: DriftModel | None = None) -> FigureData:
        """Return the data of figures, the rows of the steps excepted; ``drift`` gives the modelled ESS by turn."""
        turns = None if self.turns is None else self.turns.profile(drift)
        return self.profile.data(self._trainer.lag.histogram(), turns, self.fleet.over_time(self._time_s))


# ------------------------------------------------------------------------------------------- fleet


MOST_POINTS = 1024
"""Points in time of what is kept over time, at most (count)."""


class PointsInTime:
    """Numbers over time, kept after every so many changes (mutable). Of ``MOST_POINTS`` every second one is dropped."""

    def __init__(self) -> None:
        self.points: list[tuple[float, ...]] = []
        """Time (s), and the numbers."""
        self._num_changes, self._every, self._next = 0, 1, 1

    def is_due(self) -> bool:
        """Count a change; return whether the numbers after it are to be added."""
        self._num_changes += 1
        return self._num_changes == self._next

    def add(self, point: tuple[float, ...]) -> None:
        """Add a time and its numbers."""
        self.points.append(point)
        if len(self.points) == MOST_POINTS:
            del self.points[::2]
            self._every *= 2
        self._next = (self._num_changes // self._every + 1) * self._every


class FleetLedger:
    """Engines that join and leave (mutable); those there at the start have the ids from 0 to below ``num_engines``."""

    def __init__(self, num_engines: int) -> None:
        self.leaving: set[int] = set()
        self.num_moved = self.moved_tokens = 0  # rollouts that had to leave an engine; the tokens that they kept
        self.gone_busy_s = 0.0
        self._since_s = dict.fromkeys(range(num_engines), 0.0)  # by id of an engine that is there
        self._gone_s = 0.0
        self._num_joined = self._num_left = 0
        self._lost_tokens: int | None = 0
        self._num_first, self._taking = num_engines, PointsInTime()

    def joined(self, time_s: float, engine: int) -> None:
        """Record an engine that joins."""
        self._since_s[engine] = time_s
        self._num_joined += 1
        self._moved(time_s)

    def begins_to_leave(self, time_s: float, engine: int) -> None:
        """Record an engine that takes nothing more."""
        self.leaving.add(engine)
        self._moved(time_s)

    def left(self, time_s: float, event: events.EngineLeft, *, busy_s: float) -> None:
        """Record an engine that has left; it was busy for so long."""
        self.leaving.remove(event.engine)
        self._gone_s += time_s - self._since_s.pop(event.engine)
        self.gone_busy_s += busy_s
        self._num_left += 1
        if self._lost_tokens is not None:
            self._lost_tokens = None if event.lost_tokens is None else self._lost_tokens + event.lost_tokens

    def _moved(self, time_s: float) -> None:
        if self._taking.is_due():
            self._taking.add((time_s, self._num_taking))

    def there_s(self, duration_s: float) -> float:
        """Return the seconds that engines were there, added up."""
        return duration_s * len(self._since_s) - sum(self._since_s.values()) + self._gone_s

    def over_time(self, duration_s: float) -> EnginesOverTime | None:
        """Return the engines that are there and not leaving over time; None if none has joined or began to leave."""
        if not (self._num_joined or self._num_left or self.leaving):
            return None
        taking = [(0.0, self._num_first), *self._taking.points, (duration_s, self._num_taking)]
        return EnginesOverTime(time_s=[one[0] for one in taking], engines=[int(one[1]) for one in taking])

    @property
    def _num_taking(self) -> int:
        return len(self._since_s) - len(self.leaving)

    def report(self, duration_s: float, steps: Sequence[StepRow]) -> reports.FleetReport | None:
        """Return the numbers of the run; None if no engine has joined or left."""
        if not (self._num_joined or self._num_left):
            return None
        step_s = np.diff([0.0, *(row.time_s for row in steps)])
        return reports.FleetReport(
            engines_mean=self.there_s(duration_s) / duration_s if duration_s else float(len(self._since_s)),
            joined=self._num_joined,
            left=self._num_left,
            moved=self.num_moved,
            moved_tokens=self.moved_tokens,
            lost_tokens=self._lost_tokens,
            step_s_p95=float(np.quantile(step_s, 0.95)) if len(steps) else None,
        )


# ------------------------------------------------------------------------------------------- turns


class Place(StrEnum):
    """Where an open rollout is."""

    ENVIRONMENT = "environment"
    """Its environment is made ready, or acts."""
    WAITING = "waiting"
    """For a slot."""
    ENGINE = "engine"
    SCORING = "scoring"


class TurnLedger:
    """Observes the places of open rollouts of ``count`` environments (mutable).

    An open rollout is in one of four places. So its seconds in them add up to those from its start to its score, and
    the mean number in a place is the rollout-seconds there over the seconds of the run (Little's law).
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[int, tuple[Place, float]] = {}  # rollout -> where, and since when (s)
        self._aborting: set[int] = set()
        self._stopped = False
        self._seconds = dict.fromkeys(Place, 0.0)  # rollout-seconds
        self._prefill_s = self._decode_s = 0.0  # of the seconds on engines
        self._knows_work = False  # whether those two are known
        self._num_turns = 0
        self._faults = dict.fromkeys(events.EnvironmentFault, 0)
        self._num_retries = 0
        self._ends: dict[int, list[int]] = {}  # of a rollout to be trained on: its tokens by the end of each turn
        self._tokens: Counter[tuple[int, int]] = Counter()  # trained, by turn and lag
        self._trained: Counter[int] = Counter()  # rollouts by their number of turns
        self._dropped: Counter[int] = Counter()
        self._counts = dict.fromkeys(Place, 0)  # open rollouts by place
        self._places = PointsInTime()  # of these counts

    def event(self, time_s: float, event: events.Event) -> None:
        """Record an event."""
        match event:
            case events.TurnFinished(rollout_id):
                self._aborting.discard(rollout_id)
                self._end_turn(rollout_id, event.spans)
                self._move(time_s, rollout_id, Place.ENVIRONMENT)
                self._worked(event.seconds)
            case events.ObservationReady(rollout_id):
                self._move(time_s, rollout_id, Place.WAITING)
            case events.RolloutFinished(rollout_id):
                self._aborting.discard(rollout_id)
                if event.engine is not None:
                    self._end_turn(rollout_id, event.spans)
                self._move(time_s, rollout_id, Place.SCORING if event.reward is None else None)
                self._worked(event.seconds)
            case events.RolloutScored(rollout_id):
                self._move(time_s, rollout_id, None)
            case events.RolloutAborted(rollout_id):
                self._worked(event.seconds)
                if self._stopped or rollout_id not in self._aborting:
                    self._move(time_s, rollout_id, Place.WAITING)
                else:
                    self._drop(time_s, rollout_id)
                self._aborting.discard(rollout_id)
            case events.RolloutFailed(rollout_id):
                self._aborting.discard(rollout_id)
                self._drop(time_s, rollout_id)
            case events.EnvironmentFailed():
                self._faults[event.fault] += 1
                self._num_retries += event.again

    def command(self, time_s: float, command: events.Command) -> None:
        """Record a command; ``trained`` records a micro-batch."""
        match command:
            case events.StartRollout(rollout_id):
                self._move(time_s, rollout_id, Place.ENGINE)
            case events.OpenEnvironment(rollout_id):
                self._begin(time_s, rollout_id)
            case events.DiscardRollouts(rollout_ids):
                for rollout_id in rollout_ids:
                    self._drop(time_s, rollout_id)
            case events.AbortRollout(rollout_id):
                self._aborting.add(rollout_id)
            case events.Stop():
                self._stopped = True

    def _begin(self, time_s: float, rollout_id: int) -> None:
        self._open[rollout_id] = (Place.ENVIRONMENT, time_s)
        self._counts[Place.ENVIRONMENT] += 1
        self._ends[rollout_id] = []
        self._moved(time_s)

    def _end_turn(self, rollout_id: int, spans: events.VersionSpans) -> None:
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
        over_time = {place.value: [int(row[1 + at]) for row in self._places.points] for at, place in enumerate(Place)}
        return TurnsProfile(
            lag_mean=[lags / tokens if tokens else None for lags, tokens in zip(lag_sums_K, tokens_K, strict=True)],
            tokens=tokens_K,
            ess_modelled=modelled,
            trained=[self._trained[number] for number in num_turns],
            dropped=[self._dropped[number] for number in num_turns],
            places=PlacesOverTime(time_s=[row[0] for row in self._places.points], **over_time),
        )

    def _worked(self, seconds: events.EngineSeconds | None) -> None:
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
        self._moved(time_s)

    def _moved(self, time_s: float) -> None:
        if self._places.is_due():
            self._places.add((time_s, *self._counts.values()))

    def report(self, duration_s: float, *, finished: int) -> reports.EnvironmentReport:
        """Return the numbers of the run after so many seconds, with ``finished`` rollouts."""
        seconds = dict(self._seconds)
        for place, since_s in self._open.values():
            seconds[place] += duration_s - since_s
        finished = max(1, finished)
        parts = {place.value: one for place, one in seconds.items()}
        if self._knows_work:
            rest = max(0.0, seconds[Place.ENGINE] - self._prefill_s - self._decode_s)  # below 0 in the last digit only
            parts |= {"queue": rest, "prefill": self._prefill_s, "decode": self._decode_s}
        return reports.EnvironmentReport(
            count=self._count,
            in_use_mean=sum(seconds.values()) / duration_s if duration_s else 0.0,
            turns_mean=self._num_turns / finished,
            timeouts=self._faults[events.EnvironmentFault.TIMEOUT],
            errors=self._faults[events.EnvironmentFault.ERROR],
            retries=self._num_retries,
            expired=self._faults[events.EnvironmentFault.EXPIRED],
            seconds=reports.RolloutSeconds(**{name: one / finished for name, one in parts.items()}),
        )
