"""What a trace tells of the time that things take.

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

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import TrainingCost
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    StartTraining,
    TrainingFinished,
    VersionSpans,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)

FloatArray = NDArray[np.float64]
StepSeconds = Callable[[FloatArray, FloatArray], FloatArray]
"""Seconds of a decode step by number of sequences and tokens of context of all of them together."""

LIVES_PER_ROW = 8
"""Lives of rollouts that a row holds, at least (count)."""
MOST_ROWS = 500
"""Rows of several lives (count)."""
MOST_SINGLE = 4000
"""Rows of single lives (count)."""
DRAIN_STEPS = 8
"""Decode steps that a stretch between ends of rollouts has at least (count)."""
MIN_WINDOWS = 8
"""Windows that a fit needs; with fewer, lives are used (count)."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTimes:
    """Stretches of an engine's work; all arrays have shape [rows]."""

    steps: FloatArray
    """Decode steps (count)."""
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
    """How long it took, pauses left out (seconds)."""
    lives: FloatArray
    """Rollouts that came from the scheduler: the way to the engine is in the seconds so many times (count)."""
    waits: FloatArray
    """Of these, rollouts that met a busy engine and waited for its running step to end (count)."""


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
    """How long it took (seconds)."""

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
    engines: list[_EngineLog] = field(default_factory=list)

    def lives(
        self, dispatch_s: float = 0.0, step_s: StepSeconds | None = None, *, together: bool = True
    ) -> DecodeTimes:
        """Return the lives of rollouts on engines.

        Where times are noisy single lives mislead: one that by chance lasts longer is one in which others sample more,
        and the time would be put down to them. So those of about as many steps can be put together in a row.

        Args:
            dispatch_s: Seconds from the command to the arrival at the engine.
            step_s: What a step lasts, for the interpolation; None: always the same.
            together: Whether rows hold several lives.
        """
        prompt_tokens = self.config.workload.prompt_tokens
        rows_L9 = np.concatenate([log.lives(prompt_tokens, dispatch_s, step_s) for log in self.engines if log.lived])
        rows_L9 = np.random.default_rng(0).permutation(rows_L9)  # or a row would be a time at which all was slow
        rows_L9 = rows_L9[np.argsort(rows_L9[:, 0], kind="stable")]
        if not together:
            return DecodeTimes(*rows_L9[:: max(1, len(rows_L9) // MOST_SINGLE)].T)
        num_rows = min(MOST_ROWS, max(1, len(rows_L9) // LIVES_PER_ROW))
        return DecodeTimes(*np.array([some.sum(axis=0) for some in np.array_split(rows_L9, num_rows)]).T)


@dataclass(frozen=True, slots=True)
class _Life:
    """A rollout on an engine, from the command to its end."""

    start_s: float
    end_s: float
    kept: int
    """Tokens that it had before."""
    pieces: list[tuple[int, int, int]]
    """Version, first and end position of the tokens sampled in this life."""

    @property
    def tokens(self) -> int:
        """Tokens sampled in this life."""
        return self.pieces[-1][2] - self.pieces[0][1]


@dataclass(slots=True)
class _EngineLog:
    """What happened on one engine."""

    lived: list[_Life] = field(default_factory=list)
    loads: list[tuple[float, float, int]] = field(default_factory=list)
    """Time at which the engine went on, seconds of the pause, version."""

    def windows(self, prompt_tokens: int, *, recompute: bool) -> list[list[float]]:
        """Return the rows between two updates during all of which a rollout was in progress."""
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * 6)
        for life in self.lived:
            for number, (version, begin, end) in enumerate(life.pieces):
                row, tokens = sums[version], end - begin
                if 0 < number < len(life.pieces) - 1:
                    row[0] = max(row[0], tokens)
                row[1] += tokens
                row[2] += tokens * prompt_tokens + (begin + end - 1) * tokens / 2
                if number == 0 or recompute:
                    filled = prompt_tokens + (life.kept if number == 0 else begin)
                    row[3] += 1 if filled else 0
                    row[4] += filled
                    row[5] += filled**2
        rows = []
        for (begin_s, _, version), (end_s, pause_s, _) in pairwise(self.loads):
            if sums[version][0] > 0 and end_s - pause_s > begin_s:
                rows.append([*sums[version], end_s - pause_s - begin_s])
        return rows

    def drains(self, prompt_tokens: int) -> list[list[float]]:
        """Return rows between ends of rollouts that began together and had the engine to themselves."""
        rows: list[list[float]] = []
        cohorts: dict[float, list[_Life]] = defaultdict(list)
        for life in self.lived:
            cohorts[life.start_s].append(life)
        ends_s = sorted(life.end_s for life in self.lived)
        for start_s, next_s in pairwise([*sorted(cohorts), math.inf]):
            cohort = sorted(cohorts[start_s], key=lambda life: (life.tokens, life.end_s))
            last_s = max(life.end_s for life in cohort)
            others = bisect_right(ends_s, last_s) - bisect_right(ends_s, start_s) - len(cohort)
            paused = any(start_s < loaded_s <= last_s for loaded_s, _, _ in self.loads)
            if others or next_s < last_s or paused or any(life.kept for life in cohort):
                continue
            row = [0.0] * 7
            for left, (one, two) in zip(range(len(cohort) - 1, 0, -1), pairwise(cohort), strict=True):
                begin, steps = one.tokens, two.tokens - one.tokens
                row[0] += steps
                row[1] += steps * left
                row[2] += left * steps * (prompt_tokens + begin + (steps - 1) / 2)
                row[6] += two.end_s - one.end_s
                if row[0] >= DRAIN_STEPS and row[6] > 0:
                    rows.append(row)
                    row = [0.0] * 7
        return rows

    def lives(self, prompt_tokens: int, dispatch_s: float, step_s: StepSeconds | None) -> FloatArray:
        """Return the rows of all lives, shape [lives, 9]."""
        lived = self.lived
        start_L = np.array([life.start_s for life in lived])
        end_L = np.array([life.end_s for life in lived])
        join_L = np.minimum(start_L + dispatch_s, end_L - 1e-9)
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
                    pieces.append((begin_s, stop_s, begin, end))
        piece_P4 = np.array(pieces)
        from_P, to_P = (np.searchsorted(time_T, piece_P4[:, column]) for column in (0, 1))
        clock_T = time_T - paused_T
        first_L, last_L = np.searchsorted(time_T, join_L), np.searchsorted(time_T, end_L)
        batch_I = _overlaps(len(time_T), first_L, last_L)
        for _ in range(1 if step_s is None else 3):
            tokens_T, context_T = _sampled(clock_T, from_P, to_P, piece_P4[:, 2:], prompt_tokens)
            if step_s is not None:
                context_I = batch_I * _ratio(np.diff(context_T), np.diff(tokens_T))
                second_I = np.diff(time_T - paused_T)
                step_I = np.maximum(step_s(np.maximum(batch_I, 1), context_I), 1e-9)
                clock_T = np.concatenate([[0.0], np.cumsum(np.where(batch_I > 0, second_I / step_I, 0.0))])
        filled_L = np.array([prompt_tokens + life.kept for life in lived], dtype=np.float64)
        order = np.argsort(join_L, kind="stable")
        joins_L = join_L[order]
        sums = [
            np.concatenate([[0.0], np.cumsum(filled_L[order] ** power * (filled_L[order] > 0))]) for power in (0, 1, 2)
        ]
        before_L = np.searchsorted(joins_L, join_L, side="left")
        until_L = np.searchsorted(joins_L, end_L, side="left")
        rows = [
            np.array([life.tokens for life in lived], dtype=np.float64),
            tokens_T[last_L] - tokens_T[first_L],
            context_T[last_L] - context_T[first_L],
            *(total[until_L] - total[before_L] for total in sums),
            end_L - start_L - (paused_T[last_L] - paused_T[first_L]),
            np.ones(len(lived)),
            (first_L > 0) & (batch_I[first_L - 1] > 0),
        ]
        return np.stack(rows, axis=1)


def read_times(trace: Trace) -> TraceTimes:  # noqa: PLR0915 - a case per event
    """Read the times of a run from its trace.

    Prompts are taken to have ``workload.prompt_tokens`` tokens each: a trace does not hold their lengths.

    Raises:
        TraceError: If the trace is broken.
    """
    config = trace.config
    prompt_tokens = config.workload.prompt_tokens
    logs: dict[int, _EngineLog] = defaultdict(_EngineLog)
    started: dict[int, tuple[float, int]] = {}
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
            case StartRollout(rollout_id=one, kept_tokens=kept):
                started[one] = (now_s, kept)
            case RolloutFinished(rollout_id=one, engine=engine, spans=spans) as event:
                if event.reward is None:
                    finished_s[one] = now_s
                else:
                    result.score_s.append(0.0)
                length[one] = spans.num_tokens
                _end_life(logs[engine], started.pop(one, None), now_s, spans)
            case RolloutAborted(rollout_id=one, engine=engine, spans=spans):
                _end_life(logs[engine], started.pop(one, None), now_s, spans)
            case RolloutFailed(rollout_id=one):
                started.pop(one, None)
            case RolloutScored(rollout_id=one) if one in finished_s:
                result.score_s.append(now_s - finished_s.pop(one))
            case StartTraining() as batch:
                batch_s = now_s
            case TrainingFinished(train_s=seconds) if batch is not None:
                sizes = [prompt_tokens + length.pop(one) for one in batch.rollout_ids]
                squares, ends = sum(size**2 for size in sizes), (max(sizes), min(sizes))
                training.append((sum(sizes), squares, len(sizes), *ends, float(batch.completes_step), seconds))
                if phase_begins:
                    result.to_training_s.append(now_s - batch_s - seconds)
                    phase_begins = False
            case PublishWeights():
                command_s = now_s
            case WeightsPublished(publish_s=seconds):
                result.publish_s.append(seconds)
                published_s = now_s
                phase_begins = config.colocated
            case WeightsLoaded(engine=engine, version=version, pause_s=pause_s):
                logs[engine].loads.append((now_s, pause_s, version))
                result.pause_s.append(pause_s)
                if config.colocated:
                    result.to_generation_s.append(now_s - pause_s - max(published_s - pause_s, command_s))
                elif weight_update is not WeightUpdate.WAIT:
                    result.transfer_s.append(now_s - pause_s - command_s)
    result.training = TrainingTimes(*np.array(training).reshape(-1, 7).T)
    result.engines = [logs[engine] for engine in sorted(logs)]
    recompute = weight_update is WeightUpdate.RECOMPUTE
    windows = [row for log in result.engines for row in log.windows(prompt_tokens, recompute=recompute)]
    windows += [row for log in result.engines for row in log.drains(prompt_tokens)]
    if len(windows) >= MIN_WINDOWS:
        result.windows = _decode_times(windows)
    return result


def _end_life(log: _EngineLog, started: tuple[float, int] | None, end_s: float, spans: VersionSpans) -> None:
    if started is None or end_s <= started[0]:
        return
    start_s, kept = started
    pieces = []
    begin = 0
    for version, end in zip(spans.versions, spans.ends, strict=True):
        if end > kept:
            pieces.append((version, max(begin, kept), end))
        begin = end
    if pieces:
        log.lived.append(_Life(start_s, end_s, kept, pieces))


def _decode_times(rows: Iterable[Iterable[float]]) -> DecodeTimes:
    rows_R7 = np.array(list(rows), dtype=np.float64)
    return DecodeTimes(*rows_R7.T, *np.zeros((2, len(rows_R7))))


def _cumulated(time_T: FloatArray, pauses: list[tuple[float, float]]) -> FloatArray:
    """Return the seconds of pauses up to each time; pauses begin and end at times of ``time_T``."""
    paused_I = np.zeros(len(time_T) - 1)
    for begin_s, end_s in pauses:
        begin, end = np.searchsorted(time_T, [begin_s, end_s])
        paused_I[begin:end] = np.diff(time_T[begin : end + 1])
    return np.concatenate([[0.0], np.cumsum(paused_I)])


def _overlaps(num_times: int, from_P: NDArray[np.intp], to_P: NDArray[np.intp]) -> FloatArray:
    """Return how many pieces cover each interval between two times."""
    change_T = np.zeros(num_times)
    np.add.at(change_T, from_P, 1)
    np.add.at(change_T, to_P, -1)
    return np.cumsum(change_T)[:-1]


def _sampled(
    clock_T: FloatArray,
    from_P: NDArray[np.intp],
    to_P: NDArray[np.intp],
    tokens_P2: FloatArray,
    prompt_tokens: int,
) -> tuple[FloatArray, FloatArray]:
    """Return tokens sampled, and context of the steps that did so, up to each time: every piece at a steady speed.

    While a piece goes from ``begin`` to ``end`` at speed m, tokens grow by m and context by m (prompt + position) per
    unit of the clock: linear and quadratic between two times, so sums over all pieces are sums of differences.
    """
    begin_P, end_P = tokens_P2.T
    ticks_P = clock_T[to_P] - clock_T[from_P]
    speed_P = _ratio(end_P - begin_P, ticks_P)
    level_P = speed_P * (prompt_tokens + begin_P - 0.5 - speed_P * clock_T[from_P])
    tokens_I, level_I, growth_I = (
        _overlap_sums(len(clock_T), from_P, to_P, weight_P) for weight_P in (speed_P, level_P, speed_P**2)
    )
    tick_I = np.diff(clock_T)
    middle_I = (clock_T[1:] + clock_T[:-1]) / 2
    tokens_T = np.concatenate([[0.0], np.cumsum(tokens_I * tick_I)])
    context_T = np.concatenate([[0.0], np.cumsum((level_I + growth_I * middle_I) * tick_I)])
    return tokens_T, context_T


def _overlap_sums(num_times: int, from_P: NDArray[np.intp], to_P: NDArray[np.intp], weight_P: FloatArray) -> FloatArray:
    change_T = np.zeros(num_times)
    np.add.at(change_T, from_P, weight_P)
    np.add.at(change_T, to_P, -weight_P)
    return np.cumsum(change_T)[:-1]


def _ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    """Return ``above / below``, 0 where ``below`` is 0."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=np.float64), where=below > 0)
