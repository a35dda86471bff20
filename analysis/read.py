"""Read what runs leave in their folders, simulated and real runs alike.

Everything a figure needs is checked here, so that a broken file is one clear line and no figure fails half-way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.metrics import ESS_RAW, read_metrics
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.profile_report import FigureData
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import COMPARISON_FILE, METRICS_FILE, PROFILE_FILE, SUMMARY_FILE
from pipelinerl.records.steps import STEPS_FILE
from pipelinerl.util.arrays import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One finished or interrupted run with at least one optimizer step."""

    name: str
    """Its name in figures."""
    report: RunReport
    """``summary.json``."""
    steps: np.recarray[Any, Any]
    """``steps.csv``: a record per optimizer step."""
    figure_data: FigureData
    """``profile.json``."""
    metrics: Mapping[str, FloatArray]
    """``metrics.jsonl``: a column per name, a row per logged optimizer step; none for a simulated run."""

    @property
    def method(self) -> str:
        """The kind of its scheduler."""
        return self.report.scheduler

    @property
    def has_ess(self) -> bool:
        """Whether its effective sample size is known."""
        return ESS_RAW in self.metrics


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """Read a run folder.

    Args:
        folder: Written by ``simulate`` or ``train``.
        name: Name of the run in figures. None: the name of the folder.

    Returns:
        The run. Without ``metrics.jsonl`` it is read as a simulated one.

    Raises:
        ConfigError: If a file is missing, broken, or without an optimizer step; one line that names it.
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
        name=name if name is not None else folder.resolve().name,
        report=report,
        steps=steps,
        figure_data=figure_data,
        metrics=read_metrics(folder / METRICS_FILE, steps.step),
    )


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read run folders and name them by as much of the end of their paths as tells them apart.

    Args:
        folders: Written by ``simulate`` or ``train``.

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


def read_comparison(folder: str | Path) -> ComparisonReport:
    """Read the report that ``compare`` wrote.

    Args:
        folder: Folder of the comparison.

    Returns:
        The comparison: ``read_run(folder / arm.folder, arm.name)`` reads the run of an arm.

    Raises:
        ConfigError: If the file is missing or broken, or no run has ended; one line that names it.
    """
    path = Path(folder) / COMPARISON_FILE
    comparison = ComparisonReport.read(path)
    if not comparison.arms:
        raise ConfigError(f"{path} has no arm yet")
    return comparison
