"""The commands that measure, and the plan that takes what they wrote."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, assert_fails, sets
from tiny_plan import unknown_run

from pipelinerl.config.run import CHECK_STEPS, RunConfig, check_config
from pipelinerl.config.run_file import dump_run, load_run, parse_run, with_overrides
from pipelinerl.records.check_report import CheckReport, CheckRow, Finding
from sim.run import simulate

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan_qwen7b_128_h100.toml"


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
    gpus, seen = [], list[tuple[Path, bool]]()

    def check(config: RunConfig, *, out: Path, shared: bool, **_: Any) -> CheckReport:
        seen.append((out, shared))
        gpus.append(config.hardware.gpu)
        return CheckReport(rows=[CheckRow(what="links", measured="1 GB/s", finding=finding, advice="look")])

    monkeypatch.setattr("backends.check.run_check.check", check)
    assert command("train", EXAMPLE, "--check", "--out", tmp_path / "out").status == status
    result = command("train", EXAMPLE, "--check", "--json", "--hardware", hardware)
    assert (result.status, json.loads(result.out)["rows"][0]["finding"]) == (status, finding)
    (out, shared), (temporary, alone) = seen
    assert (out, shared, alone) == (tmp_path / "out", True, False)
    assert not temporary.exists()
    assert gpus == ["H100", "H200"]
    assert_fails(command("train", EXAMPLE, "--check", "--resume"), 2, "--check begins a run of its own, got --resume")


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
    plans = [
        json.loads(
            command("plan", path, "--json", *sets("seed=1", "plan.simulate=5"), *options, "--hardware", hardware).out
        )["certainty"]
        for options in ([], ["--measured", check])
    ]
    assert plans[1]["right"] > plans[0]["right"] + 0.1
    assert plans[1]["unknown"]["decode step"] < plans[0]["unknown"]["decode step"]
    (asked,) = plans[0]["measurements"][0]["commands"]
    assert f"{path} --hardware {hardware} --set seed=1 --weight-sync-s SECONDS" in asked
    assert (
        command(
            *shlex.split(asked.replace("SECONDS", "5").replace("measured_sync.toml", str(tmp_path / "m.toml")))[1:]
        ).status
        == 0
    )
    for name in ("plan", "simulate", "compare"):
        assert_fails(
            command(name, path, "--measured", tmp_path / "none"), 2, "--measured must be a folder of `measure`"
        )


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
