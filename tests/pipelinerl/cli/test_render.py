"""Tables of runs and comparisons on a terminal."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, sets

from pipelinerl.cli.render_comparison import print_comparison
from pipelinerl.cli.render_cost import cost_line
from pipelinerl.cli.render_run import duration, print_summary
from pipelinerl.records.comparison_report import ComparisonReport
from pipelinerl.records.cost import Rates
from pipelinerl.records.reports import RunReport


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.0025, "2.5 ms"), (0.25649, "256.5 ms"), (0.99996, "1 s"), (1.92045, "1.92 s"),
        (33.868, "33.87 s"), (119.9, "119.9 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"),
        (9e6, "2,500 h"), (9e9, "2,500,000 h"),
    ],
)  # fmt: skip
def test_a_time_span_is_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def summary(command: Command, tiny: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(command("simulate", tiny, "--json").out)
    return loaded


def test_an_incomplete_run_says_so(summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = RunReport.from_dict(summary, name="run")
    print_summary(report, "run")
    assert "ended early" not in capsys.readouterr().out
    print_summary(report.model_copy(update={"complete": False}), "run")
    assert "no: the run ended early" in capsys.readouterr().out


def test_a_run_of_no_time_at_all_has_a_table(summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    seconds = dict.fromkeys(summary["seconds"], 0.0)
    report = RunReport.from_dict({**summary, "duration_s": 0.0, "seconds": seconds}, name="run")
    print_summary(report, "run")
    assert "none" in capsys.readouterr().out


def one_arm(name: str, scenario: str, summary: dict[str, Any], baseline: str = "b") -> ComparisonReport:
    arm = {"name": name, "folder": "x", "speedup": 1.5, "summary": summary}
    scenarios = [{"name": scenario, "arms": [arm]}]
    data = {"baseline": baseline, "scenarios": scenarios, "failures": [], "complete": True}
    return ComparisonReport.from_dict(data, name="comparison")


def test_names_are_printed_as_they_are(summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are markup to rich, which drops what it knows and raises at a lone [/]."""
    print_comparison(one_arm("[red]x", "[/] y", summary, baseline="[bold]z"), "[blue]run.toml")
    print_summary(RunReport.from_dict(summary, name="run"), "[/]run.toml")
    shown = capsys.readouterr().out
    for name in ("[red]x", "[/] y", "[blue]run.toml: speed-up over [bold]z", "[/]run.toml: pipeline"):
        assert name in shown


def test_a_long_name_gives_way_to_the_numbers(
    summary: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    large = copy.deepcopy(summary) | {"tokens_per_s": 123456789.0}
    print_comparison(one_arm("A" * 90, "Z" * 90, large), "run.toml")
    shown = capsys.readouterr().out
    assert any("123,456,789" in line and "1.50" in line for line in shown.splitlines())
    assert (shown.count("A"), shown.count("Z"), shown.count("…")) == (180, 90, 0)  # a row, and the sentence below
    assert max(map(len, shown.splitlines())) <= 80


def test_an_arm_without_a_step_has_no_seconds_per_step(
    summary: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print_comparison(one_arm("arm", "as given", summary | {"optimizer_steps": 0}), "run.toml")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("arm")]
    assert row.split()[3] == "-"


@pytest.mark.parametrize(("steps", "said"), [(10, True), (50, False)])
def test_a_run_too_short_for_its_start_up_to_fade_says_so(command: Command, steps: int, said: bool) -> None:
    """The quickstart: 9.2k tokens/s over 10 steps and 11.9k in the last 5 of them; 11.7k over 50, and 12.4k later."""
    quickstart = Path(__file__).parents[3] / "examples" / "quickstart.toml"
    assert ("the second half alone" in command("simulate", quickstart, *sets(f"optimizer_steps={steps}")).out) == said


def test_cost_is_a_line_with_the_range_of_each_number() -> None:
    cost, dear = (Rates(gpus=4, usd_per_hour=12.0, watts=2800.0).cost(seconds, tokens=8e6) for seconds in (7200, 9000))
    assert cost_line(cost, [cost, dear]) == (
        "3 USD (3 to 3.75) or 1 GPU-hours (1 to 1.25) per million trained tokens; "
        "24 USD (24 to 30), 8 GPU-hours (8 to 10), at most 5.6 kWh (5.6 to 7) for the run"
    )
    unpriced = Rates(gpus=4, usd_per_hour=None, watts=None).cost(7200, tokens=8e6)
    assert cost_line(unpriced) == "1 GPU-hours per million trained tokens; 8 GPU-hours for the run"
