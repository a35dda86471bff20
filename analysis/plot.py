"""The figures of whatever a folder holds: runs side by side, one comparison, or one plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from analysis import report
from analysis.paper_mode import analytic_curves
from analysis.planning import save_plan
from analysis.read import read_comparison, read_run, read_runs
from pipelinerl.config.run_file import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.run_folder import COMPARISON_FILE, FIGURES_FOLDER, PLAN_FILE, RUN_FILE


def draw(folders: Sequence[Path], figures: Path | None = None) -> list[Path]:
    """Draw the figures of runs side by side, or of one comparison, or of one plan.

    Args:
        folders: What ``simulate``, ``train``, ``compare`` or ``plan`` has written.
        figures: Where they go; made if need be. None: ``figures`` in the first folder.

    Returns:
        The paths of the figures.

    Raises:
        ConfigError: If a folder holds nothing to draw or a broken file, or is one of several and holds a plan or a
            comparison.
        OSError: If the figures cannot be written.
    """
    figures = folders[0] / FIGURES_FOLDER if figures is None else figures
    for file, what in ((PLAN_FILE, "plan"), (COMPARISON_FILE, "comparison")):
        found = [folder for folder in folders if os.path.exists(folder / file)]
        if found and len(folders) > 1:
            raise ConfigError(f"DIR... must be runs or a single {what}, got {len(folders)} with {found[0]}")
        if found:
            if file == PLAN_FILE:
                return save_plan(PlanReport.read(found[0] / PLAN_FILE), figures)
            return _draw_comparison(found[0], figures)
    return report.save_figures(read_runs(folders), figures)


def _draw_comparison(folder: Path, figures: Path) -> list[Path]:
    comparison = read_comparison(folder)
    arms = next(arms for arms in comparison.scenarios.values() if arms)  # the first scenario stands for all
    runs = [read_run(folder / arm.folder, arm.name) for arm in arms]
    config = load_run(folder / arms[0].folder / RUN_FILE)
    curves = analytic_curves(config, largest_lag=max(run.number("lag.max") for run in runs))
    seeds = {}
    if all(run.has_ess for run in runs):  # they have learned
        seeds = {arm.name: [read_run(folder / one) for one in arm.folders] for arm in arms}
    return report.save_figures(runs, figures, comparison=comparison, curves=curves, seeds=seeds)
