"""The figures of a plan."""

from pathlib import Path

from tiny_plan import planned, priced_plan

from analysis.planning import save_plan


def test_a_plan_is_drawn_against_lag_and_against_the_split(tmp_path: Path) -> None:
    report = priced_plan()
    assert report.splits.levels  # some of the accelerators generate
    names = {path.name for path in save_plan(report, tmp_path / "figures")}
    figures = ("plan_throughput_against_lag", "plan_throughput_against_split")
    assert names == {f"{figure}.{kind}" for figure in figures for kind in ("png", "pdf")}


def test_a_colocated_recommendation_has_no_split(tmp_path: Path) -> None:
    report = planned("plan={schedulers=['conventional'], generation_batch_size=[8], simulate=2, simulate_steps=4}")
    assert [path.stem for path in save_plan(report, tmp_path)] == 2 * ["plan_throughput_against_lag"]
