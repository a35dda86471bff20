"""The times of a run, read from its trace.

Theory of operation. An engine reports which weight version sampled which tokens of every rollout. So the tokens that it
sampled between two weight updates are known exactly, and with them, if some rollout was in progress all the time, the
number of decode steps (one per token of that rollout), the sequences and the context of all these steps: a *window*, an
exact equation for the coefficients of the decode step. So are stretches in which rollouts that began together, and have
the engine to themselves, end one after the other. Where there is neither, every
*life* of a rollout gives an equation: from its command to its last token the engine made as many steps as it has
tokens; what the others had sampled meanwhile is interpolated between the times at which their tokens are known. The
interpolation goes by a step clock, which runs at the speed that the last fit gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipelinerl.calibration.engine_log import EngineLog, Life, StepSeconds
from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import TrainingCost
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    ObservationReady,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    StartTraining,
    TrainingFinished,
    TurnFinished,
    VersionSpans,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)
from pipelinerl.util.arrays import FloatArray

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
    """Tokens filled in."""
    prefill_squares: FloatArray
    """Sum of the squares of the tokens filled in per sequence."""
    seconds: FloatArray
    """Duration without pauses (seconds)."""
    lives: FloatArray
    """Rollouts sent by the scheduler: the seconds hold the delay to the engine so many times (count)."""
    front_end: FloatArray
    """Seconds of them at the front end, known from its cost per rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTimes:
    """Micro-batches of the trainer; all arrays have shape [micro-batches]."""

    tokens: FloatArray
    """Tokens, prompts included."""
    squares: FloatArray
    """Sum over the sequences of their squared tokens."""
    sequences: FloatArray
    """Sequences (count)."""
    longest: FloatArray
    """Tokens of the longest of them."""
    shortest: FloatArray
    """Tokens of the shortest of them."""
    steps: FloatArray
    """1 where the micro-batch completed an optimizer step, else 0."""
    seconds: FloatArray
    """Duration (seconds)."""

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
        weights are loaded while rollouts are in progress, so nothing tells when a last token was sampled.
        """
        in_flight = self.config.scheduler.weight_update in (WeightUpdate.KEEP, WeightUpdate.RECOMPUTE)
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
        chance, and the fit would attribute the time to them. So a row can hold several lives of about as many steps.

        Args:
            dispatch_s: Seconds from the command to the arrival at the engine.
            step_s: Seconds of a step, for the interpolation; None: the same for all steps.
            request_s: Seconds of an engine's front end per rollout.
            together: Whether rows hold several lives.
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
    """Read the times of a run from its trace.

    Prompts are taken to have ``workload.prompt_tokens`` tokens each where rollouts have one turn: the trace does not
    hold their lengths then. An engine is taken to have room for the caches that it keeps between two turns.

    Raises:
        TraceError: If the trace is broken.
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
    batch: StartTraining | None = None
    batch_s = published_s = command_s = 0.0
    phase_begins = config.colocated
    weight_update = config.scheduler.weight_update
    for record in trace.records():
        now_s = record.time_s
        match record.event or record.command:
            case StartRollout(rollout_id=one, engine=engine, kept_tokens=kept):
                started[one] = _Start(len(logs[engine].sent_s), now_s, read[one], kept, *caches.take(one, engine))
                logs[engine].sent_s.append(now_s)
            case RolloutFinished(rollout_id=one, engine=engine, spans=spans) as event:
                generated_s = now_s if engine is not None else turn_end_s.get(one, now_s)
                if event.reward is None:
                    finished_s[one] = generated_s
                else:
                    result.score_s.append(now_s - generated_s)
                length[one] = spans.num_tokens
                if engine is not None:
                    _end_life(logs[engine], started.pop(one, None), now_s, spans)
            case RolloutAborted(rollout_id=one, engine=engine, spans=spans):
                _end_life(logs[engine], started.pop(one, None), now_s, spans)
            case TurnFinished(rollout_id=one, engine=engine, spans=spans):
                _end_life(logs[engine], started.pop(one, None), now_s, spans)
                turn_end_s[one] = now_s
                caches.keep(one, engine, read[one] + spans.num_tokens)
            case ObservationReady(rollout_id=one, read_tokens=int(tokens)):
                read[one] = tokens
            case RolloutFailed(rollout_id=one):
                started.pop(one, None)
            case RolloutScored(rollout_id=one) if one in finished_s:
                result.score_s.append(now_s - finished_s.pop(one))
            case StartTraining() as batch:
                batch_s = now_s
            case TrainingFinished(train_s=seconds) if batch is not None:
                sizes = [read[one] + length.pop(one) for one in batch.rollout_ids]
                squares, ends = sum(size**2 for size in sizes), (max(sizes), min(sizes))
                if phase_begins:
                    result.to_training_s.append(now_s - batch_s - seconds)
                    phase_begins = False
                else:
                    seconds = max(seconds, now_s - batch_s)  # its way to the trainer and back is time, too
                training.append((sum(sizes), squares, len(sizes), *ends, float(batch.completes_step), seconds))
            case PublishWeights():
                command_s = now_s
            case WeightsPublished(publish_s=seconds):
                result.publish_s.append(seconds)
                published_s = now_s
                phase_begins = config.colocated
            case WeightsLoaded(engine=engine, version=version, pause_s=pause_s):
                logs[engine].loads.append((now_s, pause_s, version))
                caches.loaded(engine, version)
                result.pause_s.append(pause_s)
                if config.colocated:
                    result.to_generation_s.append(now_s - pause_s - max(published_s - pause_s, command_s))
                elif weight_update is not WeightUpdate.WAIT:
                    result.transfer_s.append(now_s - pause_s - command_s)
    result.training = TrainingTimes(*np.array(training).reshape(-1, 7).T)
    result.engines = [logs[engine] for engine in sorted(logs)]
    recompute = weight_update is WeightUpdate.RECOMPUTE
    windows = [row for log in result.engines for row in log.windows(recompute=recompute)]
    windows += [row for log in result.engines for row in log.drains()]
    if len(windows) >= MIN_WINDOWS:
        result.windows = _decode_times(windows)
    return result


class _Start(NamedTuple):
    """A rollout that has been sent to an engine; the fields are those of its ``Life``, but for one."""

    number: int
    start_s: float
    read: int
    kept: int
    cached: int
    salt: int | None
    """Version for which that is so, if it goes on with that; None: for all."""


class _Caches:
    """The KV caches that engines keep of rollouts between two turns (mutable)."""

    def __init__(self, config: RunConfig) -> None:
        environment = config.environment
        self._prefix_cache = PrefixCaching.OFF if environment is None else environment.prefix_cache
        recompute = config.scheduler.weight_update is WeightUpdate.RECOMPUTE
        self._drops_old = recompute or self._prefix_cache is PrefixCaching.SALTED
        self._tokens: dict[int, dict[int, int]] = defaultdict(dict)  # by engine and rollout
        self._version: dict[int, int] = defaultdict(int)  # by engine

    def keep(self, rollout_id: int, engine: int, num_tokens: int) -> None:
        """Keep the cache of a rollout whose turn has ended."""
        if self._prefix_cache is not PrefixCaching.OFF:
            self._tokens[engine][rollout_id] = num_tokens

    def take(self, rollout_id: int, engine: int) -> tuple[int, int | None]:
        """Return the tokens that an engine has of a rollout that goes on there, and ``salt`` of its ``_Start``."""
        return self._tokens[engine].pop(rollout_id, 0), self._version[engine] if self._drops_old else None

    def loaded(self, engine: int, version: int) -> None:
        """Drop what an engine with new weights does not keep."""
        self._version[engine] = version
        if self._drops_old:
            self._tokens[engine].clear()


def _end_life(log: EngineLog, started: _Start | None, end_s: float, spans: VersionSpans) -> None:
    if started is None or end_s <= started.start_s:
        return
    number, start_s, read, kept, cached, salt = started
    pieces = []
    begin = 0
    for version, end in zip(spans.versions, spans.ends, strict=True):
        if end > kept:
            pieces.append((version, max(begin, kept), end))
        begin = end
    if pieces:
        cached = cached if salt in (None, pieces[0][0]) else 0
        log.lived.append(Life(start_s, end_s, read, kept, cached, pieces, number))


def _decode_times(rows: Iterable[Iterable[float]]) -> DecodeTimes:
    rows_R7 = np.array(list(rows), dtype=np.float64)
    return DecodeTimes(*rows_R7.T, *np.zeros((2, len(rows_R7))))
