"""Comparisons: which runs are made, that each is the run it would be alone, and what is kept when some fail."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import load_run, parse_run, with_overrides
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.reports import RunReport
from sim import compare as module
from sim import parallel
from sim.compare import Cell, compare, default_comparison, plan_cells
from sim.run import simulate

BASE: dict[str, Any] = {
    "seed": 3,
    "optimizer_steps": 6,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 4, "generation_batch_size": 6},
    "workload": {"group_size": 2, "length": {"kind": "uniform", "max": 50}},
    "hardware": {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-3}},
}
PIPELINE, CONVENTIONAL = {"name": "pipeline"}, {"name": "conventional", "set": ["scheduler.kind=conventional"]}
STALLS = {
    "name": "stalls",
    "set": ["workload.success_rate=1.0", "scheduler.filter_no_signal=true", "scheduler.discard_limit=20"],
}
SLOW, FAST = (
    {"name": "slow trainer", "set": ["hardware.training.token_s=1e-2"]},
    {"name": "fast trainer", "set": ["hardware.training.token_s=1e-4"]},
)


@pytest.fixture(autouse=True)
def heeds_ctrl_c() -> Iterator[None]:
    """Tests that a shell runs in the background start out with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(*overrides: str, **compare_table: Any) -> RunConfig:
    data = with_overrides(BASE, overrides)
    return parse_run(data | {"compare": compare_table} if compare_table else data)


def two_by_two() -> RunConfig:
    return run(arms=[PIPELINE, CONVENTIONAL], scenarios=[SLOW, FAST], baseline="conventional")


class InThisProcess:
    """Runs what is submitted at once; processes are slow to start and cannot be looked into."""

    def __init__(self, workers: int, context: Any, *, initializer: Callable[[], None]) -> None:
        assert workers >= 1

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing is left to end."""


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InThisProcess)


def fault(config: RunConfig, out: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compare(config, out=out)
    return str(caught.value)


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# --------------------------------------------------------------------------------------- the plan


def test_every_arm_meets_every_scenario_in_order_with_the_seed_of_the_base() -> None:
    cells = plan_cells(two_by_two())
    assert [(cell.scenario, cell.arm, cell.folder) for cell in cells] == [
        ("slow trainer", "pipeline", "slow_trainer/pipeline"),
        ("slow trainer", "conventional", "slow_trainer/conventional"),
        ("fast trainer", "pipeline", "fast_trainer/pipeline"),
        ("fast trainer", "conventional", "fast_trainer/conventional"),
    ]
    assert [cell.config.hardware.training.token_s for cell in cells] == [1e-2, 1e-2, 1e-4, 1e-4]
    assert [cell.config.scheduler.kind for cell in cells] == ["pipeline", "conventional"] * 2
    assert {cell.config.seed for cell in cells} == {3}
    assert {cell.config.compare for cell in cells} == {None}


def test_with_seeds_every_arm_runs_once_with_each() -> None:
    cells = plan_cells(run(arms=[PIPELINE, CONVENTIONAL], baseline="pipeline", seeds=[5, 1]))
    assert [(cell.arm, cell.seed, cell.config.seed, cell.folder) for cell in cells] == [
        ("pipeline", 5, 5, "as_given/pipeline/seed_5"),
        ("pipeline", 1, 1, "as_given/pipeline/seed_1"),
        ("conventional", 5, 5, "as_given/conventional/seed_5"),
        ("conventional", 1, 1, "as_given/conventional/seed_1"),
    ]
    assert cells[1].name == "scenario 'as given', arm 'pipeline', seed 1"


@pytest.mark.usefixtures("in_this_process")
def test_an_arm_of_several_seeds_is_shown_by_the_first_and_names_them_all(tmp_path: Path) -> None:
    config = run(arms=[PIPELINE, CONVENTIONAL], baseline="conventional", seeds=[5, 1])
    result = compare(config, out=tmp_path)
    first, second = result["scenarios"][0]["arms"]
    assert (first["name"], first["folder"]) == ("pipeline", "as_given/pipeline/seed_5")
    assert [(one["seed"], one["folder"]) for one in first["repeats"]] == [
        (5, "as_given/pipeline/seed_5"),
        (1, "as_given/pipeline/seed_1"),
    ]
    assert first["speedup"] == first["repeats"][0]["speedup"] != first["repeats"][1]["speedup"]
    assert [one["speedup"] for one in second["repeats"]] == [1.0, 1.0]  # each seed beside its own baseline
    assert first["summary"]["seed"] == 5
    assert json.loads((tmp_path / "comparison.json").read_text()) == result


def test_without_overrides_a_cell_is_the_run_itself() -> None:
    (cell,) = plan_cells(run(arms=[PIPELINE], baseline="pipeline"))
    assert cell == Cell("as given", "pipeline", run(), "as_given/pipeline")


def test_an_arm_has_the_last_word_over_its_scenario() -> None:
    arm = {"name": "arm", "set": ["scheduler.max_lag=1"]}
    scenario = {"name": "scenario", "set": ["scheduler.max_lag=5", "optimizer_steps=2"]}
    (cell,) = plan_cells(run(arms=[arm], scenarios=[scenario], baseline="arm"))
    assert (cell.config.scheduler.max_lag, cell.config.optimizer_steps) == (1, 2)


def test_by_default_the_run_is_compared_with_conventional_rl() -> None:
    assert default_comparison(run()).model_dump() == {
        "arms": [
            {"name": "pipeline (as given)", "set": []},
            *(
                {
                    "name": f"conventional G={steps}",
                    "set": ["scheduler.kind=conventional", f"scheduler.optimizer_steps_per_rl_step={steps}"],
                }
                for steps in (8, 16, 32)
            ),
        ],
        "scenarios": [{"name": "as given", "set": []}],
        "baseline": "conventional G=32",
        "seeds": [],
    }
    assert [cell.folder for cell in plan_cells(run())] == [
        "as_given/pipeline_as_given",
        "as_given/conventional_G=8",
        "as_given/conventional_G=16",
        "as_given/conventional_G=32",
    ]


def test_by_default_a_conventional_run_is_compared_with_other_g() -> None:
    cells = plan_cells(run("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=3"))
    assert [cell.config.scheduler.optimizer_steps_per_rl_step for cell in cells] == [3, 8, 16, 32]


def test_a_bound_on_the_lag_does_not_stand_in_the_way_of_the_default_comparison() -> None:
    """Conventional RL with G steps has a largest lag of G - 1: its arms get that bound, the run keeps its own."""
    cells = plan_cells(run("scheduler.max_lag=2", "optimizer_steps=100"))
    assert [cell.config.scheduler.max_lag for cell in cells] == [2, 7, 15, 31]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("G=8, H=1.5", "G=8_H=1.5"),
        ("../../etc", "etc"),
        ("..", "_"),
        ("ä / ö", "_"),
        ("a\nb", "a_b"),
        ("_x_", "x"),
        ("x" * 300, "x" * 80),
    ],
)
def test_folders_are_named_by_what_is_safe_in_a_file_name(name: str, folder: str) -> None:
    (cell,) = plan_cells(run(arms=[{"name": name}], baseline=name))
    assert cell.folder == f"as_given/{folder}"


@pytest.mark.parametrize(
    ("names", "folder"), [(("lag 1", "lag_1"), "as_given/lag_1"), (("x" * 99, "x" * 98), f"as_given/{'x' * 80}")]
)
def test_names_that_give_the_same_folder_are_one_line(names: tuple[str, str], folder: str) -> None:
    assert fault(run(arms=[{"name": name} for name in names], baseline=names[0])) == (
        f"compare: names must differ in letters, digits or = + - . among the first 80, got two that give {folder}"
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "scheduler.max_lags=3",
            "scheduler.max_lags is an unknown key; did you mean max_lag? allowed: discard_limit, filter_no_signal, "
            "generation_batch_size, kind, max_lag, micro_batch_size, on_full, on_stale, optimizer_steps_per_rl_step, "
            "partial_rollouts, publish_every, ready_queue_size, train_batch_size, weight_update",
        ),
        ("scheduler.max_lag", "--set must be KEY=VALUE with a dotted key, got 'scheduler.max_lag'"),
        ("seed.x=3", "--set seed.x=3: seed is not a table"),
        (
            "workload.length={kind='empirical', source='mine', max=9}",
            "workload.length.source must be a shipped set or the path of a .csv file, got 'mine'; shipped sets: "
            "areal_deepscaler, areal_nemotron, rgym_llama_400, rgym_llama_800, skythought",
        ),
        (
            "workload.length={kind='empirical', source='/no/such/file.csv', max=9}",
            "cannot read workload.length.source /no/such/file.csv: No such file or directory; shipped sets: "
            "areal_deepscaler, areal_nemotron, rgym_llama_400, rgym_llama_800, skythought",
        ),
    ],
)
@pytest.mark.parametrize("where", ["arm", "scenario"])
def test_a_wrong_override_is_one_line_that_names_scenario_and_arm_before_anything_is_written(
    tmp_path: Path, where: str, override: str, line: str
) -> None:
    wrong = {"name": "typo", "set": [override]}
    if where == "arm":
        config, cell = run(arms=[PIPELINE, wrong], baseline="typo"), "scenario 'as given', arm 'typo'"
    else:
        config = run(arms=[PIPELINE], scenarios=[SLOW, wrong], baseline="pipeline")
        cell = "scenario 'typo', arm 'pipeline'"
    assert fault(config, tmp_path / "out") == f"{cell}: {line}"
    assert everything_in(tmp_path) == {}


# ------------------------------------------------------------------------------------ where it goes


@pytest.mark.parametrize(
    ("there", "line"),
    [
        ("out/run.toml", "--out must be a folder without a run, got {out}, which holds run.toml"),
        ("out/comparison.json", "--out must be a folder without a run, got {out}, which holds comparison.json"),
        (
            "out/fast_trainer/conventional/steps.csv",  # what an interrupted comparison leaves
            "--out must be a folder without a run, got {out}/fast_trainer/conventional, which holds steps.csv",
        ),
        ("out", "--out must be a folder, got the file {out}"),
    ],
)
def test_a_folder_that_holds_anything_of_a_run_is_one_line_and_left_alone(
    tmp_path: Path, there: str, line: str
) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("precious")
    before = everything_in(tmp_path)
    assert fault(two_by_two(), tmp_path / "out") == line.format(out=tmp_path / "out")
    assert everything_in(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    out = tmp_path / "file" / "out"
    assert fault(two_by_two(), out) == f"--out must be a folder that can be written, got {out}: Not a directory"
    assert everything_in(tmp_path) == {"file": b"precious"}


# ----------------------------------------------------------------------------------------- results


def test_each_run_in_parallel_is_the_run_it_would_be_alone(tmp_path: Path) -> None:
    config, out, ended = two_by_two(), tmp_path / "new" / "out", []
    result = compare(config, out=out, workers=2, on_done=lambda cell, failure: ended.append((cell.folder, failure)))
    cells = plan_cells(config)
    alone = {cell.folder: simulate(cell.config) for cell in cells}
    for cell in cells:
        folder = out / cell.folder
        assert json.loads((folder / "summary.json").read_text()) == alone[cell.folder].to_dict()
        assert load_run(folder / "run.toml") == cell.config
        assert sorted(path.name for path in folder.iterdir()) == [
            "profile.json",
            "run.toml",
            "steps.csv",
            "summary.json",
        ]
    rates = {folder: summary.tokens_per_s for folder, summary in alone.items()}
    assert result == {
        "baseline": "conventional",
        "scenarios": [
            {
                "name": name,
                "arms": [
                    {
                        "name": arm,
                        "folder": f"{folder}/{arm}",
                        "speedup": rates[f"{folder}/{arm}"] / rates[f"{folder}/conventional"],
                        "summary": alone[f"{folder}/{arm}"].to_dict(),
                    }
                    for arm in ("pipeline", "conventional")
                ],
            }
            for name, folder in (("slow trainer", "slow_trainer"), ("fast trainer", "fast_trainer"))
        ],
        "failures": [],
        "complete": True,
    }
    assert json.loads((out / "comparison.json").read_text()) == result
    assert sorted(ended) == sorted((cell.folder, None) for cell in cells)


@pytest.mark.usefixtures("in_this_process")
def test_the_baseline_has_a_speedup_of_one_and_equal_arms_are_equal() -> None:
    """Common random numbers: two arms that do not differ meet the same answers and give the same numbers."""
    result = compare(run(arms=[PIPELINE, {"name": "again"}], baseline="again"))
    (first, second) = result["scenarios"][0]["arms"]
    assert (first["speedup"], second["speedup"]) == (1.0, 1.0)
    assert first["summary"] == second["summary"]


@pytest.mark.usefixtures("in_this_process")
def test_a_run_that_fails_is_told_and_the_others_are_compared(tmp_path: Path) -> None:
    ended: list[str | None] = []
    config = run(arms=[PIPELINE, STALLS, CONVENTIONAL], baseline="conventional")
    result = compare(config, out=tmp_path, on_done=lambda _cell, failure: ended.append(failure))
    stalled = (
        "stalled: more than scheduler.discard_limit = 20 rollouts were given up without an optimizer step in between"
    )
    assert result["failures"] == [f"scenario 'as given', arm 'stalls': {stalled}"]
    assert result["complete"] is False
    (scenario,) = result["scenarios"]
    assert [arm["name"] for arm in scenario["arms"]] == ["pipeline", "conventional"]
    assert scenario["arms"][1]["speedup"] == 1.0
    assert sorted(ended, key=str) == [None, None, stalled]
    assert json.loads((tmp_path / "comparison.json").read_text()) == result
    assert json.loads((tmp_path / "as_given" / "stalls" / "summary.json").read_text())["complete"] is False


@pytest.mark.usefixtures("in_this_process")
def test_without_its_baseline_an_arm_has_no_speedup() -> None:
    result = compare(run(arms=[PIPELINE, STALLS], baseline="stalls"))
    assert [(arm["name"], arm["speedup"]) for arm in result["scenarios"][0]["arms"]] == [("pipeline", None)]


@pytest.mark.usefixtures("in_this_process")
def test_where_every_run_fails_there_is_no_comparison_to_read(tmp_path: Path) -> None:
    result = compare(run(arms=[STALLS], baseline="stalls"), out=tmp_path)
    assert (len(result["failures"]), result["complete"]) == (1, False)
    assert not (tmp_path / "comparison.json").exists()


@pytest.mark.usefixtures("in_this_process")
def test_a_run_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "fast_trainer").write_text("a file where a folder should be")
    result = compare(two_by_two(), out=tmp_path)
    assert [len(scenario["arms"]) for scenario in result["scenarios"]] == [2, 0]
    assert [line.partition("--out")[0] for line in result["failures"]] == [
        "scenario 'fast trainer', arm 'conventional': ",
        "scenario 'fast trainer', arm 'pipeline': ",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_a_full_disk_fails_the_run_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: RunConfig, out: Path | None) -> RunReport:
        if config.scheduler.kind == "conventional":
            raise OSError(28, "No space left on device")
        return simulate(config)

    monkeypatch.setattr(module, "simulate", full)
    result = compare(run(arms=[PIPELINE, CONVENTIONAL], baseline="pipeline"))
    line = "scenario 'as given', arm 'conventional': [Errno 28] No space left on device"
    assert result["failures"] == [line]


# ------------------------------------------------------------------------------- cut short, in parallel


@pytest.mark.usefixtures("in_this_process")
def test_on_ctrl_c_the_runs_that_had_ended_are_kept(tmp_path: Path) -> None:
    ended: list[str] = []

    def interrupt_the_second(cell: Cell, failure: str | None) -> None:
        ended.append(cell.folder)
        if len(ended) == 2:
            raise KeyboardInterrupt

    result = compare(two_by_two(), out=tmp_path, on_done=interrupt_the_second)
    kept = [arm["folder"] for scenario in result["scenarios"] for arm in scenario["arms"]]
    assert sorted(kept) == sorted(ended)
    assert (len(kept), result["failures"], result["complete"]) == (2, [], False)
    assert json.loads((tmp_path / "comparison.json").read_text()) == result


def long_and_short() -> RunConfig:
    long = {"name": "long", "set": ["optimizer_steps=1000000"]}
    return run(arms=[{"name": "short"}, long], baseline="short")


def test_ctrl_c_ends_the_workers(tmp_path: Path) -> None:
    def interrupt(_cell: Cell, _failure: str | None) -> None:
        signal.raise_signal(signal.SIGINT)

    result = compare(long_and_short(), out=tmp_path, workers=2, on_done=interrupt)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [arm["name"] for arm in result["scenarios"][0]["arms"]] == ["short"]
    assert (result["failures"], result["complete"]) == ([], False)


def test_workers_are_started_with_ctrl_c_ignored_which_they_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends Ctrl-C to all of them, and one that heeded it would print a traceback."""
    handlers: list[Any] = []

    class Watching(InThisProcess):
        def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            handlers.append(signal.getsignal(signal.SIGINT))
            return super().submit(function, *arguments)

    monkeypatch.setattr(parallel, "ProcessPoolExecutor", Watching)
    compare(two_by_two())
    assert handlers == [signal.SIG_IGN] * 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_worker_that_dies_is_told_and_what_had_ended_is_kept(tmp_path: Path) -> None:
    """As when the system runs out of memory and kills one."""

    def kill(_cell: Cell, _failure: str | None) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    result = compare(long_and_short(), out=tmp_path, workers=2, on_done=kill)
    assert result["failures"] == [
        "a worker process died, perhaps for lack of memory; its run and those not yet begun are lost"
    ]
    assert [arm["name"] for arm in result["scenarios"][0]["arms"]] == ["short"]
    assert json.loads((tmp_path / "comparison.json").read_text()) == result


def test_it_runs_in_any_thread() -> None:
    """Signal handlers can be set in the main thread only."""
    results: list[dict[str, Any]] = []
    config = run(arms=[PIPELINE], baseline="pipeline")
    thread = threading.Thread(target=lambda: results.append(compare(config)))
    thread.start()
    thread.join()
    assert results[0]["complete"] is True


def test_a_worker_ends_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, ended = threading.Event(), threading.Event()
    codes: list[int] = []

    class Parent:
        def join(self) -> None:
            gone.wait()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(multiprocessing, "parent_process", Parent)
    monkeypatch.setattr(os, "_exit", leave)
    parallel._end_with_parent()
    assert not ended.wait(0.05)
    gone.set()
    assert ended.wait(10.0)
    assert codes == [1]


# ------------------------------------------------------------------------------- one run, interrupted


def test_a_run_in_another_thread_leaves_ctrl_c_alone() -> None:
    summaries: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: summaries.append(simulate(run())))
    thread.start()
    thread.join()
    assert summaries == [simulate(run())]


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """As one that a shell has put into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    summary = simulate(run(), on_step=lambda _row: signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert summary == simulate(run())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    states: list[bool] = []
    try:
        (gc.enable if enabled else gc.disable)()
        simulate(run(), on_step=lambda _row: states.append(gc.isenabled()))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert states == [False] * 6


def test_a_row_is_on_disk_as_soon_as_its_step_is_done(tmp_path: Path) -> None:
    """So that a killed run leaves every step it made."""
    seen: list[list[str]] = []

    def look(_row: Any) -> None:
        text = (tmp_path / "steps.csv").read_text()
        assert text.endswith("\n")
        seen.append([line.partition(",")[0] for line in text.splitlines()])

    simulate(run("optimizer_steps=3"), out=tmp_path, on_step=look)
    assert seen == [["step", "1"], ["step", "1", "2"], ["step", "1", "2", "3"]]


def test_ctrl_c_ends_a_run_at_the_step_it_was_in_and_is_free_again(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="interrupted; what was finished is kept"):
        simulate(run(), out=tmp_path, on_step=lambda row: row.step == 2 and signal.raise_signal(signal.SIGINT))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["complete"]) == (2, False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_torch_a_comparison_of_policies_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ["policy.task=addition", "policy.size=2", "policy.learning_rate=1e-3"]
    learning = {"name": "learning", "set": policy}
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError) as caught:
        compare(run(arms=[PIPELINE, learning], baseline="pipeline"), out=tmp_path / "out")
    assert str(caught.value) == (
        "scenario 'as given', arm 'learning': [policy] needs torch: pip install 'pipelinerl[learn]'"
    )
    assert not (tmp_path / "out").exists()
