"""The command line of calibrate: the file it writes, its JSON, its warnings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calibrated import GRID, NAMED, RUN, decode_rows, run_of, table_of

from pipelinerl import cli
from pipelinerl.calibration.calibrate import calibrate_table, calibrate_trace
from pipelinerl.calibration.hardware_file import doubts, hardware_toml, write_hardware
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run_file import load_run
from pipelinerl.errors import ConfigError


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["pipelinerl", "calibrate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_file_written_is_a_table_that_a_run_file_takes(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(monkeypatch, capsys, pipeline_folder, "--out", tmp_path / "new")
    text = (tmp_path / "new" / "hardware.toml").read_text()
    assert status == 0
    assert out == text
    assert text.startswith("# Calibrated from run.")
    run = tmp_path / "run.toml"
    import tomli_w

    run.write_text(tomli_w.dumps({name: value for name, value in RUN.items() if name != "hardware"}) + text)
    assert load_run(run).hardware.decode is not None
    status, _, err = call(monkeypatch, capsys, pipeline_folder, "--out", tmp_path / "new")
    assert (status, err.count("\n")) == (2, 1)
    assert "which exists" in err


def test_results_as_json(
    pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(monkeypatch, capsys, pipeline_folder, "--json")
    data = json.loads(out)
    assert status == 0
    assert set(data) == {"hardware", "fits", "notes", "warnings"}
    assert data["warnings"] == []
    assert [part["what"] for part in data["fits"]] == ["decode", "training"]


def test_a_poor_fit_is_warned_of_on_stderr_and_in_the_json_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other row takes twice as long: no line is nearer than a third to both."""
    rows = [row if index % 2 else doubled(row) for index, row in enumerate(decode_rows(*GRID))]
    source = table_of(tmp_path / "t.csv", *rows)
    status, out, err = call(monkeypatch, capsys, source, "--json")
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith(f"pipelinerl: warning: decode is a poor fit to {len(GRID)} rows of t.csv: error ")
    assert json.loads(out)["warnings"] == [err.removeprefix("pipelinerl: warning: ").rstrip()]
    status, out, err = call(monkeypatch, capsys, table_of(tmp_path / "good.csv", *decode_rows(*GRID)))
    assert (status, err) == (0, "")


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


def test_what_simulated_traces_and_kernels_give_is_not_doubted(pipeline_folder: Path) -> None:
    assert doubts(calibrate_trace(pipeline_folder)) == []
    kernels = calibrate_table(Path(__file__).parents[2] / "data" / "decode_step_kernels.csv", run_of(NAMED))
    assert doubts(kernels) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "calibrate needs SOURCE, or --run RUN.toml"),
        (("--set", "seed=1"), "--set overrides keys of --run RUN.toml"),
        (("nowhere",), "cannot read trace nowhere"),
        (("nowhere.csv",), "cannot read the table of step times nowhere.csv"),
        (("nowhere", "--train-step-s", "3"), "calibrate takes SOURCE or numbers"),
    ],
)
def test_wrong_use_ends_with_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(monkeypatch, capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_file_name_is_written_to(tmp_path: Path) -> None:
    result = calibrate_table(table_of(tmp_path / "t.csv", *decode_rows(*GRID)))
    write_hardware(tmp_path / "mine.toml", hardware_toml(result, "t.csv"))
    assert "[hardware.decode]" in (tmp_path / "mine.toml").read_text()
    assert "training was not measured" in (tmp_path / "mine.toml").read_text()
    with pytest.raises(ConfigError, match="--out must be a folder or file that can be written"):
        write_hardware(tmp_path / "mine.toml" / "x", "")
