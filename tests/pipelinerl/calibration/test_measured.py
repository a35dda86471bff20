"""Measurements merged into a run file: the facts of each source, and sources that are refused."""

from pathlib import Path

import pytest
from calibrated import GRID, decode_rows, table_of
from refusals import message
from tiny_plan import unknown_run

from pipelinerl.calibration.measured import Measured, merged
from pipelinerl.config.run import RunConfig, check_config
from pipelinerl.hardware.prior import MEASURED_SD
from sim.planning.certainty import spreads
from sim.run import simulate


def checked(folder: Path, *overrides: str) -> Path:
    simulate(check_config(unknown_run(*overrides)), out=folder, trace=True)
    return folder


def known(config: RunConfig, measured: Measured) -> set[str]:
    return {name.value for name, sd in spreads(config, measured).items() if sd == MEASURED_SD}


def test_a_check_of_synchronous_rl_measures_all_that_its_arm_has(tmp_path: Path) -> None:
    """Its answers are all finished, so their mean is that of the task."""
    truth = "workload.length.mean=80"
    config, measured = merged(unknown_run(), [checked(tmp_path / "run", "scheduler.kind=conventional", truth)])
    assert known(config, measured) == {
        "decode step", "optimizer step", "weight transfer of synchronous RL", "phase switch", "mean answer",
    }  # fmt: skip
    assert config.workload.length.mean == pytest.approx(80, rel=0.2)
    assert list(measured.weights) == [True]
    assert config.hardware.weights is None
    assert config.hardware.switch is not None


def test_a_check_of_the_pipeline_leaves_switch_and_answers_open(tmp_path: Path) -> None:
    """Short answers are done first: the mean of those that a short run finished is no mean of the task."""
    config, measured = merged(unknown_run(), [checked(tmp_path / "run")])
    assert known(config, measured) == {"decode step", "optimizer step", "weight transfer of asynchronous RL"}
    assert config.workload == unknown_run().workload
    assert config.hardware.switch is None


def test_checks_of_both_arms_add_up_in_any_order(tmp_path: Path) -> None:
    folders = [checked(tmp_path / "a"), checked(tmp_path / "b", "scheduler.kind=conventional")]
    one, other = (merged(unknown_run(), order) for order in (folders, folders[::-1]))
    assert known(*one) == known(*other)
    assert one[1].weights == other[1].weights
    assert len(one[1].weights) == 2


def test_a_table_of_step_times_measures_the_decode_step(tmp_path: Path) -> None:
    """Of a folder of `measure` only the engine counts: it trains in plain torch on one accelerator."""
    run = unknown_run("hardware.model=Qwen2.5-7B", "hardware.coefficients={training_step_s=2.0}")
    trained = [f"train,1,{batch},,{batch * 500},{0.5 + batch * 0.2}," for batch in (1, 2, 4, 8)]
    table = table_of(tmp_path / "step_times.csv", *decode_rows(*GRID), *trained)
    (tmp_path / "conditions.json").write_text('{"decode_by": "vllm"}')
    assert merged(run, [table])[0].hardware.coefficients["training_step_s"] != 2.0
    config, measured = merged(run, [tmp_path])
    assert config.hardware.coefficients["training_step_s"] == 2.0
    assert "training_mfu" not in config.hardware.coefficients
    assert {"decode step"} <= known(config, measured)
    (tmp_path / "conditions.json").write_text('{"decode_by": "torch"}')
    assert "must be measured with vLLM, as `measure --model DIR` does" in message(merged, run, [tmp_path])


def test_a_hardware_file_of_calibrate_is_merged_over_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "hardware.toml"
    file.write_text('[hardware]\ngpu = "H100"\ncoefficients = { training_mfu = 0.5 }\n')
    config, measured = merged(unknown_run("hardware.coefficients={kv_efficiency=0.7}"), [tmp_path])
    assert config.hardware.coefficients == {"kv_efficiency": 0.7, "training_mfu": 0.5}
    assert known(config, measured) == {"decode step", "optimizer step"}
    assert merged(unknown_run(), []) == (unknown_run(), Measured())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.toml", None, "--measured must be a folder of `measure` or `train --check`, a step_times.csv, or a"),
        ("notes.txt", "x", "--measured must be a folder of `measure` or `train --check`, a step_times.csv, or a"),
        ("a.toml", "x = ", "a.toml is not valid TOML"),
        ("a.toml", "seed = 1", "a.toml must hold a table [hardware], as `calibrate` writes it"),
        ("a.toml", "[hardware]\ngpu = 'B200'", "a.toml is of gpu='B200', the run file has 'H100'"),
        ("a.toml", "[hardware.weights]\npublish = 1", "hardware.weights.publish"),
    ],
)
def test_a_source_without_measurements_of_this_system_is_refused(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert words in message(merged, unknown_run(), [tmp_path / name])


def test_a_mean_answer_at_the_limit_stays_below_it(tmp_path: Path) -> None:
    folder = checked(tmp_path / "run", "scheduler.kind=conventional", "workload.length={kind='fixed', max=300}")
    config, _ = merged(unknown_run(), [folder])
    assert config.workload.length.mean == 299
