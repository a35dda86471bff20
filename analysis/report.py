"""Write the figures of runs into a folder, as PNG to look at and PDF to print; the same runs give the same bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import matplotlib
from matplotlib.figure import Figure

from analysis import bands, figures, learning
from analysis.read import Comparison, RateCurves, Run, rate_points
from analysis.style import DPI, RC
from pipelinerl.errors import ConfigError

# Neither file says when or with what it was made.
_METADATA = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def save_figures(
    runs: Sequence[Run],
    folder: str | Path,
    *,
    comparison: Comparison | None = None,
    curves: RateCurves | None = None,
    seeds: Mapping[str, Sequence[Run]] = MappingProxyType({}),
) -> list[Path]:
    """Write every figure that the data allow.

    Args:
        runs: Drawn side by side; their names must differ. May be empty if there is a comparison or there are curves.
        folder: Where to; made if it does not exist.
        comparison: Adds the speed-ups by scenario, where its baseline has ended.
        curves: Adds the analytic model to throughput against lag; the runs must then know their tokens/flash.
        seeds: The runs of every arm of a comparison, by arm. Adds learning curves with bands, where runs have learned.

    Returns:
        The files, two per figure.

    Raises:
        ConfigError: If there is nothing to draw, runs share a name, or ``curves`` and runs differ in unit.
        OSError: If a file cannot be written.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"runs must have different names to be told apart, got {', '.join(names)}")
    drawn = _run_figures(runs) if runs else {}
    if len(runs) > 1 or curves is not None:
        points, unit = rate_points(runs)
        drawn["throughput_against_max_lag"] = figures.throughput_against_max_lag(points, curves, unit)
    if comparison is not None and any(
        arm.speedup is not None for arms in comparison.scenarios.values() for arm in arms
    ):
        drawn["speedup_by_scenario"] = figures.speedup_by_scenario(comparison)
    if seeds and all(run.has_ess for runs in seeds.values() for run in runs):
        drawn["learning"] = bands.learning(seeds)
        drawn["lag_and_ess"] = bands.lag_and_ess(seeds)
    if not drawn:
        raise ConfigError("figures need a run, a comparison or analytic curves, got none")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [path for name, figure in drawn.items() for path in save_figure(figure, folder, name)]


def _run_figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return the figures of the runs alone by file name; what a run did not record, it has no figure of."""
    drawn = {
        "lag_by_position": figures.lag_by_position(runs),
        "lag_by_step": figures.lag_by_step(runs),
        "lag_histogram": figures.lag_histogram(runs),
        "samples_against_time": figures.samples_against_time(runs),
        "time_split": figures.time_split(runs),
    }
    if any(len(run.profile.generation_window.in_progress) for run in runs):
        drawn["generation_phase"] = figures.generation_phase(runs)
    if any(run.has_ess for run in runs):
        drawn["ess"] = learning.ess(runs)
    if any(run.metrics for run in runs):
        drawn["reward"] = learning.reward(runs)
    for run in runs:
        if run.profile.timeline.engines:
            name = "timeline_" + re.sub(r"[^A-Za-z0-9.=+-]+", "_", run.name)
            while name in drawn:  # two names may differ in nothing but what a file name leaves out
                name += "_"
            drawn[name] = figures.timeline(run)
    return drawn


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write one figure in both formats, laid out once."""
    paths = [folder / f"{name}.{kind}" for kind in _METADATA]
    with matplotlib.rc_context(RC):
        for path, metadata in zip(paths, _METADATA.values(), strict=True):
            figure.savefig(path, dpi=DPI, metadata=metadata)
            figure.set_layout_engine(None)  # "none" would have the next one drawn twice
    return paths
