"""`pipelinerl compare`: what it prints, what the folder holds, and what is drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import COMPARE, STALLS, TINY, Command
from run_folders import everything_in

import analysis.figures
import analysis.plot
from pipelinerl.cli.output import LOOK_FIRST
from pipelinerl.config.run import load_run
from pipelinerl.pages.runs import comparison_page
from pipelinerl.records.comparison_report import ComparisonReport


@pytest.mark.usefixtures("in_this_process", "no_figures")
def test_compare_prints_a_row_per_arm_and_keeps_what_it_prints(command: Command, tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + COMPARE)
    result = command("compare", tiny, "--out", tmp_path / "out")
    assert (result.status, result.err) == (0, "")
    kept = ComparisonReport.read(tmp_path / "out" / "comparison.json")
    assert "tiny.toml: speed-up over conventional" in result.out
    assert "as given" in result.out
    assert "too few optimizer steps for pipeline: the second half alone gives " in result.out
    assert kept.too_short[0] in result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert all(row[1:] in rows for row in comparison_page(kept).tables[0].rows)
    printed = command("compare", tiny, "--json", "--seed", 8, "--out", tmp_path / "again")
    assert (printed.status, printed.err) == (0, "")
    assert json.loads(printed.out) == json.loads((tmp_path / "again" / "comparison.json").read_text())
    assert load_run(tmp_path / "again" / "as_given" / "pipeline" / "run.toml").seed == 8


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "small_figures")
def test_the_same_comparison_gives_the_same_bytes_in_every_file_and_figure_and_ends_with_three_of_them(
    command: Command, tmp_path: Path, tiny: Path
) -> None:
    tiny.write_text(TINY + COMPARE)
    said = [command("compare", tiny, "--out", tmp_path / name).out for name in ("first", "second")]
    first = everything_in(tmp_path / "first")
    assert {"comparison.json", "as_given/pipeline/steps.csv", "figures/time_split.png"} <= set(first)
    assert first == everything_in(tmp_path / "second")
    assert "\nThe fastest is " in said[0]
    shown = [Path(line.strip()) for line in said[0].splitlines() if line.endswith(".png")]
    assert [one.stem for one in shown] == [name for name in LOOK_FIRST if name in {one.stem for one in shown}]
    assert len(shown) == 3
    assert all(one.is_file() for one in shown)


@pytest.mark.usefixtures("in_this_process")
def test_paper_mode_is_compared_in_flashes_with_the_analytic_curves_beside_it(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = []
    monkeypatch.setattr(analysis.plot, "save_figures", lambda *_, **drawn: curves.append(drawn["curves"]) or [])
    tiny.write_text(TINY + COMPARE)
    flashes = "hardware.decode={kind='utilisation', flash_s=0.001}"
    result = command("compare", tiny, "--set", flashes, "--out", tmp_path / "out")
    assert result.status == 0
    assert "tok/flash" in result.out
    arms = json.loads((tmp_path / "out" / "comparison.json").read_text())["scenarios"][0]["arms"]
    assert f"{arms[0]['summary']['tokens_per_flash']:.2f}" in result.out
    assert curves[0].max_lag[0] == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "small_figures")
def test_a_comparison_whose_baseline_fails_shows_the_others_with_status_1(
    command: Command, tmp_path: Path, tiny: Path
) -> None:
    """There is no speed-up to draw, but all else."""
    arms = f'[{{ name = "pipeline" }}, {{ name = "stalls", set = {json.dumps(STALLS)} }}]'
    scenarios = '[{ name = "one" }, { name = "other", set = ["seed=5"] }]'
    tiny.write_text(f'{TINY}\n[compare]\nbaseline = "stalls"\narms = {arms}\nscenarios = {scenarios}\n')
    result = command("compare", tiny, "--out", tmp_path / "out")
    assert result.status == 1
    assert result.err.startswith("pipelinerl: scenario 'one', arm 'stalls': stalled: more than ")
    assert result.err.count("\n") == 2
    assert [line.split()[1] for line in result.out.splitlines() if line.startswith("pipeline")] == ["-", "-"]
    names = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert "lag_by_step" in names
    assert "speedup_by_scenario" not in names


@pytest.mark.usefixtures("in_this_process")
def test_the_first_scenario_with_a_finished_run_stands_for_all_in_the_figures_of_runs(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def draw(runs: list[Any], _folder: Path, *, comparison: Any, curves: Any, **_: Any) -> list[Path]:
        analysis.figures.speedup_by_scenario(comparison)  # it does without the missing arms
        scenarios = [scenario.name for scenario in comparison.scenarios]
        drawn.append(([(run.name, run.report.seed) for run in runs], scenarios, curves))
        return []

    monkeypatch.setattr(analysis.plot, "save_figures", draw)
    scenarios = f'[{{ name = "stalls", set = {json.dumps(STALLS)} }}, {{ name = "goes well", set = ["seed=5"] }}]'
    tiny.write_text(TINY + COMPARE + f"scenarios = {scenarios}\n")
    result = command("compare", tiny, "--out", tmp_path / "out")
    assert drawn == [([("pipeline", 5), ("conventional", 5)], ["stalls", "goes well"], None)]
    assert (result.status, result.err.count("\n")) == (1, 2)
    assert result.err.startswith("pipelinerl: scenario 'stalls', arm 'conventional': stalled: ")
