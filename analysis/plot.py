"""Write the figures of the content of a folder: runs side by side, one comparison, or one plan."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.figure import Figure

from analysis import bands, figures, learning, throughput
from analysis.environments import rollouts_against_environments
from analysis.planning import save_plan
from analysis.read import Run, read_comparison, read_run, read_runs
from analysis.style import save_figure
from analysis.throughput import RateCurves, analytic_curves, rate_points
from analysis.turns import rollout_time, turns
from pipelinerl.config.run_file import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.environments_report import EnvironmentsReport
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.run_folder import COMPARISON_FILE, ENVIRONMENTS_FILE, FIGURES_FOLDER, PLAN_FILE, RUN_FILE


def draw(folders: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Draw the figures of runs side by side, or of one comparison, or of one plan.

    Args:
        folders: Written by ``simulate``, ``train``, ``compare`` or ``plan``.
        out: Folder of the figures; made if need be. None: ``figures`` in the first folder.

    Returns:
        The paths of the figures.

    Raises:
        ConfigError: If a folder holds nothing to draw or a broken file, or is one of several and holds a plan or a
            comparison.
        OSError: If the figures cannot be written.
    """
    out = folders[0] / FIGURES_FOLDER if out is None else out
    kinds = (
        (PLAN_FILE, "plan", _draw_plan),
        (ENVIRONMENTS_FILE, "report of environments", _draw_environments),
        (COMPARISON_FILE, "comparison", _draw_comparison),
    )
    for file, kind, draw_one in kinds:
        found = [folder for folder in folders if os.path.exists(folder / file)]
        if found and len(folders) > 1:
            raise ConfigError(f"DIR... must be runs or a single {kind}, got {len(folders)} with {found[0]}")
        if found:
            return draw_one(found[0], out)
    return save_figures(read_runs(folders), out)


def _draw_plan(folder: Path, out: Path) -> list[Path]:
    return save_plan(PlanReport.read(folder / PLAN_FILE), out)


def _draw_environments(folder: Path, out: Path) -> list[Path]:
    report = EnvironmentsReport.read(folder / ENVIRONMENTS_FILE)
    out.mkdir(parents=True, exist_ok=True)
    return save_figure(rollouts_against_environments(report), out, "rollouts_against_environments")


def _draw_comparison(folder: Path, out: Path) -> list[Path]:
    comparison = read_comparison(folder)
    arms = next(scenario.arms for scenario in comparison.scenarios if scenario.arms)  # the first one stands for all
    runs = [read_run(folder / arm.folder, arm.name) for arm in arms]
    config = load_run(folder / arms[0].folder / RUN_FILE)
    curves = analytic_curves(config, largest_lag=max(run.report.lag.max for run in runs))
    seeds = {}
    if all(run.has_ess for run in runs):  # they have learned
        seeds = {arm.name: [read_run(folder / one) for one in arm.folders] for arm in arms}
    return save_figures(runs, out, comparison=comparison, curves=curves, seeds=seeds)


def save_figures(
    runs: Sequence[Run],
    folder: str | Path,
    *,
    comparison: ComparisonReport | None = None,
    curves: RateCurves | None = None,
    seeds: Mapping[str, Sequence[Run]] = MappingProxyType({}),
) -> list[Path]:
    """Write every figure that the data allow.

    Args:
        runs: Drawn side by side; their names must differ. May be empty if there is a comparison or there are curves.
        folder: Where to; made if it does not exist.
        comparison: Adds the speed-ups by scenario, where its baseline has ended in several.
        curves: Adds the analytic model to throughput against lag; the runs must then know their tokens/flash.
        seeds: The runs of every arm of a comparison, by arm. Adds learning curves with bands, where runs have learned.

    Returns:
        The files, two per figure.

    Raises:
        ConfigError: If there is nothing to draw, runs share a name, or ``curves`` and runs differ in unit.
        OSError: If a file cannot be written.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"runs must have different names to be told apart, got {', '.join(names)}")
    drawn = _run_figures(runs, _worth_a_timeline(runs, comparison)) if runs else {}
    if len(runs) > 1 or curves is not None:
        points, unit = rate_points(runs)
        drawn["throughput_against_max_lag"] = throughput.throughput_against_max_lag(points, curves, unit)
    scenarios = comparison.scenarios if comparison is not None else []
    if comparison is not None and sum(any(arm.speedup is not None for arm in one.arms) for one in scenarios) > 1:
        drawn["speedup_by_scenario"] = throughput.speedup_by_scenario(comparison)
    if seeds and all(run.has_ess for runs in seeds.values() for run in runs):
        drawn["learning"] = bands.learning(seeds)
        drawn["lag_and_ess"] = bands.lag_and_ess(seeds)
    if not drawn:
        raise ConfigError("figures need a run, a comparison or analytic curves, got none")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [path for name, figure in drawn.items() for path in save_figure(figure, folder, name)]


def _worth_a_timeline(runs: Sequence[Run], comparison: ComparisonReport | None) -> Sequence[Run]:
    """Return the runs that get a timeline: of a comparison the baseline and the fastest, else all."""
    if comparison is None:
        return runs
    fastest = max(runs, key=lambda run: run.report.tokens_per_s)
    return [run for run in runs if run is fastest or run.name == comparison.baseline]


def _run_figures(runs: Sequence[Run], with_timeline: Sequence[Run]) -> dict[str, Figure]:
    """Return the figures of the runs alone by file name; what a run did not record, it has no figure of."""
    drawn = {
        "lag_by_position": figures.lag_by_position(runs),
        "lag_by_step": figures.lag_by_step(runs),
        "lag_histogram": figures.lag_histogram(runs),
        "samples_against_time": figures.samples_against_time(runs),
        "time_split": figures.time_split(runs),
    }
    if any(len(run.figure_data.generation_window.in_progress) for run in runs):
        drawn["generation_phase"] = figures.generation_phase(runs)
    if all(run.report.environments for run in runs):
        drawn["rollout_time"] = rollout_time(runs)
    if any(run.has_ess for run in runs):
        drawn["ess"] = learning.ess(runs)
    if any(run.metrics for run in runs):
        drawn["reward"] = learning.reward(runs)
    for run in runs:
        if run.figure_data.turns is not None:
            drawn[_own_name("turns", run, drawn)] = turns(run)
        if run in with_timeline and run.figure_data.timeline.engines:
            drawn[_own_name("timeline", run, drawn)] = figures.timeline(run)
    return drawn


def _own_name(what: str, run: Run, drawn: Mapping[str, Figure]) -> str:
    """Return the file name of a figure of one run."""
    name = f"{what}_" + re.sub(r"[^A-Za-z0-9.=+-]+", "_", run.name)
    while name in drawn:  # two names may differ in nothing but what a file name leaves out
        name += "_"
    return name
