"""Simulate the same workload under several schedulers and circumstances, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.config import CompareConfig, RunConfig, Variant
from pipelinerl.errors import ConfigError, PipelineRLError
from pipelinerl.runfile import parse_run, with_overrides
from pipelinerl.runfolder import COMPARISON_FILE, check_vacant, write_json
from sim.run import simulate
from sim.world import World


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a comparison."""

    scenario: str
    arm: str
    config: RunConfig
    folder: str
    """Relative to the folder of the comparison."""


def default_comparison(config: RunConfig) -> CompareConfig:
    """Return what is compared when the run file does not say: it as it is, and the paper's conventional G."""
    own = f"{config.scheduler.kind} (as given)"
    arms = [Variant(name=own)]
    for steps in (8, 16, 32):
        overrides = ["scheduler.kind=conventional", f"scheduler.optimizer_steps_per_rl_step={steps}"]
        arms.append(Variant(name=f"conventional G={steps}", set=overrides))
    return CompareConfig(arms=arms, baseline="conventional G=32")


def plan_cells(config: RunConfig) -> list[Cell]:
    """Return every arm in every scenario; all share the seed, hence prompts, answers and delays.

    Args:
        config: The base; its ``compare`` table says what to vary.

    Returns:
        Cells in the order of the table.

    Raises:
        ConfigError: If an override is wrong; the line names scenario and arm.
    """
    comparison = config.compare or default_comparison(config)
    base = config.model_dump(mode="json", exclude_none=True, exclude={"compare"})
    cells = []
    for scenario in comparison.scenarios:
        for arm in comparison.arms:
            data = with_overrides(base, [*scenario.set, *arm.set])
            cell_config = parse_run(data, name=f"scenario {scenario.name!r}, arm {arm.name!r}")
            folder = f"{_file_name(scenario.name)}/{_file_name(arm.name)}"
            cells.append(Cell(scenario.name, arm.name, cell_config, folder))
    folders = [cell.folder for cell in cells]
    if len(set(folders)) < len(folders):
        raise ConfigError(f"compare: names must differ in letters, digits or = + - ., got {sorted(folders)}")
    return cells


def compare(
    config: RunConfig,
    *,
    out: Path | None = None,
    workers: int | None = None,
    on_done: Callable[[Cell, str | None], None] | None = None,
) -> dict[str, Any]:
    """Simulate all cells and put them side by side.

    On Ctrl-C the cells that have ended are kept and compared; the others are left out.

    Args:
        config: The base; its ``compare`` table says what to vary.
        out: Folder to keep the runs and comparison.json in.
        workers: Processes (count). None: one per core.
        on_done: Called after each cell, with what went wrong with it, if anything.

    Returns:
        The comparison: ``baseline``, ``scenarios`` with their arms and speed-ups, ``failures``, ``complete``.

    Raises:
        ConfigError: If the input is wrong; nothing is written.
    """
    comparison = config.compare or default_comparison(config)
    cells = plan_cells(config)
    if out is not None:
        check_vacant(out)
    for cell in cells:
        World(cell.config)  # every file it names can be used
    summaries: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    num_workers = min(workers or os.cpu_count() or 1, len(cells))
    complete = False
    with context.Pool(num_workers, initializer=_ignore_interrupts) as pool:
        jobs = [(index, cell, out) for index, cell in enumerate(cells)]
        try:
            for index, summary, failure in pool.imap_unordered(_run_cell, jobs):
                if failure is None:
                    summaries[cells[index].folder] = summary
                else:
                    failures.append(f"{cells[index].scenario}, {cells[index].arm}: {failure}")
                if on_done is not None:
                    on_done(cells[index], failure)
            complete = not failures
        except KeyboardInterrupt:
            pool.terminate()
    result = {
        "baseline": comparison.baseline,
        "scenarios": _side_by_side(cells, summaries, comparison.baseline),
        "failures": sorted(failures),
        "complete": complete,
    }
    if out is not None and summaries:
        write_json(out / COMPARISON_FILE, result)
    return result


def _run_cell(job: tuple[int, Cell, Path | None]) -> tuple[int, dict[str, Any], str | None]:
    index, cell, out = job
    try:
        return index, simulate(cell.config, out=None if out is None else out / cell.folder), None
    except PipelineRLError as error:
        return index, {}, str(error)


def _side_by_side(cells: list[Cell], summaries: dict[str, dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Return the arms of each scenario with their speed-up in tokens/s over the baseline of the scenario."""
    scenarios: list[dict[str, Any]] = []
    for name in dict.fromkeys(cell.scenario for cell in cells):
        done = [cell for cell in cells if cell.scenario == name and cell.folder in summaries]
        rates = {cell.arm: summaries[cell.folder]["tokens_per_s"] for cell in done}
        arms = [
            {
                "name": cell.arm,
                "folder": cell.folder,
                "speedup": rates[cell.arm] / rates[baseline] if rates.get(baseline) else None,
                "summary": summaries[cell.folder],
            }
            for cell in done
        ]
        scenarios.append({"name": name, "arms": arms})
    return scenarios


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=+-]+", "_", name).strip("_.") or "_"


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
