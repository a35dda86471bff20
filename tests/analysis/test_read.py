"""Run folders are read as they were written; a broken file is one line."""

from __future__ import annotations

import functools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import BATCH, ENGINES, write_real_run, write_run
from numpy.testing import assert_allclose
from refusals import message

from analysis.read import read_comparison, read_run, read_runs
from backends.driver.metrics import StepMetrics
from pipelinerl.errors import ConfigError
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.steps import COLUMNS, StepRow, read_steps
from pipelinerl.rl.config import LossConfig
from pipelinerl.scheduler.events import WeightsPublished

HEADER = ",".join(COLUMNS).encode() + b"\n"


def test_a_run_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "pipe", num_steps=5))
    written = json.loads((tmp_path / "pipe" / "profile.json").read_text())
    assert (run.name, run.method, run.report.samples_trained) == ("pipe", "pipeline", 5 * BATCH)
    assert run.steps.lag_mean.tolist() == read_steps(tmp_path / "pipe" / "steps.csv").lag_mean.tolist()
    assert run.figure_data.lag_histogram.total == written["lag_histogram"]["total"]
    assert [lag is None for lag in run.figure_data.lag_by_position.lag_mean] == [False] * 31 + [True]
    blocks = written["timeline"]["trainer"]
    assert [list(block) for block in run.figure_data.timeline.trainer] == blocks
    assert len(run.figure_data.timeline.engines) == ENGINES


def test_a_blank_cell_is_nan_in_a_column_that_no_figure_needs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    text = (folder / "steps.csv").read_text()
    (folder / "steps.csv").write_text(text.replace(",0.5,1024.0", ",,1024.0"))
    assert np.isnan(read_run(folder).steps.reward_mean).all()


def test_runs_of_one_name_are_named_by_the_end_of_their_paths(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, num_steps=2) for name in ("a/run", "b/run", "c/other")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run", "c/other"]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "other"]


def test_a_folder_given_twice_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    with pytest.raises(ConfigError, match="run folders must be different"):
        read_runs([folder, folder / ".." / "run"])


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("summary.json", None, "cannot read {path}: "),
        ("summary.json", ("lag.max", None), "{path}: lag.max "),
        ("steps.csv", None, "{path} has no optimizer step yet"),
        ("steps.csv", HEADER, "{path} has no optimizer step yet"),
        ("steps.csv", HEADER + b"1,2,3,4,x" + b",6" * 10, "{path}, line 2: wait_s "),
        ("profile.json", None, "cannot read {path}: "),
        ("profile.json", ("lag_histogram.total", [1, None]), "{path}: lag_histogram.total.1 "),
        ("profile.json", ("lag_histogram.in_queue", [0, 0]), "{path}: lag_histogram.in_queue must hold a token"),
        ("profile.json", ("lag_by_position.tokens", [1]), "{path}: lag_by_position.tokens must have 32 values, got 1"),
        ("profile.json", ("timeline.trainer", [[0, 1, "resting"]]), "{path}: timeline.trainer.0.2"),
        ("profile.json", ("timeline.engines", [{"engine": 0}]), "{path}: timeline.engines.0.time_s "),
    ],
)
def test_a_broken_file_is_one_line_that_names_it_and_the_key(
    tmp_path: Path, file: str, change: bytes | tuple[str, Any] | None, error: str
) -> None:
    path = write_run(tmp_path / "run", num_steps=2) / file
    match change:
        case None:
            path.unlink()
        case bytes():
            path.write_bytes(change)
        case (key, value):
            data = json.loads(path.read_text())
            *tables, last = key.split(".")
            functools.reduce(operator.getitem, tables, data)[last] = value
            path.write_text(json.dumps(data))
    assert message(read_run, path.parent).startswith(error.format(path=path))


def test_a_comparison_without_an_arm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text('{"baseline": "a", "scenarios": [], "failures": [], "complete": true}')
    with pytest.raises(ConfigError, match=r"comparison.json has no arm yet"):
        read_comparison(tmp_path)


def test_metrics_are_a_column_each_with_nan_where_a_line_lacks_them(tmp_path: Path) -> None:
    run = read_run(write_real_run(tmp_path / "run"))
    assert run.metrics["reward/mean"].tolist() == [0.25, 0.5, -0.5]
    assert_allclose(run.metrics["ess/lag_1"], [np.nan, 0.75, 0.25])
    assert run.has_ess


def test_a_run_without_a_line_of_metrics_has_none(tmp_path: Path) -> None:
    for folder in (write_run(tmp_path / "simulated", num_steps=2), write_real_run(tmp_path / "real", [], num_steps=2)):
        run = read_run(folder)
        assert (run.metrics, run.has_ess) == ({}, False)


def test_metrics_of_a_real_run_are_read(tmp_path: Path) -> None:
    metrics, lines = StepMetrics(LossConfig()), []
    ledger = RunLedger(num_engines=1, colocated=False, longest=100)
    for step in (1, 2):
        metrics.trained(np.log([1.0, 1.0, 2.0]), [0, 0, 0])
        metrics.add_trainer_metrics({"loss": 0.1, "gradient_norm": float("inf")})  # may overflow: no figure shows it
        numbers = (step, 10.0 * step, 5.0, 1.0, 4.0, BATCH, 1000, 0.0, 0, 0.0, 0.0, 8, 0, 0.5, 15.0)
        row = StepRow(**dict(zip(COLUMNS, numbers, strict=True)))
        ledger.event(10.0 * step, WeightsPublished(step, 1.0))
        lines.append({"step": step, **metrics.take(row, ledger)})
    run = read_run(write_real_run(tmp_path / "run", lines))
    assert_allclose(run.metrics["ess/token_raw"], 16 / 18)
    assert_allclose(run.metrics["idle/trainer"], 0.4)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"step": 2, "reward/mean": 0', " is not valid JSON: Expecting ',' delimiter: line 2 column 1 (char 29)"),
        ("", " is not valid JSON: Expecting value: line 2 column 1 (char 1)"),
        ("[2]", ": must hold a table, got list"),
        ('{"reward/mean": 0.5}', ": step must be 2, got null"),
        ('{"step": 3, "reward/mean": 0.5}', ": step must be 2, got 3"),
        ('{"step": 2}', ": reward/mean is missing"),
        ('{"step": 2, "reward/mean": NaN}', ": reward/mean must be a number, got NaN"),
        ('{"step": 2, "reward/mean": 1, "ess/lag_0": Infinity}', ": ess/lag_0 must be a number, got Infinity"),
        ('{"step": 2, "reward/mean": 1, "train/loss": "x"}', ': train/loss must be a number, got "x"'),
        ('{"step": 2, "reward/mean": 1, "train/loss": true}', ": train/loss must be a number, got true"),
        (f'{{"step": 2, "reward/mean": 1{"0" * 400}}}', f": reward/mean must be a number, got 1{'0' * 76}..."),
    ],
)
def test_a_broken_line_of_metrics_is_one_line_with_its_number(tmp_path: Path, line: str, error: str) -> None:
    path = write_real_run(tmp_path / "run") / "metrics.jsonl"
    first, _, third = path.read_text().splitlines()
    path.write_text("\n".join([first, line, third]))
    assert message(read_run, path.parent) == f"{path}, line 2{error}"


def test_more_lines_of_metrics_than_steps_are_refused(tmp_path: Path) -> None:
    folder = write_real_run(tmp_path / "run", num_steps=2)
    assert message(read_run, folder) == f"{folder / 'metrics.jsonl'}, line 3: steps.csv has 2 optimizer steps only"
