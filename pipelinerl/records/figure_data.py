"""Data of figures beyond a row per step, in bounded space: lag by position, one generation phase, a timeline."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pipelinerl.records.profile_report import (
    EnginesOverTime,
    EngineTimeline,
    FigureData,
    GenerationWindow,
    LagByPosition,
    LagHistogram,
    Timeline,
    TrainerWork,
    TurnsProfile,
    WeightUpdateTimes,
)

POSITION_BINS = 64
"""Bins of position in the answer (count)."""
WINDOW_BINS = 200
"""Bins of time in the generation window (count)."""
WINDOW_ROLLOUTS = 65_536
"""Rollouts in the generation window, at most (count)."""
TIMELINE_ENGINES = 8
"""Engines in the timeline, the first ones (count)."""
TIMELINE_STEPS = 12
"""Optimizer steps in the timeline of disaggregated runs (count)."""
TIMELINE_RL_STEPS = 2
"""RL steps in the timeline of colocated runs (count)."""
TIMELINE_POINTS = 20_000
"""Points and intervals in the timeline, at most (count)."""


class FigureRecorder:
    """Collects the data of figures; the ledger reports to it.

    The *generation window* of a colocated run is its first generation phase. That of any other run ends when three
    times as many rollouts have ended as were started at the first instant. The *timeline* covers the first optimizer
    steps or RL steps. ``longest`` bounds an answer (tokens).
    """

    def __init__(self, *, engine_ids: Iterable[int], colocated: bool, longest: int) -> None:
        self.watching = True  # whether it still needs reports of rollouts
        self.num_first = 0  # rollouts started at the first instant, as the ledger counts them
        self._colocated = colocated
        # Lag by position: differences along the positions, so that a span costs two additions.
        self._lag_change = np.zeros(longest + 1, dtype=np.int64)
        self._count_change = np.zeros(longest + 1, dtype=np.int64)
        # Generation window: start, end, tokens of each rollout in it.
        self._window: dict[int, list[float]] = {}
        self._window_end_s: float | None = None
        self._num_left = 0
        # Timeline.
        self._timeline_end_s: float | None = None
        self._num_points = 0
        self._trainer: list[tuple[float, float, TrainerWork]] = []
        shown = list(islice(engine_ids, TIMELINE_ENGINES))
        self._occupancy: dict[int, list[tuple[float, int]]] = {engine: [] for engine in shown}
        self._pauses: dict[int, list[tuple[float, float]]] = {engine: [] for engine in shown}
        self._updates: dict[int, tuple[float, float]] = {}  # version -> published, last loaded
        self._num_publications = 0
        self._time_s = 0.0

    # -------------------------------------------------------------------------------------- rollouts

    def rollout_started(self, time_s: float, rollout_id: int, engine: int, in_progress: int) -> None:
        """Note that a rollout starts or goes on; ``in_progress`` counts the engine's rollouts, this one included."""
        if rollout_id in self._window:
            if self._window[rollout_id][1] >= 0:  # a weight update aborted it; between turns it is in progress
                self._window[rollout_id][1] = -1.0
                self._num_left -= 1
        elif self._window_end_s is None:
            if len(self._window) == WINDOW_ROLLOUTS:
                self._window_end_s = time_s
            else:
                self._window[rollout_id] = [time_s, -1.0, 0.0]
        self.turn_ended(time_s, engine, in_progress)

    def turn_ended(self, time_s: float, engine: int, in_progress: int) -> None:
        """Note that a rollout left its engine, which has so many others in progress."""
        if self._timeline_end_s is None and engine in self._occupancy:
            points = self._occupancy[engine]
            if points and points[-1][0] == time_s:
                points[-1] = (time_s, in_progress)
            else:
                points.append((time_s, in_progress))
                self._count_point(time_s)

    def rollout_ended(self, time_s: float, rollout_id: int, num_tokens: int) -> None:
        """Note that a rollout is in progress no more, if it was; it has ``num_tokens`` tokens."""
        if rollout_id in self._window and self._window[rollout_id][1] < 0:
            self._window[rollout_id][1:] = time_s, num_tokens
            self._num_left += 1
            if self._window_end_s is None and not self._colocated and self._num_left == 3 * self.num_first:
                self._window_end_s = time_s
            self._stop_watching_if_over()

    def _stop_watching_if_over(self) -> None:
        windows_closed = self._window_end_s is not None and self._timeline_end_s is not None
        self.watching = not (windows_closed and self._num_left >= len(self._window))

    def _count_point(self, time_s: float) -> None:
        self._num_points += 1
        if self._num_points == TIMELINE_POINTS:
            self._timeline_end_s = time_s
            self._stop_watching_if_over()

    # --------------------------------------------------------------------------------------- trainer

    def trained(self, start_N: NDArray[np.int64], end_N: NDArray[np.int64], lag_N: NDArray[np.int64]) -> None:
        """Note the version spans of a batch: tokens [start, end) at a lag."""
        # Only at the ends of spans, in place: the cost does not depend on the longest answer.
        np.add.at(self._lag_change, start_N, lag_N)
        np.subtract.at(self._lag_change, end_N, lag_N)
        np.add.at(self._count_change, start_N, 1)
        np.subtract.at(self._count_change, end_N, 1)

    def trainer_worked(self, start_s: float, end_s: float, kind: TrainerWork) -> None:
        """Note an interval in which the trainer was training or publishing."""
        if self._colocated and kind == "training" and self._window_end_s is None:
            self._window_end_s = start_s
        if self._timeline_end_s is None:
            self._trainer.append((start_s, end_s, kind))
            self._count_point(end_s)
        elif self._num_points == TIMELINE_POINTS and start_s < self._timeline_end_s < end_s:
            self._trainer.append((start_s, self._timeline_end_s, kind))  # in progress when the timeline was full

    def step_done(self, time_s: float, version: int) -> None:
        """Note the end of an optimizer step."""
        self._time_s = time_s
        if self._timeline_end_s is None and not self._colocated and version == TIMELINE_STEPS:
            self._timeline_end_s = time_s
            self._stop_watching_if_over()

    def published(self, time_s: float, version: int) -> None:
        """Note a publication."""
        self._num_publications += 1
        if self._timeline_end_s is None:
            if self._colocated and self._num_publications == TIMELINE_RL_STEPS:
                self._timeline_end_s = time_s
                self._stop_watching_if_over()
            self._updates[version] = (time_s, time_s)

    def loaded(self, time_s: float, engine: int, version: int, pause_s: float) -> None:
        """Note that an engine has loaded a version after a pause."""
        if version in self._updates:
            self._updates[version] = (self._updates[version][0], time_s)
            if engine in self._pauses:
                self._pauses[engine].append((time_s - pause_s, time_s))

    # --------------------------------------------------------------------------------------- results

    def data(
        self, lag_histogram: LagHistogram, turns: TurnsProfile | None = None, fleet: EnginesOverTime | None = None
    ) -> FigureData:
        """Return the data of figures, with the trained tokens by lag, turns and engines that the ledger counted."""
        return FigureData(
            lag_histogram=lag_histogram,
            lag_by_position=self._lag_by_position(),
            generation_window=self._generation_window(),
            timeline=self._timeline(),
            turns=turns,
            fleet=fleet,
        )

    def _lag_by_position(self) -> LagByPosition:
        lag_L, count_L = np.cumsum(self._lag_change)[:-1], np.cumsum(self._count_change)[:-1]
        width = -(-len(lag_L) // POSITION_BINS)
        edges = np.arange(0, len(lag_L), width)
        lag, count = np.add.reduceat(lag_L, edges), np.add.reduceat(count_L, edges)
        means = [float(one / tokens) if tokens else None for one, tokens in zip(lag, count, strict=True)]
        return LagByPosition(width_tokens=width, lag_mean=means, tokens=count.tolist())

    def _generation_window(self) -> GenerationWindow:
        """Return rollouts in progress and tokens/s by bin of time; a rollout's tokens are spread over its time."""
        end_s = self._window_end_s if self._window_end_s is not None else self._time_s
        rollouts = np.array([[a, b if b >= 0 else end_s, n] for a, b, n in self._window.values()]).reshape(-1, 3)
        start_R, stop_R, tokens_R = rollouts.T
        rate_R = np.divide(tokens_R, stop_R - start_R, out=np.zeros_like(tokens_R), where=stop_R > start_R)
        edges = np.linspace(0.0, end_s, WINDOW_BINS + 1)
        passed = [np.clip(edge - start_R, 0.0, stop_R - start_R) for edge in edges]
        width_s = end_s / WINDOW_BINS
        in_progress = np.diff([float(one.sum()) for one in passed])
        tokens = np.diff([float((one * rate_R).sum()) for one in passed])
        scale = 1.0 / width_s if width_s else 0.0
        return GenerationWindow(
            start_s=0.0,
            width_s=width_s,
            in_progress=(in_progress * scale).tolist(),
            tokens_per_s=(tokens * scale).tolist(),
        )

    def _timeline(self) -> Timeline:
        engines = [
            EngineTimeline(
                engine=engine,
                time_s=[time_s for time_s, _ in points],
                in_progress=[count for _, count in points],
                paused=self._pauses[engine],
            )
            for engine, points in self._occupancy.items()
        ]
        updates = [
            WeightUpdateTimes(version=version, published_s=published_s, loaded_s=loaded_s)
            for version, (published_s, loaded_s) in self._updates.items()
        ]
        end_s = self._timeline_end_s if self._timeline_end_s is not None else self._time_s
        return Timeline(until_s=end_s, trainer=self._trainer, engines=engines, updates=updates)
