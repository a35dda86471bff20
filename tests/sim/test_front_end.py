"""The front end of an engine: rollouts one after the other, and reports that take time."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from recorded_run import Recorded
from tiny_comparison import BASE

from pipelinerl.config.run import load_run, parse_run, with_overrides
from pipelinerl.scheduler.events import RolloutAborted, RolloutFinished, StartRollout
from sim.cluster import SimulatedCluster
from sim.run import simulate

ONE_ENGINE: dict[str, Any] = {
    "optimizer_steps": 1,
    "cluster": {"accelerators": 2, "generation_accelerators": 1},
    "scheduler": {"train_batch_size": 3, "generation_batch_size": 3},
    "workload": {"group_size": 1, "length": {"kind": "fixed", "max": 2}},
    "hardware": {
        "decode": {"kind": "affine", "step_s": 1.0},
        "training": {"token_s": 0.0},
        "latency": {"request_s": 0.4, "report_s": 0.25},
    },
}


def times_of(*overrides: str) -> dict[str, list[tuple[float, int]]]:
    recorded = Recorded()
    SimulatedCluster(parse_run(with_overrides(ONE_ENGINE, overrides))).run(recorded)
    return {
        kind.__name__: [(round(t, 9), one.rollout_id) for t, one in recorded.entries if isinstance(one, kind)]
        for kind in (StartRollout, RolloutFinished, RolloutAborted)
    }


def test_rollouts_reach_the_engine_one_after_the_other_and_are_reported_later() -> None:
    """Taken at 0.4, 0.8, 1.2 s; the first has its steps from 0.4 s, the others join at 1.4 s; 0.25 s to the report."""
    times = times_of()
    assert times["StartRollout"][:4] == [(0.0, 0), (0.0, 1), (0.0, 2), (2.65, 3)]  # its slot is taken till the report
    assert times["RolloutFinished"] == [(2.65, 0), (3.65, 1), (3.65, 2)]


def test_a_rollout_whose_report_is_on_its_way_when_the_run_ends_is_recorded_as_ended() -> None:
    """Batches of one: the run ends at 2.65 s, when both others are in their last step; a second run is slower to report
    the first one than the others take to finish."""
    assert times_of("scheduler.train_batch_size=1")["RolloutAborted"] == [(2.65, 1), (2.65, 2), (2.65, 3)]
    late = times_of("scheduler.train_batch_size=1", "hardware.latency.report_s=1.5", "hardware.latency.request_s=0.4")
    assert late["RolloutFinished"] == [(3.9, 0)]
    assert late["RolloutAborted"] == [(3.9, 1), (3.9, 2), (3.9, 3)]  # 1 and 2 had all their tokens at 3.4 s


def test_dispatch_comes_after_the_front_end() -> None:
    assert times_of("hardware.latency.dispatch_s=0.3")["RolloutFinished"][0] == (2.95, 0)


def test_each_engine_has_a_front_end_of_its_own() -> None:
    times = times_of("cluster.accelerators=3", "cluster.generation_accelerators=2", "scheduler.generation_batch_size=1")
    assert times["RolloutFinished"][:2] == [(2.65, 0), (2.65, 1)]


def test_a_front_end_that_is_the_slowest_sets_the_pace_and_its_queue_adds_no_lag() -> None:
    """4 rollouts per step on 2 engines, 0.25 s each: an optimizer step every 0.5 s, however many slots there are."""
    slow = ("hardware.latency.request_s=0.25", "optimizer_steps=200", "hardware.training.token_s=1e-4")
    few, many = (
        simulate(parse_run(with_overrides(BASE, (*slow, f"scheduler.generation_batch_size={size}"))))
        for size in (12, 48)
    )
    for report in (few, many):
        assert report.duration_s / report.optimizer_steps == pytest.approx(0.5, rel=0.03)
    assert many.lag.mean == pytest.approx(few.lag.mean, abs=0.05)


def test_tokens_age_while_they_are_reported() -> None:
    """A quarter of a second on the way back or there: the same steps, and on the way back that much more lag."""
    common = ("optimizer_steps=400", "hardware.training.token_s=1e-4", "scheduler.generation_batch_size=48")
    reported, dispatched = (
        simulate(parse_run(with_overrides(BASE, (*common, f"hardware.latency.{name}=0.25"))))
        for name in ("report_s", "dispatch_s")
    )
    step_s = reported.duration_s / reported.optimizer_steps
    assert step_s == pytest.approx(dispatched.duration_s / dispatched.optimizer_steps, rel=0.03)
    assert reported.lag.mean - dispatched.lag.mean == pytest.approx(0.25 / step_s, rel=0.1)


def test_a_run_file_without_the_keys_is_resolved_without_them(tmp_path: Path) -> None:
    config = parse_run(BASE)
    simulate(config, out=tmp_path)
    latency = tomllib.loads((tmp_path / "run.toml").read_text())["hardware"]["latency"]
    assert set(latency) == {"dispatch_s", "dispatch_jitter_s", "reward_s", "preprocess_s"}
    assert load_run(tmp_path / "run.toml") == config
