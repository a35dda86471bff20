"""``plan``: of a run file, of a question with several cases, against another plan, and with what was measured."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from command_line import Command, assert_fails, sets
from tiny_plan import TINY, priced_plan, unknown_run

import sim.planning.answer
from pipelinerl.config.run import CHECK_STEPS, RunConfig, check_config, dump_run, load_run, parse_run, with_overrides
from pipelinerl.hardware.catalogue import find_gpu
from pipelinerl.hardware.prior import MEAN_SD
from pipelinerl.pages.plans import cases_page
from pipelinerl.records import run_folder
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.reports import CheckReport, CheckRow, Finding
from pipelinerl.records.run_folder import PLAN_FILE, RECOMMENDED_FILE, cannot_write, write_json
from sim.run import simulate

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan_qwen7b_128_h100.toml"

FEW = sets(
    "plan.simulate=1", "plan.simulate_steps=8", "optimizer_steps=8", "plan.tensor_parallel=[1]",
    "plan.generation_batch_size=[8]", "plan.publish_every=[1]", "plan.optimizer_steps_per_rl_step=[2]",
    "plan.schedulers=['pipeline']",
)  # fmt: skip
QUESTION = (
    "--model", "Qwen2.5-1.5B", "--train-batch-size", "8", "--mean-length", "50", "--price", "2", "--max-mean-lag", "20",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "no_figures")
def test_a_question_of_two_sizes_is_one_table_and_saves_the_file(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("plan", *QUESTION, "--accelerators", "2,4", *FEW, "--save", "mine.toml")
    assert result.status == 0, result.err
    assert "mine.toml: the recommendation in each of 2 cases" in result.out
    assert re.search(r"^answer +Fastest( and cheapest)?: 4 GPUs, ", result.out)
    assert "  workload.length.cv = 1: 0.5 gives " in result.out
    assert result.out.endswith("the question is in mine.toml; change it, and ask: pipelinerl plan mine.toml\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    kept = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert kept["cluster"] == {"accelerators": 2}
    assert kept["price"] == {"gpu_hour": 2}


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "no_figures")
def test_answers_that_grow_are_one_answer_of_when_to_switch(command: Command, tmp_path: Path) -> None:
    """Eight short steps are worth no restart; without a price the public one is assumed in every phase."""
    run, out = tmp_path / "run.toml", tmp_path / "out"
    run.write_text(tomli_w.dumps(TINY))
    result = command("plan", run, "--mean-length", "20..100", *FEW, "--out", out)
    assert result.status == 0, result.err
    words = " ".join(result.out.split())
    assert re.match(r"answer Pipeline \d/\d H=8 throughout\. By the screening .* restarts \(10 min, assumed\)", words)
    assert all(f" {mean} tokens Pipeline RL at a mean lag of " in words for mean in (30, 50, 70, 90))
    assert words.count("USD per million trained tokens at assumed prices") == 5
    assert words.count(f"assumed: {find_gpu('H100').price_per_hour:.2f} USD per H100-hour (on-demand, ") == 1
    kept = {name: PlanReport.read(out / name / PLAN_FILE) for name in (f"{mean}_tokens" for mean in (30, 50, 70, 90))}
    assert f" {cases_page(kept).answer} " in words  # what a page of the folders says
    (phases, *_) = those = [one.phases for one in kept.values()]
    assert phases is not None
    assert those == 4 * [phases]
    assert phases.plans == [(phases.single, 8, 100)]


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_run_file_without_what_the_plan_finds_is_planned_and_compared_with_another(
    command: Command, tmp_path: Path
) -> None:
    run, other = tmp_path / "run.toml", tmp_path / "old"
    tables = {**TINY, "cluster": {"accelerators": 4}, "scheduler": {"train_batch_size": 8}}
    run.write_text(tomli_w.dumps(tables))
    other.mkdir()
    write_json(other / PLAN_FILE, priced_plan().to_dict())
    ask = ("plan", run, "--set", "plan.simulate=3", "--gpu", "A100", "--against", other, "--out", tmp_path / "out")
    result = command(*ask)
    assert result.status == 0, result.err
    assert (tmp_path / "out" / "figures" / "plan_throughput_against_lag.png").exists()
    assert_fails(command(*ask), 2, f"got {tmp_path / 'out'}, which holds plan.json")
    assert "\nrun file" not in result.out
    assert f"against {other}:" in result.out
    assert "  hardware.gpu: H100 -> A100: -" in result.out
    assert "  price.gpu_hour: 2 -> not given: +0% tokens/s alone" in result.out


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "no_figures")
def test_several_cases_have_a_folder_each_and_one_that_cannot_be_is_said(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    unsaid = [word for word in QUESTION if word not in ("--mean-length", "50")]
    question = ("plan", *unsaid, "--accelerators", "1,2,4", *FEW, "--out", out, "--json")
    result = command(*question)
    assert result.status == 0, result.err
    one, two, four = json.loads(result.out)["cases"]
    assert (one["case"], one["plan"]) == ("1 GPUs", None)  # none is left to train
    assert two["plan"] == json.loads((out / "2_GPUs" / PLAN_FILE).read_text())
    assert (out / "2_GPUs" / RECOMMENDED_FILE).exists()
    for case in (two, four):  # what nobody gave is as uncertain in each
        assert case["plan"]["certainty"]["unknown"]["mean answer"] == MEAN_SD
        assert {one["key"] for one in case["plan"]["assumed"]} >= {"workload.length.cv", "workload.length.mean"}
    assert (out / "question.toml").exists()
    assert_fails(command("plan", *QUESTION, "--accelerators", "1", *FEW), 2, "as others have to train, got 1")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody can write to, root neither")
def test_a_folder_that_cannot_be_made_ends_a_plan_before_it_is_made(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim.planning.answer, "Runner", None)  # would fail
    assert_fails(command("plan", EXAMPLE, "--out", "/proc/a/out"), 2, "got /proc/a/out: No such file or directory")


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "no_figures")
def test_a_plan_that_cannot_be_written_is_shown_before_the_error(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _data: object) -> None:
        raise cannot_write(path, OSError(28, "No space left on device"))

    monkeypatch.setattr(run_folder, "write_json", full)
    run, out = tmp_path / "run.toml", tmp_path / "out"
    run.write_text(tomli_w.dumps(TINY))
    result = command("plan", run, *FEW, "--out", out)
    assert result.status == 1
    assert result.out.startswith("answer ")
    assert result.err == f"pipelinerl: cannot write {out / PLAN_FILE}: No space left on device\n"


@pytest.mark.parametrize(
    "words",
    [("--gpu", "H100,H20O", "--accelerators", "4"),
     ("--gpu", "H100", "--accelerators", "2,4", "--set", "hardware.generation_gpu=H20O")],
)  # fmt: skip
def test_a_name_that_the_catalogue_lacks_ends_a_question_of_several_cases_at_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_fails(command("plan", *QUESTION, *words), 2, "got 'H20O'; did you mean H20")
    assert list(tmp_path.iterdir()) == []


# What measures, and the plan that takes what was measured.


def test_a_check_of_a_run_file_is_its_first_steps() -> None:
    whole = load_run(EXAMPLE, ["scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=32"])
    short = check_config(whole)
    assert (whole.optimizer_steps, short.optimizer_steps) == (1000, CHECK_STEPS)
    assert (whole.scheduler.optimizer_steps_per_rl_step, short.scheduler.optimizer_steps_per_rl_step) == (32, 1)
    assert short.cluster == whole.cluster


@pytest.mark.parametrize(("finding", "status"), [(Finding.SLOW, 0), (Finding.UNCHECKED, 0), (Finding.WRONG, 1)])
def test_train_check_ends_with_status_1_if_something_is_wrong(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finding: Finding, status: int
) -> None:
    """Its hardware may come from another file."""
    hardware = tmp_path / "hw.toml"
    hardware.write_text('[hardware]\ngpu = "H200"\nmodel = "Qwen2.5-7B"\n')
    seen = []

    def check(config: RunConfig, *, out: Path, shared: bool, **_: Any) -> CheckReport:
        seen.append((config.hardware.gpu, shared, out))
        return CheckReport(rows=[CheckRow(what="links", measured="1 GB/s", finding=finding, advice="look")])

    monkeypatch.setattr("backends.check.run_check.check", check)
    assert command("train", EXAMPLE, "--check", "--out", tmp_path / "out").status == status
    result = command("train", EXAMPLE, "--check", "--json", "--hardware", hardware)
    assert (result.status, json.loads(result.out)["rows"][0]["finding"]) == (status, finding)
    kept, (*alone, temporary) = seen
    assert kept == ("H100", True, tmp_path / "out")
    assert alone == ["H200", False]
    assert not temporary.exists()
    assert_fails(command("train", EXAMPLE, "--check", "--resume"), 2, "--check begins a run of its own, got --resume")


SYNC = "weight transfer of asynchronous RL"


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.slow
def test_a_plan_takes_what_was_measured_and_is_surer(command: Command, tmp_path: Path) -> None:
    """What it proposes carries the file of hardware and the overrides, and is a command."""
    path, check, hardware = tmp_path / "run.toml", tmp_path / "check", tmp_path / "hw.toml"
    hardware.write_text('[hardware]\ngpu = "H100"\nmodel = "Qwen2.5-1.5B"\n')
    path.write_text(dump_run(unknown_run()))
    truth = "hardware.coefficients={sync_s_per_root_gb=6.0}"
    simulate(check_config(unknown_run(truth)), out=check, trace=True)
    ask = ("plan", path, "--json", *sets("seed=1", "plan.simulate=5"), "--hardware", hardware)
    plans = [json.loads(command(*ask, *options).out)["certainty"] for options in ([], ["--measured", check])]
    assert plans[1]["unknown"]["decode step"] < plans[0]["unknown"]["decode step"]
    (asked,) = next(one for one in plans[0]["measurements"] if one["measured"] == [SYNC])["commands"]
    assert f"{path} --hardware {hardware} --set seed=1 --weight-sync-s SECONDS" in asked
    measure = asked.replace("SECONDS", "5").replace("measured_sync.toml", str(tmp_path / "m.toml"))
    assert command(*shlex.split(measure)[1:]).status == 0
    for name in ("plan", "simulate", "compare"):
        result = command(name, path, "--measured", tmp_path / "none")
        assert_fails(result, 2, "--measured must be a folder of `measure`")


@pytest.mark.usefixtures("in_this_process", "no_figures")
@pytest.mark.slow
def test_simulate_and_compare_take_what_was_measured_each_arm_its_own(command: Command, tmp_path: Path) -> None:
    """Weights that take 3 s in a run of the pipeline do so in its arm, and not in that of synchronous RL."""
    base = unknown_run("hardware.weights={publish_s=0.5}").model_dump(mode="json", exclude_none=True)
    slow, path = tmp_path / "slow", tmp_path / "run.toml"
    simulate(check_config(parse_run(with_overrides(base, ["hardware.weights.publish_s=3.0"]))), out=slow, trace=True)
    path.write_text(dump_run(parse_run({**base, "optimizer_steps": 6})))

    def publish_s(folder: Path) -> float:
        weights = load_run(folder / "run.toml").hardware.weights
        assert weights is not None
        return weights.publish_s

    assert command("simulate", path, "--measured", slow, "--out", tmp_path / "s").status == 0
    assert publish_s(tmp_path / "s") == pytest.approx(3.0, rel=0.01)
    arms = 'compare.arms=[{ name = "a" }, { name = "b", set = ["scheduler.kind=conventional"] }]'
    result = command("compare", path, "--measured", slow, "--out", tmp_path / "c", *sets(arms, "compare.baseline=a"))
    assert result.status == 0
    assert [publish_s(tmp_path / "c" / "as_given" / arm) for arm in "ab"] == pytest.approx([3.0, 0.5], rel=0.01)
