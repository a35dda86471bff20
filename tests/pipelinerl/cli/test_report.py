"""``pipelinerl report``: what a page says, for each kind of folder, and what is wrong input."""

from __future__ import annotations

import json
import re
import shutil
import sys
import webbrowser
from base64 import b64decode
from pathlib import Path

import in_memory
import pytest
from command_line import Command
from tiny_comparison import CONVENTIONAL, PIPELINE, run
from tiny_plan import in_this_process, planned

from pipelinerl.pages.page import cost_line, page_markdown
from pipelinerl.pages.plans import choice, plan_page
from pipelinerl.pages.runs import comparison_page
from pipelinerl.records.comparison_report import ComparisonReport, EnvironmentsReport, EnvironmentsRow
from pipelinerl.records.plan_report import Assumed, PlanReport
from pipelinerl.records.reports import Bottleneck, CostReport, RolloutSeconds
from pipelinerl.records.run_folder import write_json
from pipelinerl.records.validation_report import PredictedRow, UnusableRow
from sim.compare import compare
from sim.validation.predict import validation_report


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison."""
    folder = tmp_path_factory.mktemp("root") / "compared"
    with in_this_process():
        compare(run(arms=[PIPELINE, CONVENTIONAL], baseline="conventional"), out=folder)
    return folder


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plan, within one that holds it alone."""
    folder = tmp_path_factory.mktemp("plans") / "4_GPUs"
    planned("price.gpu_hour=2.0", out=folder)
    return folder


def written(command: Command, *folders: Path, kind: str = "md") -> str:
    out = folders[0].parent / f"page.{kind}"
    done = command("report", *folders, "--out", out)
    assert (done.status, done.err) == (0, "")
    return out.read_text()


def answer(text: str) -> str:
    """The line below the question."""
    return text.split("\n")[4]


def test_the_page_of_a_run_has_its_numbers_and_its_run_file(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    finished = tmp_path / "run"
    assert command("simulate", tiny, "--set", "price.gpu_hour=2.5", "--out", finished).status == 0
    summary = json.loads((finished / "summary.json").read_text())
    text = written(command, finished)
    assert f"{summary['tokens_per_s']:,.0f} tokens/s" in answer(text)
    assert f"mean lag of {summary['lag']['mean']:.2f}" in answer(text)
    assert f"- Cost: {cost_line(CostReport.from_dict(summary['cost'], name='cost'))}\n" in text
    assert (finished / "run.toml").read_text().rstrip() in text
    assert "decode, from the run file: kind affine, step_s 0.01" in text


def test_runs_side_by_side_have_a_column_each_and_the_fastest_answers(
    command: Command, finished: Path, tiny: Path, no_figures: None
) -> None:
    slow = finished.with_name("slow")
    assert command("simulate", tiny, "--set", "hardware.training.token_s=1e-2", "--out", slow).status == 0
    text = written(command, slow, finished)
    assert answer(text).startswith("run: ")
    assert "|  | slow | run |" in text
    assert (finished / "run.toml").read_text().rstrip() in text


def test_the_page_of_a_comparison_names_the_fastest_arm_and_what_arms_differ_in(
    command: Command, compared: Path
) -> None:
    comparison = ComparisonReport.read(compared / "comparison.json")
    best = max(comparison.arms, key=lambda arm: arm.summary.tokens_per_s)
    text = written(command, compared)
    assert answer(text) == comparison.answer
    assert text == page_markdown(comparison_page(comparison, compared))
    assert "| scheduler.kind | pipeline | conventional |" in text
    assert (compared / best.folder / "run.toml").read_text().rstrip() in text


def test_the_page_of_a_plan_says_what_to_run_and_why(command: Command, plan_folder: Path) -> None:
    """The caption of the figure tells central values from means of the draws."""
    report = PlanReport.read(plan_folder / "plan.json")
    text = written(command, plan_folder)
    assert text == page_markdown(plan_page(report, plan_folder))
    assert answer(text) == choice(report.recommended)
    assert (plan_folder / "recommended.toml").read_text().rstrip() in text
    assert "## Assumed" not in text  # there was a run file
    for title in ("Why", "How sure", "Depends on", "Next", "What limits it", "Assumptions"):
        assert f"\n## {title}\n\n- " in text
    page = written(command, plan_folder, kind="html")
    assert len(page.encode()) < 3e6
    (link,) = re.findall(r'href="data:text/plain;base64,([^"]+)"', page)
    assert b64decode(link).decode() == (plan_folder / "recommended.toml").read_text()
    assert "means of the draws" in page


def test_the_page_of_several_plans_says_who_wins_where(command: Command, tmp_path: Path, plan_folder: Path) -> None:
    """A folder of plans, or plans side by side: the fastest answers, and what the question assumed stands there."""
    report = PlanReport.read(plan_folder / "plan.json")
    assumed = Assumed(key="workload.length.cv", value=1.0, instead=[])
    best = report.recommended.model_copy(update={"tokens_per_s": 2 * report.recommended.tokens_per_s})
    for name in ("4_GPUs", "16_GPUs"):
        shutil.copytree(plan_folder, tmp_path / "cases" / name)
    faster = report.model_copy(update={"recommended": best, "assumed": [assumed]})
    write_json(tmp_path / "cases" / "16_GPUs" / "plan.json", faster.to_dict())
    text = written(command, tmp_path / "cases")
    assert answer(text).startswith("Fastest and cheapest: 16 GPUs, ")
    assert text.index("| 4 GPUs | ") < text.index("| 16 GPUs | ")
    assert "- workload.length.cv = 1\n" in text
    assert text == written(command, tmp_path / "cases" / "4_GPUs", tmp_path / "cases" / "16_GPUs")
    assert "16 GPUs: " in written(command, tmp_path / "cases", kind="html")


def test_the_page_of_numbers_of_environments_has_the_verdict_and_the_run_of_the_knee(
    command: Command, tmp_path: Path, finished: Path
) -> None:
    seconds = RolloutSeconds(environment=1.0, waiting=0.0, engine=1.0, scoring=0.0)
    rows = [
        EnvironmentsRow(
            count=count, rollouts_per_hour=rate, in_use_mean=count, generation=0.5, training=0.1, lag_mean=1.0,
            seconds=seconds, bottleneck=Bottleneck.ENVIRONMENT, usd_per_1000_rollouts=usd, folder="run",
        )
        for count, rate, usd in ((8, 50.0, 3.0), (16, 100.0, 2.0))
    ]  # fmt: skip
    report = EnvironmentsReport(
        accelerators=4, slots=12, rows=rows, knee=16, verdict="the knee is at 16", failures=[], complete=True
    )
    write_json(finished.parent / "environments.json", report.to_dict())
    (finished.parent / "comparison.json").write_text("{}")  # it lies beside, and is not what was asked
    out = tmp_path / "page.md"
    told = command("report", finished.parent, "--out", out).out
    text = out.read_text()
    assert told == f"{out}: {out.stat().st_size / 1e3:.1f} kB\n"
    assert answer(text) == "The knee is at 16."
    assert "| 8 | 50 | 8 | 50% | 10% | 1.00 | 3 | environment |" in text
    assert (finished / "run.toml").read_text().rstrip() in text
    page = tmp_path / "page.html"
    assert command("report", finished.parent, "--out", page).out == f"{page}: {page.stat().st_size / 1e6:.2f} MB\n"
    assert "Cost against environments" in page.read_text()


def test_the_page_of_a_validation_has_a_row_per_published_run(command: Command, tmp_path: Path) -> None:
    parts = {"mode": "", "gpus": 8, "answer_tokens": None, "fitted_to": (), "inputs": (), "error": 0.1}
    ends = {"measured": 10.0, "predicted": 11.0, "low": 9.0, "high": 13.0, "alone": None}
    ends |= {"alone_low": None, "alone_high": None}
    rows = [
        PredictedRow(id=name, family=name, quantity=kind, assumed=("no cv",), **parts, **ends)
        for name, kind in (("one", "s/step"), ("two", "staleness"))
    ]
    (tmp_path / "v").mkdir()
    write_json(tmp_path / "v/validation.json", validation_report([*rows, UnusableRow(id="e", reason="no")]).to_dict())
    text = written(command, tmp_path / "v")
    assert answer(text).startswith("2 rows predicted, 1 not usable; median error 10%")
    assert "- no cv: one, two\n" in text
    assert "| one | s/step | 10 | 11 | 9-13 | +10% |" in text
    assert "predicted over measured" in written(command, tmp_path / "v", kind="html")


@pytest.mark.slow
def test_the_page_of_a_real_run_says_that_it_is_measured(command: Command, tmp_path: Path) -> None:
    config = in_memory.config_of()
    in_memory.run_checked(config, tmp_path / "real", in_memory.parts_of(config))
    text = written(command, tmp_path / "real")
    assert "- Kind: a real run: everything is measured, seed 0, 6 optimizer steps\n" in text
    assert "- Band: none: one run\n" in text
    assert "Assumptions" not in text
    page = written(command, tmp_path / "real", kind="html")
    assert "Mean reward" in page


def test_open_shows_the_page(command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    out = finished / "page.md"
    assert command("report", finished, "--out", out, "--open").status == 0
    assert opened == [out.as_uri()]


def test_without_bokeh_a_page_is_one_line_and_markdown_is_written(
    command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.startswith(("bokeh", "analysis.page"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    done = command("report", finished, "--out", finished / "page.html")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "is not installed; pip install bokeh" in done.err
    assert command("report", finished, "--out", finished / "page.md").status == 0


def test_wrong_input_is_one_line(command: Command, finished: Path, compared: Path) -> None:
    for arguments, said in (
        ((finished, "--out", finished / "page.pdf"), "--out must end in .html or .md, got"),
        ((finished, "--out", finished / "no" / "page.md"), "--out must be a file in a folder that exists, got"),
        ((finished, compared, "--out", finished / "page.md"), "must be runs or a single folder with a comparison.json"),
        ((finished / "nothing", "--out", finished / "page.md"), "cannot read"),
    ):
        done = command("report", *arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert said in done.err
