"""Fixtures of the figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_runs import write_run
from run_folders import simulated_steps

from analysis.read import Run, read_runs
from pipelinerl.records.comparison_report import ComparisonReport


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A pipeline, and conventional with G = 32 and G = 8, in this order."""
    root = tmp_path_factory.mktemp("runs")
    folders = [write_run(root / "pipeline", num_steps=200)]
    folders += [write_run(root / f"conventional G={g}", rl_step=g, num_steps=200) for g in (32, 8)]
    return read_runs(folders)


@pytest.fixture(scope="session")
def comparison(runs: list[Run]) -> ComparisonReport:
    speedups = {"central": (1.5, 1.0, 0.6), "long tail": (1.8, 1.0, 0.5)}
    scenarios = []
    for name, values in speedups.items():
        arms = [
            {"name": run.name, "folder": f"{name}/{run.name}", "speedup": speedup, "summary": run.report.to_dict()}
            for run, speedup in zip(runs, values, strict=True)
        ]
        scenarios.append({"name": name, "arms": arms})
    data = {"failures": [], "complete": True, "baseline": runs[1].name, "scenarios": scenarios}
    return ComparisonReport.from_dict(data, name="comparison")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six optimizer steps of the quickstart, with a trace."""
    return simulated_steps(tmp_path_factory.mktemp("run"), [])
