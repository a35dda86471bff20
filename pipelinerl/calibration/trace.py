"""The times of a run, read from its trace.

Theory of operation. An engine reports which weight version sampled which tokens of every rollout. So the tokens that it
sampled between two weight updates are known exactly. If some rollout was in progress all that time, so are the number
of decode steps (one per token of that rollout), the sequences and the context of all these steps: a *window*, an exact
equation for the coefficients of the decode step. Another is a *drain*: a stretch in which rollouts that began together,
alone on the engine, end one after the other. Without either, every *life* of a rollout gives an equation: from its
command to its last token the engine made as many steps as the rollout has tokens. The tokens that other rollouts
sampled meanwhile are interpolated between the times at which they are known, on a step clock that runs at the speed of
the last fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import TrainingCost
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler import events
from pipelinerl.util.arrays import FloatArray, ratio

# One engine's log as equations for its decode steps.

StepSeconds = Callable[[FloatArray, FloatArray], FloatArray]
"""Seconds of a decode step by number of sequences and tokens of context of all of them together."""

DRAIN_STEPS = 8
"""Decode steps that a stretch between ends of rollouts has at least (count)."""


@dataclass(frozen=True, slots=True)
class Life:
    """A rollout on an engine, from the command to its end, or one turn of it."""

    start_s: float
    end_s: float
    read: int
    """Tokens of its prompt and observations."""
    kept: int
    """Tokens that it had generated before."""
    cached: int
    """Of ``read`` and ``kept``: tokens whose KV cache the engine still had."""
    pieces: list[tuple[int, int, int]]
    """Version, first and end position of the tokens sampled in this life."""
    number: int
    """Number of the rollout in order of the commands."""

    @property
    def tokens(self) -> int:
        """Tokens sampled in this life."""
        return self.pieces[-1][2] - self.pieces[0][1]


@dataclass(slots=True)
class EngineLog:
    """The rollouts and the weight updates of one engine."""

    sent_s: list[float] = field(default_factory=list)
    lived: list[Life] = field(default_factory=list)
    loads: list[tuple[float, float, int]] = field(default_factory=list)
    """Time at which the engine went on, seconds of the pause, version."""

    def late_reports(self) -> list[int]:
        """Return, per weight update, how many rollouts ended before the pause and were reported later."""
        reports_L2 = np.array(sorted((life.end_s, life.pieces[-1][0]) for life in self.lived))
        numbers = []
        for (loaded_s, pause_s, version), (next_s, _, _) in pairwise([*self.loads, (math.inf, 0.0, 0)]):
            first, last = np.searchsorted(reports_L2[:, 0], (loaded_s - pause_s, next_s), side="right")
            numbers.append(int((reports_L2[first:last, 1] < version).sum()))
        return numbers

    def windows(self, *, recompute: bool) -> list[list[float]]:
        """Return the rows between two updates during all of which a rollout was in progress."""
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * 6)
        for life in self.lived:
            for number, (version, begin, end) in enumerate(life.pieces):
                row, tokens = sums[version], end - begin
                if 0 < number < len(life.pieces) - 1:
                    row[0] = max(row[0], tokens)
                row[1] += tokens
                row[2] += tokens * life.read + (begin + end - 1) * tokens / 2
                if number == 0 or recompute:
                    until, cached = life.read + begin, life.cached if number == 0 else 0
                    row[3] += 1 if until > cached else 0
                    row[4] += until - cached
                    row[5] += until**2 - cached**2
        rows = []
        for (begin_s, _, version), (end_s, pause_s, _) in pairwise(self.loads):
            if sums[version][0] > 0 and end_s - pause_s > begin_s:
                rows.append([*sums[version], end_s - pause_s - begin_s])
        return rows

    def drains(self) -> list[list[float]]:
        """Return rows between ends of rollouts that began together and had the engine to themselves."""
        rows: list[list[float]] = []
        cohorts: dict[float, list[Life]] = defaultdict(list)
        for life in self.lived:
            cohorts[life.start_s].append(life)
        starts_s = sorted(life.start_s for life in self.lived)
        ends_s = sorted(life.end_s for life in self.lived)
        for start_s, next_s in pairwise([*sorted(cohorts), math.inf]):
            cohort = sorted(cohorts[start_s], key=lambda life: (life.tokens, life.end_s))
            last_s = max(life.end_s for life in cohort)
            others = bisect_left(starts_s, start_s) - bisect_right(ends_s, start_s)
            paused = any(start_s < loaded_s <= last_s for loaded_s, _, _ in self.loads)
            if others or next_s < last_s or paused or any(life.kept for life in cohort):
                continue
            row = [0.0] * 7
            read = sum(life.read for life in cohort)
            for left, (one, two) in zip(range(len(cohort) - 1, 0, -1), pairwise(cohort), strict=True):
                begin, steps = one.tokens, two.tokens - one.tokens
                read -= one.read
                row[0] += steps
                row[1] += steps * left
                row[2] += steps * (read + left * (begin + (steps - 1) / 2))
                row[6] += two.end_s - one.end_s
                if row[0] >= DRAIN_STEPS and row[6] > 0:
                    rows.append(row)
                    row = [0.0] * 7
        return rows

    def front_end_s(self, request_s: float) -> FloatArray:
        """Return how long each life was at the front end, which takes one rollout after the other (seconds)."""
        taken_s, free_s = [], -math.inf
        for sent_s in self.sent_s:
            free_s = max(sent_s, free_s) + request_s
            taken_s.append(free_s)
        return np.array([taken_s[life.number] - life.start_s for life in self.lived])

    def lives(self, dispatch_s: float, step_s: StepSeconds | None, front_end_L: FloatArray) -> FloatArray:
        """Return the rows of all lives, shape [lives, columns]."""
        lived = self.lived
        start_L = np.array([life.start_s for life in lived])
        end_L = np.array([life.end_s for life in lived])
        join_L = np.minimum(start_L + front_end_L + dispatch_s, end_L - 1e-9)
        pauses = [(loaded_s - pause_s, loaded_s) for loaded_s, pause_s, _ in self.loads]
        loaded_s = {version: time_s for time_s, _, version in self.loads}
        time_T = np.unique(np.concatenate([join_L, end_L, np.array(pauses).ravel()]))
        paused_T = _cumulated(time_T, pauses)
        # Pieces of lives with known tokens at both ends; they begin and end at times of time_T.
        pieces = []
        for life, join_s in zip(lived, join_L, strict=True):
            times = [join_s, *(loaded_s.get(version, join_s) for version, _, _ in life.pieces[1:]), life.end_s]
            for (begin_s, stop_s), (_, begin, end) in zip(pairwise(times), life.pieces, strict=True):
                if stop_s > begin_s:
                    pieces.append((begin_s, stop_s, begin, end, life.read))
        piece_P5 = np.array(pieces)
        from_P, to_P = (np.searchsorted(time_T, piece_P5[:, column]) for column in (0, 1))
        clock_T = time_T - paused_T
        first_L, last_L = np.searchsorted(time_T, join_L), np.searchsorted(time_T, end_L)
        batch_I = _overlap_sums(len(time_T), first_L, last_L, np.ones(len(lived)))
        for _ in range(1 if step_s is None else 3):
            tokens_T, context_T = _sampled(clock_T, from_P, to_P, piece_P5[:, 2:])
            if step_s is not None:
                context_I = batch_I * np.maximum(0.0, ratio(np.diff(context_T), np.diff(tokens_T)))
                second_I = np.diff(time_T - paused_T)
                step_I = np.maximum(step_s(np.maximum(batch_I, 1), context_I), 1e-9)
                clock_T = np.concatenate([[0.0], np.cumsum(np.where(batch_I > 0, second_I / step_I, 0.0))])
        until_L, cached_L = np.array([(life.read + life.kept, life.cached) for life in lived], dtype=np.float64).T
        filled_L = np.minimum(_after_pauses(join_L, pauses), end_L - 1e-9)
        order = np.argsort(filled_L, kind="stable")
        fills_L = filled_L[order]
        sums = [
            np.concatenate([[0.0], np.cumsum(size_L[order])])
            for size_L in (until_L > cached_L, until_L - cached_L, until_L**2 - cached_L**2)
        ]
        before_L = np.searchsorted(fills_L, filled_L, side="left")
        after_L = np.searchsorted(fills_L, end_L, side="left")
        waits_L = (first_L > 0) & (batch_I[first_L - 1] > 0)
        steps_L = np.array([life.tokens for life in lived], dtype=np.float64)
        # A rollout that meets a busy engine waits for its running step to end: half a step in the mean.
        longer_L = 1 + waits_L / (2 * steps_L)
        rows = [
            steps_L * longer_L,
            (tokens_T[last_L] - tokens_T[first_L]) * longer_L,
            (context_T[last_L] - context_T[first_L]) * longer_L,
            *(total[after_L] - total[before_L] for total in sums),
            end_L - start_L - (paused_T[last_L] - paused_T[first_L]),
            np.ones(len(lived)),
            front_end_L,
        ]
        return np.stack(rows, axis=1)


def _cumulated(time_T: FloatArray, pauses: list[tuple[float, float]]) -> FloatArray:
    """Return the seconds of pauses up to each time; pauses begin and end at times of ``time_T``."""
    paused_I = np.zeros(len(time_T) - 1)
    for begin_s, end_s in pauses:
        begin, end = np.searchsorted(time_T, [begin_s, end_s])
        paused_I[begin:end] = np.diff(time_T[begin : end + 1])
    return np.concatenate([[0.0], np.cumsum(paused_I)])


def _after_pauses(time_L: FloatArray, pauses: list[tuple[float, float]]) -> FloatArray:
    """Return the times at which rollouts join the batch: one that comes in a pause joins at its end."""
    begin_P, end_P = np.array([(-math.inf, -math.inf), *sorted(pauses)]).T
    over_L: FloatArray = end_P[np.searchsorted(begin_P, time_L, side="right") - 1]
    return np.maximum(time_L, over_L)


def _sampled(
    clock_T: FloatArray, from_P: NDArray[np.intp], to_P: NDArray[np.intp], tokens_P3: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return tokens sampled, and context of the steps that did so, up to each time: every piece at a steady speed.

    While a piece goes from ``begin`` to ``end`` at speed m, tokens grow by m and context by m (read + position) per
    unit of the clock: linear and quadratic between two times, so sums over all pieces are sums of differences.
    """
    begin_P, end_P, read_P = tokens_P3.T
    ticks_P = clock_T[to_P] - clock_T[from_P]
    speed_P = ratio(end_P - begin_P, ticks_P)
    level_P = speed_P * (read_P + begin_P - 0.5 - speed_P * clock_T[from_P])
    tokens_I, level_I, growth_I = (
        _overlap_sums(len(clock_T), from_P, to_P, weight_P) for weight_P in (speed_P, level_P, speed_P**2)
    )
    tick_I = np.diff(clock_T)
    middle_I = (clock_T[1:] + clock_T[:-1]) / 2
    tokens_T = np.concatenate([[0.0], np.cumsum(tokens_I * tick_I)])
    context_T = np.concatenate([[0.0], np.cumsum((level_I + growth_I * middle_I) * tick_I)])
    return tokens_T, context_T


def _overlap_sums(num_times: int, from_P: NDArray[np.intp], to_P: NDArray[np.intp], weight_P: FloatArray) -> FloatArray:
    """Return, for every interval between two times, the sum of the weights of the pieces that go on in it."""
    change_T = np.zeros(num_times)
    np.add.at(change_T, from_P, weight_P)
    np.add.at(change_T, to_P, -weight_P)
    return np.cumsum(change_T)[:-1]


LIVES_PER_ROW = 8
"""Lives of rollouts that a row holds, at least (count)."""
MOST_ROWS = 500
"""Rows of several lives (count)."""
MOST_SINGLE = 4000
"""Rows of single lives (count)."""
MIN_WINDOWS = 8
"""Windows that a fit needs; with fewer, lives are used (count)."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTimes:
    """Stretches of an engine's work; all arrays have shape [rows]."""

    steps: FloatArray
    """Decode steps, half of one included for every rollout that met a busy engine and waited for its step to end."""
    sequences: FloatArray
    """Sum over the steps of the sequences in them: tokens sampled (count)."""
    context: FloatArray
    """Sum over the steps of the tokens of context of all sequences in them (tokens)."""
    prefills: FloatArray
    """Sequences whose KV cache was filled (count)."""
    prefill_tokens: FloatArray
    prefill_squares: FloatArray
    """Sum of the squares of the tokens filled in per sequence."""
    seconds: FloatArray
    """Duration without pauses (seconds)."""
    lives: FloatArray
    """Rollouts sent by the scheduler: the seconds hold the delay to the engine so many times (count)."""
    front_end: FloatArray
    """Seconds of these rollouts at the front end, known from its cost per rollout."""

    @classmethod
    def of(cls, *, seconds: FloatArray, **columns: FloatArray) -> DecodeTimes:
        """Return stretches with these columns; the others are 0."""
        nothing = {one.name: np.zeros(len(seconds)) for one in fields(cls)}
        return cls(**{**nothing, **columns, "seconds": seconds})


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTimes:
    """Micro-batches of the trainer; all arrays have shape [micro-batches]."""

    tokens: FloatArray
    """Prompts included."""
    squares: FloatArray
    """Sum over the sequences of their squared tokens."""
    sequences: FloatArray
    longest: FloatArray
    """Of the sequences (tokens)."""
    shortest: FloatArray
    """Of the sequences (tokens)."""
    steps: FloatArray
    """1 where the micro-batch completed an optimizer step, else 0."""
    seconds: FloatArray

    def bounds_s(self, cost: TrainingCost) -> FloatArray:
        """Return the seconds of each micro-batch by each bound on its fullest rank, shape [bounds, micro-batches]."""
        return np.stack(
            cost.bounds_s(
                (self.tokens, self.squares),
                longest=(self.longest, self.longest**2),
                shortest=(self.shortest, self.shortest**2),
                sequences=self.sequences,
                fixed_s=cost.micro_batch_s + cost.step_s * self.steps,
            )
        )


@dataclass(slots=True)
class TraceTimes:
    """All times of a run; lists hold one entry per occurrence, in seconds."""

    config: RunConfig
    training: TrainingTimes
    publish_s: list[float] = field(default_factory=list)
    """Seconds the trainer stood still to publish."""
    pause_s: list[float] = field(default_factory=list)
    """Seconds an engine stood still to load."""
    transfer_s: list[float] = field(default_factory=list)
    """From the command to publish to the start of the pause, rest of the running step included."""
    score_s: list[float] = field(default_factory=list)
    """From the last token to the score: reward and preprocessing."""
    to_training_s: list[float] = field(default_factory=list)
    """From the command to train to the start of training, first micro-batch of a phase; colocated only."""
    to_generation_s: list[float] = field(default_factory=list)
    """From the end of the publication to the start of the last pause; colocated only."""
    windows: DecodeTimes | None = None
    """Stretches between two updates; None: too few."""
    engines: list[EngineLog] = field(default_factory=list)

    @property
    def late_s(self) -> float | None:
        """Mean time from the last token of a rollout to its report, the rest of a step included (seconds).

        By Little's law: how many are on their way when a pause begins, over how many end per second of work. None: no
        weights are loaded while rollouts are in progress, so the times of last tokens are unknown.
        """
        in_flight = self.config.scheduler.weight_update in (events.WeightUpdate.KEEP, events.WeightUpdate.RECOMPUTE)
        late = [number for log in self.engines if log.lived for number in log.late_reports()]
        if self.config.colocated or not in_flight or not late:
            return None
        ends_s = [life.end_s for log in self.engines for life in log.lived]
        working_s = len(self.engines) * max(ends_s) - sum(self.pause_s)
        return sum(late) / len(late) * working_s / len(ends_s)

    @property
    def shortest_life_s(self) -> float:
        """Shortest time from a command to start a rollout until it left its engine (seconds)."""
        return min(life.end_s - life.start_s for log in self.engines for life in log.lived)

    def lives(
        self,
        dispatch_s: float = 0.0,
        step_s: StepSeconds | None = None,
        *,
        request_s: float = 0.0,
        together: bool = True,
    ) -> DecodeTimes:
        """Return the lives of rollouts on engines.

        Where times are noisy, single lives mislead: other rollouts sample more during a life that lasts longer by
        chance, and the fit would attribute the time to them. So rows hold several lives of about as many steps, if
        ``together``. ``dispatch_s``: from the command to the arrival at the engine. ``step_s``: of a step, for the
        interpolation; None: the same for all. ``request_s``: at an engine's front end per rollout.
        """
        rows_LC = np.concatenate(
            [log.lives(dispatch_s, step_s, log.front_end_s(request_s)) for log in self.engines if log.lived]
        )
        rows_LC = np.random.default_rng(0).permutation(rows_LC)  # else a row would hold lives of one slow period
        rows_LC = rows_LC[np.argsort(rows_LC[:, 0], kind="stable")]
        if not together:
            return DecodeTimes(*rows_LC[:: max(1, len(rows_LC) // MOST_SINGLE)].T)
        num_rows = min(MOST_ROWS, max(1, len(rows_LC) // LIVES_PER_ROW))
        return DecodeTimes(*np.array([some.sum(axis=0) for some in np.array_split(rows_LC, num_rows)]).T)


def read_times(trace: Trace) -> TraceTimes:  # noqa: PLR0915 - a case per event
    """Read the times of a run from its trace; TraceError if it is broken.

    Prompts are taken to have ``workload.prompt_tokens`` tokens each where rollouts have one turn: the trace does not
    hold their lengths then. An engine is taken to have room for the caches that it keeps between two turns.
    """
    config = trace.config
    logs: dict[int, EngineLog] = defaultdict(EngineLog)
    started: dict[int, _Start] = {}
    read: dict[int, int] = defaultdict(lambda: config.workload.prompt_tokens)
    caches = _Caches(config)
    turn_end_s: dict[int, float] = {}
    finished_s: dict[int, float] = {}
    length: dict[int, int] = {}
    training: list[tuple[float, ...]] = []
    result = TraceTimes(config, TrainingTimes(*np.zeros((7, 0))))
    batch: events.StartTraining | None = None
    batch_s = published_s = command_s = 0.0
    phase_begins = config.colocated
    weight_update = config.scheduler.weight_update
    for record in trace.records():
        now_s = record.time_s
        match record.event or record.command:
            case events.StartRollout(rollout_id=one, engine=engine, kept_tokens=kept):
                started[one] = _Start(len(logs[engine].sent_s), now_s, read[one], kept, *caches.take(one, engine))
                logs[engine].sent_s.append(now_s)
            case events.RolloutFinished(rollout_id=one, engine=engine, spans=spans) as event:
                generated_s = now_s if engine is not None else turn_end_s.get(one, now_s)
                if event.reward is None:
                    finished_s[one] = generated_s
                else:
                    result.score_s.append(now_s - generated_s)
                length[one] = spans.num_tokens
                if engine is not None:
                    _end_life(logs[engine], started.pop(one, None), now_s, spans)
            case events.RolloutAborted(rollout_id=one, engine=engine, spans=spans):
                _end_life(logs[engine], started.pop(one, None), now_s, spans)
            case events.TurnFinished(rollout_id=one, engine=engine, spans=spans):
                _end_life(logs[engine], started.pop(one, None), now_s, spans)
                turn_end_s[one] = now_s
                caches.keep(one, engine, read[one] + spans.num_tokens)
            case events.ObservationReady(rollout_id=one, read_tokens=int(tokens)):
                read[one] = tokens
            case events.RolloutFailed(rollout_id=one):
                started.pop(one, None)
            case events.RolloutScored(rollout_id=one) if one in finished_s:
                result.score_s.append(now_s - finished_s.pop(one))
            case events.StartTraining() as batch:
                batch_s = now_s
            case events.TrainingFinished(train_s=seconds) if batch is not None:
                sizes = [read[one] + length.pop(one) for one in batch.rollout_ids]
                squares, ends = sum(size**2 for size in sizes), (max(sizes), min(sizes))
                if phase_begins:
                    result.to_training_s.append(now_s - batch_s - seconds)
                    phase_begins = False
                else:
                    seconds = max(seconds, now_s - batch_s)  # its way to the trainer and back is time, too
                training.append((sum(sizes), squares, len(sizes), *ends, float(batch.completes_step), seconds))
            case events.PublishWeights():
                command_s = now_s
            case events.WeightsPublished(publish_s=seconds):
                result.publish_s.append(seconds)
                published_s = now_s
                phase_begins = config.colocated
            case events.WeightsLoaded(engine=engine, version=version, pause_s=pause_s):
                logs[engine].loads.append((now_s, pause_s, version))
                caches.loaded(engine, version)
                result.pause_s.append(pause_s)
                if config.colocated:
                    result.to_generation_s.append(now_s - pause_s - max(published_s - pause_s, command_s))
                elif weight_update is not events.WeightUpdate.WAIT:
                    result.transfer_s.append(now_s - pause_s - command_s)
    result.training = TrainingTimes(*np.array(training).reshape(-1, 7).T)
    result.engines = [logs[engine] for engine in sorted(logs)]
    recompute = weight_update is events.WeightUpdate.RECOMPUTE
    windows = [row for log in result.engines for row in log.windows(recompute=recompute)]
    windows += [row for log in result.engines for row in log.drains()]
    if len(windows) >= MIN_WINDOWS:
        names = ("steps", "sequences", "context", "prefills", "prefill_tokens", "prefill_squares", "seconds")
        result.windows = DecodeTimes.of(**dict(zip(names, np.array(windows).T, strict=True)))
    return result


class _Start(NamedTuple):
    """A rollout sent to an engine; the fields as in ``Life``."""

    number: int
    start_s: float
    read: int
    kept: int
    cached: int
    salt: int | None
    """``cached`` holds only if the rollout goes on with this version; None: with any."""


class _Caches:
    """The KV caches that engines keep of rollouts between two turns (mutable)."""

    def __init__(self, config: RunConfig) -> None:
        environment = config.environment
        self._prefix_cache = PrefixCaching.OFF if environment is None else environment.prefix_cache
        recompute = config.scheduler.weight_update is events.WeightUpdate.RECOMPUTE
        self._drops_old = recompute or self._prefix_cache is PrefixCaching.SALTED
        self._tokens: dict[int, dict[int, int]] = defaultdict(dict)  # by engine and rollout
        self._version: dict[int, int] = defaultdict(int)  # by engine

    def keep(self, rollout_id: int, engine: int, num_tokens: int) -> None:
        if self._prefix_cache is not PrefixCaching.OFF:
            self._tokens[engine][rollout_id] = num_tokens

    def take(self, rollout_id: int, engine: int) -> tuple[int, int | None]:
        """Return ``cached`` and ``salt`` of the ``_Start`` of a rollout on an engine."""
        return self._tokens[engine].pop(rollout_id, 0), self._version[engine] if self._drops_old else None

    def loaded(self, engine: int, version: int) -> None:
        """Drop the caches that an engine discards with new weights."""
        self._version[engine] = version
        if self._drops_old:
            self._tokens[engine].clear()


def _end_life(log: EngineLog, started: _Start | None, end_s: float, spans: events.VersionSpans) -> None:
    if started is None or end_s <= started.start_s:
        return
    number, start_s, read, kept, cached, salt = started
    pieces = [
        (version, max(begin, kept), end)
        for version, (begin, end) in zip(spans.versions, pairwise((0, *spans.ends)), strict=True)
        if end > kept
    ]
    if pieces:
        cached = cached if salt in (None, pieces[0][0]) else 0
        log.lived.append(Life(start_s, end_s, read, kept, cached, pieces, number))
