"""The scheduler against a hostile but legal driver: every legal order of events, for any configuration."""

import copy
import random
from dataclasses import replace

import pytest
from hostile_driver import HAPPENINGS, HostileDriver
from hostile_ledger import Case, Place, cases
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pipelinerl.config.run import SchedulerConfig
from pipelinerl.scheduler.events import RolloutFinished, RolloutScored, Routing, StopReason, WeightUpdate


@settings(derandomize=True, deadline=None, max_examples=60)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_a_reward_that_comes_with_the_end_is_answered_as_one_that_follows(case, seed):
    """Each score that follows its rollout's end directly, put into that event: the same commands in the same order."""
    driver, rng = HostileDriver(case), random.Random(seed)
    for _ in range(100):
        driver.go_on(rng, num_happenings=3, failures=True)
        ends = [] if driver.stopped else driver.rollouts(Place.IN_FLIGHT)
        if ends:
            entry = rng.choice(ends)
            driver.report(entry, obey_abort=rng.random() < 0.5)
            if entry[2].place is Place.SCORING and not driver.stopped:
                driver.score(entry, float(rng.randint(0, 1)))
    scheduler = case.fresh()
    assert tuple(scheduler.start()) == driver.answers[0]
    happened = list(zip(driver.events, driver.answers[1:], strict=True))
    num_merged = 0
    while happened:
        one, answer = happened.pop(0)
        following = happened[0][0] if happened else None
        if isinstance(one, RolloutFinished) and following == RolloutScored(
            one.rollout_id, getattr(following, "reward", 0)
        ):
            one = replace(one, reward=following.reward)
            answer += happened.pop(0)[1]
            num_merged += 1
        assert tuple(scheduler.handle(one)) == answer
    event(f"more than 10 merged: {num_merged > 10}")


@settings(derandomize=True, deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=cases(),
    pace=st.fixed_dictionaries({kind: st.sampled_from([0.05, 1.0, 1.0]) for kind in HAPPENINGS}),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_command_is_legal_and_every_run_ends(case, pace, seed):
    """The driver checks each command. After any history a driver without failures brings the run to its end.

    A fresh scheduler, and copies made during the run, answer the same events with the same commands; the original has
    also refused impossible events meanwhile.
    """
    driver, rng, copies = HostileDriver(case), random.Random(seed), []
    for _ in range(3):
        driver.go_on(rng, num_happenings=60, failures=True, pace=pace)
        copies.append((copy.deepcopy(driver.scheduler), len(driver.events)))
    driver.go_on(random.Random(0), num_happenings=10_000, failures=False)
    assert driver.stopped is StopReason.DONE or driver.config.discard_limit < 10**6
    event(f"{driver.config.kind}, {driver.stopped}")
    event(f"{case.routing}, environments: {case.environments is not None}")
    fresh = case.fresh()
    assert tuple(fresh.start()) == driver.answers[0]
    for scheduler, num_events in [(fresh, 0), *copies]:
        answers = [tuple(scheduler.handle(one)) for one in driver.events[num_events:]]
        assert answers == driver.answers[num_events + 1 :]


FASTER = {"observe": 8.0, "end turn": 4.0, "decode": 2.0, "join": 0.3, "leave": 0.3, "end of notice": 0.3, "fail": 0.2}
"""Rates at which all environments are open most of the time, and engines come and go now and then."""


@settings(derandomize=True, deadline=None, max_examples=12)
@pytest.mark.parametrize("routing", Routing)
@given(
    weight_update=st.sampled_from(WeightUpdate),
    max_lag=st.sampled_from([None, 2]),
    kv_cache_tokens=st.sampled_from([None, 0, 20, 40]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_turn_goes_where_its_routing_says_and_nobody_waits_for_ever(
    routing, weight_update, max_lag, kv_cache_tokens, seed
):
    """Twelve rollouts with turns on three engines of two slots at first; the ledger names each engine, too."""
    scheduler = SchedulerConfig(
        train_batch_size=4,
        generation_batch_size=2,
        micro_batch_size=4,
        max_lag=max_lag,
        weight_update=weight_update,
        ready_queue_size=8,
        discard_limit=10**6,
        routing=routing,
    )
    driver = HostileDriver(Case(scheduler, 40, 3, 2, 12, kv_cache_tokens))
    driver.go_on(random.Random(seed), num_happenings=1000, failures=True, pace=FASTER)
    driver.go_on(random.Random(0), num_happenings=20_000, failures=False)
    assert driver.stopped is StopReason.DONE
