"""``plan``: of a run file, of a question with several cases, against another plan."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
from command_line import Command, assert_fails, sets
from tiny_plan import TINY, priced_plan

from pipelinerl.hardware.prior import MEAN_SD
from pipelinerl.records.run_folder import PLAN_FILE, RECOMMENDED_FILE, write_json

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
def test_a_question_of_two_sizes_is_one_table_and_leaves_the_file(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("plan", *QUESTION, "--accelerators", "2,4", *FEW)
    assert result.status == 0, result.err
    assert "plan_qwen2.5_1.5b.toml: the recommendation in each of 2 cases" in result.out
    assert re.search(r"^answer +Fastest( and cheapest)?: 4 GPUs, ", result.out)
    assert "  workload.length.cv = 1: 0.5 gives " in result.out
    assert result.out.endswith("and ask: pipelinerl plan plan_qwen2.5_1.5b.toml\n")
    kept = tomllib.loads((tmp_path / "plan_qwen2.5_1.5b.toml").read_text())
    assert kept["cluster"] == {"accelerators": 2}
    assert kept["price"] == {"gpu_hour": 2}


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
    result = command("plan", run, "--set", "plan.simulate=2", "--gpu", "A100", "--against", other)
    assert result.status == 0, result.err
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


def test_a_plan_without_a_file_or_a_model_is_one_line(command: Command) -> None:
    assert_fails(command("plan"), 2, "plan needs a run file, or a model: --model NAME")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_json_draws_and_keeps_the_folder(command: Command, tmp_path: Path) -> None:
    path, out = tmp_path / "run.toml", tmp_path / "out"
    path.write_text(tomli_w.dumps(TINY))
    result, again = (command("plan", path, "--set", "plan.simulate=3", "--out", out, "--json") for _ in range(2))
    assert result.status == 0
    assert json.loads(result.out) == json.loads((out / "plan.json").read_text())
    assert (out / "figures" / "plan_throughput_against_lag.png").exists()
    assert_fails(again, 2, f"got {out}, which holds plan.json")
