"""Runs with a bound on lag, or fewer publications, against theory: ages, budgets, rollouts given up for them.

Each docstring derives the expected value. Statistical tests have a fixed seed; their docstring has the spread of the
measured value over 20 seeds (sd), hence how often another seed would fail.
By default a decode step lasts 1 s with any batch, and all else takes no time.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_run import fixed, oldest_trained, play, trains_in, uniform

from pipelinerl.scheduler.events import (
    PublishWeights,
    RolloutFinished,
    StartRollout,
    StartTraining,
    WeightsLoaded,
    WeightUpdate,
)
from sim.workload import Workload

# --------------------------------------------------------------------------------------- bounded lag


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    scheduler=st.fixed_dictionaries(
        {
            "max_lag": st.integers(2, 6),
            "publish_every": st.sampled_from([1, 2, 3]),
            "on_stale": st.sampled_from(["train", "drop", "requeue"]),
            "weight_update": st.sampled_from([kind.value for kind in WeightUpdate]),
            "micro_batch_size": st.sampled_from([4, 8]),
        }
    ),
    group_size=st.sampled_from([1, 4]),
    slots=st.integers(1, 20),
    train_s=st.sampled_from([0.0, 3.0, 40.0]),
    dispatch_s=st.sampled_from([0.0, 0.5, 5.0]),
)
def test_no_trained_token_is_older_than_max_lag(scheduler, group_size, slots, train_s, dispatch_s):
    """Whatever the lengths, latencies and speeds. With ``train`` nothing is given up for it."""
    hardware = {
        **trains_in(train_s),
        "weights": {"publish_s": 0.5, "transfer_s": 1.5, "pause_s": 0.5},
        "latency": {"dispatch_s": dispatch_s, "dispatch_jitter_s": dispatch_s, "reward_s": 1.0},
    }
    run = play(
        12, batch=8, slots=slots, engines=2, length=uniform(20), group_size=group_size, hardware=hardware, **scheduler
    )
    assert oldest_trained(run) == run.summary().lag.max <= scheduler["max_lag"]
    if scheduler["on_stale"] == "train":
        assert run.summary().rollouts.discarded == run.summary().rollouts.aborted == 0


# ------------------------------------------------------------------------------ publications now and then


@pytest.mark.parametrize(("every", "num_publications"), [(1, 11), (3, 3), (5, 2), (12, 0)])
def test_only_publications_cost_the_trainer_time(every, num_publications):
    """A trainer that never waits: 5 s for the first batch, 12 steps of 20 s, 4 s per publication but after the last."""
    scheduler = {"publish_every": every}
    hardware = {**trains_in(20.0), "weights": {"publish_s": 4.0}}
    run = play(12, batch=10, slots=40, length=fixed(5), hardware=hardware, **scheduler)
    assert [entry.version for _, entry in run.of(PublishWeights)] == [*range(every, 12, every)]
    assert run.summary().duration_s == 5 + 12 * 20 + 4 * num_publications


@pytest.mark.parametrize(
    ("slots", "ends_s"), [(30, [12.5, 15, 17.5, 30, 32.5, 35]), (8, [12.5, 22.5, 32.5, 45, 55, 65])]
)
def test_publishing_every_k_steps_at_lag_k_minus_1_generates_k_batches_from_one_publication_to_the_next(slots, ends_s):
    """verl's fully asynchronous mode without staleness: K = 3, B = 8, answers of 10 s, steps of 2.5 s, all else free.

    24 rollouts start together where there are slots for them, else in waves of 8, and none before the next
    publication: all is as in conventional RL, but for training that begins with the first batch.
    """
    scheduler = {"publish_every": 3, "max_lag": 2, "ready_queue_size": 24}
    run = play(6, batch=8, slots=slots, length=fixed(10), hardware=trains_in(2.5), **scheduler)
    assert [row.time_s for row in run.steps] == ends_s
    assert [row.lag_mean for row in run.steps] == [row.lag_max for row in run.steps] == [0, 1, 2, 0, 1, 2]
    assert admitted_per_publication(run) == [24, 24]


def admitted_per_publication(run):
    """Rollouts started from the start of the run and from each ``WeightsLoaded`` (of one engine) to the next."""
    counts = [0]
    for _, entry in run.of(StartRollout, WeightsLoaded):
        if isinstance(entry, WeightsLoaded):
            counts.append(0)
        else:
            counts[-1] += 1
    return counts


@pytest.mark.parametrize(("every", "staleness"), [(1, 0.0), (1, 1.0), (2, 0.5), (4, 0.25), (4, 1.0)])
def test_staleness_s_admits_1_plus_s_times_k_batches_less_rollouts_carried_over(every, staleness):
    """verl's budget between publications, (1 + s) K B less rollouts carried over, at max_lag = (1 + s) K - 1.

    With slots for all of them and a trainer that is slower than any answer, the budget is used up every time.
    """
    budget = round((1 + staleness) * every) * 8
    scheduler = {"publish_every": every, "max_lag": budget // 8 - 1, "ready_queue_size": 64}
    run = play(24, batch=8, slots=64, length=uniform(20), hardware=trains_in(30.0), **scheduler)
    num_started = num_taken = 0
    budgets = []
    for count, version in zip(admitted_per_publication(run), range(0, 24, every), strict=True):
        budgets.append(count + num_started - num_taken)
        num_started += count
        num_taken = (version + every) * 8
    assert budgets == [budget] * (24 // every)
    assert oldest_trained(run) == run.summary().lag.max == budget // 8 - 1


def run_within(max_lag, on_stale):
    """100 slots, B = 32, log-normal lengths around 200 with cv = 1: without a bound lags up to 19."""
    scheduler = {"on_stale": on_stale, "max_lag": max_lag}
    return play(
        150, batch=32, slots=64, length={"kind": "lognormal", "mean": 200, "cv": 1.0, "max": 2000}, group_size=4,
        **scheduler,
    )  # fmt: skip


@pytest.mark.slow
def test_dropping_stale_rollouts_shortens_the_answers_trained_on():
    """The mean of 4800 answers as drawn, and of the trained ones; they differ in a few groups at the end: 1.5 %.

    Waiting trains on them as they are, dropping on shorter ones, the more so the tighter the bound: over 20 seeds
    0.78 of the mean at 3, sd 0.006, and of that 0.84 at 1, sd 0.009. (What is dropped before it finishes is in no
    mean of finished answers: that one is as short.)
    """
    unbounded, waiting, dropping, dropping_more = (
        run_within(*bound) for bound in ((None, "train"), (3, "train"), (3, "drop"), (1, "drop"))
    )
    workload = Workload(unbounded.config.workload, seed=0)
    drawn = np.mean([workload.group(group, group).lengths for group in range(1200)])

    def trained(run):
        return run.summary().length.trained_mean

    assert trained(unbounded) == pytest.approx(drawn, rel=0.015)
    assert trained(waiting) == pytest.approx(drawn, rel=0.015)
    assert trained(dropping) < 0.85 * drawn
    assert trained(dropping_more) < 0.9 * trained(dropping)


def test_a_requeued_prompt_is_tried_again_and_a_dropped_one_is_not():
    """Groups started per prompt."""
    tries = {}
    for on_stale in ("drop", "requeue"):
        run = play(40, batch=8, slots=16, length=uniform(60), max_lag=1, on_stale=on_stale, seed=1)
        prompts = [entry.prompt_id for _, entry in run.of(StartRollout)]
        tries[on_stale] = sorted({prompts.count(prompt_id) for prompt_id in prompts})
        assert run.summary().discarded_by_reason["stale"] + run.summary().rollouts.aborted > 0
    assert tries["drop"] == [1]
    assert tries["requeue"][0] == 1
    assert len(tries["requeue"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("success_rate", [0.5, 0.1, 0.9])
def test_groups_without_a_signal_are_replaced_for_as_long_as_it_takes(success_rate):
    """Groups of 4 differ with probability 1 - p^4 - (1 - p)^4; of the n groups that ended, 1200 were trained.

    The share strays by sqrt(s (1 - s)/n): 4.9 times that for 1 seed in 10^6.
    """
    run = play(
        150, batch=32, slots=64, length=uniform(100), group_size=4, success_rate=success_rate, filter_no_signal=True
    )
    summary = run.summary()
    trained, discarded = summary.rollouts.trained // 4, summary.discarded_by_reason["no_signal"] // 4
    share = 1 - success_rate**4 - (1 - success_rate) ** 4
    num_groups = trained + discarded
    assert trained == 1200
    assert trained / num_groups == pytest.approx(share, abs=4.9 * math.sqrt(share * (1 - share) / num_groups))
    rewards = {entry.rollout_id: entry.reward for _, entry in run.of(RolloutFinished)}
    for _, entry in run.of(StartTraining):
        for group in {rollout_id // 4 for rollout_id in entry.rollout_ids}:
            assert len({rewards[4 * group + member] for member in range(4)}) == 2
