"""Write the figures of folders: of runs side by side, of a comparison, a plan, a report of environments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.figure import Figure

from analysis import figures
from analysis.chart import PAGE_IN, PALE, drawn, save_figure
from analysis.read import Run, read_comparison, read_run, read_runs
from pipelinerl.config.run import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport, EnvironmentsReport
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.run_folder import COMPARISON_FILE, ENVIRONMENTS_FILE, FIGURES_FOLDER, PLAN_FILE, RUN_FILE
from pipelinerl.records.validation_report import ValidationReport

VALIDATION_TICKS = (0.5, 0.7, 1.0, 1.3, 2.0, 3.0)


def draw(folders: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Draw the figures of runs side by side, or of one comparison, plan or report of environments; return their paths.

    They go to ``out``, made if need be. None: ``figures`` in the first folder.

    Raises:
        ConfigError: If a folder holds nothing to draw or a broken file, or runs are mixed with anything else.
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
    charts = figures.plan_charts(PlanReport.read(folder / PLAN_FILE))
    return _save({name: drawn(chart, height=2.4) for name, chart in charts.items()}, out)


def _draw_environments(folder: Path, out: Path) -> list[Path]:
    report = EnvironmentsReport.read(folder / ENVIRONMENTS_FILE)
    return _save({"rollouts_against_environments": environments_figure(report)}, out)


def environments_figure(report: EnvironmentsReport) -> Figure:
    """Draw throughput against the number of environments, and with prices the cost below it."""
    charts = figures.environments_charts(report)
    height, title = 0.8 + 1.2 * len(charts), "What more environments give"
    return drawn(charts, height=height, title=title, rows=len(charts), sharex=True)


def save_validation(report: ValidationReport, out: Path) -> list[Path]:
    """Draw predicted over measured, if a row has a relative error."""
    chart = figures.validation_chart(report)
    if chart is None:
        return []
    figure = drawn(chart, width=PAGE_IN, height=1.0 + 0.14 * len(chart.y.rows))
    (axes,) = figure.axes
    axes.axvspan(0.7, 1.3, color=PALE, linewidth=0)
    axes.set_xticks(VALIDATION_TICKS, [f"{tick:g}" for tick in VALIDATION_TICKS])
    axes.minorticks_off()
    return _save({"validation": figure}, out)


def _save(made: Mapping[str, Figure], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    return [path for name, figure in made.items() for path in save_figure(figure, out, name)]


def _draw_comparison(folder: Path, out: Path) -> list[Path]:
    comparison = read_comparison(folder)
    arms = next(scenario.arms for scenario in comparison.scenarios if scenario.arms)  # the first one stands for all
    runs = [read_run(folder / arm.folder, arm.name) for arm in arms]
    config = load_run(folder / arms[0].folder / RUN_FILE)
    curves = figures.analytic_curves(config, largest_lag=max(run.report.lag.max for run in runs))
    seeds = {}
    if all(run.has_ess for run in runs):  # they have learned
        seeds = {arm.name: [read_run(folder / one) for one in arm.folders] for arm in arms}
    return save_figures(runs, out, comparison=comparison, curves=curves, seeds=seeds)


def save_figures(
    runs: Sequence[Run],
    folder: Path,
    *,
    comparison: ComparisonReport | None = None,
    curves: figures.RateCurves | None = None,
    seeds: Mapping[str, Sequence[Run]] = MappingProxyType({}),
) -> list[Path]:
    """Write every figure that the data allow; return the files, two per figure.

    ``runs`` have different names; ``folder`` is made if need be. ``comparison`` adds the speed-ups by scenario, where
    its baseline has ended in several; ``curves`` the analytic model to throughput against lag; ``seeds``, the runs of
    every arm, learning curves with bands, where runs have learned.

    Raises:
        ConfigError: If there are ``curves`` and a run does not know its tokens/flash.
        OSError: If a file cannot be written.
    """
    made = _run_figures(runs, _timeline_runs(runs, comparison))
    if len(runs) > 1 or curves is not None:
        made["throughput_against_max_lag"] = drawn(figures.throughput_against_max_lag(runs, curves), height=2.0)
    scenarios = comparison.scenarios if comparison is not None else []
    if comparison is not None and sum(any(arm.speedup is not None for arm in one.arms) for one in scenarios) > 1:
        made["speedup_by_scenario"] = drawn(figures.speedup_by_scenario(comparison), height=0.5 + 0.2 * len(scenarios))
    if seeds and all(run.has_ess for runs in seeds.values() for run in runs):
        made["learning"] = figures.learning(seeds)
        made["lag_and_ess"] = figures.lag_and_ess(seeds)
    return _save(made, folder)


def _timeline_runs(runs: Sequence[Run], comparison: ComparisonReport | None) -> Sequence[Run]:
    """Return the runs that get a timeline: the baseline and the fastest of a comparison, else all."""
    if comparison is None:
        return runs
    fastest = max(runs, key=lambda run: run.report.tokens_per_s)
    return [run for run in runs if run is fastest or run.name == comparison.baseline]


def _run_figures(runs: Sequence[Run], with_timeline: Sequence[Run]) -> dict[str, Figure]:
    made = {
        "lag_by_position": drawn(figures.lag_by_position(runs)),
        "lag_by_step": figures.lag_by_step(runs),
        "lag_histogram": figures.lag_histogram(runs),
        "samples_against_time": drawn(figures.samples_against_time(runs)),
        "time_split": figures.time_split_figure(runs),
    }
    if any(len(run.figure_data.generation_window.in_progress) for run in runs):
        made["generation_phase"] = drawn(figures.generation_phase(runs), height=2.6, rows=2, sharex=True)
    if all(run.report.environments for run in runs):
        made["rollout_time"] = drawn(figures.rollout_time(runs), height=0.9 + 0.3 * len(runs))
    if charts := figures.fleet_over_time(runs):
        made["fleet_over_time"] = drawn(charts, height=2.6, title="Engines and speed over time", rows=2, sharex=True)
    if chart := figures.fleet_seconds(runs):
        made["fleet_seconds"] = drawn(chart, width=PAGE_IN, height=0.6 + 0.3 * len(chart.y.rows))
    if any(run.has_ess for run in runs):
        made["ess"] = figures.ess_figure(runs)
    if any(run.metrics for run in runs):
        made["reward"] = figures.reward_figure(runs)
    for run in runs:
        if run.figure_data.turns is not None:
            made[_own_name("turns", run, made)] = figures.turns(run)
        if run in with_timeline and run.figure_data.timeline.engines:
            made[_own_name("timeline", run, made)] = figures.timeline(run)
    return made


def _own_name(what: str, run: Run, made: Mapping[str, Figure]) -> str:
    name = f"{what}_" + re.sub(r"[^A-Za-z0-9.=+-]+", "_", run.name)
    while name in made:  # two names may differ only in characters that a file name leaves out
        name += "_"
    return name
