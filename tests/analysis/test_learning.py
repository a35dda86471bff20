"""Figures of runs that have learned: effective sample size and reward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import with_metrics, write_real_run
from matplotlib.figure import Figure
from numpy.testing import assert_allclose

from analysis import figures
from analysis import figures as learning
from analysis.read import Run, read_run
from pipelinerl.errors import ConfigError


def test_metrics_that_end_before_steps_csv_are_drawn_up_to_their_end(tmp_path: Path) -> None:
    run = read_run(write_real_run(tmp_path / "run", num_steps=5))
    assert [len(line.get_xdata()) for axes in learning.reward_figure([run]).axes for line in axes.lines] == [3, 3, 3]


def test_ess_shows_each_step_raw_and_truncated_and_the_mean_of_each_lag(tmp_path: Path) -> None:
    left, right = learning.ess_figure([read_run(write_real_run(tmp_path / "run"))]).axes
    raw, truncated = left.lines
    assert np.column_stack(raw.get_data()).tolist() == [[1, 1.0], [2, 0.75], [3, 0.5]]
    assert np.column_stack(truncated.get_data()).tolist() == [[1, 1.0], [2, 0.875], [3, 0.625]]
    assert (raw.get_linestyle(), truncated.get_linestyle()) == ("-", "--")
    [by_lag] = right.lines
    assert np.column_stack(by_lag.get_data()).tolist() == [[0, 0.75], [1, 0.5], [10, 0.25]]  # steps that have the lag
    assert left.get_ylim() == right.get_ylim() == pytest.approx((0.22, 1.03))


def test_ess_of_1_shows_in_full_and_without_columns_that_were_not_logged(tmp_path: Path) -> None:
    line: dict[str, float] = {"step": 1, "reward/mean": 0.0, "ess/token_raw": 1.0}
    left, right = learning.ess_figure([read_run(write_real_run(tmp_path / "run", [line]))]).axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[1.0]]
    assert left.get_ylim()[0] < 1.0 < left.get_ylim()[1]
    assert [len(line.get_ydata()) for line in right.lines] == [0]


def test_reward_is_shown_against_steps_samples_and_time(tmp_path: Path) -> None:
    run = read_run(write_real_run(tmp_path / "run", rl_step=1))  # 61.5 s per step
    steps, samples, time = learning.reward_figure([run]).axes
    for axes, position in ((steps, [1, 2, 3]), (samples, [64, 128, 192]), (time, [61.5 / 60, 2.05, 3.075])):
        [line] = axes.lines
        assert_allclose(line.get_xdata(), position)
        assert line.get_ydata().tolist() == [0.25, 0.5, -0.5]
        assert axes.get_ylim()[0] < -0.5
    labels = [axes.get_xlabel() for axes in (steps, samples, time)]
    assert labels == ["optimizer step", "trained (samples)", "time (min)"]


def test_a_long_run_is_a_moving_mean_over_each_step(runs: list[Run]) -> None:
    [run] = with_metrics(runs[:1])
    figure = learning.reward_figure([run])
    each, mean = figure.axes[0].lines
    reward = run.metrics["reward/mean"]
    assert_allclose(each.get_ydata(), reward)
    smooth = mean.get_ydata()
    assert smooth[[0, 100, 199]] == pytest.approx([reward[:4].mean(), reward[97:104].mean(), reward[196:].mean()])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["pipeline", "each step (thick: mean of 7 steps)"]


def test_a_moving_mean_leaves_out_missing_values(runs: list[Run]) -> None:
    [run] = with_metrics(runs[:1])
    ess = run.metrics["ess/token_raw"]
    ess[[0, 1, 2, 3, 4, 5, 10]] = np.nan
    _, mean, _ = learning.ess_figure([run]).axes[0].lines
    expected = [np.nan, np.nan, ess[6], ess[6:8].mean(), np.delete(ess[7:14], 3).mean()]  # 3 steps to each side
    assert_allclose(mean.get_ydata()[[0, 2, 3, 4, 10]], expected)


@pytest.mark.parametrize("draw", [learning.ess_figure, learning.reward_figure])
def test_simulated_runs_are_left_out_and_real_ones_keep_their_colour(
    draw: Callable[[list[Run]], Figure], runs: list[Run], tmp_path: Path
) -> None:
    real = read_run(write_real_run(tmp_path / "real", rl_step=2))
    lines = draw([*runs, real]).axes[0].lines
    expected = figures.samples_against_time([*runs, real]).series[-1]
    assert {line.get_color() for line in lines} == {expected.color}
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["real"]
    with pytest.raises(ConfigError, match="in pipeline, conventional G=32, conventional G=8"):
        draw(runs)
