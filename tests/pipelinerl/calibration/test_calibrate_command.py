"""The command line of calibrate: the file it writes, its JSON, its warnings."""

import json
from dataclasses import astuple
from pathlib import Path

import pytest
import tomli_w
from calibrated import GRID, NAMED, RUN, decode_rows, run_of, table_of
from command_line import Command, assert_fails

from pipelinerl.calibration.calibrate import calibrate_table, calibrate_trace, doubts, hardware_toml, write_hardware
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import load_run
from pipelinerl.errors import ConfigError


def test_the_file_written_is_a_table_that_a_run_file_takes(
    command: Command, pipeline_folder: Path, tmp_path: Path
) -> None:
    result = command("calibrate", pipeline_folder, "--out", tmp_path / "new")
    text = (tmp_path / "new" / "hardware.toml").read_text()
    assert (result.status, result.out) == (0, text)
    assert text.startswith("# Calibrated from run.")
    run = tmp_path / "run.toml"
    run.write_text(tomli_w.dumps({name: value for name, value in RUN.items() if name != "hardware"}) + text)
    assert load_run(run).hardware.decode is not None
    again = command("calibrate", pipeline_folder, "--out", tmp_path / "new")
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert "which exists" in again.err


def test_results_as_json(command: Command, pipeline_folder: Path) -> None:
    result = command("calibrate", pipeline_folder, "--json")
    data = json.loads(result.out)
    assert result.status == 0
    assert set(data) == {"hardware", "fits", "notes", "warnings"}
    assert data["warnings"] == []
    assert [part["what"] for part in data["fits"]] == ["decode", "training"]


def test_a_poor_fit_is_warned_of_on_stderr_and_in_the_json_and_is_no_failure(command: Command, tmp_path: Path) -> None:
    """Every other row takes twice as long: no line is nearer than a third to both."""
    rows = [row if index % 2 else doubled(row) for index, row in enumerate(decode_rows(*GRID))]
    source = table_of(tmp_path / "t.csv", *rows)
    status, out, err = astuple(command("calibrate", source, "--json"))
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith(f"pipelinerl: warning: decode is a poor fit to {len(GRID)} rows of t.csv: error ")
    assert json.loads(out)["warnings"] == [err.removeprefix("pipelinerl: warning: ").rstrip()]
    good = command("calibrate", table_of(tmp_path / "good.csv", *decode_rows(*GRID)))
    assert (good.status, good.err) == (0, "")


def doubled(row: str) -> str:
    *cells, seconds, last = row.split(",")
    return ",".join([*cells, str(2 * float(seconds)), last])


def test_a_share_of_the_peak_that_is_all_of_it_is_warned_of(tmp_path: Path) -> None:
    """Prefill in a third of the time that the optimistic level needs cannot be."""
    run = run_of(NAMED)
    prefill = resolved_hardware(run).prefill
    rows = [f"prefill,1,1,,{n},{(prefill.token_s * n + prefill.token_squared_s * n**2) / 3}," for n in (256, 512, 1024)]
    (line,) = [one for one in doubts(calibrate_table(table_of(tmp_path / "t.csv", *rows), run)) if "bound" in one]
    assert line.startswith("prefill_mfu came out at its bound, 1: prefill is as fast as the accelerator can be")


def test_fits_of_simulated_traces_and_kernels_are_not_doubted(pipeline_folder: Path) -> None:
    assert doubts(calibrate_trace(pipeline_folder)) == []
    kernels = calibrate_table(Path(__file__).parents[2] / "data" / "decode_step_kernels.csv", run_of(NAMED))
    assert doubts(kernels) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "calibrate needs SOURCE, or --run RUN.toml"),
        (("--set", "seed=1"), "--set overrides keys of --run RUN.toml"),
        (("--hardware", "hw.toml"), "--hardware takes the place of a table of --run RUN.toml"),
        (("nowhere",), "cannot read trace nowhere"),
        (("nowhere.csv",), "cannot read the table of step times nowhere.csv"),
        (("nowhere", "--train-step-s", "3"), "calibrate takes SOURCE or numbers"),
    ],
)
def test_wrong_use_ends_with_one_line_and_status_2(command: Command, arguments: tuple[str, ...], message: str) -> None:
    assert_fails(command("calibrate", *arguments), 2, message)


def test_a_file_name_is_written_to(tmp_path: Path) -> None:
    result = calibrate_table(table_of(tmp_path / "t.csv", *decode_rows(*GRID)))
    write_hardware(tmp_path / "mine.toml", hardware_toml(result, "t.csv"))
    assert "[hardware.decode]" in (tmp_path / "mine.toml").read_text()
    assert "training was not measured" in (tmp_path / "mine.toml").read_text()
    with pytest.raises(ConfigError, match="--out must be a folder or file that can be written"):
        write_hardware(tmp_path / "mine.toml" / "x", "")
