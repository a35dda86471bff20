"""Read what runs leave in their folders into frozen values, simulated and real runs alike.

Everything a figure needs is checked here, so that a broken file is one clear line and no figure fails half-way.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.json_file import FloatArray, JsonTable, lookup, read_text
from analysis.metrics import ESS_RAW, read_metrics
from pipelinerl.errors import ConfigError

SECONDS = ("generating", "training", "publishing", "waiting_for_data")
"""What the trainer's wall time is split into, in the order of a step."""

_SUMMARY_NUMBERS = (
    "duration_s",
    "samples_trained",
    "tokens_per_s",
    "lag.max",
    "utilisation.generation",
    "utilisation.training",
    *(f"seconds.{what}" for what in SECONDS),
)
_STEP_COLUMNS = ("step", "time_s", "samples", "lag_mean", "lag_max")


@dataclass(frozen=True, slots=True, eq=False)
class LagByPosition:
    """Mean lag of the trained tokens against their position in the answer."""

    width_tokens: float
    """Width of a bin (tokens)."""
    lag_mean: FloatArray
    """Mean lag of a bin (optimizer steps), nan where it holds no token."""
    tokens: FloatArray
    """Tokens in a bin (count)."""


@dataclass(frozen=True, slots=True, eq=False)
class LagHistogram:
    """Trained tokens with a lag of 0, 1, 2, ... optimizer steps (counts), for the lag and each of its two parts."""

    total: FloatArray
    """Lag: from sampling to training."""
    in_flight: FloatArray
    """Its part until the rollout finished."""
    in_queue: FloatArray
    """Its part from then on."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationWindow:
    """Generation over all engines in time bins: one generation phase, or the first rollouts of a pipeline."""

    start_s: float
    """Start of the first bin (seconds)."""
    width_s: float
    """Width of a bin (seconds)."""
    in_progress: FloatArray
    """Mean sequences in progress (count)."""
    tokens_per_s: FloatArray
    """Generated tokens per second."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineTimeline:
    """One engine over time."""

    engine: int
    """Its number."""
    time_s: FloatArray
    """When the number of sequences in progress changed (seconds)."""
    in_progress: FloatArray
    """The number from that time on (count)."""
    paused_s: FloatArray
    """Start and end of each pause, shape [pauses, 2] (seconds)."""


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The first part of a run, event by event."""

    until_s: float
    """Where it ends (seconds)."""
    training_s: FloatArray
    """Start and end of each optimizer step, shape [steps, 2] (seconds)."""
    publishing_s: FloatArray
    """Start and end of each publication, shape [publications, 2] (seconds)."""
    engines: tuple[EngineTimeline, ...]
    """A few of the engines."""
    updates: tuple[tuple[int, float], ...]
    """Version and time of publication (seconds) of every weight update."""


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What figures need beyond the table of steps."""

    lag_by_position: LagByPosition
    lag_histogram: LagHistogram
    generation_window: GenerationWindow
    timeline: Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One finished or interrupted run with at least one optimizer step."""

    name: str
    """What figures call it."""
    summary: Mapping[str, Any]
    """``summary.json``."""
    steps: Mapping[str, FloatArray]
    """``steps.csv``: a column per name, a row per optimizer step, nan where a cell is blank."""
    profile: Profile
    """``profile.json``."""
    metrics: Mapping[str, FloatArray]
    """``metrics.jsonl``: a column per name, a row per logged optimizer step; none for a simulated run."""

    @property
    def method(self) -> str:
        """The kind of its scheduler."""
        return str(self.summary["scheduler"])

    @property
    def has_ess(self) -> bool:
        """Whether its effective sample size is known."""
        return ESS_RAW in self.metrics

    def number(self, key: str) -> float:
        """Return a number of the summary by its dotted key."""
        return float(lookup(self.summary, key))


@dataclass(frozen=True, slots=True)
class Arm:
    """One scheduler in one scenario of a comparison."""

    name: str
    method: str
    """The kind of its scheduler."""
    max_lag: float
    """Largest lag of any trained token (optimizer steps)."""
    folder: str
    """Its run folder, relative to the comparison's."""
    speedup: float | None
    """Its trained tokens per second over those of the baseline arm (no unit); None: that one failed."""
    folders: tuple[str, ...]
    """The run folders of all its seeds, ``folder`` first."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same workload under several schedulers, in several scenarios."""

    baseline: str
    """Name of the arm that speed-ups refer to."""
    scenarios: Mapping[str, tuple[Arm, ...]]
    """The arms of each scenario."""


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Largest lag and throughput of one run."""

    method: str
    """The kind of its scheduler."""
    max_lag: float
    """Largest lag of any trained token (optimizer steps)."""
    rate: float
    """Trained tokens per second or flash."""


@dataclass(frozen=True, slots=True, eq=False)
class RateCurves:
    """Throughput of both methods in the analytic model (paper, appendix A), at the same bounds on lag."""

    max_lag: FloatArray
    """Bounds g (optimizer steps)."""
    pipeline: FloatArray
    """Best rate of PipelineRL (tokens/flash), shape as ``max_lag``."""
    conventional: FloatArray
    """Rate of conventional RL with G = g + 1 (tokens/flash), shape as ``max_lag``."""


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """Read a run folder.

    Args:
        folder: What ``simulate`` or ``train`` wrote.
        name: What figures call the run. None: the name of the folder.

    Returns:
        The run, everything that figures need checked.

    Raises:
        ConfigError: If a file is missing, broken, or without an optimizer step; one line that names it. Without
            ``metrics.jsonl`` the run is read as a simulated one.
    """
    folder = Path(folder)
    summary = JsonTable.read(folder / "summary.json")
    summary.text("scheduler")
    for key in _SUMMARY_NUMBERS:
        summary.number(key)
    steps = _read_steps(folder / "steps.csv")
    return Run(
        name=name if name is not None else folder.resolve().name,
        summary=summary.data,
        steps=steps,
        profile=_read_profile(folder / "profile.json"),
        metrics=read_metrics(folder / "metrics.jsonl", steps["step"]),
    )


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read run folders and name them by as much of the end of their paths as tells them apart.

    Args:
        folders: What ``simulate`` or ``train`` wrote.

    Returns:
        The runs in the order given.

    Raises:
        ConfigError: As ``read_run``, and if a folder is given twice.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"run folders must be different, got {', '.join(str(folder) for folder in folders)}")
    names, parts = [path.name for path in paths], 1
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(path.parts[-parts:]) for path in paths]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_comparison(folder: str | Path) -> Comparison:
    """Read the ``comparison.json`` that ``compare`` wrote.

    Args:
        folder: Where it lies.

    Returns:
        The comparison, without its runs: ``read_run(folder / arm.folder, arm.name)`` reads one.

    Raises:
        ConfigError: If the file is missing or broken; one line that names it.
    """
    data = JsonTable.read(Path(folder) / "comparison.json")
    scenarios = {
        scenario.text("name"): tuple(
            Arm(
                name=arm.text("name"),
                method=arm.text("summary.scheduler"),
                max_lag=arm.number("summary.lag.max"),
                folder=arm.text("folder"),
                speedup=None if arm.value("speedup") is None else arm.number("speedup"),
                folders=_folders(arm),
            )
            for arm in scenario.tables("arms")
        )
        for scenario in data.tables("scenarios")
    }
    if not any(scenarios.values()):
        raise ConfigError(f"{data.path} has no arm yet")
    return Comparison(baseline=data.text("baseline"), scenarios=scenarios)


def _folders(arm: JsonTable) -> tuple[str, ...]:
    """Return the run folders of an arm: one, or one per seed."""
    if "repeats" not in arm.data:
        return (arm.text("folder"),)
    return tuple(one.text("folder") for one in arm.tables("repeats"))


def rate_points(runs: Sequence[Run]) -> tuple[list[RatePoint], str]:
    """Return what ``throughput_against_max_lag`` shows of runs: in tokens/flash if all know it, else in tokens/s.

    Args:
        runs: Any runs.

    Returns:
        A point per run, and the unit of their rates.
    """
    flashes = all(run.summary.get("tokens_per_flash") is not None for run in runs)
    key, unit = ("tokens_per_flash", "tokens/flash") if flashes else ("tokens_per_s", "tokens/s")
    return [RatePoint(run.method, run.number("lag.max"), run.number(key)) for run in runs], unit


def _read_steps(path: Path) -> dict[str, FloatArray]:
    """Return the columns of ``steps.csv``."""
    rows = list(csv.reader(read_text(path).splitlines()))
    header, body = (rows[0], rows[1:]) if rows else ([], [])
    missing = [column for column in _STEP_COLUMNS if column not in header]
    if missing:
        raise ConfigError(f"{path} lacks the columns {', '.join(missing)}")
    if not body:
        raise ConfigError(f"{path} has no optimizer step yet")
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise ConfigError(f"{path}, line {line}: must have {len(header)} values, got {len(row)}")
    try:
        table = np.array([[float(cell or "nan") for cell in row] for row in body])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    steps = {column: table[:, index] for index, column in enumerate(header)}
    for column in _STEP_COLUMNS:
        if not np.isfinite(steps[column]).all():
            raise ConfigError(f"{path}: {column} must be a number in every row")
    return steps


def _read_profile(path: Path) -> Profile:
    """Return ``profile.json``."""
    data = JsonTable.read(path)
    profile = Profile(
        lag_by_position=LagByPosition(
            width_tokens=data.number("lag_by_position.width_tokens"),
            lag_mean=data.array("lag_by_position.lag_mean", nulls=True),
            tokens=data.array("lag_by_position.tokens"),
        ),
        lag_histogram=LagHistogram(
            total=data.array("lag_histogram.total"),
            in_flight=data.array("lag_histogram.in_flight"),
            in_queue=data.array("lag_histogram.in_queue"),
        ),
        generation_window=GenerationWindow(
            start_s=data.number("generation_window.start_s"),
            width_s=data.number("generation_window.width_s"),
            in_progress=data.array("generation_window.in_progress"),
            tokens_per_s=data.array("generation_window.tokens_per_s"),
        ),
        timeline=Timeline(
            until_s=data.number("timeline.until_s"),
            training_s=data.spans("timeline.trainer", "training"),
            publishing_s=data.spans("timeline.trainer", "publishing"),
            engines=tuple(
                EngineTimeline(
                    engine=int(one.number("engine")),
                    time_s=one.array("time_s"),
                    in_progress=one.array("in_progress"),
                    paused_s=one.spans("paused"),
                )
                for one in data.tables("timeline.engines")
            ),
            updates=tuple(
                (int(one.number("version")), one.number("published_s")) for one in data.tables("timeline.updates")
            ),
        ),
    )
    _check_lengths(path, profile)
    return profile


def _check_lengths(path: Path, profile: Profile) -> None:
    """Complain about arrays that belong together and differ in length, and about a profile of no token."""
    position, window = profile.lag_by_position, profile.generation_window
    pairs = [
        ("lag_by_position.tokens", position.tokens, position.lag_mean),
        ("generation_window.tokens_per_s", window.tokens_per_s, window.in_progress),
        *(("timeline.engines.in_progress", one.in_progress, one.time_s) for one in profile.timeline.engines),
    ]
    for key, one, other in pairs:
        if len(one) != len(other):
            raise ConfigError(f"{path}: {key} must have {len(other)} values, got {len(one)}")
    histogram = profile.lag_histogram
    for key, tokens in (
        ("total", histogram.total),
        ("in_flight", histogram.in_flight),
        ("in_queue", histogram.in_queue),
    ):
        if not tokens.sum() > 0:
            raise ConfigError(f"{path}: lag_histogram.{key} must hold a token")
