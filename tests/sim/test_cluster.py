"""Rewards with limited concurrency: by hand, by Little's law, and in the screening of a plan."""

from __future__ import annotations

import pytest
from played_run import fixed, play, trains_in

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.hardware.costs import DecodeStep, LatencyConfig
from pipelinerl.records.reports import Bottleneck
from pipelinerl.scheduler.events import RolloutFinished, RolloutScored
from pipelinerl.theory.lengths import LengthStatistics, lengths_from
from pipelinerl.theory.steady_state import screen
from sim.clock import TICKS_PER_S
from sim.cluster import Scoring
from sim.run import simulate


def test_rewards_wait_for_a_worker_by_hand():
    """Two workers, 3 s a reward, 1 s of preprocessing: five that finish at 0, 0, 0, 2 and 9 s are scored at 4, 4, 7, 7
    and 13 s."""
    scoring = Scoring(LatencyConfig(reward_s=3.0, preprocess_s=1.0, reward_workers=2))
    finished_s = [0, 0, 0, 2, 9]
    assert [t + scoring.ticks(t * TICKS_PER_S) / TICKS_PER_S for t in finished_s] == [4, 4, 7, 7, 13]


@pytest.mark.parametrize("kind", ["pipeline", "conventional", "one_step_off"])
def test_as_many_workers_as_rollouts_are_no_limit(kind):
    sizes = {"batch": 4, "slots": 4, "engines": 2, "length": fixed(9), "kind": kind}
    hardware = trains_in(2.0)
    free = play(20, **sizes, hardware={**hardware, "latency": {"reward_s": 5.0}})
    many = play(20, **sizes, hardware={**hardware, "latency": {"reward_s": 5.0, "reward_workers": 100}})
    assert many.entries == free.entries


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_rewards_bound_the_rate_and_little_has_the_queue(workers):
    """Rewards of 6 s by c workers: c / 6 rollouts a second, and each worker is busy all the time.

    Mean number being scored = rate x mean time from the last token to the score: both are taken from the events.
    """
    run = play(
        200, batch=2, slots=20, length=fixed(4), ready_queue_size=40,
        hardware={"latency": {"reward_s": 6.0, "reward_workers": workers}},
    )  # fmt: skip
    times_s = [time_s for time_s, _ in run.of(RolloutScored)]
    num = len(times_s)
    assert num / times_s[-1] == pytest.approx(workers / 6.0, rel=0.03)
    finished_s = {one.rollout_id: time_s for time_s, one in run.of(RolloutFinished)}
    waits_s = [time_s - finished_s[one.rollout_id] for time_s, one in run.of(RolloutScored)]
    assert min(waits_s) >= 6.0
    area, scoring, last_s = 0.0, 0, 0.0
    for time_s, one in run.of(RolloutFinished, RolloutScored):
        area += scoring * (time_s - last_s)
        last_s, scoring = time_s, scoring + (1 if isinstance(one, RolloutFinished) else -1)
    scored = {one.rollout_id for _, one in run.of(RolloutScored)}
    unfinished_s = sum(last_s - finished_s[one] for one in finished_s.keys() - scored)
    assert sum(waits_s) + unfinished_s == pytest.approx(area)
    assert simulate(run.config).bottleneck is Bottleneck.REWARD


@pytest.mark.parametrize("kind", ["pipeline", "conventional", "one_step_off"])
def test_a_plan_is_screened_with_the_rate_of_rewards(kind):
    """16 rewards of 10 s by 2 workers: 80 s a step; all else takes less."""
    run = play(
        20, batch=16, slots=8, engines=2, length=fixed(8), kind=kind, ready_queue_size=64,
        hardware={"latency": {"reward_s": 10.0, "reward_workers": 2}},
    )  # fmt: skip
    hardware = resolved_hardware(run.config)
    decode_step = DecodeStep(hardware.decode, tensor_parallel=1, most=8)
    estimate = screen(run.config, hardware, decode_step, LengthStatistics(lengths_from([8]), prompt_tokens=0.0))
    assert estimate.step_s == pytest.approx(80.0, rel=0.15)
    assert run.steps[-1].time_s / 20 == pytest.approx(80.0, rel=0.15)
