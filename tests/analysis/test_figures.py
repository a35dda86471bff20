"""Figures show the content of the run folder: every number is read back from the artists of the figure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import BATCH, SLOTS, with_figure_data, with_fleet, write_run
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from numpy.testing import assert_allclose

from analysis import figures
from analysis.chart import ACTIVITY_COLORS, drawn
from analysis.figures import throughput_against_max_lag
from analysis.read import Run, read_run


def legend_of(figure: Figure) -> list[str]:
    [legend] = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_lag_by_position_shows_the_bins_at_their_middle(runs: list[Run]) -> None:
    [axes] = drawn(figures.lag_by_position(runs)).axes
    assert [line.get_label() for line in axes.lines] == [run.name for run in runs]
    for line, run in zip(axes.lines, runs, strict=True):
        assert_allclose(line.get_xdata(), 32 + 64 * np.arange(32))  # 2048 tokens in 32 bins
        lag_mean = run.figure_data.lag_by_position.lag_mean
        assert_allclose(line.get_ydata(), [np.nan if lag is None else lag for lag in lag_mean])


def test_lag_by_step_of_short_runs_shows_steps_csv(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(steps), rl_step=4, num_steps=steps)) for steps in (150, 1)]
    for axes, run in zip(figures.lag_by_step(runs).axes, runs, strict=True):
        largest, mean = axes.lines
        assert_allclose(mean.get_xdata(), np.arange(1, len(run.steps) + 1))
        assert_allclose(mean.get_ydata(), np.arange(len(run.steps)) % 4)
        assert_allclose(largest.get_ydata(), run.steps.lag_max)


def test_lag_by_step_of_a_long_run_ends_with_100_steps_as_they_are(runs: list[Run]) -> None:
    panels = figures.lag_by_step(runs).axes
    assert len(panels) == 2 * len(runs)
    for axes, run in zip(panels[1::2], runs, strict=True):
        largest, mean = axes.lines
        assert_allclose(mean.get_xdata(), np.arange(101, 201))
        assert_allclose(mean.get_ydata(), run.steps.lag_mean[100:])
        assert_allclose(largest.get_ydata(), run.steps.lag_max[100:])


@pytest.mark.parametrize(("index", "rl_step"), [(1, 32), (2, 8)])
def test_a_sawtooth_becomes_a_flat_mean_in_a_band_from_0_to_its_top(runs: list[Run], index: int, rl_step: int) -> None:
    axes = figures.lag_by_step(runs).axes[2 * index]
    mean, largest = axes.lines
    assert_allclose(mean.get_ydata(), (rl_step - 1) / 2)
    assert_allclose(largest.get_ydata(), rl_step - 1)
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0, rl_step - 1)


def test_lag_histogram_shows_shares_on_one_scale_and_means_that_add_up(runs: list[Run]) -> None:
    panels = figures.lag_histogram(runs).axes
    assert len({axes.get_xlim() + axes.get_ylim() for axes in panels}) == 1
    for axes, run in zip(panels, runs, strict=True):
        [bars] = axes.patches
        tokens = np.array(run.figure_data.lag_histogram.total)
        assert_allclose(bars.get_data().values, 100 * tokens / tokens.sum())
        assert_allclose(bars.get_data().edges, np.arange(len(tokens) + 1) - 0.5)
        assert axes.get_ylim()[1] >= max(bars.get_data().values)
        name, means = axes.get_title(loc="left").split("\n")
        mean, flying, queued = (float(word) for word in re.findall(r"[\d.]+", means))
        assert name == run.name
        assert mean == pytest.approx(tokens @ np.arange(len(tokens)) / tokens.sum(), abs=0.005)
        assert mean == pytest.approx(flying + queued, abs=0.015)  # three numbers of two decimals


def test_the_bound_on_lag_is_drawn_where_a_run_has_one(runs: list[Run]) -> None:
    report = runs[0].report.model_copy(update={"max_lag": 12})
    bounded = [replace(runs[0], report=report), runs[1]]
    rows = figures.lag_by_step(bounded).axes
    assert [[list(line.get_ydata()) for line in axes.lines[2:]] for axes in rows] == [[[12, 12]], [[12, 12]], [], []]
    above, below = figures.lag_histogram(bounded).axes
    assert [list(line.get_xdata()) for line in above.lines] == [[12, 12]]
    assert not below.lines
    for chart in (figures.lag_by_position(bounded), throughput_against_max_lag(bounded)):
        [axes] = drawn(chart).axes
        [line] = [one for one in axes.lines if one.get_label() == "max_lag = 12"]
        assert [12, 12] in [list(values) for values in line.get_data()]
    for draw in (figures.lag_by_step, figures.lag_histogram):
        assert "max_lag" in legend_of(draw(bounded))
        assert "max_lag" not in legend_of(draw(runs))


def test_generation_phase_shows_both_series_on_one_time_axis(runs: list[Run]) -> None:
    upper, lower = drawn(figures.generation_phase(runs), rows=2, sharex=True).axes
    assert upper.get_shared_x_axes().joined(upper, lower)
    assert lower.get_xlabel() == "time from the start of generation (min)"  # the longest lasts 60 * 3.9 s
    for run, counts, rates in zip(runs, upper.lines, lower.lines, strict=True):
        window = run.figure_data.generation_window
        assert_allclose(counts.get_xdata(), (np.arange(60) + 0.5) * window.width_s / 60)
        assert_allclose(counts.get_ydata(), window.in_progress)
        assert_allclose(rates.get_ydata(), np.array(window.tokens_per_s) / 1000)
    assert lower.get_ylabel() == "generation\n(thousand tokens/s)"


def test_samples_against_time_rises_by_a_batch_at_the_end_of_each_step(runs: list[Run]) -> None:
    [axes] = drawn(figures.samples_against_time(runs)).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (min)", "trained (thousand samples)")
    for line, run in zip(axes.lines, runs, strict=True):
        assert_allclose(line.get_xdata(), np.append(0, run.steps.time_s) / 60)
        assert_allclose(line.get_ydata(), BATCH * np.arange(201) / 1000)


def test_a_fleet_shows_its_engines_and_the_speed_of_each_step(runs: list[Run]) -> None:
    """The run without a fleet is left out. 260 s are minutes; the first step begins at 0."""
    engines, speed = figures.fleet_over_time([with_fleet(runs[0]), runs[1]])
    [there], [line] = engines.series, speed.series
    steps = runs[0].steps
    assert_allclose(there.x * 60, [0, 60, 120, steps.time_s[-1]])
    assert_allclose(there.y, [4, 3, 4, 4])
    assert_allclose(line.x * 60, steps.time_s)
    assert_allclose(line.y[:2], steps.tokens[:2] / [steps.time_s[0], steps.time_s[1] - steps.time_s[0]])
    assert figures.fleet_over_time(runs) == []


def test_steps_at_one_instant_have_no_speed(runs: list[Run]) -> None:
    steps = runs[0].steps.copy()
    steps.time_s[1] = steps.time_s[0]
    _, speed = figures.fleet_over_time([replace(with_fleet(runs[0]), steps=steps)])
    assert np.isnan(speed.series[0].y).tolist() == [False, True, *[False] * (len(steps) - 2)]


def test_the_time_of_groups_and_trainer_adds_up(runs: list[Run]) -> None:
    """Of 4 places, 2.4 + 0.2 + 0.4 + 1; of the trainer's work 60 s are for its failures."""
    chart = figures.fleet_seconds([with_fleet(runs[0])])
    assert chart is not None
    assert chart.y.rows == ["spot, 4 engines", "trainer"]
    seconds, run_s = runs[0].report.seconds, runs[0].report.duration_s
    shares = {one.label: (one.x - one.other).tolist() for one in chart.series}
    spot, trainer = ({name: both[row] for name, both in shares.items() if both[row]} for row in (0, 1))
    assert spot == pytest.approx({"engines there": 60, "starting": 5, "failed": 10, "reclaimed": 25})
    parts = {"training": seconds.training - 60, "checkpoints": 10, "restarts": 20, "work redone": 30}
    assert trainer == pytest.approx({name: 100 * part / run_s for name, part in parts.items()})
    assert figures.fleet_seconds(runs) is None


def test_timeline_shows_an_engine_the_mean_of_the_others_and_every_block_and_update(runs: list[Run]) -> None:
    line = runs[0].figure_data.timeline
    figure = figures.timeline(runs[0])
    [axes] = figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["engine 0", "mean of 3 others", "trainer"]
    filled, pauses, others, others_pause, *blocks = axes.collections[:6]
    counts = np.array([engine.in_progress for engine in line.engines])
    for area, expected, bottom in ((filled, counts[0], 2), (others, counts[1:].mean(axis=0), 1)):
        heights = area.get_paths()[0].vertices[:, 1]
        assert heights.max() == pytest.approx(bottom + 0.8 * expected.max() / SLOTS)
        assert set(np.round(bottom + 0.8 * expected / SLOTS, 9)) <= set(np.round(heights, 9))
    for area, bottom in ((pauses, 2), (others_pause, 1)):  # all engines pause at the same time
        edges = area.get_paths()[0].vertices
        inside = {float(round(x * 60, 6)) for x, y in edges if y == pytest.approx(bottom + 0.8)}
        assert inside >= {round(end, 6) for pause in line.engines[0].paused for end in pause}
        assert all(any(start - 1e-6 <= x <= end + 1e-6 for start, end in line.engines[0].paused) for x in inside)
    for block, kind in zip(blocks, ("training", "publishing"), strict=True):
        spans = [(start_s, end_s) for start_s, end_s, work in line.trainer if work == kind]
        ends = np.array([[path.vertices[:, 0].min(), path.vertices[:, 0].max()] for path in block.get_paths()])
        assert_allclose(ends * 60, spans)  # 260 s are drawn in minutes
    updates = [lines.get_paths()[0].vertices[0, 0] * 60 for lines in axes.collections[6:]]
    assert_allclose(updates, [update.published_s for update in line.updates])
    assert [text.get_text() for text in axes.texts] == [str(update.version) for update in line.updates[::2]]


def test_an_engine_that_never_worked_counts_as_empty(runs: list[Run]) -> None:
    first, second, third, _ = runs[0].figure_data.timeline.engines
    idle = second.model_copy(update={"time_s": [], "in_progress": [], "paused": []})
    [axes] = figures.timeline(with_figure_data(runs[0], timeline={"engines": [first, idle, third]})).axes
    mean = axes.collections[2].get_paths()[0].vertices[:, 1].max()
    assert mean == pytest.approx(1 + 0.8 * max(third.in_progress) / SLOTS / 2)


def test_the_legend_of_a_timeline_has_the_scale_and_pauses_if_there_are_any(runs: list[Run]) -> None:
    first, *others = legend_of(figures.timeline(runs[0]))
    assert first == f"sequences in progress (full height: {SLOTS})"
    assert "engine paused" in others
    assert "engine paused" not in legend_of(figures.timeline(runs[1]))  # conventional


def test_time_split_stacks_seconds_per_1000_samples_and_writes_the_shares(runs: list[Run]) -> None:
    [axes] = figures.time_split_figure(runs).axes
    kinds = ("generating", "training", "publishing", "waiting_for_data")
    for at, run in enumerate(runs):
        bars = [container[at] for container in axes.containers]
        seconds = np.array([getattr(run.report.seconds, kind) for kind in kinds])
        assert_allclose([bar.get_width() for bar in bars], seconds / (BATCH * 200) * 1000)
        assert_allclose([bar.get_x() for bar in bars[1:]], np.cumsum([bar.get_width() for bar in bars[:-1]]))
        assert_allclose(bars[-1].get_x() + bars[-1].get_width(), run.report.duration_s / (BATCH * 200) * 1000)
        assert [to_hex(bar.get_facecolor()) for bar in bars] == [ACTIVITY_COLORS[kind] for kind in kinds]
    texts = [text.get_text() for text in axes.texts]
    run = runs[0]
    assert f"{run.report.seconds.training / run.report.duration_s:.0%}" in texts
    assert "97%" in texts  # utilisation of generation
    assert f"{run.report.utilisation.training:.0%}" in texts
