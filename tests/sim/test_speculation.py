"""Speculative decoding of simulated engines: its law, its limits, and its rules by hand.

``test_engine_equality.py`` proves the engine exact: scripts of chance and whole runs against single steps.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from engine_log import both_engines, log_of, spans
from played_run import Played, trains_in
from recorded_run import Recorded
from refusals import message

from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.hardware.costs import tokens_per_step
from pipelinerl.scheduler.events import RolloutFinished, StartRollout, WeightUpdate
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine
from sim.interface import DecodeCost, Drafting, EngineSettings, PrefillCost
from sim.run import simulate

Z = 4.9
"""Standard errors that a mean of many draws is off once in 10^6."""


def speculation(tokens: int, acceptance: float, **keys) -> SpeculationConfig:
    return SpeculationConfig(method="ngram", tokens=tokens, acceptance=acceptance, **keys)


def settings(drafting: SpeculationConfig, *, step=(10, 10), context=(0, 0), capacity=None, step_tokens=None):
    """An engine with as many slots as ``step`` has entries; ticks per token of context, and on top with drafts."""
    cost = DecodeCost((0, *step), *context)
    return EngineSettings(
        cost, PrefillCost(0, 0, 0), capacity, 5, step_tokens=step_tokens, drafting=Drafting(drafting, seed=0)
    )


def run_of(*, steps=40, acceptance=0.6, kind="pipeline", slots=16, seed=0, length=None, **keys) -> RunConfig:
    """Return a generation-bound run of four engines; ``decode`` and other keys of ``[engine.speculation]``."""
    decode = keys.pop("decode", {"kind": "affine", "step_s": 0.01})
    hardware = keys.pop("hardware", {})
    tables = {
        "seed": seed,
        "optimizer_steps": steps,
        "cluster": {"accelerators": 8, "generation_accelerators": 4},
        "scheduler": {"kind": kind, "train_batch_size": 32, "generation_batch_size": slots},
        "workload": {"group_size": 4, "length": length or {"kind": "lognormal", "mean": 200, "cv": 0.5, "max": 800}},
        "hardware": {"decode": decode, "training": {"token_s": 0.0}, **hardware},
    }
    if acceptance is not None:
        tables["engine"] = {"speculation": {"method": "ngram", "tokens": 3, "acceptance": acceptance, **keys}}
    return parse_run(tables)


def entries_of(config: RunConfig) -> list:
    recorded = Recorded()
    SimulatedCluster(config).run(recorded)
    return recorded.entries


# ------------------------------------------------------------------------------------------------------------- the law


@pytest.mark.parametrize(("acceptance", "drafted"), [(0.0, 3), (0.3, 1), (0.6, 3), (0.9, 7), (1.0, 4)])
def test_the_mean_tokens_of_a_step_are_the_geometric_sum(acceptance, drafted):
    """(1 - a^(k+1)) / (1 - a); k + 1 at a = 1. Their distribution has mean and variance of drafts that are accepted
    one after the other until the first is refused. Fails for 1 seed in 10^6 if right (n = 200 000)."""
    expected = drafted + 1 if acceptance == 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
    assert tokens_per_step(acceptance, drafted) == pytest.approx(expected)
    gains = Drafting(speculation(drafted, acceptance), seed=1).gains(5, 0, range(200_000), acceptance)
    accepted = np.random.default_rng(2).random((200_000, drafted)) < acceptance
    trials = 1 + accepted.cumprod(axis=1).sum(axis=1)
    for drawn in (gains, trials):
        error = Z * trials.std() / math.sqrt(200_000)
        assert drawn.mean() == pytest.approx(expected, abs=error + 1e-12)
        assert (drawn.min(), drawn.max()) == (trials.min(), trials.max())


def test_a_chance_depends_on_seed_rollout_tokens_and_step_alone():
    first, second = (Drafting(speculation(3, 0.5), seed=seed) for seed in (0, 1))
    whole = first.gains(7, 10, range(100), 0.5)
    assert (first.gains(7, 10, range(40, 100), 0.5) == whole[40:]).all()
    assert (first.gains(7, 10, range(100), 0.6) >= whole).all()
    others = [first.gains(8, 10, range(100), 0.5), first.gains(7, 11, range(100), 0.5)]
    assert all((other != whole).any() for other in (*others, second.gains(7, 10, range(100), 0.5)))


def test_the_makespan_of_a_rollout_is_that_of_independent_drafts():
    """Steps until 300 tokens, by engines against drafts tossed one by one. Fails for 1 seed in 10^6 if right: means of
    4000 each (z = 4.9)."""
    config = speculation(4, 0.7)
    log = log_of_many(config, number=4000, length=300)
    toss = np.random.default_rng(3)
    steps = []
    for _ in range(4000):
        tokens = count = 0
        while tokens < 300:
            run = 1
            while run <= 4 and toss.random() < 0.7:
                run += 1
            tokens, count = tokens + run, count + 1
        steps.append(count)
    error = Z * math.sqrt(2) * np.std(steps) / math.sqrt(4000)
    assert np.mean(log) == pytest.approx(np.mean(steps), abs=error)
    assert np.std(log) == pytest.approx(np.std(steps), rel=0.1)


def log_of_many(config, *, number, length):
    """The steps of so many rollouts, one after the other on an engine whose step is a tick."""
    given = settings(config, step=(1,))
    rollouts = [(0, rollout_id, 0, length) for rollout_id in range(number)]
    ends = [tick for tick, *_ in log_of(ClosedFormEngine, given, rollouts=rollouts)]
    return [after - before for before, after in pairwise([0, *ends])]


# ------------------------------------------------------------------------------------------- nothing and all accepted


def test_without_an_accepted_draft_a_run_is_one_with_the_steps_of_verification():
    """3 drafts cost what 4 sequences in place of one do, and give nothing: the same events at the same instants."""
    wasted = run_of(acceptance=0.0, decode={"kind": "affine", "step_s": 0.01, "sequence_s": 1e-3})
    plain = run_of(acceptance=None, decode={"kind": "affine", "step_s": 0.01, "sequence_s": 4e-3})
    assert entries_of(wasted) == entries_of(plain)


@both_engines
def test_with_every_draft_accepted_each_step_gives_k_plus_one_tokens(make):
    """k = 3: 10 tokens take 3 steps, the last of which gives only 2; at 15 ticks the engine pauses for 5."""
    given = settings(speculation(3, 1.0))
    (_, finished, _, whole), *_ = log_of(make, given, rollouts=[(0, 0, 0, 10)])
    assert (finished, whole) == ("finished", spans((0, 10)))
    loaded, (tick, _, _, parts) = log_of(make, given, rollouts=[(0, 0, 0, 10)], updates=[(15, WeightUpdate.KEEP)])
    assert loaded[:2] == (25, "loaded")
    assert (tick, parts) == (35, spans((0, 8), (1, 10)))


def test_drafts_change_times_and_no_tokens():
    """Rollout by rollout, a conventional run generates as many tokens as without, in less time."""
    drafts, plain = (Played(run_of(acceptance=one, kind="conventional")) for one in (0.7, None))
    lengths = [{one.rollout_id: one.spans.num_tokens for _, one in run.of(RolloutFinished)} for run in (drafts, plain)]
    assert lengths[0] == lengths[1]
    assert drafts.entries[-1][0] < plain.entries[-1][0]


# ----------------------------------------------------------------------------------------------------------- two limits


def rate(config: RunConfig) -> float:
    """Trained tokens per second of the second half."""
    steps = simulate(config).steps
    middle = len(steps) // 2
    return steps.tokens[middle:].sum() / (steps.time_s[-1] - steps.time_s[middle - 1])


ROOF = {
    "kind": "roofline", "peak_flops": 1e15, "bandwidth": 1e12, "parameters_read": 1e9, "parameters_active": 1e9,
    "kv_bytes_per_token": 0.0, "weight_efficiency": 1.0, "flops_efficiency": 1.0, "step_overhead_s": 0.0,
    "sequence_overhead_s": 0.0,
}  # fmt: skip
"""2 ms to read, 2 us per token to multiply: bound by memory up to 1000 tokens a step."""


@pytest.mark.parametrize(
    ("decode", "gain"),
    [
        pytest.param(ROOF, tokens_per_step(0.6, 3), id="bound by memory: the tokens per step"),
        pytest.param({**ROOF, "bandwidth": 1e18}, tokens_per_step(0.6, 3) / 4, id="by compute: over k + 1"),
    ],
)
def test_the_gain_between_both_limits(decode, gain):
    """Batches are full in both; the last step of an answer and a missed step are 2 of 90, so 2 % are allowed."""
    assert rate(run_of(decode=decode)) / rate(run_of(decode=decode, acceptance=None)) == pytest.approx(gain, rel=0.02)


def test_littles_law_holds_with_drafts():
    """Slots are full: those of four engines over the mean time of a rollout are the rollouts per second."""
    run = Played(run_of(steps=80))
    starts = {entry.rollout_id: time_s for time_s, entry in run.of(StartRollout)}
    ends = [(time_s, entry.rollout_id) for time_s, entry in run.of(RolloutFinished)]
    half = ends[len(ends) // 2 :]
    mean_s = sum(time_s - starts[rollout_id] for time_s, rollout_id in half) / len(half)
    per_s = len(half) / (half[-1][0] - half[0][0])
    assert per_s * mean_s == pytest.approx(4 * 16, rel=0.03)


# -------------------------------------------------------------------------------------------------------- when to draft


@both_engines
def test_nothing_is_drafted_above_a_number_of_sequences(make):
    """k = 3, all accepted, off above 1: two requests get a token in each of 10 steps of 10 ticks. Then the second is
    alone: its other 10 tokens take 3 steps of 7 ticks."""
    given = settings(speculation(3, 1.0, off_above=1), step=(7, 10))
    finished = log_of(make, given, rollouts=[(0, 0, 0, 10), (0, 1, 0, 20)])
    assert [(tick, rollout_id) for tick, _, rollout_id, _ in finished] == [(100, 0), (121, 1)]


@both_engines
def test_drafting_reads_the_context_of_drafting_steps_alone(make):
    """A token of context is 2 ticks, and 3 on top with drafts, off above 1. Two of 1 and 2 tokens to come with prompts
    of 4: a step of 10 + 2 * 8 ticks, then one of 10 + 5 * 5."""
    given = settings(speculation(3, 1.0, off_above=1), context=(2, 3))
    finished = log_of(make, given, rollouts=[(0, 0, 4, 1), (0, 1, 4, 2)])
    assert [tick for tick, *_ in finished] == [26, 61]


def test_acceptance_falls_with_the_distance_between_drafter_and_policy():
    """A refresh after every third step is published with the version it is made at: distances 0 1 2 0 1 2."""
    drafter = speculation(3, 0.8, decay=0.5, refresh_every=3, refresh_s=5.0)
    assert [drafter.acceptance_of(version) for version in range(6)] == [0.8, 0.4, 0.2] * 2
    assert [drafter.refresh_after_s(version) for version in range(1, 7)] == [0.0, 0.0, 5.0] * 2
    never = speculation(3, 0.8, decay=0.5)
    assert (never.acceptance_of(2), never.refresh_after_s(3)) == (0.2, 0.0)


def test_new_weights_change_the_tokens_of_steps():
    """A drafter that is never refreshed and is useless a version later: k + 1 tokens a step, then about one."""
    run = simulate(run_of(acceptance=1.0, decay=1e-9, hardware=trains_in(1.0)))
    assert run.tokens_per_step is not None
    assert 1.0 < run.tokens_per_step < 1.5
    assert simulate(run_of(acceptance=1.0)).tokens_per_step > 3.9


def test_a_refresh_takes_time_of_the_trainer():
    """12 steps of 1 s, refreshed at 3, 6, 9, 12: 4 times 0.5 s."""
    plain, refreshed = (
        simulate(run_of(steps=12, hardware=trains_in(1.0), **keys)).seconds.training
        for keys in ({}, {"refresh_every": 3, "refresh_s": 0.5})
    )
    assert refreshed - plain == pytest.approx(2.0)


# ----------------------------------------------------------------------------------------------------------------- room


@both_engines
@pytest.mark.parametrize(("capacity", "second_s"), [(15, 20), (16, 10)])
def test_a_step_needs_room_for_all_drafts(make, capacity, second_s):
    """Two requests with 4 tokens in the cache, 4 to come and k = 3: 2 * 8 tokens of room, or one after the other."""
    given = settings(speculation(3, 1.0), capacity=capacity)
    finished = log_of(make, given, rollouts=[(0, 0, 4, 4), (0, 1, 4, 4)])
    assert [tick for tick, *_ in finished] == [10, second_s]


@both_engines
def test_a_sequence_takes_as_many_tokens_of_a_step_as_it_may_get(make):
    """12 tokens a step, 4 of them for the first request: a prompt of 9 is read in 8 + 1."""
    given = settings(speculation(3, 0.0), step_tokens=12)
    finished = log_of(make, given, rollouts=[(0, 0, 0, 9), (1, 1, 9, 1)])
    assert [(tick, rollout_id) for tick, _, rollout_id, _ in finished] == [(30, 1), (90, 0)]


def test_a_cache_holds_the_longest_rollout_and_its_drafts():
    room = {"kv_cache_tokens": 802}
    assert "803 tokens in all, got kv_cache_tokens=802" in message(lambda: simulate(run_of(hardware=room)))
    run_of(hardware={"kv_cache_tokens": 803})


# -------------------------------------------------------------------------------------------------------------- the run


def test_the_same_seed_gives_the_same_bytes_and_another_one_others():
    first, again, other = (entries_of(run_of(seed=seed)) for seed in (4, 4, 5))
    assert first == again
    assert first != other


def test_the_summary_has_the_tokens_per_step_and_is_silent_without():
    """A step gives 2.176 tokens, but for the last step of an answer of 200: 1 % less at most."""
    assert simulate(run_of()).tokens_per_step == pytest.approx(tokens_per_step(0.6, 3), rel=0.01)
    assert "tokens_per_step" not in simulate(run_of(acceptance=None)).to_dict()


def test_a_simulation_needs_an_acceptance():
    config = parse_run(
        {
            **run_of().model_dump(mode="json", exclude_none=True),
            "engine": {"speculation": {"method": "ngram", "tokens": 3}},
        }
    )
    assert message(lambda: simulate(config)) == "engine.speculation.acceptance is missing; a simulation needs it"


def test_seconds_of_a_refresh_need_its_steps():
    assert "refresh_every is missing; refresh_s=2 needs it" in message(lambda: run_of(refresh_s=2.0))


def test_slower_engines_draft_more_slowly():
    """All four are half as fast from the first second on: about twice as long, but for that second."""
    faults = [{"engine": engine, "second": 1.0, "kind": "slow", "factor": 2.0, "seconds": 1e5} for engine in range(4)]
    decode = {"kind": "affine", "step_s": 0.1, "context_token_s": 1e-6}
    plain = run_of(decode=decode, draft_cost=0.1)
    slow = parse_run({**plain.model_dump(mode="json", exclude_none=True), "faults": faults})
    assert simulate(slow).duration_s == pytest.approx(2 * simulate(plain).duration_s - 1, rel=0.001)
