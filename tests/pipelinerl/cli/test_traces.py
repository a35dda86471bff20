"""Traces of other systems at the command line: ``simulate --workload``, ``calibrate``, ``export --to``."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from command_line import Command, assert_fails, sets

FILES = Path(__file__).parents[2] / "data" / "traces"


def test_simulate_plays_a_trace_and_says_what_it_set(
    command: Command, tiny: Path, tmp_path: Path, no_figures: None
) -> None:
    trace = FILES / "applied_compute.jsonl"
    result = command("simulate", tiny, "--workload", trace, "--json", "--out", tmp_path / "run")
    assert result.status == 0, result
    assert json.loads(result.out)["environments"]["turns_mean"] > 1
    lack = "applied-compute does not have: groups, rewards, arrivals"
    assert result.err == f"pipelinerl: warning: applied_compute.jsonl: {lack}\n"
    kept = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert kept["environment"]["turns"]["source"] == str(trace)
    again = tmp_path / "again"
    changed = command("simulate", tiny, "--workload", trace, *sets("environment.count=9"), "--out", again)
    assert changed.status == 0
    assert f"of {trace}: environment={{ count = " in changed.out
    assert tomllib.loads((again / "run.toml").read_text())["environment"]["count"] == 9


def test_a_file_that_is_no_trace_is_refused_with_the_known_formats(command: Command, tiny: Path) -> None:
    assert_fails(command("simulate", tiny, "--workload", tiny), 2, "--workload must be", "mooncake", "unirl", str(tiny))


def test_calibrate_gives_the_tables_of_a_workload_and_no_hardware(command: Command, tmp_path: Path) -> None:
    result = command("calibrate", FILES / "dynamo.jsonl", "--out", tmp_path)
    assert (result.status, result.err) == (0, "")
    assert (tmp_path / "workload.toml").read_text() == result.out
    tables = tomllib.loads(result.out)
    assert set(tables) == {"workload", "environment"}
    assert "# no times of decode steps: [hardware] is not fitted" in result.out
    assert "# environment.count is not in a trace: set it" in result.out
    printed = json.loads(command("calibrate", FILES / "dynamo.jsonl", "--json").out)
    assert {name: printed[name] for name in tables} == tables
    assert_fails(command("calibrate", FILES / "dynamo.jsonl", "--out", tmp_path), 2, "workload.toml, which exists")
    assert_fails(command("calibrate", FILES / "dynamo.jsonl", "--train-step-s", 3), 2, "only --out and --json")


@pytest.mark.parametrize("name", ["mooncake", "dynamo"])
def test_export_writes_the_requests_of_a_run_once_and_simulate_reads_them(
    command: Command, tiny: Path, tmp_path: Path, no_figures: None, name: str
) -> None:
    assert command("simulate", tiny, "--out", tmp_path / "run", "--trace", "full").status == 0
    out = tmp_path / "requests.jsonl"
    result = command("export", tmp_path / "run", "--to", name, "--out", out)
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines()[0] == str(out)
    assert f"{name} does not have: " in result.out
    assert result.out.splitlines()[1].startswith(f"{len(out.read_text().splitlines())} requests of ")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("requests")) == ["requests.jsonl"]
    again = command("simulate", tiny, "--workload", out)
    assert again.status == 0, again
    assert f"of {out}: workload.length={{ kind = " in again.out
    assert_fails(command("export", tmp_path / "run", "--to", name, "--out", out), 2, "--out must be a new file")
    assert_fails(
        command("export", tmp_path / "run", "--to", "weka", "--out", out),
        2,
        "--to must be dynamo or mooncake, got 'weka'",
    )
    assert_fails(command("export", tmp_path / "none", "--to", name, "--out", tmp_path / "x"), 2, "RUN")
