"""Figures show what the run folder holds: every number is read back from the artists of the figure."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.testing import assert_allclose

from analysis import figures, learning
from analysis.canvas import handy_time
from analysis.read import Comparison, RateCurves, RatePoint, Run, rate_points, read_comparison, read_run, read_runs
from analysis.report import save_figures
from analysis.style import ACTIVITY_COLORS, METHOD_HUES, series_styles, tone
from backends.step_metrics import StepMetrics
from pipelinerl.errors import ConfigError
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.steps import COLUMNS, StepRow
from pipelinerl.scheduler.events import WeightsPublished

BATCH, SLOTS, LONGEST_TOKENS, ENGINES = 64, 64, 2048, 4


def write_run(folder: Path, *, rl_step: int | None = None, num_steps: int = 40) -> Path:
    """Write a small run folder of realistic shape: conventional with G = ``rl_step``, or pipeline if that is None.

    Rates are made up; the lag follows theory: step i of an RL step has lag i, and a pipeline with lengths uniform
    on 1..L and g = 8 has a mean lag of g (1 - p / L) / 2 at position p.
    """
    folder.mkdir(parents=True)
    rows = _pipeline_rows(num_steps) if rl_step is None else _conventional_rows(num_steps, rl_step)
    with (folder / "steps.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "summary.json").write_text(json.dumps(_summary(rows, rl_step)))
    (folder / "profile.json").write_text(json.dumps(_profile(rows, rl_step)))
    return folder


def _pipeline_rows(num_steps: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(1)
    rows, time_s = [], 0.0
    for step in range(1, num_steps + 1):
        train_s, publish_s, wait_s = 14.4, 0.5, float(rng.uniform(0.5, 3.0))
        time_s += train_s + publish_s + wait_s
        in_flight, in_queue = 8 / 3 * (1 - np.exp(-step / 8)) + rng.normal(0, 0.1), rng.uniform(0.3, 0.6)
        top = min(step - 1, int(rng.integers(7, 10)))
        rows.append(_row(step, time_s, (train_s, publish_s, wait_s), (in_flight, in_queue), top))
    return rows


def _conventional_rows(num_steps: int, rl_step: int) -> list[dict[str, float]]:
    rows, time_s = [], 0.0
    for step in range(1, num_steps + 1):
        lag = (step - 1) % rl_step
        wait_s = 40.0 + 12.0 * rl_step if lag == 0 else 0.0
        publish_s = 0.5 if lag == rl_step - 1 else 0.0
        time_s += 9.0 + wait_s + publish_s
        rows.append(_row(step, time_s, (9.0, publish_s, wait_s), (0.0, float(lag)), lag))
    return rows


def _row(step: int, time_s: float, seconds: tuple[float, ...], lags: tuple[float, float], top: int) -> dict[str, float]:
    (train_s, publish_s, wait_s), (flight, queue) = seconds, lags
    return {
        "step": step,
        "time_s": time_s,
        "train_s": train_s,
        "publish_s": publish_s,
        "wait_s": wait_s,
        "samples": BATCH,
        "tokens": BATCH * LONGEST_TOKENS / 2,
        "lag_mean": flight + queue,
        "lag_max": top,
        "lag_in_flight_mean": flight,
        "lag_in_queue_mean": queue,
        "in_progress": SLOTS * ENGINES,
        "ready": 10,
        "reward_mean": 0.5,
        "length_mean": LONGEST_TOKENS / 2,
    }


def _summary(rows: list[dict[str, float]], rl_step: int | None) -> dict[str, object]:
    duration_s, waited_s = rows[-1]["time_s"], sum(row["wait_s"] for row in rows)
    return {
        "scheduler": "pipeline" if rl_step is None else "conventional",
        "optimizer_steps": len(rows),
        "duration_s": duration_s,
        "samples_trained": BATCH * len(rows),
        "tokens_per_s": sum(row["tokens"] for row in rows) / duration_s,
        "lag": {"mean": 3.0, "max": max(row["lag_max"] for row in rows)},
        "utilisation": {"generation": 0.97 if rl_step is None else 0.41, "training": 1 - waited_s / duration_s},
        "seconds": {
            "generating": 0.0 if rl_step is None else waited_s,
            "training": sum(row["train_s"] for row in rows),
            "publishing": sum(row["publish_s"] for row in rows),
            "waiting_for_data": waited_s if rl_step is None else 0.0,
        },
    }


def _profile(rows: list[dict[str, float]], rl_step: int | None) -> dict[str, object]:
    position = (np.arange(32) + 0.5) / 32
    lag = 4 * (1 - position) if rl_step is None else np.full(32, (rl_step - 1) / 2)
    if rl_step is None:
        in_flight, in_queue = 1e6 * np.arange(9, 0, -1), 1e6 * np.array([30, 13, 2])
        total = np.convolve(in_flight, in_queue) / 45e6
    else:
        in_flight, in_queue = np.array([1e6 * rl_step]), np.full(rl_step, 1e6)
        total = in_queue
    time = np.linspace(0, 1, 60)
    busy = np.ones(60) if rl_step is None else np.clip(1.2 * (1 - time), 0, 1)
    until_s = 260.0
    return {
        "lag_by_position": {
            "width_tokens": LONGEST_TOKENS / 32,
            "lag_mean": [*lag[:-1].tolist(), None],
            "tokens": [*(1e6 * (1 - position[:-1])).tolist(), 0],
        },
        "lag_histogram": {"total": total.tolist(), "in_flight": in_flight.tolist(), "in_queue": in_queue.tolist()},
        "generation_window": {
            "start_s": 0.0,
            "width_s": 2.0 if rl_step is None else 0.7 + 0.1 * rl_step,
            "in_progress": (SLOTS * ENGINES * busy).tolist(),
            "tokens_per_s": (9000 * busy / (0.4 + 0.6 * busy)).tolist(),
        },
        "timeline": _timeline(rows, rl_step, until_s),
    }


def _timeline(rows: list[dict[str, float]], rl_step: int | None, until_s: float) -> dict[str, object]:
    rng = np.random.default_rng(2)
    trainer, updates, phases = [], [], []
    for row in rows:
        end = row["time_s"] - row["publish_s"]
        trainer.append([end - row["train_s"], end, "training"])
        if row["wait_s"]:
            phases.append((end - row["train_s"] - row["wait_s"], row["wait_s"]))
        if row["publish_s"]:
            trainer.append([end, row["time_s"], "publishing"])
            updates.append({"version": row["step"], "published_s": row["time_s"], "loaded_s": row["time_s"] + 1.0})
    engines = []
    for engine in range(ENGINES):
        if rl_step is None:
            times = np.arange(0, until_s, 1.0)
            counts = SLOTS - rng.integers(0, 3, len(times))
            paused = [[one["published_s"], one["loaded_s"]] for one in updates if one["loaded_s"] < until_s]
        else:
            paused = []
            drain = [
                (start + wait * np.sort(rng.beta(2, 2, SLOTS)), np.arange(SLOTS - 1, -1, -1)) for start, wait in phases
            ]
            times = np.concatenate([[start, *ends] for (start, _), (ends, _) in zip(phases, drain, strict=True)])
            counts = np.concatenate([[SLOTS, *left] for _, left in drain])
        keep = times < until_s
        engines.append(
            {
                "engine": engine,
                "time_s": times[keep].tolist(),
                "in_progress": counts[keep].tolist(),
                "paused": paused,
            }
        )
    return {
        "until_s": until_s,
        "trainer": [[start, min(end, until_s), what] for start, end, what in trainer if start < until_s],
        "engines": engines,
        "updates": [one for one in updates if one["published_s"] < until_s],
    }


METRICS: list[dict[str, float]] = [
    {"step": 1, "reward/mean": 0.25, "ess/token_raw": 1.0, "ess/token_truncated": 1.0, "ess/lag_0": 1.0},
    {"step": 2, "reward/mean": 0.5, "ess/token_raw": 0.75, "ess/token_truncated": 0.875, "ess/lag_0": 0.5}
    | {"ess/lag_1": 0.75, "ess/lag_10": 0.25},
    {"step": 3, "reward/mean": -0.5, "ess/token_raw": 0.5, "ess/token_truncated": 0.625, "ess/lag_1": 0.25},
]
"""What a real run of three optimizer steps logs, as far as figures show it."""


def write_real_run(folder: Path, lines: list[dict[str, float]] = METRICS, **keywords: Any) -> Path:
    """Write a small run folder with metrics, by default of as many steps as those."""
    write_run(folder, **{"num_steps": len(lines)} | keywords)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def with_metrics(runs: list[Run]) -> list[Run]:
    """Return runs of 200 steps as if they were real."""
    rng = np.random.default_rng(3)
    metrics = {"reward/mean": rng.uniform(0, 1, 200), "ess/token_raw": rng.uniform(0.8, 0.9, 200)}
    metrics |= {"ess/token_truncated": rng.uniform(0.9, 1, 200)}
    metrics |= {f"ess/lag_{lag}": np.full(200, 1 - lag / 50) for lag in range(9)}
    return [replace(run, metrics=metrics) for run in runs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A pipeline, and conventional with G = 32 and G = 8, in this order."""
    root = tmp_path_factory.mktemp("runs")
    folders = [write_run(root / "pipeline", num_steps=200)]
    folders += [write_run(root / f"conventional G={g}", rl_step=g, num_steps=200) for g in (32, 8)]
    return read_runs(folders)


@pytest.fixture(scope="module")
def comparison(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    speedups = {"central": (1.5, 1.0, 0.6), "long tail": (1.8, 1.0, 0.5)}
    data = {
        "baseline": runs[1].name,
        "scenarios": [
            {
                "name": name,
                "arms": [
                    {"name": run.name, "folder": f"{name}/{run.name}", "speedup": speedup, "summary": run.summary}
                    for run, speedup in zip(runs, values, strict=True)
                ],
            }
            for name, values in speedups.items()
        ],
    }
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "comparison.json").write_text(json.dumps(data))
    return read_comparison(folder)


CURVES = RateCurves(
    max_lag=np.array([8.0, 132.0]), pipeline=np.array([1.10, 16.90]), conventional=np.array([1.18, 10.69])
)
POINTS = [RatePoint("conventional", 133, 10.4), RatePoint("pipeline", 132, 16.2), RatePoint("pipeline", 64, 8.1)]

FIGURES: dict[str, Callable[[list[Run], Comparison], Figure]] = {
    "lag_by_position": lambda runs, _: figures.lag_by_position(runs),
    "lag_by_step": lambda runs, _: figures.lag_by_step(runs),
    "lag_histogram": lambda runs, _: figures.lag_histogram(runs),
    "throughput_against_max_lag": lambda *_: figures.throughput_against_max_lag(POINTS, CURVES, "tokens/flash"),
    "generation_phase": lambda runs, _: figures.generation_phase(runs),
    "samples_against_time": lambda runs, _: figures.samples_against_time(runs),
    "timeline": lambda runs, _: figures.timeline(runs[0]),
    "time_split": lambda runs, _: figures.time_split(runs),
    "speedup_by_scenario": lambda _, comparison: figures.speedup_by_scenario(comparison),
    "ess": lambda runs, _: learning.ess(with_metrics(runs)),
    "reward": lambda runs, _: learning.reward(with_metrics(runs)),
}


def labels_of(figure: Figure) -> list[str]:
    """Every label of the axes and of the whole figure."""
    own = [figure.get_supxlabel(), figure.get_supylabel()]
    return [text for text in own + [t for a in figure.axes for t in (a.get_xlabel(), a.get_ylabel())] if text]


# ------------------------------------------------------------------------------------------- reading


def test_a_run_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "pipe", num_steps=5))
    written = json.loads((tmp_path / "pipe" / "profile.json").read_text())
    with (tmp_path / "pipe" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (run.name, run.method, run.number("samples_trained")) == ("pipe", "pipeline", 5 * BATCH)
    assert run.steps["lag_mean"].tolist() == [float(row["lag_mean"]) for row in rows]
    assert run.profile.lag_histogram.total.tolist() == written["lag_histogram"]["total"]
    assert np.isnan(run.profile.lag_by_position.lag_mean).tolist() == [False] * 31 + [True]
    blocks = written["timeline"]["trainer"]
    assert run.profile.timeline.publishing_s.tolist() == [block[:2] for block in blocks if block[2] == "publishing"]
    assert len(run.profile.timeline.training_s) + len(run.profile.timeline.publishing_s) == len(blocks)
    assert len(run.profile.timeline.engines) == ENGINES


def test_a_blank_cell_is_not_a_number_where_no_figure_needs_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    text = (folder / "steps.csv").read_text()
    (folder / "steps.csv").write_text(text.replace(",0.5,1024.0", ",,1024.0"))
    assert np.isnan(read_run(folder).steps["reward_mean"]).all()


def test_runs_of_one_name_are_told_apart_by_the_end_of_their_paths(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, num_steps=2) for name in ("a/run", "b/run", "c/other")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run", "c/other"]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "other"]


def test_a_folder_given_twice_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    with pytest.raises(ConfigError, match="run folders must be different"):
        read_runs([folder, folder / ".." / "run"])


def _set(data: dict[str, Any], key: str, *value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        data = data[table]
    if value:
        data[last] = value[0]
    else:
        del data[last]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("summary.json", ("scheduler",), "scheduler is missing"),
        ("summary.json", ("scheduler", 3), "scheduler must be a string, got 3"),
        ("summary.json", ("lag.max",), "lag.max is missing"),
        ("summary.json", ("lag", 3), "lag.max is missing"),
        ("summary.json", ("lag.max", None), "lag.max must be a number, got null"),
        ("summary.json", ("seconds.training", True), "seconds.training must be a number, got true"),
        ("summary.json", ("duration_s", float("nan")), "duration_s must be a number, got NaN"),
        ("profile.json", ("lag_histogram.total", "x"), "lag_histogram.total must be a list of numbers"),
        ("profile.json", ("lag_histogram.total", [1, None]), "lag_histogram.total must be a list of numbers"),
        ("profile.json", ("lag_histogram.in_queue", [0, 0]), "lag_histogram.in_queue must hold a token"),
        ("profile.json", ("lag_by_position.tokens", [1]), "lag_by_position.tokens must have 32 values, got 1"),
        ("profile.json", ("timeline.engines", 4), "timeline.engines must be a list of tables"),
        (
            "profile.json",
            ("timeline.trainer", [[0, "a", "training"]]),
            "timeline.trainer must be a list of [start, end]",
        ),
        ("profile.json", ("timeline.trainer", 4), "timeline.trainer must be a list of [start, end]"),
        ("profile.json", ("timeline.engines", [{"engine": 0}]), "time_s is missing"),
        (
            "profile.json",
            ("timeline.engines", [{"engine": 0, "time_s": [], "in_progress": [], "paused": [[1, 2, 3]]}]),
            "paused must be a list of [start, end]",
        ),
    ],
)
def test_a_wrong_value_is_one_line_that_names_file_and_key(
    tmp_path: Path, file: str, change: tuple[Any, ...], message: str
) -> None:
    path = write_run(tmp_path / "run", num_steps=2) / file
    data = json.loads(path.read_text())
    _set(data, *change)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        read_run(path.parent)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", None, "cannot read {path}: No such file or directory"),
        ("summary.json", b"\xff", "cannot read {path}: it is not UTF-8 text"),
        ("summary.json", b"{", "{path} is not valid JSON: "),
        ("summary.json", b"[]", "{path} must hold a table, got list"),
        ("steps.csv", None, "cannot read {path}: No such file or directory"),
        ("steps.csv", b"", "{path} lacks the columns step, time_s, samples, lag_mean, lag_max"),
        ("steps.csv", b"step,time_s,samples,lag_mean,lag_max\n", "{path} has no optimizer step yet"),
        ("steps.csv", b"step,time_s,samples,lag_mean,lag_max\n1,2", "{path}, line 2: must have 5 values, got 2"),
        ("steps.csv", b"step,time_s,samples,lag_mean,lag_max\n1,2,3,4,x", "{path}: could not convert"),
        (
            "steps.csv",
            b"step,time_s,samples,lag_mean,lag_max\n1,2,3,,5",
            "{path}: lag_mean must be a number in every row",
        ),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path: Path, file: str, text: bytes | None, message: str) -> None:
    path = write_run(tmp_path / "run", num_steps=2) / file
    path.unlink() if text is None else path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_run(path.parent)
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)


def test_a_comparison_without_an_arm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text('{"baseline": "a", "scenarios": []}')
    with pytest.raises(ConfigError, match=r"comparison.json has no arm yet"):
        read_comparison(tmp_path)


def test_metrics_are_a_column_each_with_nan_where_a_line_lacks_them(tmp_path: Path) -> None:
    run = read_run(write_real_run(tmp_path / "run"))
    assert run.metrics["reward/mean"].tolist() == [0.25, 0.5, -0.5]
    assert_allclose(run.metrics["ess/lag_1"], [np.nan, 0.75, 0.25])
    assert run.has_ess


@pytest.mark.parametrize("text", [None, ""])
def test_a_run_without_a_line_of_metrics_has_none(tmp_path: Path, text: str | None) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    if text is not None:
        (folder / "metrics.jsonl").write_text(text)
    run = read_run(folder)
    assert (run.metrics, run.has_ess) == ({}, False)


def test_what_a_real_run_logs_is_read(tmp_path: Path) -> None:
    metrics, lines = StepMetrics(truncation=5.0), []
    books = RunLedger(num_engines=1, colocated=False, longest=100)
    for step in (1, 2):
        metrics.trained(np.log([1.0, 1.0, 2.0]), [0, 0, 0])
        metrics.trainer_said({"loss": 0.1, "gradient_norm": float("inf")})  # may overflow: no figure shows it
        numbers = (step, 10.0 * step, 5.0, 1.0, 4.0, BATCH, 1000, 0.0, 0, 0.0, 0.0, 8, 0, 0.5, 15.0)
        row = StepRow(**dict(zip(COLUMNS, numbers, strict=True)))
        books.event(10.0 * step, WeightsPublished(step, 1.0))
        lines.append({"step": step, **metrics.take(row, books)})
    run = read_run(write_real_run(tmp_path / "run", lines))
    assert_allclose(run.metrics["ess/token_raw"], 16 / 18)
    assert_allclose(run.metrics["idle/trainer"], 0.4)


def test_a_log_that_ends_before_the_table_of_steps_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    run = read_run(write_real_run(tmp_path / "run", num_steps=5))
    assert [len(line.get_xdata()) for axes in learning.reward([run]).axes for line in axes.lines] == [3, 3, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 2, "reward/mean": 0', ", column 29: not valid JSON: Expecting ',' delimiter"),
        ("", ", column 1: not valid JSON: Expecting value"),
        ("[2]", ": must hold a table, got list"),
        ('{"reward/mean": 0.5}', ": step must be 2, got null"),
        ('{"step": 3, "reward/mean": 0.5}', ": step must be 2, got 3"),
        ('{"step": 2}', ": reward/mean is missing"),
        ('{"step": 2, "reward/mean": NaN}', ": reward/mean must be a number, got NaN"),
        ('{"step": 2, "reward/mean": 1, "ess/lag_0": Infinity}', ": ess/lag_0 must be a number, got Infinity"),
        ('{"step": 2, "reward/mean": 1, "train/loss": "x"}', ': train/loss must be a number, got "x"'),
        ('{"step": 2, "reward/mean": 1, "train/loss": true}', ": train/loss must be a number, got true"),
        (f'{{"step": 2, "reward/mean": 1{"0" * 400}}}', f": reward/mean must be a number, got 1{'0' * 400}"),
    ],
)
def test_a_broken_line_of_metrics_is_one_line_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write_real_run(tmp_path / "run") / "metrics.jsonl"
    first, _, third = path.read_text().splitlines()
    path.write_text("\n".join([first, line, third]))
    with pytest.raises(ConfigError) as caught:
        read_run(path.parent)
    assert str(caught.value) == f"{path}, line 2{message}"


def test_more_lines_of_metrics_than_steps_are_refused(tmp_path: Path) -> None:
    folder = write_real_run(tmp_path / "run", num_steps=2)
    with pytest.raises(ConfigError) as caught:
        read_run(folder)
    assert str(caught.value) == f"{folder / 'metrics.jsonl'}, line 3: steps.csv has 2 optimizer steps only"


# ------------------------------------------------------------------------------------------- figures


def test_lag_by_position_shows_the_bins_at_their_middle(runs: list[Run]) -> None:
    [axes] = figures.lag_by_position(runs).axes
    assert [line.get_label() for line in axes.lines] == [run.name for run in runs]
    for line, run in zip(axes.lines, runs, strict=True):
        assert_allclose(line.get_xdata(), 32 + 64 * np.arange(32))  # 2048 tokens in 32 bins
        assert_allclose(line.get_ydata(), run.profile.lag_by_position.lag_mean)


def test_lag_by_step_of_a_short_run_is_what_the_table_says(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rl_step=4, num_steps=150))
    [axes] = figures.lag_by_step([run]).axes
    largest, mean = axes.lines
    assert_allclose(mean.get_xdata(), np.arange(1, 151))
    assert_allclose(mean.get_ydata(), np.arange(150) % 4)
    assert_allclose(largest.get_ydata(), run.steps["lag_max"])


def test_lag_by_step_of_a_long_run_ends_with_100_steps_as_they_are(runs: list[Run]) -> None:
    panels = figures.lag_by_step(runs).axes
    assert len(panels) == 2 * len(runs)
    for axes, run in zip(panels[1::2], runs, strict=True):
        largest, mean = axes.lines
        assert_allclose(mean.get_xdata(), np.arange(101, 201))
        assert_allclose(mean.get_ydata(), run.steps["lag_mean"][100:])
        assert_allclose(largest.get_ydata(), run.steps["lag_max"][100:])


@pytest.mark.parametrize(("index", "rl_step"), [(1, 32), (2, 8)])
def test_a_sawtooth_becomes_a_flat_mean_in_a_band_from_0_to_its_top(runs: list[Run], index: int, rl_step: int) -> None:
    axes = figures.lag_by_step(runs).axes[2 * index]
    mean, largest = axes.lines
    assert_allclose(mean.get_ydata(), (rl_step - 1) / 2)
    assert_allclose(largest.get_ydata(), rl_step - 1)
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0, rl_step - 1)


def test_lag_by_step_takes_a_run_far_shorter_than_the_others(runs: list[Run], tmp_path: Path) -> None:
    short = read_run(write_run(tmp_path / "short", num_steps=1))
    mean, _ = figures.lag_by_step([runs[0], short]).axes[2].lines
    assert_allclose(mean.get_ydata(), short.steps["lag_mean"])


def test_lag_histogram_shows_shares_that_sum_to_all_tokens_and_means_that_add_up(runs: list[Run]) -> None:
    panels = figures.lag_histogram(runs).axes
    assert len(panels) == 3 * len(runs)
    for at, run in enumerate(runs):
        means = []
        for axes, name in zip(panels[3 * at : 3 * at + 3], ("total", "in_flight", "in_queue"), strict=True):
            [bars] = axes.patches
            tokens = getattr(run.profile.lag_histogram, name)
            assert_allclose(bars.get_data().values, 100 * tokens / tokens.sum())
            assert_allclose(bars.get_data().edges, np.arange(len(tokens) + 1) - 0.5)
            means.append(float(axes.get_title(loc="left").rsplit(" ", 1)[1]))
        assert means[0] == pytest.approx(means[1] + means[2], abs=0.015)  # three numbers of two decimals
        assert panels[3 * at].get_title(loc="left").startswith(run.name)


def test_throughput_against_max_lag_shows_points_in_order_of_lag_and_both_curves() -> None:
    [axes] = figures.throughput_against_max_lag(POINTS, CURVES, "tokens/flash").axes
    drawn = {line.get_label(): np.column_stack(line.get_data()).tolist() for line in axes.lines}
    assert drawn == {
        "pipeline, model": [[8, 1.10], [132, 16.90]],
        "conventional, model": [[8, 1.18], [132, 10.69]],
        "pipeline, runs": [[64, 8.1], [132, 16.2]],
        "conventional, runs": [[133, 10.4]],
    }
    assert axes.get_ylabel() == "throughput (tokens/flash)"


def test_throughput_in_tokens_per_second_cannot_be_drawn_with_curves_in_flashes() -> None:
    with pytest.raises(ConfigError, match="points must be in tokens/flash"):
        figures.throughput_against_max_lag(POINTS, CURVES)
    with pytest.raises(ConfigError, match="needs a point or a curve"):
        figures.throughput_against_max_lag([])


def test_runs_are_compared_in_flashes_only_if_all_know_them(runs: list[Run]) -> None:
    in_flashes = [replace(run, summary={**run.summary, "tokens_per_flash": 2.5}) for run in runs]
    assert rate_points(in_flashes) == ([RatePoint(r.method, r.number("lag.max"), 2.5) for r in runs], "tokens/flash")
    points, unit = rate_points([*in_flashes[:1], runs[1]])
    assert unit == "tokens/s"
    assert [point.rate for point in points] == [run.number("tokens_per_s") for run in runs[:2]]


def test_generation_phase_shows_both_series_on_one_time_axis(runs: list[Run]) -> None:
    upper, lower = figures.generation_phase(runs).axes
    assert upper.get_shared_x_axes().joined(upper, lower)
    assert lower.get_xlabel() == "time from the start of generation (min)"  # the longest lasts 60 * 3.9 s
    for run, counts, rates in zip(runs, upper.lines, lower.lines, strict=True):
        window = run.profile.generation_window
        assert_allclose(counts.get_xdata(), (np.arange(60) + 0.5) * window.width_s / 60)
        assert_allclose(counts.get_ydata(), window.in_progress)
        assert_allclose(rates.get_ydata(), window.tokens_per_s / 1000)
    assert lower.get_ylabel() == "generation\n(thousand tokens/s)"


def test_samples_against_time_rises_by_a_batch_at_the_end_of_each_step(runs: list[Run]) -> None:
    [axes] = figures.samples_against_time(runs).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (min)", "trained (thousand samples)")
    for line, run in zip(axes.lines, runs, strict=True):
        assert_allclose(line.get_xdata(), np.append(0, run.steps["time_s"]) / 60)
        assert_allclose(line.get_ydata(), BATCH * np.arange(201) / 1000)


def test_timeline_shows_every_engine_block_pause_and_update(runs: list[Run]) -> None:
    line = runs[0].profile.timeline
    figure = figures.timeline(runs[0])
    [axes] = figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["engine 0", "engine 1", "engine 2", "engine 3", "trainer"]
    areas, blocks = axes.collections[:ENGINES], axes.collections[ENGINES : ENGINES + 2]
    for area, engine, bottom in zip(areas, line.engines, (4, 3, 2, 1), strict=True):
        top = area.get_paths()[0].vertices[:, 1].max()
        assert top == pytest.approx(bottom + 0.8 * engine.in_progress.max() / SLOTS)
    for block, spans in zip(blocks, (line.training_s, line.publishing_s), strict=True):
        ends = np.array([[path.vertices[:, 0].min(), path.vertices[:, 0].max()] for path in block.get_paths()])
        assert_allclose(ends * 60, spans)  # 260 s are drawn in minutes
    pauses = np.array([[bar.get_x(), bar.get_x() + bar.get_width()] for bar in axes.patches])
    assert_allclose(pauses * 60, np.concatenate([engine.paused_s for engine in line.engines]))
    updates = [lines.get_paths()[0].vertices[0, 0] * 60 for lines in axes.collections[ENGINES + 2 :]]
    assert_allclose(updates, [published_s for _, published_s in line.updates])
    assert [text.get_text() for text in axes.texts] == [str(version) for version, _ in line.updates[::2]]


def test_timeline_leaves_the_row_of_an_engine_that_never_worked_empty(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    data = json.loads((folder / "profile.json").read_text())
    data["timeline"]["engines"][1].update(time_s=[], in_progress=[], paused=[])
    (folder / "profile.json").write_text(json.dumps(data))
    [axes] = figures.timeline(read_run(folder)).axes
    feet = [area.get_paths()[0].vertices[:, 1].min() for area in axes.collections[: ENGINES - 1]]
    assert feet == [4, 2, 1]


def test_timeline_scale_names_the_most_sequences_in_progress(runs: list[Run]) -> None:
    figure = figures.timeline(runs[0])
    [legend] = figure.legends
    assert legend.get_texts()[0].get_text() == f"sequences in progress (full height: {SLOTS})"
    assert "engine paused" in [text.get_text() for text in legend.get_texts()]
    [legend] = figures.timeline(runs[1]).legends
    assert "engine paused" not in [text.get_text() for text in legend.get_texts()]  # a conventional run has no pause


def test_time_split_stacks_seconds_per_1000_samples_and_writes_the_shares(runs: list[Run]) -> None:
    [axes] = figures.time_split(runs).axes
    kinds = ("generating", "training", "publishing", "waiting_for_data")
    for at, run in enumerate(runs):
        bars = [container[at] for container in axes.containers]
        seconds = np.array([run.number(f"seconds.{kind}") for kind in kinds])
        assert_allclose([bar.get_width() for bar in bars], seconds / (BATCH * 200) * 1000)
        assert_allclose([bar.get_x() for bar in bars[1:]], np.cumsum([bar.get_width() for bar in bars[:-1]]))
        assert_allclose(bars[-1].get_x() + bars[-1].get_width(), run.number("duration_s") / (BATCH * 200) * 1000)
        assert [to_hex(bar.get_facecolor()) for bar in bars] == [ACTIVITY_COLORS[kind] for kind in kinds]
    texts = [text.get_text() for text in axes.texts]
    run = runs[0]
    assert f"{run.number('seconds.training') / run.number('duration_s'):.0%}" in texts
    assert "97%" in texts  # utilisation of generation
    assert f"{run.number('utilisation.training'):.0%}" in texts


def test_speedup_by_scenario_marks_each_arm_in_each_row(comparison: Comparison) -> None:
    [axes] = figures.speedup_by_scenario(comparison).axes
    drawn = {line.get_label(): np.column_stack(line.get_data()).tolist() for line in axes.lines}
    assert drawn["pipeline"] == [[1.5, 0], [1.8, 1]]
    assert drawn["conventional G=8"] == [[0.6, 0], [0.5, 1]]
    assert [x for x, _ in drawn["conventional G=32 (baseline)"]] == [1.0, 1.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["central", "long tail"]


def test_ess_shows_each_step_raw_and_truncated_and_the_mean_of_each_lag(tmp_path: Path) -> None:
    left, right = learning.ess([read_run(write_real_run(tmp_path / "run"))]).axes
    raw, truncated = left.lines
    assert np.column_stack(raw.get_data()).tolist() == [[1, 1.0], [2, 0.75], [3, 0.5]]
    assert np.column_stack(truncated.get_data()).tolist() == [[1, 1.0], [2, 0.875], [3, 0.625]]
    assert (raw.get_linestyle(), truncated.get_linestyle()) == ("-", "--")
    [by_lag] = right.lines
    assert np.column_stack(by_lag.get_data()).tolist() == [[0, 0.75], [1, 0.5], [10, 0.25]]  # steps that have the lag
    assert left.get_ylim() == right.get_ylim() == pytest.approx((0.22, 1.03))


def test_ess_of_1_shows_in_full(tmp_path: Path) -> None:
    left, right = learning.ess([read_run(write_real_run(tmp_path / "run", METRICS[:1]))]).axes
    assert left.get_ylim()[0] < 1.0 < left.get_ylim()[1]
    assert right.lines[0].get_ydata().tolist() == [1.0]


def test_ess_is_drawn_without_what_was_not_logged(tmp_path: Path) -> None:
    left, right = learning.ess(
        [read_run(write_real_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.0, "ess/token_raw": 0.5}]))]
    ).axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[0.5]]
    assert [len(line.get_ydata()) for line in right.lines] == [0]


def test_reward_is_shown_against_steps_samples_and_time(tmp_path: Path) -> None:
    run = read_run(write_real_run(tmp_path / "run", rl_step=1))  # 61.5 s per step
    steps, samples, time = learning.reward([run]).axes
    for axes, position in ((steps, [1, 2, 3]), (samples, [64, 128, 192]), (time, [61.5 / 60, 2.05, 3.075])):
        [line] = axes.lines
        assert_allclose(line.get_xdata(), position)
        assert line.get_ydata().tolist() == [0.25, 0.5, -0.5]
        assert axes.get_ylim()[0] < -0.5
    assert [axes.get_xlabel() for axes in (steps, samples, time)] == [
        "optimizer step",
        "trained (samples)",
        "time (min)",
    ]


def test_a_long_run_is_a_moving_mean_over_each_step(runs: list[Run]) -> None:
    [run] = with_metrics(runs[:1])
    figure = learning.reward([run])
    each, mean = figure.axes[0].lines
    reward = run.metrics["reward/mean"]
    assert_allclose(each.get_ydata(), reward)
    smooth = mean.get_ydata()
    assert smooth[[0, 100, 199]] == pytest.approx([reward[:4].mean(), reward[97:104].mean(), reward[196:].mean()])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "pipeline",
        "each step (thick: mean of 7 steps)",
    ]


def test_a_moving_mean_leaves_out_what_is_unknown() -> None:
    nan = float("nan")
    assert_allclose(learning._moving_mean(np.array([1.0, nan, 3.0, nan, nan, nan]), 1), [1, 2, 3, 3, nan, nan])


@pytest.mark.parametrize("draw", [learning.ess, learning.reward])
def test_simulated_runs_are_left_out_and_real_ones_keep_their_colour(
    draw: Callable[[list[Run]], Figure], runs: list[Run], tmp_path: Path
) -> None:
    real = read_run(write_real_run(tmp_path / "real", rl_step=2))
    lines = draw([*runs, real]).axes[0].lines
    expected = figures.samples_against_time([*runs, real]).axes[0].lines[-1]
    assert {line.get_color() for line in lines} == {expected.get_color()}
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["real"]
    with pytest.raises(ConfigError, match="in pipeline, conventional G=32, conventional G=8"):
        draw(runs)


# --------------------------------------------------------------------------------------- house style


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_a_unit_on_its_number_axes(name: str, runs: list[Run], comparison: Comparison) -> None:
    labels = labels_of(FIGURES[name](runs, comparison))
    bare = [label for label in labels if not label.endswith(")") and "optimizer step" not in label]
    assert labels
    assert bare == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_text_fits_the_figure_and_is_large_enough_to_print(
    name: str, runs: list[Run], comparison: Comparison
) -> None:
    figure = FIGURES[name]([replace(run, name=f"trial 7, eight nodes, {run.name}") for run in runs], comparison)
    figure.draw_without_rendering()
    box = figure.get_tightbbox()  # of all that is drawn, in inches
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert figure.get_figwidth() in (3.4, 7.0)
    assert min(text.get_fontsize() for text in texts) >= 7.0
    assert min(box.x0, box.y0) >= -0.01
    assert box.x1 <= figure.get_figwidth() + 0.01
    assert box.y1 <= figure.get_figheight() + 0.01


def test_a_run_without_lag_is_drawn_at_the_foot_of_an_axis_from_0_to_1(tmp_path: Path) -> None:
    on_policy = read_run(write_run(tmp_path / "run", rl_step=1, num_steps=10))
    for draw in (figures.lag_by_position, figures.lag_by_step):
        [axes] = draw([on_policy]).axes
        assert all(np.nanmax(line.get_ydata()) == 0 for line in axes.lines)
        assert axes.get_ylim() == pytest.approx((0, 1), abs=0.06)


def test_a_long_legend_takes_its_room_from_the_paper_and_not_from_the_panel(runs: list[Run]) -> None:
    heights_in = []
    for number in (1, 20):
        figure = figures.lag_by_position(
            [replace(runs[0], name=f"a run with a name, number {k}") for k in range(number)]
        )
        figure.draw_without_rendering()
        heights_in.append(figure.axes[0].get_position().height * figure.get_figheight())
    assert heights_in[1] == pytest.approx(heights_in[0], abs=0.25)
    assert heights_in[0] > 1.3


def test_a_long_name_loses_its_start_in_a_legend(runs: list[Run]) -> None:
    figure = figures.samples_against_time([replace(runs[0], name="a" * 100 + "bc")])
    [label] = [text.get_text() for text in figure.legends[0].get_texts()]
    assert label == "…" + "a" * 48 + "bc"  # 3.4 in hold 57 letters, 6 of them for line and gap
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= 3.41


def test_a_run_has_one_colour_in_all_figures(runs: list[Run]) -> None:
    for draw in (figures.lag_by_position, figures.generation_phase, figures.samples_against_time):
        assert [line.get_color() for line in draw(runs).axes[0].lines] == [
            METHOD_HUES["pipeline"],
            tone(METHOD_HUES["conventional"], 1.0),  # the larger lag is the darker
            tone(METHOD_HUES["conventional"], -1.0),
        ]


@given(st.lists(st.integers(0, 500), min_size=2, max_size=12, unique=True), st.sampled_from(["pipeline", "other"]))
def test_within_a_method_colours_darken_with_lag(max_lags: list[int], method: str) -> None:
    styles = series_styles([method] * len(max_lags), max_lags)
    order = sorted(range(len(max_lags)), key=lambda index: max_lags[index])
    light = [sum(int(styles[index].color[at : at + 2], 16) for at in (1, 3, 5)) for index in order]
    assert all(one > other for one, other in pairwise(light))


@given(st.floats(1e-3, 1e8))
def test_a_time_axis_keeps_to_handy_numbers(longest_s: float) -> None:
    seconds, symbol = handy_time(longest_s)
    assert {"s": 1, "min": 60, "h": 3600, "days": 86400}[symbol] == seconds
    assert longest_s / seconds >= 3 or symbol == "s"
    assert longest_s / seconds < 180 or symbol == "days"


# -------------------------------------------------------------------------------------------- report


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    # A new process, hash seed and date each: nothing of these may reach the files.
    code = (
        "import sys; from analysis.read import read_run; from analysis.report import save_figures;"
        "save_figures([read_run(sys.argv[1])], sys.argv[2])"
    )
    processes, written = [], []
    for folder, number in (("a", "0"), ("b", "86400")):
        paths = [str(write_run(tmp_path / folder / "run", num_steps=20)), str(tmp_path / folder / "out")]
        environment = {**os.environ, "PYTHONHASHSEED": number, "SOURCE_DATE_EPOCH": number}
        command = [sys.executable, "-c", code, *paths]
        processes.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]))
    for process, folder in zip(processes, "ab", strict=True):
        assert process.wait(timeout=120) == 0
        written.append({path.name: path.read_bytes() for path in sorted((tmp_path / folder / "out").iterdir())})
    assert written[0] == written[1]
    assert len(written[0]) == 14
    assert not any(b"CreationDate" in data or b"Matplotlib" in data for data in written[0].values())


@pytest.mark.slow
def test_save_figures_writes_all_that_the_data_allow(runs: list[Run], comparison: Comparison, tmp_path: Path) -> None:
    settings = dict(matplotlib.rcParams)
    paths = save_figures(runs, tmp_path / "new" / "figures", comparison=comparison)
    assert dict(matplotlib.rcParams) == settings
    names = {path.stem for path in paths}
    assert names == {
        "lag_by_position",
        "lag_by_step",
        "lag_histogram",
        "samples_against_time",
        "time_split",
        "generation_phase",
        "throughput_against_max_lag",
        "speedup_by_scenario",
        "timeline_pipeline",
        "timeline_conventional_G=32",
        "timeline_conventional_G=8",
    }
    assert sorted(paths) == sorted((tmp_path / "new" / "figures").iterdir())
    assert {path.suffix for path in paths} == {".png", ".pdf"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "added"),
    [(METRICS, {"ess", "reward"}), ([{"step": 1, "reward/mean": 0.5}], {"reward"})],
)
def test_metrics_add_their_figures_and_leave_the_others_alone(
    lines: list[dict[str, float]], added: set[str], tmp_path: Path
) -> None:
    real = read_run(write_real_run(tmp_path / "run", lines, num_steps=3))
    simulated = replace(real, metrics={})
    save_figures([simulated], tmp_path / "before")
    save_figures([real], tmp_path / "after")
    before, after = (
        {path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("before", "after")
    )
    assert {Path(name).stem for name in after.keys() - before.keys()} == added
    assert before == {name: after[name] for name in before}


def test_a_run_without_window_and_timeline_has_the_other_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    data = json.loads((folder / "profile.json").read_text())
    data["generation_window"].update(in_progress=[], tokens_per_s=[])
    data["timeline"] = {"until_s": 0.0, "trainer": [], "engines": [], "updates": []}
    (folder / "profile.json").write_text(json.dumps(data))
    run = read_run(folder)
    stems = {path.stem for path in save_figures([run], tmp_path / "out")}
    assert stems == {"lag_by_position", "lag_by_step", "lag_histogram", "samples_against_time", "time_split"}
    with pytest.raises(ConfigError, match="no generation window in run"):
        figures.generation_phase([run])
    with pytest.raises(ConfigError, match="no engine in the timeline of run"):
        figures.timeline(run)


@pytest.mark.slow
def test_names_that_differ_only_in_what_a_file_name_leaves_out_keep_their_own_files(
    runs: list[Run], tmp_path: Path
) -> None:
    twins = [replace(run, name=name) for name, run in zip(("x/y", "x y"), runs, strict=False)]
    stems = {path.stem for path in save_figures(twins, tmp_path)}
    assert {"timeline_x_y", "timeline_x_y_"} <= stems


def test_curves_need_no_run_but_runs_that_know_flashes(runs: list[Run], tmp_path: Path) -> None:
    assert [path.name for path in save_figures([], tmp_path, curves=CURVES)] == [
        "throughput_against_max_lag.png",
        "throughput_against_max_lag.pdf",
    ]
    with pytest.raises(ConfigError, match="points must be in tokens/flash"):
        save_figures(runs, tmp_path / "not", curves=CURVES)
    assert not (tmp_path / "not").exists()


def test_nothing_to_draw_and_equal_names_are_refused(runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="figures need a run, a comparison or analytic curves"):
        save_figures([], tmp_path)
    with pytest.raises(ConfigError, match="runs must have different names"):
        save_figures([runs[0], runs[0]], tmp_path)


@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        ("analysis", ("matplotlib", "sim", "backends", "simpy", "torch")),
        ("analysis.read", ("matplotlib", "sim", "backends", "simpy", "torch")),
        ("analysis.report", ("matplotlib.pyplot", "sim", "backends", "simpy", "torch")),
    ],
)
def test_importing_stays_light(module: str, unloaded: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {unloaded!r} if name in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert shown.stdout == "[]\n"
