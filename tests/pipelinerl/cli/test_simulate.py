"""`pipelinerl simulate`: what it prints and draws, what the folder holds, and what a run that fails leaves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import EMPIRICAL, RUN_FILES, STALLS, Command, Result, assert_fails, program, sets
from run_folders import everything_in, rows_of

from pipelinerl.cli.output import figures_named
from pipelinerl.config.run import load_run
from pipelinerl.pages.runs import run_page
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import RunReport


def test_the_run_folder_holds_the_run_and_the_table_its_numbers(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    result = command("simulate", tiny, "--out", tmp_path / "run")
    assert (result.status, result.err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == RUN_FILES
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["complete"]) == (6, True)
    page = run_page({"tiny": RunReport.read(tmp_path / "run" / "summary.json")})
    assert "tiny.toml: pipeline" in result.out
    assert all(cell in result.out for row in page.tables[0].rows for text in row for cell in text.splitlines())
    assert page.answer not in " ".join(result.out.split())  # the table alone
    rows = rows_of(tmp_path / "run")
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(int(row["tokens"]) for row in rows) == summary["tokens_trained"]
    printed = command("simulate", tiny, "--json", "--out", tmp_path / "again")
    assert (printed.status, printed.err) == (0, "")
    assert json.loads(printed.out) == json.loads((tmp_path / "again" / "summary.json").read_text()) == summary


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_has_seen_enough_is_no_error(tiny: Path, options: tuple[str, ...]) -> None:
    run = [*program(), "simulate", str(tiny), *options]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_without_out_nothing_is_written(command: Command, tmp_path: Path, tiny: Path) -> None:
    before = everything_in(tmp_path)
    assert command("simulate", tiny).status == 0
    assert everything_in(tmp_path) == before


def test_a_seed_gives_the_same_bytes_and_another_one_others_and_the_option_overrides_the_file(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    for name, seed in (("a", ()), ("b", ("--seed", 4)), ("c", ("--seed", 3)), ("d", ("--set", "seed=4"))):
        assert command("simulate", tiny, *seed, "--out", tmp_path / name, "--trace", "full").status == 0
    a, b, c, d = (everything_in(tmp_path / name) for name in "abcd")
    assert set(a) == {*RUN_FILES, "trace.jsonl.gz"}
    assert a == c
    assert b == d
    for name in a:
        assert a[name] != b[name], name
    assert load_run(tmp_path / "b" / "run.toml").seed == 4


def test_the_run_file_of_the_folder_makes_the_same_run_again(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.csv").write_text("prompt_id,response_tokens\n1,5\n1,50\n2,20\n")
    overrides = sets(EMPIRICAL, "workload.length.source=mine.csv", "scheduler.max_lag=2")
    assert command("simulate", tiny, *overrides, "--seed", 9, "--out", tmp_path / "a").status == 0
    monkeypatch.chdir("/")
    assert command("simulate", tmp_path / "a" / "run.toml", "--out", tmp_path / "b").status == 0
    assert everything_in(tmp_path / "a") == everything_in(tmp_path / "b")


def test_a_run_may_go_into_a_folder_that_holds_other_things(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    assert command("simulate", tiny, "--out", tmp_path).status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*RUN_FILES, "tiny.toml"])


def test_conventional_says_its_g_and_paper_mode_counts_in_flashes(command: Command, tiny: Path) -> None:
    overrides = sets("scheduler.kind=conventional", "hardware.decode={kind='utilisation', flash_s=0.001}")
    result = command("simulate", tiny, *overrides)
    summary = json.loads(command("simulate", tiny, *overrides, "--json").out)
    assert "tiny.toml: conventional G=3" in result.out
    assert summary["tokens_per_flash"] == pytest.approx(summary["tokens_per_s"] * 0.001)
    assert f"{summary['tokens_per_flash']:.2f} tokens/flash" in result.out


def test_a_run_that_fails_has_status_1_and_is_kept(command: Command, tmp_path: Path, tiny: Path) -> None:
    result = command("simulate", tiny, *sets(*STALLS), "--out", tmp_path / "run", "--trace", "full")
    assert_fails(result, 1, "stalled: ", "scheduler.discard_limit")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"] is False
    assert command("replay", tmp_path / "run").status == 0


def test_a_full_disk_has_status_1(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_recording: Recording, _row: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recording, "_step_done", full)
    result = command("simulate", tiny, "--out", tmp_path / "run")
    assert_fails(result, 1, "No space left on device")


def test_a_file_that_may_not_grow_leaves_no_traceback(tmp_path: Path, tiny: Path) -> None:
    """The real thing, as far as a test may go: a limit on the size of files."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    command = [*program(limit), "simulate", tiny, "--out", tmp_path / "run", "--set", "optimizer_steps=100"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_fails(Result(ended.returncode, ended.stdout, ended.stderr), 1, "File too large")


def test_three_figures_are_shown_and_the_others_named() -> None:
    stems = ["lag_by_position", "lag_by_step", "time_split", "reward", "throughput_against_max_lag"]
    said = figures_named([Path("out") / f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf")])
    shown = [f"  out/{stem}.png" for stem in ("throughput_against_max_lag", "time_split", "lag_by_step")]
    assert said.splitlines() == ["Figures:", *shown, "  and lag_by_position, reward"]


def test_without_matplotlib_the_numbers_are_kept_and_a_line_says_so(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in {"matplotlib", "analysis"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = command("simulate", tiny, "--out", tmp_path / "out")
    assert result.status == 0
    assert result.err.count("\n") == 1
    assert "matplotlib is not installed" in result.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == RUN_FILES
