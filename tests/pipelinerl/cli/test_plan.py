"""The command ``plan`` and what it prints."""

import json
from pathlib import Path

import pytest
import tomli_w
from command_line import Command, assert_fails
from tiny_plan import TINY, priced_plan

from pipelinerl.cli.render_plan import print_plan


def test_the_table_shows_the_recommendation_the_reasons_and_what_it_was_compared_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = priced_plan()
    print_plan(report, "run.toml")
    text = capsys.readouterr().out
    number = report.certainty.ways
    assert f"run.toml: 13 candidates screened, {number} compared in 400 draws, 7 simulated" in text
    assert text.index("answer ") < text.index("why ") < text.index("next ") < text.index("candidates screened")
    for one in (report.recommended, report.runner_up, report.own):
        assert one is not None
        assert one.label.removesuffix(" (run file)") in text
        assert f"{one.tokens_per_s:,.0f}" in text
    assert f"bottleneck: {report.recommended.verdict}" in text


def test_a_run_file_of_a_kind_that_was_not_tried_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    report = priced_plan()
    assert report.own is not None
    other = report.own.model_copy(update={"among_schedulers": False})
    print_plan(report.model_copy(update={"own": other}), "run.toml")
    line = "run file (only to compare with: plan.schedulers has no pipeline): recommended is "
    assert line in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_json_draws_and_keeps_the_folder(command: Command, tmp_path: Path) -> None:
    path, out = tmp_path / "run.toml", tmp_path / "out"
    path.write_text(tomli_w.dumps(TINY))
    result, again = (command("plan", path, "--set", "plan.simulate=3", "--out", out, "--json") for _ in range(2))
    assert result.status == 0
    assert json.loads(result.out) == json.loads((out / "plan.json").read_text())
    assert (out / "figures" / "plan_throughput_against_lag.png").exists()
    assert_fails(again, 2, f"got {out}, which holds plan.json")
