"""The house style of all figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import CURVES, case_study, with_fleet, with_metrics, write_run
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis import figures
from analysis import figures as learning
from analysis.chart import METHOD_HUES, PAGE_IN, drawn, handy_time, hue, series_styles, tone
from analysis.figures import speedup_by_scenario, throughput_against_max_lag
from analysis.read import Run, read_run
from pipelinerl.records.comparison_report import ComparisonReport

FIGURES: dict[str, Callable[[list[Run], ComparisonReport], Figure]] = {
    "lag_by_position": lambda runs, _: drawn(figures.lag_by_position(runs)),
    "lag_by_step": lambda runs, _: figures.lag_by_step(runs),
    "lag_histogram": lambda runs, _: figures.lag_histogram(runs),
    "throughput_against_max_lag": lambda runs, _: drawn(throughput_against_max_lag(case_study(runs[0]), CURVES)),
    "generation_phase": lambda runs, _: drawn(figures.generation_phase(runs), rows=2, sharex=True),
    "samples_against_time": lambda runs, _: drawn(figures.samples_against_time(runs)),
    "fleet_over_time": lambda runs, _: drawn(
        figures.fleet_over_time([*map(with_fleet, runs)]), title="Engines and speed", rows=2, sharex=True
    ),
    "fleet_seconds": lambda runs, _: drawn(figures.fleet_seconds([*map(with_fleet, runs)]), width=PAGE_IN),
    "timeline": lambda runs, _: figures.timeline(runs[0]),
    "time_split": lambda runs, _: figures.time_split_figure(runs),
    "speedup_by_scenario": lambda _, comparison: drawn(speedup_by_scenario(comparison)),
    "ess": lambda runs, _: learning.ess_figure(with_metrics(runs)),
    "reward": lambda runs, _: learning.reward_figure(with_metrics(runs)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_units_a_title_and_a_legend(name: str, runs: list[Run], comparison: ComparisonReport) -> None:
    figure = FIGURES[name](runs, comparison)
    labels = [figure.get_supxlabel(), figure.get_supylabel()]
    labels += [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert any(labels)
    assert [one for one in labels if one and not one.endswith(")") and "optimizer step" not in one] == []
    [legend] = figure.legends
    assert legend.get_title().get_text()
    assert legend.get_texts()


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", FIGURES)
def test_every_text_fits_the_figure_and_is_large_enough_to_print(
    name: str, number: int, runs: list[Run], comparison: ComparisonReport
) -> None:
    named = [replace(run, name=f"trial 7, eight nodes, {run.name}") for run in runs[:number]]
    figure = FIGURES[name](named, comparison)
    figure.draw_without_rendering()
    box = figure.get_tightbbox()  # of everything drawn (inches)
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert figure.get_figwidth() in (3.4, 7.0)
    assert min(text.get_fontsize() for text in texts) >= 7.0
    assert min(box.x0, box.y0) >= -0.01
    assert box.x1 <= figure.get_figwidth() + 0.01
    assert box.y1 <= figure.get_figheight() + 0.01
    [legend] = figure.legends
    labels = [*figure.texts, *(axes.yaxis.label for axes in figure.axes)]
    assert [text for text in labels if text.get_window_extent().overlaps(legend.get_window_extent())] == []


def test_a_run_without_lag_is_drawn_at_0_on_an_axis_to_1(tmp_path: Path) -> None:
    on_policy = read_run(write_run(tmp_path / "run", rl_step=1, num_steps=10))
    for figure in (drawn(figures.lag_by_position([on_policy])), figures.lag_by_step([on_policy])):
        [axes] = figure.axes
        assert all(np.nanmax(line.get_ydata()) == 0 for line in axes.lines)
        assert axes.get_ylim() == pytest.approx((0, 1), abs=0.06)


def test_a_long_legend_makes_the_figure_taller_and_not_the_panel_smaller(runs: list[Run]) -> None:
    heights_in = []
    for number in (1, 20):
        several = [replace(runs[0], name=f"a run with a name, number {k}") for k in range(number)]
        figure = drawn(figures.lag_by_position(several))
        figure.draw_without_rendering()
        heights_in.append(figure.axes[0].get_position().height * figure.get_figheight())
    assert heights_in[1] == pytest.approx(heights_in[0], abs=0.25)
    assert heights_in[0] > 1.3


def test_a_long_name_loses_its_start_in_a_legend(runs: list[Run]) -> None:
    figure = drawn(figures.samples_against_time([replace(runs[0], name="a" * 100 + "bc")]))
    [label] = [text.get_text() for text in figure.legends[0].get_texts()]
    assert label == "…" + "a" * 48 + "bc"  # 3.4 in hold 57 letters, 6 of them for line and gap
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= 3.41


def test_a_run_has_one_colour_in_all_figures(runs: list[Run]) -> None:
    for chart in (figures.lag_by_position(runs), figures.generation_phase(runs)[0], figures.samples_against_time(runs)):
        assert [line.color for line in chart.series] == [
            METHOD_HUES["pipeline"],
            tone(METHOD_HUES["conventional"], 1.0),  # the larger lag is the darker
            tone(METHOD_HUES["conventional"], -1.0),
        ]


def test_an_unknown_kind_has_its_own_colour_by_its_name() -> None:
    assert hue("mine:KIND") == hue("mine:KIND") not in METHOD_HUES.values()
    assert len({hue(kind) for kind in ("pipeline", "conventional", "one_step_off", "partial_rollouts", "mine")}) == 5


@given(st.lists(st.integers(0, 500), min_size=2, max_size=12, unique=True), st.sampled_from(["pipeline", "other"]))
def test_within_a_method_colours_darken_with_lag(max_lags: list[int], method: str) -> None:
    styles = series_styles([method] * len(max_lags), max_lags)
    order = sorted(range(len(max_lags)), key=lambda index: max_lags[index])
    light = [sum(int(styles[index].color[at : at + 2], 16) for at in (1, 3, 5)) for index in order]
    assert all(one > other for one, other in pairwise(light))


@given(st.floats(1e-3, 1e8))
def test_a_time_axis_has_numbers_from_3_to_180(longest_s: float) -> None:
    seconds, symbol = handy_time(longest_s)
    assert {"s": 1, "min": 60, "h": 3600, "days": 86400}[symbol] == seconds
    assert longest_s / seconds >= 3 or symbol == "s"
    assert longest_s / seconds < 180 or symbol == "days"
