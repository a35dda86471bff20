"""Data of figures beyond summary.json and steps.csv: the content of profile.json."""

from __future__ import annotations

from typing import Literal

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
    """Engines that have joined and are not leaving, at up to 1024 points in time."""

    time_s: list[float]
    """The start, times at which engines had joined or began to leave, the end (s)."""
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
