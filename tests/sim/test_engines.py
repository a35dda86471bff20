"""Engines that come and go in simulated runs: by hand, by identities, and with engines that take one step at a time.

By default a decode step lasts 1 s with any batch, answers have 10 tokens, and all else takes no time. Engine 0 stays;
what is offered at the place of engine 1 is a recorded capacity.
"""

import math
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_run import Keeping, environment, fixed, play, trains_in, uniform
from step_by_step import StepByStepEngine

from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.run import PriceConfig, RunConfig, parse_run
from pipelinerl.errors import RunFailedError
from pipelinerl.records.recording import replay_run
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    NO_TOKENS,
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    RolloutAborted,
    RolloutFinished,
    RolloutPreempted,
    StartRollout,
    TrainingFinished,
    TurnFinished,
    VersionSpans,
    WeightsLoaded,
    WeightUpdate,
)
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine
from sim.fleet import TrainerFaults
from sim.run import simulate

Z = 4.9
"""A standard normal is farther from 0 once in a million."""
CHANGES = (EngineJoined, EngineLeaving, EngineLeft, RolloutAborted)


@pytest.fixture
def spot(tmp_path):
    """Make the table of a fleet with engine 0 reserved, and a spot engine of a recorded capacity."""

    def table(capacity, *, notice_s=None, reserved=True, **keys):
        (tmp_path / "spot.csv").write_text("second,engines\n" + "".join(f"{at},{n}\n" for at, n in capacity))
        groups = [{"name": "spot", "kind": "spot", "engines": 1, "capacity": str(tmp_path / "spot.csv")}]
        if notice_s is not None:
            groups[0]["notice_s"] = notice_s
        first = [{"name": "reserved", "engines": 1}] if reserved else []
        return {"start_s": 0.0, "groups": [*first, *groups], **keys}

    return table


def two_rollouts(fleet, **keys):
    return play(1, batch=2, slots=1, length=fixed(10), engines=2, fleet=fleet, **keys)


def starts_and_ends(run, rollout_id):
    kinds = StartRollout, RolloutFinished, RolloutAborted
    return [(at, type(one).__name__, one.engine) for at, one in run.of(*kinds) if one.rollout_id == rollout_id]


# ------------------------------------------------------------------------------------------------------- a loss by hand


@pytest.mark.parametrize(
    ("taken_s", "keys", "known", "lost", "end_s"),
    [
        (5.5, {}, 4, 1, 16.0),
        (5.5, {"stream_tokens": 1}, 5, 0, 15.0),
        (5.5, {"stream_tokens": 64}, 0, 5, 20.0),
        (5.5, {"keep_tokens": False}, 0, 5, 20.0),
        (5.5, {"notice_s": 3.0}, 5, 0, 15.0),
        (5.5, {"notice_s": 3.0, "keep_tokens": False}, 0, 5, 20.0),
        (6.0, {}, 6, 0, 14.0),  # the step that ends at this instant counts
        (10.0, {"stream_tokens": 1}, 9, 1, 11.0),  # but that it was the last one is not known
        (10.0, {"notice_s": 3.0}, 9, 1, 11.0),
    ],
)
def test_a_rollout_of_a_lost_engine_goes_on_with_the_tokens_known(spot, taken_s, keys, known, lost, end_s):
    """It waits for engine 0, which has a slot at 10 s, and generates the rest there."""
    run = two_rollouts(spot([(0, 1), (taken_s, 0)], **{"stream_tokens": 2, **keys}))
    spans = VersionSpans((0,), (known,)) if known else NO_TOKENS
    assert run.of(*CHANGES)[:3] == [
        (taken_s - keys.get("notice_s", 0.0), EngineLeaving(1)),
        (taken_s, RolloutAborted(1, 1, spans)),
        (taken_s, EngineLeft(1, lost)),
    ]
    assert starts_and_ends(run, 1)[2:] == [(10.0, "StartRollout", 0), (end_s, "RolloutFinished", 0)]
    report = run.summary().fleet
    assert (report.moved, report.moved_tokens, report.lost_tokens) == (1, known, lost)


def test_a_preempted_rollout_keeps_the_tokens_reported(spot):
    """Two rollouts of 5 tokens and a step more overflow a cache of 11; the second waits with its 5 until 7.5 s."""
    fleet = spot([(0, 1), (7.5, 0)], stream_tokens=4)
    run = play(1, batch=4, slots=2, length=fixed(10), engines=2, fleet=fleet, hardware={"kv_cache_tokens": 11})
    assert (5.0, RolloutPreempted(3, 1, 5)) in run.of(RolloutPreempted)
    spans = VersionSpans((0,), (4,))
    assert run.of(RolloutAborted)[:2] == [(7.5, RolloutAborted(1, 1, spans)), (7.5, RolloutAborted(3, 1, spans))]
    assert run.of(EngineLeft) == [(7.5, EngineLeft(1, 7 + 5 - 2 * 4))]


def test_an_engine_that_fails_after_its_notice_loses_what_it_has_not_reported():
    """It has notice from the start, a day before it would be reclaimed, and fails. A token lasts a second."""
    soon = {"kind": "spot", "reclaim_hours": 1.0, "away_s": 0.0, "notice_s": 86_400.0, "mtbf_hours": 0.01}
    groups = [{"name": "reserved", "engines": 1}, {"name": "spot", "engines": 1, **soon}]
    run = play(1, batch=2, slots=1, length=fixed(300), engines=2, fleet={"stream_tokens": 7, "groups": groups})
    (began_s, began), (ended_s, ended) = run.of(EngineLeaving)[0], run.of(EngineLeft)[0]
    (aborted,) = [one for at, one in run.of(RolloutAborted) if at == ended_s]
    assert (began_s, began.engine, ended.engine) == (0.0, 1, 1)
    known, decoded = aborted.spans.num_tokens, math.floor(ended_s)
    assert (known, ended.lost_tokens) == (decoded // 7 * 7, decoded % 7)
    assert ended.lost_tokens


def test_an_engine_with_notice_loads_no_version_published_since(spot):
    """From 15 s on; each engine publishes a version every 10 s."""
    run = play(8, batch=1, slots=1, length=fixed(10), engines=2, fleet=spot([(0, 1), (40, 0)], notice_s=25.0))
    last_s = {engine: max(at for at, one in run.of(WeightsLoaded) if one.engine == engine) for engine in (0, 1)}
    assert last_s[1] < 15
    assert last_s[0] > 40


def test_a_request_on_its_way_is_lost_without_a_token(spot):
    run = two_rollouts(spot([(0, 1), (1, 0)]), hardware={"latency": {"dispatch_s": 2.0}})
    assert run.of(*CHANGES)[1:3] == [(1.0, RolloutAborted(1, 1, NO_TOKENS)), (1.0, EngineLeft(1, 0))]


def test_a_report_on_its_way_is_lost_with_its_engine(spot):
    """All 10 tokens are there at 10 s, known at 15 s; the engine is taken at 12 s, and the last token is not known."""
    run = two_rollouts(spot([(0, 1), (12, 0)], stream_tokens=1), hardware={"latency": {"report_s": 5.0}})
    assert run.of(*CHANGES)[1:3] == [(12.0, RolloutAborted(1, 1, VersionSpans((0,), (9,)))), (12.0, EngineLeft(1, 1))]
    assert starts_and_ends(run, 1)[2:] == [(15.0, "StartRollout", 0), (21.0, "RolloutFinished", 0)]


def test_a_turn_of_a_lost_engine_begins_anew_without_its_tokens(spot):
    """Turns of 10 tokens: at 15.5 s the second has 5. The first turn and its environment stay."""
    turns = environment(count=2, turns=2)
    run = two_rollouts(spot([(0, 1), (15.5, 0)], keep_tokens=False), environment=turns)
    ((_, aborted),) = [one for one in run.of(RolloutAborted) if one[0] == 15.5]
    assert aborted.spans.num_tokens == 10
    assert run.summary().fleet.lost_tokens == 5
    assert run.summary().environments.turns_mean == 2


def test_the_end_of_a_run_moves_nothing(spot):
    """Rollout 1 had to leave engine 1 at once. It goes on on engine 2, which has notice from 9 s on, until 10 s."""
    fleet = spot([(0, 0), (2, 1), (29, 0)], notice_s=20.0)
    run = play(1, batch=1, slots=1, length=fixed(10), engines=2, fleet=fleet)
    assert run.of(EngineLeaving)[1:] == [(9.0, EngineLeaving(2))]
    assert run.entries[-1] == (10.0, RolloutAborted(1, 2, VersionSpans((0,), (8,))))
    assert run.summary().fleet.moved == 1


# ------------------------------------------------------------------------------------------------------ a join by hand


@pytest.mark.parametrize(
    ("back_s", "changes", "first_start_s"),
    [
        (18, [(24.0, EngineJoined(2, 1)), (27.0, WeightsLoaded(2, 2, 1.0))], 27.0),
        (19, [(25.0, EngineJoined(2, 2))], 25.0),
    ],
)
def test_a_machine_that_is_back_joins_after_start_transfer_and_pause(spot, back_s, changes, first_start_s):
    """Versions 1 and 2 are published at 10.5 s and 21.5 s: engine 0 generates 10 s, pauses 1 s, and trains 0.5 s.

    A machine begins to load 3 s after its return, transfer and pause take 2 s and 1 s. That of 18 s loads version 1,
    and version 2 as soon as it has joined.
    """
    run = play(
        4, batch=1, slots=1, length=fixed(10), engines=2, fleet=spot([(0, 0), (back_s, 1)], start_s=3.0),
        hardware={"weights": {"transfer_s": 2.0, "pause_s": 1.0}, **trains_in(0.5)},
    )  # fmt: skip
    of_2 = [(at, one) for at, one in run.entries if getattr(one, "engine", None) == 2]
    assert of_2[: len(changes)] == changes
    assert (of_2[len(changes)][0], type(of_2[len(changes)][1])) == (first_start_s, StartRollout)


@pytest.mark.parametrize(("capacity", "notice_s"), [([(0, 1), (5, 0), (8, 1), (12, 0)], None),
    ([(0, 1), (5, 0), (8, 1), (15, 0)], 3.0)])  # fmt: skip
def test_a_machine_that_is_taken_before_it_could_join_never_joins(spot, capacity, notice_s):
    """It would join at 8 + 4 s, when it is taken, or gets notice."""
    run = two_rollouts(spot(capacity, start_s=4.0, notice_s=notice_s))
    assert not run.of(EngineJoined)


def test_a_run_without_engines_that_come_back_fails_in_one_line(spot):
    with pytest.raises(RunFailedError, match=r"^no engine of fleet\.groups is left, and none comes back$"):
        play(1, batch=1, slots=1, length=fixed(10), fleet=spot([(0, 1), (5.5, 0)], reserved=False))


def test_engines_that_never_get_to_join_end_a_run(monkeypatch):
    """Each fails 36 s after its start, in the mean, and loads for 10^5 s."""
    monkeypatch.setattr("sim.engines.ID_LIMIT", 5000)
    groups = [{"name": "a", "engines": 1, "mtbf_hours": 0.01, "repair_s": 0.0}]
    with pytest.raises(RunFailedError, match=r"^engines of fleet\.groups have started 5,000 times; they end too soon$"):
        play(1, batch=1, slots=1, length=fixed(1000), fleet={"start_s": 1e5, "groups": groups})


# ---------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("keys", [
    {}, {"kind": "one_step_off", "optimizer_steps_per_rl_step": 2}, {"environment": environment(count=8)},
    {"weight_update": "abort", "max_lag": 1, "on_stale": "drop"},
])  # fmt: skip
def test_a_fleet_that_never_fails_changes_nothing(keys):
    setting = {"batch": 8, "slots": 3, "length": uniform(20), "engines": 3, "hardware": trains_in(3.0)}
    fleet = {"groups": [{"name": "a", "engines": 2}, {"name": "b", "engines": 1}]}
    assert play(8, **setting, **keys, fleet=fleet).entries == play(8, **setting, **keys).entries


def test_an_engine_that_is_half_as_fast_takes_twice_as_long():
    def duration_s(**keys):
        run = play(
            4, batch=4, slots=4, length=uniform(20), prompt_tokens=7, engines=2,
            fleet={"groups": [{"name": "a", "engines": 2, **keys}]}, hardware={"prefill": {"token_s": 0.1}},
        )  # fmt: skip
        return run.summary().duration_s

    assert duration_s(stragglers=1.0, slowdown=2.0) == pytest.approx(2 * duration_s(), rel=1e-12)


def test_a_run_with_a_fleet_replays_and_is_the_same_bytes_again(tmp_path):
    group = {"name": "a", "kind": "spot", "engines": 3, "mtbf_hours": 0.01, "reclaim_hours": 0.02, "away_s": 5.0}
    fleet = {"start_s": 1.0, "groups": [group], "trainer": {"mtbf_hours": 0.05, "checkpoint_every_s": 60.0}}
    run = play(20, batch=4, slots=3, length=uniform(20), engines=3, fleet=fleet, hardware=trains_in(10.0))
    once, again = (tmp_path / name for name in ("once", "again"))
    report = simulate(run.config, out=once, trace=True)
    simulate(run.config, out=again, trace=True)
    assert [path.read_bytes() for path in sorted(once.iterdir())] == [
        path.read_bytes() for path in sorted(again.iterdir())
    ]
    replayed = replay_run(Trace(once / TRACE_FILE))
    assert (replayed.difference, replayed.compared) == (None, ("summary.json", "steps.csv"))
    assert report.fleet.moved
    assert report.fleet == run.summary().fleet


# ---------------------------------------------------------------------------------------------------------------- laws


def test_an_engine_is_there_for_its_share_of_the_time():
    """Lives X are exponential with mean m = 360 s; of each the first d = 40 s are start and transfer, then a repair of
    r = 60 s follows. So a share A = m p / (m + r) of the time an engine is there, p = exp(-d / m). Over n cycles
    Y = max(0, X - d) - A (X + r) adds up to 0 with variance n (Var Y), Cov(Y, X) = p m (m + d). The first life has no
    start and the last cycle is cut, together d + m + r at most. 1 seed in 10^6.
    """
    m, d, r, num_engines = 360.0, 40.0, 60.0, 20
    group = {"name": "a", "engines": num_engines, "mtbf_hours": m / 3600, "repair_s": r}
    run = play(
        120, batch=8, slots=1, length=fixed(20), engines=num_engines,
        fleet={"start_s": 30.0, "stream_tokens": 1, "groups": [group]},
        hardware={"decode": {"kind": "affine", "step_s": 30.0}, "weights": {"transfer_s": 10.0}},
    )  # fmt: skip
    (report,), run_s = run.cluster.measured().capacity.groups, run.summary().duration_s
    p = math.exp(-d / m)
    share = m * p / (m + r)
    variance = 2 * m**2 * p - (m * p) ** 2 + share**2 * m**2 - 2 * share * p * m * (m + d)
    cycles = num_engines * run_s / (m + r)
    error = math.sqrt(variance / cycles) / (m + r)
    cut = (d + m + r) / run_s
    assert report.there_mean / num_engines == pytest.approx(share, abs=Z * error + cut)
    assert report.gpus_paid == num_engines  # they are reserved
    assert abs(report.failures - cycles) < Z * math.sqrt(cycles) + num_engines
    assert Z * error + cut < 0.05  # it would see a start or a repair that is left out


# -------------------------------------------------------------------------------------------------------- the trainer


def test_checkpoints_lengthen_the_training_during_which_they_come_due():
    """Steps of 10 s without waits from 1 s on; a checkpoint is due 25 s after the first work that the last one lacks.

    That is at 26 s, in the third step; work goes on at 29 s, so the next one is at 54 s, before the sixth.
    """
    faults = {"checkpoint_every_s": 25.0, "checkpoint_s": 3.0}
    run = play(6, batch=1, slots=4, length=fixed(1), fleet={"trainer": faults}, hardware=trains_in(10.0))
    assert [one.train_s for _, one in run.of(TrainingFinished)] == [10, 10, 13, 10, 10, 13]
    capacity = run.cluster.measured().capacity
    assert capacity.trainer.to_dict() == {"failures": 0, "checkpoint_s": 6.0, "restart_s": 0.0, "redone_s": 0.0}
    assert (capacity.groups, run.summary().fleet) == ([], None)


@pytest.mark.parametrize("partial", [False, True])
def test_colocated_a_failure_costs_what_was_generated_too(partial):
    """All time is work of two accelerators: the run lasts as long as its work does with these failures."""
    setting = {"batch": 4, "slots": 4, "length": uniform(20), "engines": 2, "hardware": trains_in(2.0)}
    setting |= {"kind": "conventional", "partial_rollouts": partial}
    faults = {"mtbf_hours": 0.1, "checkpoint_every_s": 50.0, "checkpoint_s": 2.0, "restart_s": 20.0}
    run, without = play(30, **setting, fleet={"trainer": faults}), play(30, **setting)
    expected = TrainerFaults.drawn(run.config.fleet.trainer, accelerators=2, seed=0)
    assert run.summary().duration_s == pytest.approx(expected.extend(0.0, without.summary().duration_s), rel=1e-9)
    report = run.cluster.measured().capacity.trainer
    assert report.failures == expected.num_failures > 1
    assert report.redone_s == pytest.approx(expected.redone_s, rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------- cost


def test_each_group_costs_what_is_paid_for(spot):
    """16 s. Reserved: all of them. Spot: 5.5 s, and from 8 s on, 3 s of which it starts; two accelerators an engine."""
    fleet = spot([(0, 1), (5.5, 0), (8, 1)], start_s=3.0)
    fleet["groups"][0]["price_per_hour"], fleet["groups"][1]["price_per_hour"] = 3600.0, 360.0
    run = two_rollouts(fleet, hardware={"latency": {"reward_s": 0.0}})
    run_s = run.summary().duration_s
    config = run.config.model_copy(update={"price": PriceConfig(gpu_hour=36.0)})
    report = simulate(config)
    reserved, other = report.capacity.groups
    states = [getattr(other, f"{state}_mean") * run_s for state in ("there", "starting", "failed", "reclaimed")]
    assert states == pytest.approx([5.5 + run_s - 11, 3.0, 0.0, 2.5])
    assert (other.failures, other.reclaims, reserved.there_mean) == (0, 1, 1.0)
    assert [reserved.gpus_paid, other.gpus_paid * run_s] == pytest.approx([1.0, run_s - 2.5])
    assert [reserved.usd, other.usd] == pytest.approx([run_s, (run_s - 2.5) / 10])
    assert report.cost.usd == pytest.approx(run_s + (run_s - 2.5) / 10 + run_s / 100)
    assert report.cost.gpu_hours == pytest.approx((3 * run_s - 2.5) / 3600)


# ------------------------------------------------------------------------------------------------------ lent engines

LENT = {"name": "lent", "kind": "lent", "engines": 1, "switch_s": 1.0}


def test_a_trainer_that_waits_lends_its_accelerators_by_hand():
    """One slot each. The lent engine joins at 1 s, its rollout of 10 s completes the batch of two at 11 s; then it
    leaves with a rollout just begun, and the step of 5 s ends after the switch, at 17 s. It joins again at 18 s."""
    fleet = {"groups": [{"name": "own", "engines": 1}, LENT]}
    run = play(2, batch=2, slots=1, length=fixed(10), hardware=trains_in(5.0), fleet=fleet)
    assert [(time_s, one) for time_s, one in run.of(EngineJoined, EngineLeft) if time_s < 20] == [
        (1.0, EngineJoined(1, 0)), (11.0, EngineLeft(1, 0)), (18.0, EngineJoined(2, 1))
    ]  # fmt: skip
    assert next(time_s for time_s, _ in run.of(TrainingFinished)) == 17.0
    assert [(one.rollout_id, one.spans) for time_s, one in run.of(RolloutAborted) if time_s == 11.0] == [(3, NO_TOKENS)]


def test_lending_pays_where_generation_limits_and_costs_a_switch_where_it_does_not_wait_long():
    """24 rollouts a batch on 4 engines of 2 slots, 10 s each: 30 s a batch, training 5 s; four engines more help."""
    sizes = {"batch": 24, "slots": 2, "engines": 4, "length": fixed(10), "hardware": trains_in(5.0)}
    own = {"name": "own", "engines": 4}
    times_s = [
        play(12, **sizes, fleet={"groups": [own, *more]}).steps[-1].time_s
        for more in ([], [LENT], [{**LENT, "switch_s": 40.0}])
    ]
    assert times_s[1] < 0.9 * times_s[0]
    assert times_s[2] >= times_s[0]


# --------------------------------------------------------------------------------- with engines that take single steps

SOON = {"mtbf_hours": 0.01}


@st.composite
def runs(draw):
    """Return a run file and recorded capacities by the name of their group.

    Engines last for seconds. Some runs have multiples of one time only, so that much happens at the same instant.
    """

    def one_of(*values):
        return draw(st.sampled_from(values))

    def group(name, engines):
        table = {"name": name, "engines": engines, "repair_s": one_of(0.0, 0.2, 1.0)}
        table |= one_of({}, {"stragglers": 0.5, "slowdown": one_of(1.37, 2.0)}) | one_of({}, SOON)
        if one_of(False, True):
            table |= {"kind": "spot"} | one_of({}, {"notice_s": 0.1 * slow}, {"notice_s": 3.0})
            if one_of(False, True):
                return table | {"reclaim_hours": 0.01, "away_s": one_of(0.0, 0.3, 2.0)}
            gaps = draw(st.lists(st.integers(1, 20), max_size=30))
            seconds = [0.05 * slow * at for at in accumulate([0, *gaps])]
            capacities[name] = [(at, draw(st.integers(0, engines))) for at in seconds]
            capacities[name].append((seconds[-1] + 1.0, engines))
        return table

    capacities = {}
    engines, slow = draw(st.integers(1, 4)), one_of(1, 30, 100)
    first = draw(st.integers(1, engines))
    groups = [group("a", first), *([group("b", engines - first)] if first < engines else [])]
    groups += one_of([], [{"name": "lent", "kind": "lent", "engines": 1, "switch_s": one_of(0.0, 0.05)}])
    hardware = {
        "decode": {"kind": "affine", "step_s": 0.01 * slow},
        "training": {"token_s": 0.0, "step_s": 0.05 * slow},
    }
    if one_of(False, True):
        hardware["decode"] |= {"sequence_s": 1e-4, "context_token_s": 1e-6}
        hardware |= {
            "weights": {"publish_s": 0.02 * slow, "transfer_s": 0.1 * slow, "pause_s": 0.03 * slow},
            "prefill": {"sequence_s": 1e-3, "token_s": 1e-4, "token_squared_s": 1e-6},
            "latency": {"dispatch_s": 2e-3 * slow, "dispatch_jitter_s": 1e-3 * slow, "reward_s": 0.02},
        }
    if one_of(False, False, True):
        hardware.setdefault("latency", {}).update({"request_s": 0.013 * slow, "report_s": 0.05 * slow})
    tables = {
        "seed": draw(st.integers(0, 99)),
        "optimizer_steps": 8,
        "cluster": {"accelerators": engines + 1, "generation_accelerators": engines},
        "scheduler": {"train_batch_size": one_of(4, 8, 16), "generation_batch_size": one_of(1, 3, 6)},
        "workload": {"group_size": 2, "prompt_tokens": one_of(0, 5), "length": one_of(uniform(40), fixed(12))},
        "fleet": {
            "start_s": one_of(0.0, 0.1, 10.0),
            "keep_tokens": one_of(True, True, False),
            "stream_tokens": one_of(1, 3, 7),
            "groups": groups,
        },
    }
    stale = one_of({}, {"max_lag": 1, "on_stale": one_of("train", "drop", "requeue")})
    keys = stale | {"weight_update": one_of(*WeightUpdate).value, "publish_every": one_of(1, 1, 2)}
    tables["scheduler"] |= one_of(keys, keys, {"kind": "one_step_off"})
    if one_of(False, True):
        turns = {"mean": 4, "cv": 0.7, "max": 9, "observation_tokens": 5, "observation_max": 20, "context_max": 150}
        caches = {"prefix_cache": one_of(*PrefixCaching).value, "failure_rate": 0.02}
        tables["environment"] = {"count": 20, "step_s": 0.1, **caches, "turns": {"kind": "lognormal", **turns}}
        hardware["kv_cache_tokens"] = one_of(160, 600)
    else:
        hardware |= one_of({}, {"kv_cache_tokens": 50})
    return {**tables, "hardware": hardware | one_of({}, {"step_tokens": 6})}, capacities


class Run(Keeping):
    """A simulated run."""

    def __init__(self, config: RunConfig, make):
        super().__init__(
            num_engines=config.num_engines,
            colocated=False,
            longest=config.longest_answer_tokens,
            environments=config.environment and config.environment.count,
        )
        self.cluster = SimulatedCluster(config, engine_factory=make)
        self.cluster.run(self)


class Counting(StepByStepEngine):
    """Counts the tokens that each engine decodes."""

    def __init__(self, clock, host, engine_id, settings, *, decoded):
        super().__init__(clock, host, engine_id, settings)
        self.decoded = decoded

    def _end_step(self):
        if not self._pausing and self._suspended_since is None:
            self.decoded[self._engine_id] += len(self._running)
        super()._end_step()


def check_twins(tables, capacities, folder):
    """Both engines give the same run, and each engine's tokens are kept or lost."""
    for group in tables["fleet"]["groups"]:
        if rows := capacities.get(group["name"]):
            group["capacity"] = str(folder / f"{group['name']}.csv")
            Path(group["capacity"]).write_text("second,engines\n" + "".join(f"{at},{n}\n" for at, n in rows))
    config = parse_run(tables)
    decoded, kept_tokens, lost, begun = Counter(), Counter(), Counter(), {}
    run = Run(config, ClosedFormEngine)
    slow = Run(config, lambda *args: Counting(*args, decoded=decoded))
    assert run.entries == slow.entries
    for _, one in run.entries:
        match one:
            case StartRollout():
                begun[one.rollout_id] = one.kept_tokens
            case TurnFinished() | RolloutAborted() | RolloutFinished() if one.engine is not None:
                kept_tokens[one.engine] += one.spans.num_tokens - begun.pop(one.rollout_id)
            case EngineLeft():
                lost[one.engine] += one.lost_tokens
    assert not begun
    assert decoded == kept_tokens + lost
    totals = run.summary()
    num_lost = totals.fleet.lost_tokens if totals.fleet else 0
    assert sum(decoded.values()) == totals.tokens.generated + num_lost
    bound = config.scheduler.max_lag
    if bound is not None and config.scheduler.on_stale == "train":
        assert totals.lag.max <= bound
    groups = run.cluster.measured().capacity.groups
    for group in groups:
        away = group.failed_mean + group.reclaimed_mean + group.training_mean
        states = group.there_mean + group.starting_mean + away
        assert states == pytest.approx(group.engines, rel=1e-9)
        assert group.failures == 0 or any(one.mtbf_hours for one in config.fleet.groups)
    if totals.fleet:
        assert sum(group.there_mean for group in groups) == pytest.approx(totals.fleet.engines_mean, rel=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("capacities")


@settings(derandomize=True, deadline=None, max_examples=8)
@given(run=runs())
def test_a_few_fleets_are_the_same_with_both_engines_and_account_for_every_token(run, folder):
    check_twins(*run, folder)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=50)
@given(run=runs())
def test_fleets_are_the_same_with_both_engines_and_account_for_every_token(run, folder):
    check_twins(*run, folder)
