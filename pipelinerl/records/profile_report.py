"""Data of figures beyond summary.json and steps.csv: the content of profile.json, and its collectors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl.util.strict_model import Report, equally_long

TrainerWork = Literal["training", "publishing"]


class LagHistogram(Report):
    """Trained tokens with a lag of 0, 1, 2, ... optimizer steps (counts)."""

    total: list[int]
    """Trained tokens with lag 0, 1, 2, ... (tokens)."""
    in_flight: list[int]
    """The same for the part in flight (tokens)."""
    in_queue: list[int]
    """The same for the part in queue (tokens)."""


class LagByPosition(Report):
    """Mean lag of the trained tokens against their position in the answer."""

    width_tokens: int
    """Width of a bin of position in the answer, at most 64 bins (tokens)."""
    lag_mean: list[float | None]
    """Mean lag per bin, null where no token (optimizer steps)."""
    tokens: list[int]
    """Trained tokens per bin (tokens)."""

    _equally_long = equally_long("lag_mean", "tokens")


class GenerationWindow(Report):
    """Generation over all engines in bins of time: one generation phase, or the first rollouts of a pipeline."""

    start_s: float
    """Start of the window, 0 (s). Conventional: the first generation phase. Pipeline: until three times as many
    rollouts as started at the first instant have ended. At most 65 536 rollouts."""
    width_s: float
    """Width of each of the 200 bins (s)."""
    in_progress: list[float]
    """Mean number in progress on all engines, per bin (rollouts)."""
    tokens_per_s: list[float]
    """Generated tokens per second on all engines, per bin; each rollout's tokens spread evenly over its time (1/s)."""

    _equally_long = equally_long("in_progress", "tokens_per_s")


class EngineTimeline(Report):
    """One engine over time."""

    engine: int
    """Number of the engine; the first 8."""
    time_s: list[float]
    """Times at which its number of rollouts in progress changed (s)."""
    in_progress: list[int]
    """The number from each of these times on (rollouts)."""
    paused: list[tuple[float, float]]
    """List of [start, end] of its pauses (s)."""

    _equally_long = equally_long("time_s", "in_progress")


class WeightUpdateTimes(Report):
    """A weight update."""

    version: int
    """A published version."""
    published_s: float
    """Start of its publication (s)."""
    loaded_s: float
    """Time at which the last engine had loaded it (s)."""


class Timeline(Report):
    """The first part of a run, event by event."""

    until_s: float
    """End of the timeline: 12 optimizer steps, conventional 2 RL steps (s). At most 20 000 points."""
    trainer: list[tuple[float, float, TrainerWork]]
    """List of [start, end, ``training`` or ``publishing``] (s)."""
    engines: list[EngineTimeline]
    """The first few engines."""
    updates: list[WeightUpdateTimes]
    """The weight updates, in order of publication."""


class PlacesOverTime(Report):
    """Where the open rollouts are, at up to 1024 points in time."""

    time_s: list[float]
    """The points, after every so many moves of a rollout from one place to another (s)."""
    environment: list[int]
    """Rollouts whose environment is made ready or acts (count)."""
    waiting: list[int]
    """Rollouts that wait for a slot (count)."""
    engine: list[int]
    """Rollouts that have a slot (count)."""
    scoring: list[int]
    """Rollouts that are being scored (count)."""

    _equally_long = equally_long("time_s", "environment", "waiting", "engine", "scoring")


class TurnsProfile(Report):
    """Rollouts with turns."""

    lag_mean: list[float | None]
    """Mean lag of the trained tokens of turn 1, 2, 3, ..., null where no token (optimizer steps)."""
    tokens: list[int]
    """Trained tokens of turn 1, 2, 3, ... (tokens)."""
    ess_modelled: list[float | None] | None = None
    """Modelled effective sample size of these tokens, null where there is none. Absent without a drift model."""
    trained: list[int]
    """Trained rollouts of 0, 1, 2, ... turns (rollouts)."""
    dropped: list[int]
    """Discarded, aborted and failed rollouts that had generated 0, 1, 2, ... turns by then (rollouts)."""
    places: PlacesOverTime
    """Where the open rollouts are, each with an environment."""

    _turns_equally_long = equally_long("lag_mean", "tokens", "ess_modelled")
    _rollouts_equally_long = equally_long("trained", "dropped")


class EnginesOverTime(Report):
    """Engines that are there, at up to 1024 points in time."""

    time_s: list[float]
    """The start, times at which engines had joined or left, the end (s)."""
    engines: list[int]
    """Engines from then on (count)."""

    _equally_long = equally_long("time_s", "engines")


class FigureData(Report):
    """Data of figures beyond a row per step: the content of profile.json."""

    lag_histogram: LagHistogram
    """Tokens by lag."""
    lag_by_position: LagByPosition
    """Lag by position in the answer."""
    generation_window: GenerationWindow
    """Generation over time."""
    timeline: Timeline
    """Engines and trainer over time."""
    turns: TurnsProfile | None = None
    """Turns. Absent where rollouts have one."""
    fleet: EnginesOverTime | None = None
    """Engines over time. Absent where all stay."""


# ---------------------------------------------------------------------------------------- collectors, in bounded space

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

    def rollout_left(self, time_s: float, rollout_id: int, engine: int, in_progress: int, num_tokens: int) -> None:
        """Note that a rollout left its engine with ``num_tokens`` tokens, and is in progress no more."""
        self.rollout_ended(time_s, rollout_id, num_tokens)
        self.turn_ended(time_s, engine, in_progress)

    def turn_ended(self, time_s: float, engine: int, in_progress: int) -> None:
        """Note that a rollout left its engine, and is still in progress."""
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
