"""Comparisons: which runs are made, that each equals the run made alone, and results kept when some fail."""

import json
import sys
from pathlib import Path

import pytest
from command_line import RUN_FILES
from refusals import message
from run_folders import everything_in
from tiny_comparison import CONVENTIONAL, PIPELINE, SLOW, STALLS, run, two_by_two

from pipelinerl.config.run import RunConfig, load_run
from pipelinerl.errors import ConfigError, install
from pipelinerl.records.reports import RunReport
from sim import compare as module
from sim.compare import Cell, compare, default_comparison, plan_cells
from sim.run import simulate


def fault(config: RunConfig, out: Path | None = None) -> str:
    return message(compare, config, out=out)


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
    first, second = result.scenarios[0].arms
    assert (first.name, first.folder) == ("pipeline", "as_given/pipeline/seed_5")
    assert [(one.seed, one.folder) for one in first.repeats] == [
        (5, "as_given/pipeline/seed_5"),
        (1, "as_given/pipeline/seed_1"),
    ]
    assert first.speedup == first.repeats[0].speedup != first.repeats[1].speedup
    assert [one.speedup for one in second.repeats] == [1.0, 1.0]  # each seed beside its own baseline
    assert first.summary.seed == 5
    assert json.loads((tmp_path / "comparison.json").read_text()) == result.to_dict()


def test_without_overrides_a_cell_is_the_run_itself() -> None:
    (cell,) = plan_cells(run(arms=[PIPELINE], baseline="pipeline"))
    assert cell == Cell("as given", "pipeline", run(), "as_given/pipeline")


def test_an_arm_has_the_last_word_over_its_scenario() -> None:
    arm = {"name": "arm", "set": ["scheduler.max_lag=1"]}
    scenario = {"name": "scenario", "set": ["scheduler.max_lag=5", "optimizer_steps=2"]}
    (cell,) = plan_cells(run(arms=[arm], scenarios=[scenario], baseline="arm"))
    assert (cell.config.scheduler.max_lag, cell.config.optimizer_steps) == (1, 2)


def test_by_default_the_run_is_compared_with_conventional_rl() -> None:
    table = default_comparison(run())
    kind, steps = "scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step"
    assert [(arm.name, arm.set) for arm in table.arms] == [
        ("pipeline (as given)", []),
        *((f"conventional G={g}", [kind, f"{steps}={g}"]) for g in (8, 16, 32)),
    ]
    assert table.model_dump(exclude={"arms"}) == {
        "scenarios": [{"name": "as given", "set": []}], "baseline": "conventional G=32", "seeds": [],
    }  # fmt: skip
    folders = ["pipeline_as_given", "conventional_G=8", "conventional_G=16", "conventional_G=32"]
    assert [cell.folder for cell in plan_cells(run())] == [f"as_given/{folder}" for folder in folders]


def test_the_default_comparison_of_a_conventional_run_or_of_one_with_a_bound_on_the_lag() -> None:
    """Conventional RL with G steps has a largest lag of G - 1: its arms get that bound, the run keeps its own."""
    conventional = plan_cells(run("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=3"))
    assert [cell.config.scheduler.optimizer_steps_per_rl_step for cell in conventional] == [3, 8, 16, 32]
    bounded = plan_cells(run("scheduler.max_lag=2", "optimizer_steps=100"))
    assert [cell.config.scheduler.max_lag for cell in bounded] == [2, 7, 15, 31]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("G=8, H=1.5", "G=8_H=1.5"), ("../../etc", "etc"), ("..", "_"), ("ä / ö", "_"), ("a\nb", "a_b"), ("_x_", "x"),
        ("x" * 300, "x" * 80),
    ],
)  # fmt: skip
def test_names_of_folders_are_safe_file_names(name: str, folder: str) -> None:
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
    ("override", "key"),
    [
        ("scheduler.max_lags=3", "scheduler.max_lags "),
        ("scheduler.max_lag", "--set "),
        ("workload.length={kind='empirical', source='mine', max=9}", "workload.length.source "),
        ("workload.length={kind='empirical', source='/no/file.csv', max=9}", "cannot read workload.length.source "),
    ],
)
@pytest.mark.parametrize("where", ["arm", "scenario"])
def test_a_wrong_override_is_one_line_that_names_scenario_and_arm_before_anything_is_written(
    tmp_path: Path, where: str, override: str, key: str
) -> None:
    wrong = {"name": "typo", "set": [override]}
    if where == "arm":
        config, cell = run(arms=[PIPELINE, wrong], baseline="typo"), "scenario 'as given', arm 'typo'"
    else:
        config = run(arms=[PIPELINE], scenarios=[SLOW, wrong], baseline="pipeline")
        cell = "scenario 'typo', arm 'pipeline'"
    assert fault(config, tmp_path / "out").startswith(f"{cell}: {key}")
    assert everything_in(tmp_path) == {}


# ------------------------------------------------------------------------------------ where it goes


@pytest.mark.parametrize(
    ("there", "out", "named"),
    [
        ("out/comparison.json", "out", "out, which holds"),
        ("out/fast_trainer/conventional/steps.csv", "out", "out/fast_trainer/conventional, which holds"),  # interrupted
        ("out", "out", "out"),
        ("out", "out/new", "out/new: "),
    ],
)
def test_a_folder_that_is_taken_or_cannot_be_made_is_left_alone(
    tmp_path: Path, there: str, out: str, named: str
) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("precious")
    before = everything_in(tmp_path)
    line = fault(two_by_two(), tmp_path / out)
    assert line.startswith("--out must be a folder")
    assert f"{tmp_path}/{named}" in line
    assert everything_in(tmp_path) == before


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
        assert sorted(path.name for path in folder.iterdir()) == RUN_FILES
    for scenario in result.scenarios:
        baseline = alone[f"{scenario.name.replace(' ', '_')}/conventional"]
        assert [arm.name for arm in scenario.arms] == ["pipeline", "conventional"]
        for arm in scenario.arms:
            assert arm.summary == alone[arm.folder]
            assert arm.speedup == alone[arm.folder].tokens_per_s / baseline.tokens_per_s
            assert (arm.too_short or []) == alone[arm.folder].too_short
    assert [scenario.name for scenario in result.scenarios] == ["slow trainer", "fast trainer"]
    assert (result.baseline, result.failures, result.complete) == ("conventional", [], True)
    assert json.loads((out / "comparison.json").read_text()) == result.to_dict()
    assert sorted(ended) == sorted((cell.folder, None) for cell in cells)


@pytest.mark.usefixtures("in_this_process")
def test_the_baseline_has_a_speedup_of_one_and_equal_arms_are_equal() -> None:
    """Common random numbers: two arms that do not differ meet the same answers and give the same numbers."""
    result = compare(run(arms=[PIPELINE, {"name": "again"}], baseline="again"))
    (first, second) = result.scenarios[0].arms
    assert (first.speedup, second.speedup) == (1.0, 1.0)
    assert first.summary == second.summary


@pytest.mark.usefixtures("in_this_process")
def test_a_run_that_fails_is_reported_and_the_others_are_compared(tmp_path: Path) -> None:
    ended: list[str | None] = []
    config = run(arms=[PIPELINE, STALLS, CONVENTIONAL], baseline="conventional")
    result = compare(config, out=tmp_path, on_done=lambda _cell, failure: ended.append(failure))
    stalled = (
        "stalled: more than scheduler.discard_limit = 20 rollouts were given up without an optimizer step in between: "
        "rewards of a group are equal; change the task or scheduler.filter_no_signal"
    )
    assert result.failures == [f"scenario 'as given', arm 'stalls': {stalled}"]
    assert result.complete is False
    (scenario,) = result.scenarios
    assert [arm.name for arm in scenario.arms] == ["pipeline", "conventional"]
    assert scenario.arms[1].speedup == 1.0
    assert sorted(ended, key=str) == [None, None, stalled]
    assert json.loads((tmp_path / "comparison.json").read_text()) == result.to_dict()
    assert json.loads((tmp_path / "as_given" / "stalls" / "summary.json").read_text())["complete"] is False


@pytest.mark.usefixtures("in_this_process")
def test_without_its_baseline_an_arm_has_no_speedup() -> None:
    result = compare(run(arms=[PIPELINE, STALLS], baseline="stalls"))
    assert [(arm.name, arm.speedup) for arm in result.scenarios[0].arms] == [("pipeline", None)]


@pytest.mark.usefixtures("in_this_process")
def test_where_every_run_fails_there_is_no_comparison_to_read(tmp_path: Path) -> None:
    result = compare(run(arms=[STALLS], baseline="stalls"), out=tmp_path)
    assert (len(result.failures), result.complete) == (1, False)
    assert not (tmp_path / "comparison.json").exists()


@pytest.mark.usefixtures("in_this_process")
def test_a_folder_of_a_run_that_cannot_be_made_is_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "fast_trainer").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"^--out must be a folder that can be written, got .*fast_trainer"):
        compare(two_by_two(), out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast_trainer"]


@pytest.mark.usefixtures("in_this_process")
def test_a_full_disk_fails_the_run_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: RunConfig, out: Path | None) -> RunReport:
        if config.scheduler.kind == "conventional":
            raise OSError(28, "No space left on device")
        return simulate(config)

    monkeypatch.setattr(module, "simulate", full)
    result = compare(run(arms=[PIPELINE, CONVENTIONAL], baseline="pipeline"))
    line = "scenario 'as given', arm 'conventional': [Errno 28] No space left on device"
    assert result.failures == [line]


def test_without_torch_a_comparison_of_policies_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ["policy.task=addition", "policy.size=2", "policy.learning_rate=1e-3"]
    learning = {"name": "learning", "set": policy}
    monkeypatch.setitem(sys.modules, "torch", None)
    line = fault(run(arms=[PIPELINE, learning], baseline="pipeline"), tmp_path / "out")
    assert line == f"scenario 'as given', arm 'learning': [policy] needs torch: {install('learn')}"
    assert not (tmp_path / "out").exists()
