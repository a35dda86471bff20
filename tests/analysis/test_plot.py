"""Which figures are written, and that the same runs give the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from made_up_runs import CURVES, METRICS, write_real_run, write_run

from analysis import figures
from analysis.plot import save_figures
from analysis.read import Run, read_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport

ALWAYS = {"lag_by_position", "lag_by_step", "lag_histogram", "samples_against_time", "time_split"}
"""Figures of any run."""


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    # A new process, hash seed and date each: nothing of these may reach the files.
    code = (
        "import sys; from analysis.read import read_run; from analysis.plot import save_figures;"
        "save_figures([read_run(sys.argv[1])], sys.argv[2])"
    )
    processes, written = [], []
    for folder, number in (("a", "0"), ("b", "86400")):
        paths = [str(write_run(tmp_path / folder / "run", num_steps=20)), str(tmp_path / folder / "out")]
        environment = {**os.environ, "PYTHONHASHSEED": number, "SOURCE_DATE_EPOCH": number}
        command = [sys.executable, "-c", code, *paths]
        processes.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]))
    for process, folder in zip(processes, "ab", strict=True):
        assert process.wait(timeout=600) == 0
        written.append({path.name: path.read_bytes() for path in sorted((tmp_path / folder / "out").iterdir())})
    assert written[0] == written[1]
    assert len(written[0]) == 14
    assert not any(b"CreationDate" in data or b"Matplotlib" in data for data in written[0].values())


@pytest.mark.slow
def test_save_figures_writes_all_that_the_data_allow(
    runs: list[Run], comparison: ComparisonReport, tmp_path: Path
) -> None:
    settings = dict(matplotlib.rcParams)
    paths = save_figures(runs, tmp_path / "new" / "figures", comparison=comparison)
    assert dict(matplotlib.rcParams) == settings
    timelines = {"timeline_pipeline", "timeline_conventional_G=32"}  # the fastest and the baseline
    of_all = {"generation_phase", "throughput_against_max_lag", "speedup_by_scenario"}
    assert {path.stem for path in paths} == ALWAYS | of_all | timelines
    assert sorted(paths) == sorted((tmp_path / "new" / "figures").iterdir())
    assert {path.suffix for path in paths} == {".png", ".pdf"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "added"), [(METRICS, {"ess", "reward"}), ([{"step": 1, "reward/mean": 0.5}], {"reward"})]
)
def test_metrics_add_their_figures_and_leave_the_others_alone(
    lines: list[dict[str, float]], added: set[str], tmp_path: Path
) -> None:
    real = read_run(write_real_run(tmp_path / "run", lines, num_steps=3))
    simulated = replace(real, metrics={})
    save_figures([simulated], tmp_path / "before")
    save_figures([real], tmp_path / "after")
    before, after = (
        {path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("before", "after")
    )
    assert {Path(name).stem for name in after.keys() - before.keys()} == added
    assert before == {name: after[name] for name in before}


def test_a_run_without_window_and_timeline_has_the_other_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    data = json.loads((folder / "profile.json").read_text())
    data["generation_window"].update(in_progress=[], tokens_per_s=[])
    data["timeline"] = {"until_s": 0.0, "trainer": [], "engines": [], "updates": []}
    (folder / "profile.json").write_text(json.dumps(data))
    run = read_run(folder)
    stems = {path.stem for path in save_figures([run], tmp_path / "out")}
    assert stems == ALWAYS
    with pytest.raises(ConfigError, match="no generation window in run"):
        figures.generation_phase([run])
    with pytest.raises(ConfigError, match="no engine in the timeline of run"):
        figures.timeline(run)


@pytest.mark.slow
def test_names_that_differ_only_in_what_a_file_name_leaves_out_keep_their_own_files(
    runs: list[Run], tmp_path: Path
) -> None:
    twins = [replace(run, name=name) for name, run in zip(("x/y", "x y"), runs, strict=False)]
    stems = {path.stem for path in save_figures(twins, tmp_path)}
    assert {"timeline_x_y", "timeline_x_y_"} <= stems


@pytest.mark.slow
def test_speedups_in_one_scenario_are_a_table_and_no_figure(
    runs: list[Run], comparison: ComparisonReport, tmp_path: Path
) -> None:
    one = comparison.model_copy(update={"scenarios": comparison.scenarios[:1]})
    assert "speedup_by_scenario" not in {path.stem for path in save_figures(runs[:1], tmp_path, comparison=one)}


def test_curves_need_no_run_but_runs_that_know_flashes(runs: list[Run], tmp_path: Path) -> None:
    assert [path.name for path in save_figures([], tmp_path, curves=CURVES)] == [
        "throughput_against_max_lag.png",
        "throughput_against_max_lag.pdf",
    ]
    with pytest.raises(ConfigError, match="points must be in tokens/flash"):
        save_figures(runs, tmp_path / "not", curves=CURVES)
    assert not (tmp_path / "not").exists()


def test_nothing_to_draw_and_equal_names_are_refused(runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="figures need a run, a comparison or analytic curves"):
        save_figures([], tmp_path)
    with pytest.raises(ConfigError, match="runs must have different names"):
        save_figures([runs[0], runs[0]], tmp_path)
