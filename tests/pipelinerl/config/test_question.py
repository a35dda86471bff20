"""Questions of a few options: run files, cases, assumptions, and what a run file may leave to the plan."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from refusals import message

from pipelinerl.config.question import OPTIONS, ask, asked_of, question_text, save_question, with_placeholders
from pipelinerl.config.run import flat, parse_run

GIVEN = {
    "model": "Qwen3-14B", "gpu": "H100", "accelerators": "64,96", "train_batch_size": "512", "group_size": "16",
    "mean_length": "4000", "max_length": "32000", "max_mean_lag": "4", "price": "2.5",
    "spot_price": "1.2", "spot_mtbf": "8h", "mtbf": "50000 h", "lend": "20s",
}  # fmt: skip
OPEN = {
    "optimizer_steps": 10,
    "cluster": {"accelerators": 8},
    "scheduler": {"train_batch_size": 8},
    "workload": {"length": {"kind": "fixed", "max": 10}},
    "hardware": {"gpu": "H100", "model": "Qwen2.5-1.5B"},
}


def test_options_are_keys_of_a_run_file_and_several_values_are_cases() -> None:
    question = ask(GIVEN)
    assert [one.name for one in question.cases] == ["64 GPUs", "96 GPUs"]
    for case, number in zip(question.cases, (64, 96), strict=True):
        values = flat(case.config.model_dump())
        assert [values[key] for key in OPTIONS.values()] == [
            "Qwen3-14B", "H100", number, "vllm-0.32", "ours", None, 512, 16, 4000, 32000, None, 4, 2.5, "neutral", 1.2,
            8.0, 50_000.0, 20.0, None,
        ]  # fmt: skip
        assert not case.whole


def test_all_that_is_not_given_is_an_assumption_and_in_the_file() -> None:
    """A model alone is a question; what one option says is assumed no more."""
    question = ask({"model": "Qwen3-14B"})
    keys = {one.key for one in question.assumed}
    assert keys >= set(OPTIONS.values()) - {
        "hardware.model", "hardware.weight_sync", "plan.lag_limit", "plan.risk", "price.gpu_hour",
        "plan.spot.price_per_hour", "plan.spot.reclaim_hours", "plan.mtbf_hours", "plan.lend_switch_s",
        "plan.speculate",
    }  # fmt: skip
    text = question_text(question)
    assert "accelerators = 64  # assumed\n" in text
    assert 'model = "Qwen3-14B"\n' in text
    assert tomllib.loads(text) == question.tables
    fewer = {one.key for one in ask(GIVEN, None, ["workload.prompt_tokens=7"]).assumed}
    assert fewer == {"optimizer_steps", "hardware.engine", "hardware.software", "workload.length.cv"}


def test_the_file_of_a_question_asks_it_again(tmp_path: Path) -> None:
    question = ask(GIVEN)
    path = tmp_path / "again.toml"
    path.write_text(question_text(question))
    again = ask({"accelerators": "64,96"}, path)
    assert [one.config for one in again.cases] == [one.config for one in question.cases]
    assert again.assumed == ()


@pytest.mark.parametrize(
    ("option", "values"), [("group_size", (1, 3, 16, 500, 1000)), ("train_batch_size", (1, 6, 512))]
)
def test_an_assumed_batch_has_whole_groups_and_so_has_a_given_one(option: str, values: tuple[int, ...]) -> None:
    for value in values:
        config = ask({"model": "Qwen3-14B", option: str(value)}).cases[0].config
        assert config.scheduler.train_batch_size % config.workload.group_size == 0
        assert value in (config.scheduler.train_batch_size, config.workload.group_size)


def test_a_run_file_may_leave_open_what_the_plan_finds() -> None:
    """The placeholders are no part of what was asked, and a run file that has both keys is left as it is."""
    filled, whole = with_placeholders(OPEN)
    config = parse_run(filled)
    assert not whole
    assert (config.cluster.generation_accelerators, config.scheduler.generation_batch_size) == (4, 64)
    asked = asked_of(config, whole=whole)
    assert "generation_accelerators" not in asked["cluster"]
    assert "generation_batch_size" not in asked["scheduler"]
    assert with_placeholders(filled) == (filled, True)


def test_lists_of_the_plan_stand_for_the_keys_that_they_search() -> None:
    lists = {"train_batch_size": [16, 32], "generation_batch_size": [4], "environments": [7]}
    tables = {**OPEN, "scheduler": {}, "plan": lists, "environment": {"turns": {"kind": "fixed"}}}
    filled, _ = with_placeholders(tables)
    assert filled["scheduler"] == {"train_batch_size": 16, "generation_batch_size": 4}
    assert filled["environment"]["count"] == 7


def test_colocated_schedules_need_no_split() -> None:
    tables = {**OPEN, "scheduler": {"kind": "conventional", "train_batch_size": 8, "generation_batch_size": 8}}
    assert with_placeholders(tables) == (tables, True)


def test_a_split_that_a_smaller_cluster_cannot_have_is_dropped_only_where_the_size_is_an_option(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps({**OPEN, "cluster": {"accelerators": 8, "generation_accelerators": 6}}))
    assert [one.config.cluster.generation_accelerators for one in ask({"accelerators": "4,16"}, path).cases] == [2, 6]
    refused = message(ask, {}, path, ["cluster.accelerators=4"])
    assert "generation_accelerators must be below cluster.accelerators" in refused


def test_one_gpu_does_both_in_turn() -> None:
    assert ask({"model": "Qwen2.5-1.5B", "accelerators": "1"}).cases[0].config.colocated


def test_a_question_is_saved_in_a_new_file(tmp_path: Path) -> None:
    question, path = ask({"model": "Qwen/Qwen3-14B"}), tmp_path / "new" / "question.toml"
    save_question(question, path)
    save_question(question, path)  # the same
    assert message(save_question, ask({"model": "Qwen3-8B"}), path) == f"--save must be a new file, got {path}"
    assert path.read_text() == question_text(question)
    assert message(save_question, question, path / "q.toml").startswith(
        "--save must be a file that can be written, got"
    )


def test_a_price_per_kind_of_gpu_is_that_of_each_case() -> None:
    asked = {"model": "Qwen3-8B", "accelerators": "8", "gpu": "h100,H200", "price": "H100=2.5, H200=3.5"}
    one, two = ask(asked).cases
    assert [case.config.price and case.config.price.gpu_hour for case in (one, two)] == [2.5, 3.5]
    assert (one.sets, two.sets) == ((), ("hardware.gpu=H200", "price.gpu_hour=3.5"))
    mixed = ask({**asked, "gpu": "H100"}, overrides=["hardware.generation_gpu=H200"]).cases[0].config.price
    assert mixed is not None
    assert (mixed.gpu_hour, mixed.generation_gpu_hour) == (2.5, 3.5)
    assert message(ask, {**asked, "price": "H100=2.5"}) == (
        "--price must have every kind of GPU that is asked for, got none for H200"
    )
    assert message(ask, {**asked, "price": "H100=2.5,4"}).startswith("--price must be a number, or one per kind of GPU")
    assert message(ask, {**asked, "price": "H1O0=2.5"}).startswith("--price must be")


def test_each_kind_of_gpu_has_its_own_number_and_two_kinds_in_one_run_their_sides() -> None:
    """Numbers go with the kinds, and are no further cases."""
    asked = {"model": "Qwen3-8B", "gpu": "H100,GB200", "price": "2.5"}
    one, two = ask({**asked, "accelerators": "H100=64,GB200=36"}).cases
    assert (one.name, two.name) == ("H100 64 GPUs", "GB200 36 GPUs")
    assert [case.config.cluster.accelerators for case in (one, two)] == [64, 36]
    assert two.sets == ("hardware.gpu=GB200", "cluster.accelerators=36")
    assert "cluster.accelerators" not in {one.key for one in ask({**asked, "accelerators": "H100=64,GB200=36"}).assumed}
    mixed = {"model": "Qwen3-8B", "gpu": "H100", "accelerators": "H100=16,H20=24"}
    (case,) = ask(mixed, None, ["hardware.generation_gpu=H20"]).cases
    assert (case.name, case.config.cluster.accelerators, case.config.generation_accelerators) == ("", 40, 24)
    assert case.config.plan is not None
    assert case.config.plan.generation_accelerators == [24]


@pytest.mark.parametrize(
    ("number", "line"),
    [
        ("H100=64", "--accelerators must have every kind of GPU that is asked for, got none for GB200"),
        ("H100=64,GB200=36,H20=8", "--accelerators must name kinds of GPU that --gpu asks for, got H20"),
        ("H100=64,36", "--accelerators must be a number, or one per kind of GPU as H100=64,GB200=36, got 'H100=64,36'"),
        ("H100=64,GB200=x", "--accelerators must be whole numbers, got x"),
    ],
)
def test_wrong_numbers_per_kind_are_one_line(number: str, line: str) -> None:
    assert message(ask, {"model": "Qwen3-8B", "gpu": "H100,GB200", "accelerators": number}) == line


def test_numbers_per_kind_need_kinds(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(tomli_w.dumps({**OPEN, "hardware": {"training": {"token_s": 1e-4}}}))
    refused = message(ask, {"accelerators": "H100=8"}, run)
    assert refused == "--accelerators must be one number where no kind of GPU is named, got H100"


def test_a_growing_mean_is_phases_of_one_run(tmp_path: Path) -> None:
    """Each at the middle of an equal part; the longest answer is that of the whole run, whose growth is no other."""
    question = ask({"model": "Qwen3-8B", "mean_length": "2000..10000"})
    assert question.growth == (2000, 10_000)
    assert [one.name for one in question.cases] == ["3000 tokens", "5000 tokens", "7000 tokens", "9000 tokens"]
    lengths = [one.config.workload.length for one in question.cases]
    assert [(one.mean, one.max) for one in lengths] == [(mean, 80_000) for mean in (3000, 5000, 7000, 9000)]
    assert "workload.length.mean" not in {one.key for one in question.assumed}
    run = tmp_path / "run.toml"
    length = {"kind": "lognormal", "mean": 10, "cv": 1, "max": 100, "growth": 2.0}
    run.write_text(tomli_w.dumps({**OPEN, "workload": {"length": length}}))
    assert {one.config.workload.length.growth for one in ask({"mean_length": "20..10"}, run).cases} == {1.0}
    assert ask({"model": "Qwen3-8B", "mean_length": "2000"}).growth is None


def test_a_limit_on_the_largest_lag_takes_the_place_of_the_assumed_one_on_the_mean() -> None:
    plan = ask({"model": "Qwen3-8B", "max_lag": "4"}).cases[0].config.plan
    assert plan is not None
    assert (plan.lag_limit, plan.mean_lag_limit) == (4, None)


SIZES = ",".join(map(str, range(2, 27)))
NO_MODEL = "plan needs a run file, or a model: --model NAME"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, NO_MODEL),
        ({"gpu": "H100"}, NO_MODEL),
        ({"model": "m", "accelerators": "64,x"}, 'question: cluster.accelerators must be a whole number, got "x"'),
        ({"model": "m", "accelerators": "64,,96"}, "--accelerators must have a value, got '64,,96'"),
        ({"model": "m", "train_batch_size": "9", "group_size": "4"}, "question: scheduler.train_batch_size must be a"),
        ({"model": "m", "mean_length": "0"}, "question: workload.length.mean must be above 0, got 0"),
        (
            {"model": "m", "mean_length": "2000.."},
            "--mean-length must be tokens, or FIRST..LAST of answers that grow, got",
        ),
        (
            {"model": "m", "mean_length": "9..9"},
            "--mean-length must be tokens, or FIRST..LAST of answers that grow, got",
        ),
        (
            {"model": "m", "mean_length": "1..9", "gpu": "H100,H200"},
            "--mean-length FIRST..LAST must be the only option",
        ),
        ({"model": "m", "accelerators": SIZES}, "a question must have at most 24 cases, got 25"),
    ],
)
def test_a_wrong_question_is_one_line(options: dict[str, str], line: str) -> None:
    assert message(ask, options).startswith(line)


def test_measured_hardware_needs_no_model_and_is_not_assumed(tmp_path: Path) -> None:
    path = tmp_path / "hw.toml"
    path.write_text('[hardware]\ntraining = { token_s = 1e-4 }\ndecode = { kind = "affine", step_s = 0.01 }\n')
    question = ask({"accelerators": "8"}, hardware=path)
    assert question.cases[0].config.hardware.training is not None
    assert not [one for one in question.assumed if one.key.startswith("hardware.")]


def test_a_case_is_the_run_file_with_its_overrides(tmp_path: Path) -> None:
    """Without a run file the file that is kept is the first case's; the lists of ``[plan]`` make no run another."""
    _, second = ask(GIVEN).cases
    assert second.sets == ("cluster.accelerators=96",)
    run = tmp_path / "run.toml"
    run.write_text(tomli_w.dumps(OPEN))
    (case,) = ask({"gpu": "A100", "max_mean_lag": "3"}, run, ["optimizer_steps=5", "plan.simulate=2"]).cases
    assert case.sets == ("hardware.gpu=A100", "optimizer_steps=5")
