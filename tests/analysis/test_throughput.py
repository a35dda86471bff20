"""Throughput against lag, and speed-ups."""

from __future__ import annotations

import numpy as np
import pytest
from made_up_runs import CURVES, case_study, placed

from analysis.chart import drawn
from analysis.figures import speedup_by_scenario, throughput_against_max_lag
from analysis.read import Run
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport


def test_throughput_against_max_lag_joins_the_curves_and_no_runs(runs: list[Run]) -> None:
    [axes] = drawn(throughput_against_max_lag(case_study(runs[0]), CURVES)).axes
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


def test_a_marker_under_another_is_larger_so_that_its_rim_shows(runs: list[Run]) -> None:
    near, far = (placed(runs[0], name, "pipeline", 64, rate) for name, rate in (("near", 8.1 * 1.02), ("far", 5.0)))
    chart = throughput_against_max_lag([*case_study(runs[0]), near, far])
    sizes = {one.label: one.size for one in chart.series}
    assert sizes == {"H=64": 8.0, "H=192": 4.5, "G=134": 4.5, "near": 4.5, "far": 4.5}


def test_runs_are_compared_in_flashes_only_if_all_know_them(runs: list[Run]) -> None:
    mixed = [case_study(runs[0])[0], runs[1]]
    chart = throughput_against_max_lag(mixed)
    assert chart.y.unit == "tokens/s"
    assert [one.y for one in chart.series] == [[run.report.tokens_per_s] for run in mixed]
    with pytest.raises(ConfigError, match="must know their tokens/flash to be drawn with analytic curves"):
        throughput_against_max_lag(mixed, CURVES)


def test_speedup_by_scenario_marks_each_arm_in_each_row(comparison: ComparisonReport) -> None:
    chart = speedup_by_scenario(comparison)
    shown = {one.label: list(zip(one.x, one.y, strict=True)) for one in chart.series}
    assert shown["pipeline"] == [(1.5, 0), (1.8, 1)]
    assert shown["conventional G=8"] == [(0.6, 0), (0.5, 1)]
    assert [x for x, _ in shown["conventional G=32 (baseline)"]] == [1.0]
    assert chart.y.rows == ["central", "long tail"]
