"""Functions of the other packages that ``import pipelinerl`` offers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelinerl.config.question import OPTIONS, ask
from pipelinerl.config.run import RunConfig, load_run
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.recording import replay_run
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.steps import StepRow
from pipelinerl.records.trace import ReplayResult, Trace
from pipelinerl.util.strict_model import Report

Run = RunConfig | str | Path


def simulate(
    run: Run, *, out: str | Path | None = None, trace: bool = False, on_step: Callable[[StepRow], None] | None = None
) -> RunReport:
    """Simulate one run; the same configuration gives the same numbers and the same bytes.

    Args:
        run: What to simulate.
        out: New folder to keep the run in. None: nothing is written.
        trace: Whether the folder gets every event and command, for ``replay``.
        on_step: Called with the row of each optimizer step as soon as it is done.

    Raises:
        ConfigError: If the run file, or a file that it names, is wrong, or ``out`` holds a run; nothing is written.
        RunFailedError: If the run could not reach its end; the folder holds what happened until then.
    """
    from sim.run import simulate as simulate_run

    return simulate_run(_config(run), out=_path(out), trace=trace, on_step=on_step)


def compare(run: Run, *, out: str | Path | None = None, workers: int | None = None) -> ComparisonReport:
    """Simulate the same workload under several schedules and circumstances: the ``[compare]`` table of the run file.

    A run that failed is among the comparison's failures; the others are there.

    Args:
        run: What to compare.
        out: New folder to keep comparison and runs in. None: nothing is written.
        workers: Processes (count). None: one per core.

    Raises:
        ConfigError: If the run file, or a file that it names, is wrong, or ``out`` is not empty; nothing is written.
    """
    from sim.compare import compare as compare_runs

    return compare_runs(_config(run), out=_path(out), workers=workers)


def plan(
    run: Run | None = None, *, out: str | Path | None = None, workers: int | None = None, **question: str | float
) -> PlanReport:
    """Recommend split, batch sizes, engines and schedule for a cluster: the ``[plan]`` table of the run file.

    Args:
        run: The question; a run file may lack keys that the plan finds. None: ``question`` has it, and missing keys
            are assumed.
        out: New folder for the plan and the recommended run file. None: nothing is written.
        workers: Processes (count). None: one per core.
        question: Options of the command, one value each: ``model``, ``gpu``, ``accelerators``, ``sync``,
            ``train_batch_size``, ``group_size``, ``mean_length``, ``max_length``, ``max_lag``, ``max_mean_lag``,
            ``price``, ``spot_price``, ``spot_mtbf``, ``mtbf``, ``lend``, ``speculate``.

    Raises:
        ConfigError: If the question is wrong, nothing is feasible, or ``out`` is not empty; nothing is written.
    """
    from sim.planning.answer import plan as search_plan
    from sim.planning.answer import plan_cases
    from sim.planning.simulate import HowToPlan

    how = HowToPlan(out=_path(out), workers=workers)
    if unknown := [name for name in question if name not in OPTIONS]:
        raise ConfigError(f"plan takes {', '.join(OPTIONS)}, got {unknown[0]}")
    if isinstance(run, RunConfig):
        if question:
            raise ConfigError(f"plan takes a RunConfig or a question, got both: {', '.join(question)}")
        return search_plan(run, how)
    asked = ask(question, None if run is None else Path(run))
    if len(asked.cases) > 1:
        raise ConfigError(f"plan takes one value of each option here, got {len(asked.cases)} cases")
    (planned,) = plan_cases(asked, how)
    assert planned.report is not None  # else an error has been raised
    if planned.failure is not None:
        raise RunFailedError(planned.failure)
    return planned.report


def replay(folder: str | Path) -> ReplayResult:
    """Feed the recorded events of a run, or of a trace, to a fresh scheduler; find the first difference.

    Numbers in summary.json and steps.csv beside the trace are compared, too.

    Raises:
        TraceError: If there is no trace, or it is broken.
        ConfigError: If one of the other files is.
    """
    path = Path(folder)
    return replay_run(Trace(path / TRACE_FILE if os.path.isdir(path) else path))


def plot(folders: str | Path | Sequence[str | Path], *, out: str | Path | None = None) -> list[Path]:
    """Draw the figures of runs side by side, or of one comparison, or of one plan; return their paths.

    Args:
        folders: Folders of ``simulate``, ``train``, ``compare`` or ``plan``.
        out: Folder for the figures. None: ``figures`` in the first folder.

    Raises:
        ConfigError: If a folder holds nothing to draw, or a broken file.
        OSError: If the figures cannot be written.
    """
    from analysis.plot import draw

    several = [folders] if isinstance(folders, str | Path) else folders
    return draw([Path(one) for one in several], _path(out))


def _html(report: object) -> str | None:
    from pipelinerl.pages.plans import plan_page
    from pipelinerl.pages.runs import comparison_page, run_page

    match report:
        case RunReport():
            page = run_page({report.scheduler: report})
        case ComparisonReport():
            page = comparison_page(report)
        case PlanReport():
            page = plan_page(report)
        case _:
            return None
    from analysis.notebook import html_of

    return html_of(page, report)


Report.shown_by = _html


def _config(run: Run) -> RunConfig:
    return run if isinstance(run, RunConfig) else load_run(run)


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)
