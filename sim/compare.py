"""Simulate the same workload under several schedulers and circumstances, in parallel processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipelinerl.config.run import CompareConfig, RunConfig, Variant, parse_run, with_overrides
from pipelinerl.errors import ConfigError, PipelineRLError, RunFailedError, RunInterruptedError
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.comparison_report import ArmReport, ComparisonReport, RepeatReport, ScenarioReport
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import COMPARISON_FILE, check_vacant, make_folder, write_json
from pipelinerl.util.arrays import grouped
from sim.cluster import SimulatedCluster
from sim.parallel import run_all
from sim.run import check_installed, simulate

NAME_LENGTH = 80
"""Longest name of the folder of an arm or scenario (letters)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a comparison."""

    scenario: str
    arm: str
    config: RunConfig
    folder: str
    """Relative to the folder of the comparison."""
    seed: int | None = None
    """One of ``compare.seeds``; None without them."""

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return _cell_name(self.scenario, self.arm) + ("" if self.seed is None else f", seed {self.seed}")


CellResult = tuple[Cell, RunReport | None, str | None]
"""A cell, and its report or its error."""


def default_comparison(config: RunConfig) -> CompareConfig:
    """Return the comparison of a run file without one: the file as it is, and conventional RL at the paper's G."""
    own = f"{config.scheduler.kind} (as given)"
    arms = [Variant(name=own)]
    for steps in (8, 16, 32):
        overrides = ["scheduler.kind=conventional", f"scheduler.optimizer_steps_per_rl_step={steps}"]
        if config.scheduler.max_lag is not None:
            overrides.append(f"scheduler.max_lag={steps - 1}")  # the least that conventional RL with this G can keep
        arms.append(Variant(name=f"conventional G={steps}", set=overrides))
    return CompareConfig(arms=arms, baseline="conventional G=32")


def plan_cells(config: RunConfig) -> list[Cell]:
    """Return every arm in every scenario, with each seed, in the order of the table ``compare``.

    All share the seeds, hence prompts, answers and delays. Raises ConfigError if an override is wrong; the line names
    scenario and arm.
    """
    comparison = config.compare or default_comparison(config)
    base = config.model_dump(mode="json", exclude_none=True, exclude={"compare"})
    cells = []
    for scenario in comparison.scenarios:
        for arm in comparison.arms:
            name = _cell_name(scenario.name, arm.name)
            with _naming(name):
                data = with_overrides(base, [*scenario.set, *arm.set])
            folder = f"{_file_name(scenario.name)}/{_file_name(arm.name)}"
            if not comparison.seeds:
                cells.append(Cell(scenario.name, arm.name, parse_run(data, name=name), folder))
            for seed in comparison.seeds:
                cell_config = parse_run({**data, "seed": seed}, name=name)
                cells.append(Cell(scenario.name, arm.name, cell_config, f"{folder}/seed_{seed}", seed))
    folders = [cell.folder for cell in cells]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(
                f"compare: names must differ in letters, digits or = + - . among the first {NAME_LENGTH}, "
                f"got two that give {folder}"
            )
    return cells


def compare(
    config: RunConfig,
    *,
    out: Path | None = None,
    workers: int | None = None,
    on_done: Callable[[Cell, str | None], None] | None = None,
    weights: Mapping[bool, WeightTransferConfig] | None = None,
) -> ComparisonReport:
    """Simulate all cells of the table ``compare``; on Ctrl-C the cells that have ended are kept and compared.

    ``out``: folder of the runs and comparison.json. ``workers``: processes (count); None: one per core. ``on_done``
    gets each cell, with its error, if any. ``weights``: measured weight transfers, of runs apart (False) and colocated
    (True); arms that state theirs keep it.
    Raises ConfigError if the input is wrong; nothing is written.
    """
    comparison = config.compare or default_comparison(config)
    cells = [_with_weights(cell, config, weights or {}) for cell in plan_cells(config)]
    _check_files(cells, out)
    reports: dict[str, RunReport] = {}
    failures: list[str] = []
    complete = False
    try:
        with closing(run_all(partial(_run_cell, out=out), cells, workers=workers)) as results:
            for cell, report, failure in results:
                if report is not None:
                    reports[cell.folder] = report
                else:
                    failures.append(f"{cell.name}: {failure}")
                if on_done is not None:
                    on_done(cell, failure)
        complete = not failures
    except RunFailedError as error:
        failures.append(str(error))
    except KeyboardInterrupt:
        pass  # cells that have ended are kept
    result = ComparisonReport(
        baseline=comparison.baseline,
        scenarios=[
            ScenarioReport(name=name, arms=_arms(some, reports, comparison.baseline))
            for name, some in grouped((cell.scenario, cell) for cell in cells).items()
        ],
        failures=sorted(failures),
        complete=complete,
    )
    if out is not None and reports:
        write_json(out / COMPARISON_FILE, result.to_dict())
    return result


def _with_weights(cell: Cell, config: RunConfig, weights: Mapping[bool, WeightTransferConfig]) -> Cell:
    hardware, found = cell.config.hardware, weights.get(cell.config.colocated)
    if found is None or hardware.weights != config.hardware.weights:
        return cell
    hardware = hardware.model_copy(update={"weights": found})
    return replace(cell, config=cell.config.model_copy(update={"hardware": hardware}))


def _check_files(cells: list[Cell], out: Path | None) -> None:
    """Check that all that is needed is there and every folder can be written, then make the outer folder."""
    for cell in cells:
        with _naming(cell.name):
            check_installed(cell.config)
            SimulatedCluster(cell.config)
    if out is not None:
        for folder in (out, *(out / cell.folder for cell in cells)):
            check_vacant(folder)
        make_folder(out)


def _run_cell(cell: Cell, out: Path | None) -> CellResult:
    try:
        return cell, simulate(cell.config, out=None if out is None else out / cell.folder), None
    except RunInterruptedError:
        raise KeyboardInterrupt from None  # in this very process: it is for all runs
    except (PipelineRLError, OSError) as error:
        return cell, None, str(error)


def _arms(cells: list[Cell], reports: dict[str, RunReport], baseline: str) -> list[ArmReport]:
    """Return the arms of one scenario with their speed-up in tokens/s over the baseline of the same seed."""
    cells = [cell for cell in cells if cell.folder in reports]
    rates = {(cell.arm, cell.seed): reports[cell.folder].tokens_per_s for cell in cells}

    def speedup(cell: Cell) -> float | None:
        base_rate = rates.get((baseline, cell.seed))
        return rates[cell.arm, cell.seed] / base_rate if base_rate else None

    def repeat(cell: Cell, seed: int) -> RepeatReport:
        report = reports[cell.folder]
        return RepeatReport(
            seed=seed,
            folder=cell.folder,
            speedup=speedup(cell),
            reward=None if report.reward is None else report.reward.last,
            ess=None if report.ess is None else report.ess.mean,
        )

    arms = []
    for name, own in grouped((cell.arm, cell) for cell in cells).items():
        repeats = [repeat(cell, cell.seed) for cell in own if cell.seed is not None]
        first = own[0]
        arms.append(
            ArmReport(
                name=name,
                folder=first.folder,
                speedup=speedup(first),
                summary=reports[first.folder],
                repeats=repeats or None,
                too_short=reports[first.folder].too_short or None,
            )
        )
    return arms


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=+-]+", "_", name).strip("_.")[:NAME_LENGTH] or "_"


def _cell_name(scenario: str, arm: str) -> str:
    return f"scenario {scenario!r}, arm {arm!r}"


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefix the message of a ConfigError with a name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
