"""Which figures are written, and that the same runs give the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from made_up_runs import METRICS, with_figure_data, with_fleet, write_real_run, write_run

from analysis import figures
from analysis.plot import save_figures
from analysis.read import Run, read_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport

ALWAYS = {"lag_by_position", "lag_by_step", "lag_histogram", "samples_against_time", "time_split"}
"""Figures of any run."""


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    """In processes of their own with another hash seed and date, which must not reach the files."""
    code = (
        "import sys; from analysis.read import read_run; from analysis.plot import save_figures;"
        "from pathlib import Path; save_figures([read_run(sys.argv[1])], Path(sys.argv[2]))"
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


@pytest.mark.slow
def test_a_fleet_adds_its_figures(runs: list[Run], tmp_path: Path) -> None:
    """Alone among several runs, too; a fleet whose engines stay, and a trainer that fails, have the second only."""
    save_figures(runs[:2], tmp_path / "before")
    before = {path.name for path in (tmp_path / "before").iterdir()}
    for name, run, added in (
        ("fleet", with_fleet(runs[0]), {"fleet_over_time", "fleet_seconds"}),
        ("stays", replace(with_fleet(runs[0]), figure_data=runs[0].figure_data), {"fleet_seconds"}),
    ):
        paths = save_figures([run, runs[1]], tmp_path / name)
        assert {path.stem for path in paths if path.name not in before} == added


def test_a_run_without_window_and_timeline_has_the_other_figures(runs: list[Run], tmp_path: Path) -> None:
    none = {"in_progress": [], "tokens_per_s": []}
    run = with_figure_data(runs[0], generation_window=none, timeline={"engines": []})
    assert {path.stem for path in save_figures([run], tmp_path)} == ALWAYS
    with pytest.raises(ConfigError, match="no generation window in pipeline"):
        figures.generation_phase([run])
    with pytest.raises(ConfigError, match="no engine in the timeline of pipeline"):
        figures.timeline(run)


@pytest.mark.slow
def test_runs_whose_names_give_the_same_file_name_keep_their_own_files(
    runs: list[Run], comparison: ComparisonReport, tmp_path: Path
) -> None:
    """Of a comparison with one scenario, which has no figure of speed-ups."""
    twins = [replace(run, name=name) for name, run in zip(("x/y", "x y"), runs, strict=False)]
    one = comparison.model_copy(update={"baseline": "x y", "scenarios": comparison.scenarios[:1]})
    stems = {path.stem for path in save_figures(twins, tmp_path, comparison=one)}
    assert {"timeline_x_y", "timeline_x_y_"} <= stems
    assert "speedup_by_scenario" not in stems
