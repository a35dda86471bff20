"""Faults of a schedule in simulated runs: by hand, by identities, with engines that take one step at a time.

A decode step lasts 1 s with any batch, answers have 10 tokens, and all else takes no time, unless a test says it.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_run import fixed, play, trains_in, uniform
from run_tables import tiny
from step_by_step import StepByStepEngine

from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.scheduler.events import (
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    PublishWeights,
    RolloutAborted,
    RolloutFinished,
    TrainingFinished,
    VersionSpans,
    WeightsLoaded,
)
from sim.cluster import SimulatedCluster

CHANGES = EngineLeaving, EngineLeft, EngineJoined


def one_answer(*faults, **keys):
    """The second at which the answer of 10 tokens ends."""
    run = play(1, batch=1, slots=1, length=fixed(10), faults=list(faults), **keys)
    return run.of(RolloutFinished)[0][0]


def test_an_engine_that_stands_still_goes_on_where_it_was():
    assert one_answer({"kind": "stop", "engine": 0, "second": 5.5, "seconds": 7.0}) == 17.0


@pytest.mark.parametrize(
    ("seconds", "end_s"),
    [
        (1000.0, 6 + 4 * 3),  # from its first step after 5.5 s on
        (6.0, 6 + 2 * 3 + 2),  # the two steps that begin before 11.5 s
        (0.1, 10.0),  # none
    ],
)
def test_a_slow_engine_takes_the_factor_times_as_long_for_a_step(seconds, end_s):
    fault = {"kind": "slow", "engine": 0, "second": 5.5, "seconds": seconds, "factor": 3.0}
    assert one_answer(fault) == end_s


@pytest.mark.parametrize("factor", [2.0, 3.0, 1.5, 8.0])
def test_a_run_that_only_generates_takes_the_factor_times_as_long(factor):
    fault = {"kind": "slow", "second": 0.0, "seconds": 1e5, "factor": factor}
    hardware = {"prefill": {"token_s": 0.25}}
    keys = {"batch": 8, "slots": 4, "length": uniform(10), "prompt_tokens": 4, "hardware": hardware}
    fast, slow = (play(20, faults=faults, **keys) for faults in (None, [fault]))
    ends = [[time_s for time_s, _ in run.of(TrainingFinished)] for run in (fast, slow)]
    assert ends[1] == [factor * time_s for time_s in ends[0]]


def test_a_killed_engine_keeps_what_it_has_reported_and_starts_again():
    """Of 5 tokens 4 are reported; the start takes 3 s."""
    fleet = {"start_s": 3.0, "stream_tokens": 2}
    fault = {"kind": "kill", "engine": 1, "second": 5.5}
    run = play(2, batch=2, slots=1, length=fixed(10), engines=2, fleet=fleet, faults=[fault])
    assert run.of(*CHANGES, RolloutAborted)[:4] == [
        (5.5, EngineLeaving(1)),
        (5.5, RolloutAborted(1, 1, VersionSpans((0,), (4,)))),
        (5.5, EngineLeft(1, 1)),
        (8.5, EngineJoined(2, 0)),
    ]
    (group,) = run.cluster.measured().capacity.groups
    assert (group.name, group.engines, group.failures) == ("engines", 2, 1)


def steps_of(run, *kinds):
    """Events of some kinds, each after how many optimizer steps."""
    step, found = 0, []
    for _, one in run.entries:
        if isinstance(one, TrainingFinished):
            step = one.version
        elif isinstance(one, kinds):
            found.append((step, one))
    return found


def test_a_fault_comes_right_after_its_step():
    faults = [{"kind": "kill", "engine": 0, "step": 3}, {"kind": "kill", "engine": 1, "step": 5}]
    run = play(8, batch=4, slots=2, length=uniform(10), engines=2, fleet={"start_s": 0.5}, faults=faults)
    at = {one.version: time_s for time_s, one in reversed(run.of(TrainingFinished))}
    assert run.of(EngineLeaving) == [(at[3], EngineLeaving(0)), (at[5], EngineLeaving(1))]
    assert run.of(EngineJoined)[0][0] == at[3] + 0.5


def test_a_cut_engine_is_lost_in_the_transfer_after_the_step_and_joins_with_its_version():
    hardware = {"weights": {"transfer_s": 0.25, "pause_s": 0.5}}
    fault = {"kind": "cut", "engine": 1, "step": 2}
    run = play(
        6, batch=4, slots=2, length=uniform(10), engines=2, hardware=hardware, fleet={"start_s": 1.0}, faults=[fault]
    )
    (published_s,) = [time_s for time_s, one in run.of(PublishWeights) if one.version == 2]
    (left_s, left), (joined_s, joined) = run.of(EngineLeft, EngineJoined)
    assert (left_s, left.engine) == (published_s + 0.25, 1)
    assert (joined_s, joined.engine) == (left_s + 1.0 + 0.25 + 0.5, 2)
    assert joined.version >= 2
    assert {one.engine for _, one in run.of(WeightsLoaded) if one.version == 2} == {0}


def test_a_fault_of_an_engine_that_is_away_comes_when_it_is_back():
    faults = [{"kind": "kill", "engine": 1, "second": second} for second in (5.5, 6.5)]
    run = play(9, batch=2, slots=1, length=fixed(10), engines=2, fleet={"start_s": 20.0}, faults=faults)
    left = [(time_s, one.engine) for time_s, one in run.of(EngineLeft)]
    assert left == [(5.5, 1), (25.5, 2)]
    assert run.of(EngineJoined)[-1] == (45.5, EngineJoined(3, run.of(EngineJoined)[-1][1].version))


@pytest.mark.parametrize("when", [{"step": 3}, {"second": 40.0}])
def test_a_killed_rank_has_all_since_the_checkpoint_done_again(when):
    """Answers are ready at 10 s, and a step takes 10 s: the third ends at 40 s. The fourth has a restart before it."""
    fleet = {"trainer": {"checkpoint_every_s": 1000.0, "restart_s": 7.0}}
    fault = {"kind": "kill", "rank": 0, **when}
    keys = {"batch": 1, "slots": 8, "length": fixed(10), "hardware": trains_in(10.0)}
    run = play(5, fleet=fleet, faults=[fault], **keys)
    assert [time_s for time_s, _ in run.of(TrainingFinished)] == [20.0, 30.0, 40.0, 40.0 + 7 + 30 + 10, 97.0]
    assert run.cluster.measured().capacity.trainer.failures == 1


def test_nothing_is_recorded_once_the_disk_is_full():
    with pytest.raises(RunFailedError, match=r"cannot write trace.jsonl.gz: No space left on device"):
        play(5, batch=1, slots=1, length=fixed(10), faults=[{"kind": "disk_full", "step": 3}])
    cluster, recorded = SimulatedCluster(tiny("faults=[{kind='disk_full', step=3}]")), []

    class Kept:
        def event(self, _, event):
            recorded.append(event)

        command = event

    with pytest.raises(RunFailedError):
        cluster.run(Kept())
    assert recorded[-1] == TrainingFinished(3, recorded[-1].train_s)


def test_faults_that_never_come_change_nothing():
    never = [{"kind": kind, "second": 1e5} for kind in ("kill", "cut", "disk_full")]
    keys = {"batch": 8, "slots": 4, "length": uniform(10), "engines": 3}
    assert play(20, faults=never, **keys).entries == play(20, **keys).entries


engine_faults = st.builds(
    lambda kind, engine, at: {"kind": kind[0], "engine": engine, **kind[1], **at},
    st.sampled_from([
        ("kill", {}), ("cut", {}), ("stop", {"seconds": 7.5}), ("slow", {"seconds": 20.0, "factor": 3.0}),
    ]),
    st.integers(0, 2),
    st.integers(1, 11).map(lambda step: {"step": step}) | st.integers(0, 200).map(lambda n: {"second": n / 4}),
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    faults=st.lists(engine_faults, min_size=1, max_size=6),
    weight_update=st.sampled_from(["keep", "recompute", "abort", "wait"]),
    start_s=st.sampled_from([0.0, 5.0, 60.0]),
)
def test_nothing_is_lost_or_trained_twice_whatever_comes(faults, weight_update, start_s):
    """And engines that take one step at a time agree on every event."""
    keys = {"batch": 4, "slots": 3, "length": uniform(10), "engines": 3, "group_size": 2, "faults": faults}
    keys |= {"fleet": {"start_s": start_s, "stream_tokens": 3}, "weight_update": weight_update}
    keys["hardware"] = {"weights": {"publish_s": 0.5, "transfer_s": 0.75, "pause_s": 0.25}}
    run = play(12, **keys)
    assert len(set(run.trained)) == len(run.trained) == 12 * 4
    tokens, counts = run.summary().tokens, run.summary().rollouts
    assert tokens.generated == tokens.trained + tokens.discarded + tokens.aborted + tokens.failed + tokens.unfinished
    assert counts.started == counts.trained + counts.discarded + counts.aborted + counts.failed + counts.unfinished
    num_kills = sum(one["kind"] == "kill" and "step" in one for one in faults)
    assert len(steps_of(run, EngineLeft)) <= sum(one["kind"] in ("kill", "cut") for one in faults)
    if start_s == 0.0:
        assert len(steps_of(run, EngineLeft)) >= min(1, num_kills)
    assert play(12, make=StepByStepEngine, **keys).entries == run.entries


def test_faults_that_cannot_be_simulated_are_refused():
    with pytest.raises(ConfigError, match=r"fleet.trainer is missing; simulated faults need it, got rank=1"):
        SimulatedCluster(tiny("faults=[{kind='kill', rank=1, step=1}]"))
    with pytest.raises(ConfigError, match=r"two pools, got scheduler.kind='conventional'"):
        SimulatedCluster(tiny("scheduler.kind=conventional", "faults=[{kind='cut', step=1}]"))
