"""The figures of a plan."""

import pytest
from tiny_plan import planned, priced_plan

from analysis.chart import SEEN, drawn
from analysis.figures import plan_charts, throughput_against_lag


@pytest.mark.slow
def test_a_plan_is_drawn_against_lag_and_against_the_split() -> None:
    report = priced_plan()
    assert report.splits.tokens_per_s  # some of the accelerators generate
    assert [*plan_charts(report)] == ["plan_throughput_against_lag", "plan_throughput_against_split"]


def test_screened_simulated_and_recommended_candidates_have_their_marks_and_the_limit_its_line() -> None:
    report = priced_plan()
    limited = report.model_copy(update={"run": report.run.model_copy(update={"mean_lag_limit": 2.5})})
    [axes] = drawn(throughput_against_lag(limited)).axes
    marks = {line.get_label(): line for line in axes.lines}
    for family in {one.family for one in report.simulated}:
        lags = [one.lag_mean for one in report.simulated if one.family == family]
        assert list(marks[f"{family}, simulated"].get_xdata()) == lags
        assert len(marks[f"{family}, screened"].get_xdata()) == report.screened.family.count(family)
    (legend,) = axes.get_figure().legends
    marked = [one.get_markersize() for one in legend.get_lines() if one.get_marker() not in ("None", "none", "")]
    assert len(marked) > 4
    assert min(marked) >= SEEN  # dots of the cloud are larger there
    assert list(marks["recommended"].get_xdata()) == [report.recommended.lag_mean]
    assert list(marks["mean_lag_limit"].get_xdata()) == [2.5, 2.5]
    assert "mean_lag_limit" not in [one.label for one in throughput_against_lag(report).series]


@pytest.mark.slow
def test_a_colocated_recommendation_has_no_split() -> None:
    report = planned("plan={schedulers=['conventional'], generation_batch_size=[8], simulate=2, simulate_steps=4}")
    assert [*plan_charts(report)] == ["plan_throughput_against_lag"]
