"""Pages of runs, comparisons and checks."""

from pathlib import Path
from typing import Any

import pytest
from command_line import Command, sets
from made_up_runs import CAPACITY
from tiny_comparison import run

from pipelinerl.pages.page import Page, duration
from pipelinerl.pages.runs import check_page, comparison_page, run_page
from pipelinerl.records.comparison_report import ArmReport, ComparisonReport, ScenarioReport
from pipelinerl.records.reports import Bottleneck, CheckReport, CheckRow, Finding, FleetReport, RunReport
from sim.run import simulate


@pytest.fixture(scope="module")
def summary() -> RunReport:
    return simulate(run())


def lines_of(page: Page, title: str) -> list[str]:
    """The lines of a section."""
    (lines,) = [list(one.lines) for one in page.sections if one.title == title]
    return lines


def test_the_table_of_a_run_has_its_numbers_and_says_if_it_is_incomplete(summary: RunReport) -> None:
    """The other numbers are those of its summary."""

    def numbers(**changed: Any) -> dict[str, str]:
        return dict(run_page({"run": summary.model_copy(update=changed)}).tables[0].rows)

    nothing = summary.seconds.model_copy(update=dict.fromkeys(type(summary.seconds).model_fields, 0.0))
    ended = numbers(complete=False, duration_s=0.0, seconds=nothing)
    assert (ended["complete"], ended["trainer's time"]) == ("no: the run ended early", "none")
    whole, lag, busy = numbers(), summary.lag, summary.utilisation
    assert "complete" not in whole
    expected = {
        "throughput": f"{summary.tokens_per_s:,.0f} tokens/s, {summary.samples_per_s:,.1f} samples/s",
        "token lag (optimizer steps)": f"mean {lag.mean:.2f}, p95 {lag.p95}, p99 {lag.p99}, max {lag.max}",
        "  of the mean": f"{lag.in_flight_mean:.2f} in flight, {lag.in_queue_mean:.2f} in queue",
        "busy": f"generation {busy.generation:.0%}, training {busy.training:.0%}",
        "simulated time": duration(summary.duration_s),
        "bottleneck": summary.bottleneck,
    }
    assert {key: whole[key] for key in expected} == expected
    assert f"training {summary.seconds.training / summary.duration_s:.0%}" in whole["trainer's time"]
    assert f"{summary.rollouts.started:,} started" in whole["rollouts"]


def test_the_table_of_a_run_says_what_its_fleet_did(summary: RunReport) -> None:
    """Of 1000 generated tokens and 250 lost ones 600 are trained on; a real run does not know what is lost."""
    fleet = FleetReport(
        engines_mean=2.5, joined=3, left=4, moved=1200, moved_tokens=70, lost_tokens=250, step_s_p95=90.0
    )
    tokens = summary.tokens.model_copy(update={"generated": 1000, "trained": 600})

    def numbers(**changed: Any) -> list[tuple[str, str]]:
        page = run_page({"run": summary.model_copy(update={"tokens": tokens, "duration_s": 100.0, **changed})})
        rows = [(key, text) for key, text in page.tables[0].rows]
        return rows[[key for key, _ in rows].index("rollouts") + 1 :]

    assert numbers() == []
    assert numbers(fleet=fleet, capacity=CAPACITY) == [
        ("engines", "2.5 there in the mean, 3 joined, 4 left"),
        ("  rollouts moved", "1,200, 250 tokens lost"),
        ("goodput", "48.0% of all generated tokens trained"),
        ("p95 of an optimizer step", duration(90.0)),
        ("group spot", "2.4 of 4 there, 3 failures, 5 reclaims, 12 USD"),
        ("trainer's failures", "2; of its time checkpoints 10.0%, restarts 20.0%, work redone 30.0%"),
    ]
    real = fleet.model_copy(update={"lost_tokens": None, "step_s_p95": None})
    assert numbers(fleet=real)[1:] == [("  rollouts moved", "1,200")]


@pytest.mark.parametrize("bottleneck", Bottleneck)
def test_every_bottleneck_has_what_would_change_it(bottleneck: Bottleneck, summary: RunReport) -> None:
    page = run_page({"run": summary.model_copy(update={"bottleneck": bottleneck})})
    (line,) = lines_of(page, "depends on")
    assert "make it faster" in line or "makes it faster" in line


@pytest.mark.parametrize(("steps", "short"), [(10, True), (50, False)])
def test_a_run_too_short_for_its_start_up_to_fade_says_so(command: Command, steps: int, short: bool) -> None:
    """The quickstart: 9.2k tokens/s over 10 steps and 11.9k in the last 5 of them; 11.7k over 50, and 12.4k later."""
    quickstart = Path(__file__).parents[3] / "examples" / "quickstart.toml"
    assert ("the second half alone" in command("simulate", quickstart, *sets(f"optimizer_steps={steps}")).out) == short


def compared(*scenarios: dict[str, RunReport], speedup: float | None = 1.5) -> Page:
    """The page of arms by name in each scenario; the baseline is b."""
    made = []
    for number, arms in enumerate(scenarios):
        reports = [ArmReport(name=name, folder="x", speedup=speedup, summary=one) for name, one in arms.items()]
        made.append(ScenarioReport(name=f"scenario {number}", arms=reports))
    return comparison_page(ComparisonReport(baseline="b", scenarios=made, failures=["one failed"], complete=True))


def test_a_comparison_has_a_row_per_arm_and_answers_with_the_fastest(summary: RunReport) -> None:
    slow = summary.model_copy(update={"tokens_per_s": summary.tokens_per_s / 2, "optimizer_steps": 0})
    page = compared({"a": summary, "b": slow}, {"a": summary, "b": slow}, {"a": slow, "b": summary})
    assert page.answer.startswith("The fastest is a: 2.00 times the trained tokens per second of b. Largest token lag")
    lag = [f"{summary.lag.mean:.2f}", f"{summary.lag.max}"]
    shares = [f"{one / summary.duration_s:.0%}" if one else "-" for _, one in summary.seconds]
    assert page.tables[0].rows[:2] == [
        ["scenario 0", "a", "1.50", f"{summary.tokens_per_s:,.0f}", f"{summary.duration_s / 6:.4g}", *lag, *shares],
        ["scenario 0", "b", "1.50", f"{slow.tokens_per_s:,.0f}", "-", *lag, *shares],  # no step, no seconds of it
    ]
    assert lines_of(page, "depends on")[:2] == [
        "scenario 1: the same one is fastest, 1.50 times as fast as b.",
        "scenario 2: b is fastest instead, 1.50 times as fast as b.",
    ]
    assert lines_of(page, "failed") == ["one failed"]


def test_a_comparison_without_its_baseline_or_without_a_run_has_a_page(summary: RunReport) -> None:
    assert compared({"a": summary}, speedup=None).tables[0].rows[0][2] == "-"
    assert compared({}).answer == "No run has ended."


def test_a_check_has_a_row_per_measurement_and_its_advice() -> None:
    rows = [
        CheckRow(what="  links", measured="1 GB/s", expected="2 GB/s", finding=Finding.SLOW, advice="look"),
        CheckRow(what="disk", measured="1 GB"),
    ]
    page = check_page(CheckReport(rows=rows))
    assert page.tables[0].rows == [["  links", "1 GB/s", "2 GB/s", "slow"], ["disk", "1 GB", "", "ok"]]
    assert lines_of(page, "advice") == ["slow, links: look"]
