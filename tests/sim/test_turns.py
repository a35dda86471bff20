"""Rollouts with turns, in whole simulated runs, against theory.

By default a decode step lasts 1 s with any batch, and all else takes no time.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_run import environment, fixed, play, trains_in, uniform
from refusals import message

from pipelinerl.config.run import PolicyConfig
from pipelinerl.errors import ConfigError
from pipelinerl.scheduler.events import (
    ObservationReady,
    OpenEnvironment,
    RolloutAborted,
    RolloutFinished,
    StartRollout,
    StartTraining,
    TurnFinished,
)
from sim.cluster import SimulatedCluster

# ------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ({"turns": {"kind": "lognormal", "max": 3}}, "environment.turns.mean is missing; kind='lognormal' needs"),
        ({"turns": {"kind": "recorded", "max": 3}}, "environment.turns.source is missing; kind='recorded' needs"),
        ({"turns": {"kind": "lognormal", "mean": 4.0, "max": 3}}, "mean must be at most the 3 at which"),
        ({"turns": {"kind": "lognormal", "mean": 2.0, "max": 3, "context_max": 10}},
            "environment.turns.context_max must be above workload.prompt_tokens=10, got 10"),
        ({"turns": {"kind": "lognormal", "mean": 2.0, "max": 91}},
            "environment.turns.max must leave a token a turn in context_max=100 after "
            "workload.prompt_tokens=10, got 91"),
    ],
)  # fmt: skip
def test_impossible_environments_are_one_line(table, rule):
    turns = table.get("turns", {"kind": "lognormal", "mean": 1, "max": 1})
    table = {"count": 1, **table, "turns": {"observation_max": 0, "context_max": 100, **turns}}
    assert rule in message(play, 1, batch=1, slots=1, length=fixed(4), prompt_tokens=10, environment=table)


def test_features_without_turns_are_refused():
    """Growing lengths, and a policy on keys and values of an earlier turn: one line each, before anything is done."""
    turns = environment(count=1, prefix_cache="kept")
    config = play(1, batch=1, slots=1, length=fixed(4), environment=turns).config
    with pytest.raises(ConfigError, match=r"^workload\.length\.growth must be 1 with an \[environment\], got 2"):
        play(1, batch=1, slots=1, length={**fixed(4), "growth": 2.0}, environment=turns)
    with pytest.raises(ConfigError, match=r"^environment\.prefix_cache must be 'salted' or 'off' with a \[policy\]"):
        SimulatedCluster(config.model_copy(update={"policy": PolicyConfig(task="reverse", size=4, learning_rate=1e-3)}))


# ----------------------------------------------------------------------------------------- by hand


def test_a_rollout_of_three_turns_by_hand():
    """Reset 2 s; turns of 4 tokens, 4 s each; the environment acts 3 s between them: 2 + 4 + 3 + 4 + 3 + 4 = 20 s."""
    run = play(1, batch=1, slots=1, length=fixed(4), environment=environment(count=1, reset_s=2.0, step_s=3.0))
    happened = [(time_s, type(entry)) for time_s, entry in run.entries if getattr(entry, "rollout_id", 0) == 0]
    assert happened[:9] == [
        (0.0, OpenEnvironment),
        (2.0, ObservationReady),
        (2.0, StartRollout),
        (6.0, TurnFinished),
        (9.0, ObservationReady),
        (9.0, StartRollout),
        (13.0, TurnFinished),
        (16.0, ObservationReady),
        (16.0, StartRollout),
    ]
    assert [(time_s, entry.spans.ends) for time_s, entry in run.of(TurnFinished)] == [(6.0, (4,)), (13.0, (8,))]
    assert [entry.kept_tokens for _, entry in run.of(StartRollout)] == [0, 4, 8]
    (finished_s, finished), *_ = run.of(RolloutFinished)
    assert (finished_s, finished.spans.ends) == (20.0, (12,))
    report = run.summary().environments
    assert report.turns_mean == 3.0
    places = {"environment": 8.0, "waiting": 0.0, "engine": 12.0, "scoring": 0.0}
    assert report.seconds.to_dict() == {**places, "queue": 0.0, "prefill": 0.0, "decode": 12.0}
    assert report.in_use_mean == 1.0


@pytest.mark.parametrize(("kind", "prefilled"), [("off", 10 + 17 + 24), ("kept", 10 + 3 + 3), ("salted", 10 + 3 + 3)])
def test_tokens_prefilled_in_a_turn_by_hand(kind, prefilled):
    """A prompt of 10 tokens, three turns of 4, 3 tokens observed before the second and the third; 1 s per token.

    Without a cache turn k prefills all before it: 10, 10 + 4 + 3, 10 + 8 + 6. With one only what was observed.
    """
    run = play(
        1, batch=1, slots=1, length=fixed(4), prompt_tokens=10, hardware={"prefill": {"token_s": 1.0}},
        environment=environment(count=1, observation=3, prefix_cache=kind),
    )  # fmt: skip
    (finished_s, _), *_ = run.of(RolloutFinished)
    assert finished_s == 12 + prefilled
    seconds = run.summary().environments.seconds
    assert (seconds.queue, seconds.prefill, seconds.decode) == (0.0, prefilled, 12.0)


CROWDED = {
    "batch": 8, "slots": 3, "engines": 2, "length": uniform(9), "prompt_tokens": 20, "weight_update": "recompute",
    "environment": environment(count=16, turns=4, observation=5, step_s=3.0, step_cv=1.0, context_max=100),
    "hardware": {
        **trains_in(5.0), "kv_cache_tokens": 130, "prefill": {"sequence_s": 0.5, "token_s": 0.1},
        "weights": {"transfer_s": 1.0, "pause_s": 2.0},
        "latency": {"dispatch_jitter_s": 0.3, "report_s": 0.2, "reward_s": 4.0},
    },
}  # fmt: skip
"""Queues everywhere: rollouts wait for slots and are preempted, and weights are loaded meanwhile."""


@pytest.mark.slow
@pytest.mark.parametrize("step_tokens", [None, 8])
@pytest.mark.parametrize("kind", ["keep", "abort", "wait", "recompute"])
def test_queue_prefill_and_decode_are_the_time_on_an_engine(kind, step_tokens):
    """Taken from the events: of every turn, from its start to its end; its parts never exceed it."""
    crowded = {**CROWDED, "hardware": {**CROWDED["hardware"], "step_tokens": step_tokens}, "weight_update": kind}
    run = play(20, **crowded)
    started, on_engine, worked = {}, 0.0, 0.0
    for time_s, entry in run.entries:
        if isinstance(entry, StartRollout):
            started[entry.rollout_id] = time_s
        elif isinstance(entry, TurnFinished | RolloutFinished | RolloutAborted):
            turn_s = time_s - started.pop(entry.rollout_id)
            both = entry.seconds.prefill + entry.seconds.decode
            assert 0.0 <= both <= turn_s + 1e-9
            on_engine, worked = on_engine + turn_s, worked + both
    report = run.summary()
    seconds, finished = report.environments.seconds, report.rollouts.finished
    assert not started
    assert seconds.engine * finished == pytest.approx(on_engine)
    assert (seconds.prefill + seconds.decode) * finished == pytest.approx(worked)
    assert seconds.queue + seconds.prefill + seconds.decode == pytest.approx(seconds.engine)
    assert sum(seconds.parts.values()) * finished == pytest.approx(report.environments.in_use_mean * report.duration_s)
    assert min(seconds.parts.values()) > 0.0


def test_a_step_has_a_token_for_each_sequence():
    with pytest.raises(ConfigError, match=r"step_tokens must be at least scheduler.generation_batch_size=3, got 2$"):
        play(1, **{**CROWDED, "hardware": {**CROWDED["hardware"], "step_tokens": 2}})


def test_a_budget_that_holds_every_prefill_cuts_none():
    """Event by event the run is the one without a budget."""
    whole = play(20, **CROWDED)
    cut = play(20, **{**CROWDED, "hardware": {**CROWDED["hardware"], "step_tokens": 1000}})
    assert cut.entries == whole.entries


# ------------------------------------------------------------------------------------------ against theory


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_one_turn_without_observations_is_a_rollout_without_an_environment(kind):
    """Environments that are always there and take no time change nothing: the same steps, lags and counts.

    Delays of chance keep engines from having a boundary at the same time, where order could make a difference.
    """
    hardware = {**trains_in(20.5), "latency": {"dispatch_jitter_s": 0.1}}
    sizes = {"batch": 8, "slots": 4, "engines": 3, "length": uniform(30), "group_size": 2, "hardware": hardware}
    without = play(20, **sizes, kind=kind)
    one_turn = play(20, **sizes, kind=kind, environment=environment(count=12, turns=1))
    assert without.steps == one_turn.steps
    assert without.summary() == one_turn.summary().model_copy(update={"environments": None})


@pytest.mark.parametrize("count", [1, 3, 10])
def test_few_environments_bound_the_rate_and_many_do_not(count):
    """A rollout has its environment for 5 + 3 x 4 + 2 x 2 = 21 s: E environments finish E rollouts every 21 s.

    Slots are enough for all, and the trainer takes no time. So 30 batches of 2 take 60 / E rounds, rounded up.
    """
    run = play(30, batch=2, slots=10, length=fixed(4), environment=environment(count=count, reset_s=5.0, step_s=2.0))
    assert run.summary().duration_s == 21.0 * -(-60 // count)
    assert run.summary().environments.in_use_mean == pytest.approx(count)


def test_littles_law_at_every_station():
    """Mean number in a place = rate x mean time in it, and the places add up to the environments in use.

    The mean numbers are taken from the events, second by second, not from what the ledger adds up.
    """
    run = play(
        100, batch=4, slots=3, engines=2, length=uniform(9), hardware={"latency": {"reward_s": 4.0}},
        environment=environment(count=16, turns=4, reset_s=6.0, reset_cv=1.0, step_s=3.0, step_cv=1.0),
    )  # fmt: skip
    change = {OpenEnvironment: ("acting", 1), ObservationReady: ("acting", -1), TurnFinished: ("acting", 1)}
    acting, area, last_s = 0, 0.0, 0.0
    for time_s, entry in run.entries:
        area += acting * (time_s - last_s)
        last_s = time_s
        acting += change.get(type(entry), ("", 0))[1]
    report, duration_s = run.summary().environments, run.summary().duration_s
    finished = run.summary().rollouts.finished
    assert finished > 300
    assert report.seconds.environment * finished == pytest.approx(area)
    assert report.in_use_mean * duration_s == pytest.approx(sum(report.seconds.parts.values()) * finished)
    assert report.in_use_mean <= 16 * (1 + 1e-9)
    assert report.seconds.scoring == pytest.approx(4.0, rel=0.02)  # but for rollouts cut off at the end


def test_observations_are_read_by_the_trainer_but_not_counted():
    """The trainer reads prompt, observations and answers; tokens trained are the generated ones."""
    run = play(
        2, batch=1, slots=1, length=fixed(4), prompt_tokens=10, hardware={"training": {"token_s": 1.0}},
        environment=environment(count=1, observation=3, prefix_cache="off"),
    )  # fmt: skip
    assert run.summary().tokens_trained == 2 * 12
    assert {row.train_s for row in run.steps} == {10.0 + 2 * 3 + 12}


def test_the_turns_of_the_figures_add_up_to_the_report():
    """The same tokens, lag and counts as in the summary; all that is open has an environment."""
    run = play(
        30, batch=8, slots=4, engines=3, length=uniform(30), group_size=2, hardware=trains_in(20.5),
        environment=environment(count=14, observation=2, reset_s=3.0, step_s=2.0, failure_rate=0.02),
    )  # fmt: skip
    report, profile = run.summary(), run.figure_data().turns
    assert sum(profile.tokens) == report.tokens_trained
    lag_sum = sum(lag * tokens for lag, tokens in zip(profile.lag_mean, profile.tokens, strict=True))
    assert lag_sum / report.tokens_trained == pytest.approx(report.lag.mean)
    assert profile.lag_mean == sorted(profile.lag_mean, reverse=True)  # later turns are younger
    counts = report.rollouts
    assert sum(profile.trained) == counts.trained == profile.trained[3]
    assert sum(profile.dropped) == counts.discarded + counts.aborted + counts.failed > 0
    places = profile.places
    open_ones = zip(places.environment, places.waiting, places.engine, places.scoring, strict=True)
    assert max(map(sum, open_ones)) <= 14


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["pipeline", "conventional", "partial_rollouts", "one_step_off"]),
    count=st.integers(1, 20),
    turns=st.integers(1, 6),
    slots=st.integers(1, 5),
    context_max=st.sampled_from([20, 60, 400]),
    failure_rate=st.sampled_from([0.0, 0.02]),
    retries=st.integers(0, 2),
    lifetime_s=st.sampled_from([None, 500.0]),
    prefix_cache=st.sampled_from(["off", "salted", "kept"]),
    weight_update=st.sampled_from(["keep", "recompute", "abort", "wait"]),
    seed=st.integers(0, 99),
)
def test_any_run_ends_and_counts_every_rollout_once(
    kind, count, turns, slots, context_max, failure_rate, retries, lifetime_s, prefix_cache, weight_update, seed
):
    run = play(
        6, batch=4, slots=slots, engines=2, group_size=2, length=uniform(20), prompt_tokens=5, seed=seed, kind=kind,
        weight_update=weight_update, hardware={"kv_cache_tokens": context_max + 20, "prefill": {"token_s": 0.1}},
        environment=environment(
            count=count, turns=turns, observation=7, context_max=context_max, reset_s=3.0, reset_cv=1.0, step_s=2.0,
            step_cv=2.0, step_timeout_s=9.0, step_hang_rate=failure_rate, failure_rate=failure_rate, retries=retries,
            lifetime_s=lifetime_s, prefix_cache=prefix_cache,
        ),
    )  # fmt: skip
    summary = run.summary()
    json.dumps(summary.to_dict(), allow_nan=False)  # raises ValueError where a number is none
    counts = summary.rollouts
    assert summary.complete
    assert counts.started == len(run.of(OpenEnvironment))
    ended = counts.trained + counts.discarded + counts.aborted + counts.failed
    assert counts.started == ended + counts.unfinished
    assert 0 <= summary.environments.in_use_mean <= count * (1 + 1e-9)
    report = summary.environments
    assert report.timeouts + report.errors + report.expired - report.retries == counts.failed
    for _, entry in run.of(TurnFinished, RolloutFinished):
        assert entry.spans.num_tokens <= context_max
    assert sum(entry.completes_step for _, entry in run.of(StartTraining)) == 6
