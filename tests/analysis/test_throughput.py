"""Throughput against lag, and speed-ups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import CURVES, POINTS

from analysis import throughput
from analysis.chart import drawn
from analysis.read import Run
from analysis.throughput import RatePoint, rate_points
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport


def test_throughput_against_max_lag_joins_the_curves_and_no_runs() -> None:
    [axes] = drawn(throughput.throughput_against_max_lag(POINTS, CURVES, "tokens/flash")).axes
    shown = {line.get_label(): np.column_stack(line.get_data()).tolist() for line in axes.lines}
    assert shown == {
        "pipeline, model": [[8, 1.10], [132, 16.90]],
        "conventional, model": [[8, 1.18], [132, 10.69]],
        "H=64": [[64, 8.1]],
        "H=192": [[132, 16.2]],
        "G=134": [[133, 10.4]],
    }
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "None", "None", "None"]
    assert axes.get_ylabel() == "throughput (tokens/flash)"


def test_a_marker_under_another_is_larger_so_that_its_rim_shows() -> None:
    near, far = replace(POINTS[2], name="near", rate=POINTS[2].rate * 1.02), replace(POINTS[2], name="far", rate=5.0)
    [axes] = drawn(throughput.throughput_against_max_lag([*POINTS, near, far], unit="tokens/flash")).axes
    sizes = {line.get_label(): line.get_markersize() for line in axes.lines}
    assert sizes == {"H=64": 8.0, "H=192": 4.5, "G=134": 4.5, "near": 4.5, "far": 4.5}


def test_the_bound_on_lag_is_drawn_where_runs_keep_one() -> None:
    points = [replace(POINTS[0], bound=8), replace(POINTS[1], bound=8), POINTS[2]]
    [axes] = drawn(throughput.throughput_against_max_lag(points, unit="tokens/flash")).axes
    [line] = [line for line in axes.lines if line.get_label() == "max_lag = 8"]
    assert list(line.get_xdata()) == [8, 8]


def test_throughput_in_tokens_per_second_cannot_be_drawn_with_curves_in_flashes() -> None:
    with pytest.raises(ConfigError, match="points must be in tokens/flash"):
        throughput.throughput_against_max_lag(POINTS, CURVES)
    with pytest.raises(ConfigError, match="needs a point or a curve"):
        throughput.throughput_against_max_lag([])


def test_runs_are_compared_in_flashes_only_if_all_know_them(runs: list[Run]) -> None:
    in_flashes = [replace(run, report=run.report.model_copy(update={"tokens_per_flash": 2.5})) for run in runs]
    assert rate_points(in_flashes) == (
        [RatePoint(r.name, r.method, r.report.lag.max, 2.5, r.report.max_lag, r.report.lag.mean) for r in runs],
        "tokens/flash",
    )
    points, unit = rate_points([*in_flashes[:1], runs[1]])
    assert unit == "tokens/s"
    assert [point.rate for point in points] == [run.report.tokens_per_s for run in runs[:2]]


def test_speedup_by_scenario_marks_each_arm_in_each_row(comparison: ComparisonReport) -> None:
    [axes] = drawn(throughput.speedup_by_scenario(comparison)).axes
    shown = {line.get_label(): np.column_stack(line.get_data()).tolist() for line in axes.lines}
    assert shown["pipeline"] == [[1.5, 0], [1.8, 1]]
    assert shown["conventional G=8"] == [[0.6, 0], [0.5, 1]]
    assert [x for x, _ in shown["conventional G=32 (baseline)"]] == [1.0, 1.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["central", "long tail"]
