"""The log of one engine in a trace, as equations for its decode steps (``trace_times`` has the theory)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipelinerl.util.arrays import FloatArray

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
    """Tokens of its prompt and of what it had observed."""
    kept: int
    """Tokens that it had generated before."""
    cached: int
    """Tokens of both whose keys and values the engine still had."""
    pieces: list[tuple[int, int, int]]
    """Version, first and end position of the tokens sampled in this life."""
    number: int
    """Which of the rollouts sent to the engine it was."""

    @property
    def tokens(self) -> int:
        """Tokens sampled in this life."""
        return self.pieces[-1][2] - self.pieces[0][1]


@dataclass(slots=True)
class EngineLog:
    """The rollouts and the weight updates of one engine."""

    sent_s: list[float] = field(default_factory=list)
    """Times of the commands to start rollouts."""
    lived: list[Life] = field(default_factory=list)
    loads: list[tuple[float, float, int]] = field(default_factory=list)
    """Time at which the engine went on, seconds of the pause, version."""

    def late_reports(self) -> list[int]:
        """Return, per weight update, the rollouts with their last token before the pause and their report after it."""
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
        batch_I = _overlaps(len(time_T), first_L, last_L)
        for _ in range(1 if step_s is None else 3):
            tokens_T, context_T = _sampled(clock_T, from_P, to_P, piece_P5[:, 2:])
            if step_s is not None:
                context_I = batch_I * np.maximum(0.0, _ratio(np.diff(context_T), np.diff(tokens_T)))
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
    """Return the times, each that is in a pause moved to its end: who comes in a pause joins when it is over."""
    begin_P, end_P = np.array([(-math.inf, -math.inf), *sorted(pauses)]).T
    over_L: FloatArray = end_P[np.searchsorted(begin_P, time_L, side="right") - 1]
    return np.maximum(time_L, over_L)


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
    tokens_P3: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return tokens sampled, and context of the steps that did so, up to each time: every piece at a steady speed.

    While a piece goes from ``begin`` to ``end`` at speed m, tokens grow by m and context by m (read + position) per
    unit of the clock: linear and quadratic between two times, so sums over all pieces are sums of differences.
    """
    begin_P, end_P, read_P = tokens_P3.T
    ticks_P = clock_T[to_P] - clock_T[from_P]
    speed_P = _ratio(end_P - begin_P, ticks_P)
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
    change_T = np.zeros(num_times)
    np.add.at(change_T, from_P, weight_P)
    np.add.at(change_T, to_P, -weight_P)
    return np.cumsum(change_T)[:-1]


def _ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    """Return ``above / below``, 0 where ``below`` is 0."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=np.float64), where=below > 0)
