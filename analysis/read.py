"""Read run folders. Files are checked here: a broken one ends with a line of error before any figure is drawn."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.profile_report import FigureData
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import COMPARISON_FILE, METRICS_FILE, PROFILE_FILE, SUMMARY_FILE
from pipelinerl.records.steps import STEPS_FILE
from pipelinerl.util.arrays import FloatArray, RealArray
from pipelinerl.util.explain import printable, shown
from pipelinerl.util.read import parse_json, read_lines

REWARD = "reward/mean"
"""Mean reward of the rollouts of a step; in every line."""
ESS_RAW, ESS_TRUNCATED = "ess/token_raw", "ess/token_truncated"
"""ESS of a step's raw token weights, and of the weights in the loss (share of the tokens)."""

MOST_METRICS = 40_000_000
"""Names of metrics times steps of a run (count), 8 bytes each."""

_ESS_AT_LAG = re.compile(r"ess/lag_([0-9]+)")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One finished or interrupted run with at least one optimizer step."""

    name: str
    report: RunReport
    steps: np.recarray[Any, Any]
    figure_data: FigureData
    metrics: Mapping[str, FloatArray]
    """A row per logged optimizer step; none for a simulated run."""

    @property
    def method(self) -> str:
        """Kind of its scheduler."""
        return self.report.scheduler

    @property
    def has_ess(self) -> bool:
        """Whether its effective sample size is known."""
        return ESS_RAW in self.metrics

    def metrics_by_step(self) -> list[dict[str, float]]:
        """Return the metrics that each logged optimizer step has."""
        columns = self.metrics
        return [
            {name: float(one[row]) for name, one in columns.items() if not math.isnan(one[row])}
            for row in range(len(next(iter(columns.values()), ())))
        ]


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """Read a run folder; figures show its name unless ``name`` is given.

    ConfigError if a file is missing, broken, or without an optimizer step; one line that names it.
    """
    folder = Path(folder)
    report = RunReport.read(folder / SUMMARY_FILE)
    steps = report.steps
    if not len(steps):
        raise ConfigError(f"{folder / STEPS_FILE} has no optimizer step yet")
    figure_data = FigureData.read(folder / PROFILE_FILE)
    for key, tokens in figure_data.lag_histogram:
        if not sum(tokens):
            raise ConfigError(f"{folder / PROFILE_FILE}: lag_histogram.{key} must hold a token")
    return Run(
        name=printable(name if name is not None else folder.resolve().name),
        report=report,
        steps=steps,
        figure_data=figure_data,
        metrics=read_metrics(folder / METRICS_FILE, steps.step),
    )


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read different run folders and name them by the shortest distinct ends of their paths; errors as ``read_run``."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"run folders must be different, got {', '.join(str(folder) for folder in folders)}")
    names, parts = [path.name for path in paths], 1
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(path.parts[-parts:]) for path in paths]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_comparison(folder: str | Path) -> ComparisonReport:
    """Read the report of ``compare``; ConfigError, one line, if it is missing or broken, or no run has ended."""
    path = Path(folder) / COMPARISON_FILE
    comparison = ComparisonReport.read(path)
    if not comparison.arms:
        raise ConfigError(f"{path} has no arm yet")
    return comparison


# metrics.jsonl: a line per optimizer step of a run that learns


def read_metrics(path: Path, step: RealArray) -> dict[str, FloatArray]:
    """Read metrics: a column each, a row per line of the file, nan where a line lacks the metric; none without a file.

    Line n belongs to ``step[n]``, shape [steps]; there may be fewer lines. ConfigError at the first broken line, with
    its number.
    """
    if not path.exists():
        return {}
    columns: dict[str, FloatArray] = {}
    for number, text in read_lines(path, "metrics"):
        place = f"{path}, line {number}"
        line = parse_json(text, place)
        if not isinstance(line, dict):
            raise ConfigError(f"{place}: must hold a table, got {type(line).__name__}")
        if number > len(step):
            raise ConfigError(f"{place}: steps.csv has {len(step)} optimizer steps only")
        if line.get("step") != step[number - 1]:
            raise ConfigError(f"{place}: step must be {step[number - 1]:g}, got {shown(line.get('step'))}")
        numbers = _numbers(place, line)
        if len(columns.keys() | numbers) * len(step) > MOST_METRICS:
            raise ConfigError(f"{place}: there must be at most {MOST_METRICS // len(step):,} metrics")
        for name, value in numbers.items():
            if name not in columns:
                columns[name] = np.full(len(step), math.nan)
            columns[name][number - 1] = value
    num_lines = number if columns else 0
    return {name: column[:num_lines] for name, column in columns.items()}


def ess_by_lag(metrics: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the lags that occurred (optimizer steps), rising, and the mean ESS at each (share of the tokens)."""
    columns = {int(match[1]): column for name, column in metrics.items() if (match := _ESS_AT_LAG.fullmatch(name))}
    lags = sorted(columns)
    return np.array(lags, dtype=np.float64), np.array([np.nanmean(columns[lag]) for lag in lags])


def _numbers(place: str, line: dict[str, Any]) -> dict[str, float]:
    """Return a line of numbers that fit a float; rewards and ESS, which figures show, are finite."""
    if REWARD not in line:
        raise ConfigError(f"{place}: {REWARD} is missing")
    for name, value in line.items():
        drawn = name == REWARD or name.startswith("ess/")
        in_range = type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
        if not in_range or (drawn and not math.isfinite(value)):
            raise ConfigError(f"{place}: {name} must be a number, got {shown(value)}")
    return line
