"""Means and bands of several seeds, and the figures drawn with them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from command_line import Command
from learning_run import BASE

from analysis.figures import learning, mean_and_band, student_t
from analysis.read import Run, read_comparison

ARMS = [
    {"name": "pipeline"},
    {"name": "G=2", "set": ["scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=2"]},
]
LEARNING = {
    **BASE,
    "optimizer_steps": 3,
    "policy": BASE["policy"] | {"task": "reverse", "size": 3, "warm_start": {"steps": 2}},
    "compare": {"arms": ARMS, "baseline": "G=2", "seeds": [0, 1]},
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "run.toml").write_text(tomli_w.dumps(LEARNING))
    return tmp_path / "run.toml"


@pytest.mark.slow
def test_compare_of_learning_runs_draws_them_with_bands(command: Command, run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = command("compare", run_file, "--out", out)
    assert result.status == 0, result.err
    assert "ESS" in result.out
    assert "mean reward of the last tenth" in " ".join(result.out.split())
    drawn = {path.name for path in (out / "figures").iterdir()}
    assert {"learning.png", "lag_and_ess.pdf", "reward.png", "ess.png"} <= drawn
    learned = out / "as_given" / "pipeline" / "seed_0"
    fitted = command("drift", learned, "--check", learned)
    assert fitted.out.startswith("[drift]\nexponent = ")
    assert "# seed_0: ESS " in fitted.out
    assert tomllib.loads(fitted.out)["drift"]["rates"][0] >= 0
    arms = read_comparison(out).arms
    assert arms[1].folders == ["as_given/G=2/seed_0", "as_given/G=2/seed_1"]


@pytest.mark.slow
def test_replay_of_a_run_that_learned_learns_again(command: Command, run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "mean reward" in command("simulate", run_file, "--out", out, "--trace", "full").out
    same = command("replay", out)
    assert same.status == 0
    assert "identical: learned weights" in same.out
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text(json.dumps({**summary, "weights_sha256": "other"}))
    other = command("replay", out)
    assert other.status == 1
    assert "different: learned weights" in other.out


def test_the_scale_of_rewards_fits_the_means_and_not_the_bands(runs: list[Run]) -> None:
    seeds = [replace(runs[0], metrics={"reward/mean": np.full(200, value)}) for value in (0.0, 1.0)]
    by_time, by_samples, _ = learning({"arm": seeds}).axes
    assert by_time.get_ylim() == by_samples.get_ylim() == pytest.approx((0.4, 0.6))


T_OF_2 = 2 * 0.95 / (2 * (1 - 0.95**2)) ** 0.5
"""With two degrees of freedom P(|T| < t) = t / sqrt(2 + t^2)."""


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, T_OF_2), (3, 3.182446), (4, 2.776445), (9, 2.262157), (10, 2.228139), (11, 2.200985),
     (30, 2.042272), (99, 1.984217), (1000, 1.962339)],
)  # fmt: skip
def test_the_quantile_is_students_at_any_number_of_seeds(freedom: int, quantile: float) -> None:
    """Values of Abramowitz and Stegun 1964, table 26.10, with more digits."""
    assert student_t(freedom) == pytest.approx(quantile, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "mean", "half"),
    [
        ([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]], [2.0, 5.0], [T_OF_2 / 3**0.5, 0.0]),  # standard deviation 1
        ([[1.0, 2.0], [4.0, 2.0]], [2.5, 2.0], [1.5, 0.0]),  # two seeds: their range
        ([[1.0, 2.0]], [1.0, 2.0], [np.nan, np.nan]),  # one has no band
    ],
)
def test_the_band_is_students_95_percent_interval_of_the_mean(
    values: list[list[float]], mean: list[float], half: list[float]
) -> None:
    got = mean_and_band(np.array(values))
    assert got[0].tolist() == mean
    assert got[1] == pytest.approx(half, rel=1e-12, nan_ok=True)
