"""Engines: their reports by hand-made arithmetic, and by queueing theory.

Goldens hold for both engines. By default a decode step lasts 10 ticks with any batch.
"""

from dataclasses import replace

import numpy as np
import pytest
from engine_log import TOKEN_PREFILL, Log, both_engines, log_of, settings_with, spans

from pipelinerl.scheduler.events import NO_TOKENS, VersionSpans, WeightUpdate
from sim.engine import PrefixCache, WeightHistory
from sim.interface import PrefillCost, Request

# ---------------------------------------------------------------------------------------- decode steps


@both_engines
def test_a_step_costs_its_context(make):
    """Contexts 5, 6, 7 at a tick per token and 10 per step: 15 + 16 + 17 = 48."""
    entries = log_of(make, settings_with(context=1), rollouts=[(0, 0, 5, 3)])
    assert entries == [(48, "finished", 0, spans((0, 3)))]


@both_engines
def test_waiting_rollouts_take_free_slots_and_their_prefill_delays_the_next_step(make):
    """Two slots; 12 ticks for two, 10 for one; a tick of prefill per token.

    0 -> 5 + 7 + 12 = 24 -> 36, rollout 1 has its 2 tokens, 2 joins -> 36 + 4 + 12 = 52, rollout 0 has 3 -> 62.
    """
    given = settings_with(step=(10, 12), prefill=TOKEN_PREFILL)
    entries = log_of(make, given, rollouts=[(0, 0, 5, 3), (0, 1, 7, 2), (1, 2, 4, 2)])
    assert entries == [(36, "finished", 1, spans((0, 2))), (52, "finished", 0, spans((0, 3))),
                       (62, "finished", 2, spans((0, 2)))]  # fmt: skip


@both_engines
@pytest.mark.parametrize(("arrival", "finish"), [(9, 20), (10, 30), (11, 30)])
def test_a_rollout_that_arrives_exactly_at_a_boundary_joins_at_the_next(make, arrival, finish):
    """Boundaries at 10, 20, 30; a step of its own makes the one token."""
    entries = log_of(make, settings_with(), rollouts=[(0, 0, 0, 4), (arrival, 1, 0, 1)])
    assert entries[0] == (finish, "finished", 1, spans((0, 1)))


@both_engines
def test_an_idle_engine_starts_at_once(make):
    entries = log_of(make, settings_with(), rollouts=[(10, 1, 0, 1), (3, 0, 0, 1), (13, 2, 0, 1)])
    assert [(tick, rollout_id) for tick, _, rollout_id, _ in entries] == [(13, 0), (23, 1), (33, 2)]


@both_engines
def test_an_aborted_rollout_leaves_after_the_running_step(make):
    """Boundaries at 10, 20, 30: rollout 0 is aborted at 10 in the running step, 3 before it arrives, 9 never was."""
    entries = log_of(
        make,
        settings_with(),
        rollouts=[(0, 0, 0, 4), (0, 1, 0, 4), (0, 2, 0, 1), (90, 3, 0, 1)],
        aborts=[(10, 0), (12, 2), (15, 3), (15, 9), (37, 1), (50, 1)],
    )
    assert entries == [
        (20, "aborted", 0, spans((0, 2))),
        (20, "aborted", 2, NO_TOKENS),
        (20, "aborted", 3, NO_TOKENS),
        (40, "finished", 1, spans((0, 4))),
    ]


@both_engines
def test_a_rollout_goes_on_where_an_abort_ended_it(make):
    """2 of 3 tokens are there at 20; 4 prompt tokens and those 2 are prefilled, then one step: 100 + 6 + 10."""
    log = Log(make, settings_with(prefill=TOKEN_PREFILL))
    request = Request(0, 4, 3)
    log.engines[0].submit(request, 0)
    log.at(15, lambda: log.engines[0].abort(0))
    log.clock.run(until=50)
    log.engines[0].submit(request, 100)
    log.clock.run()
    assert log.entries == [(24, "aborted", 0, spans((0, 2))), (116, "finished", 0, spans((0, 3)))]


@both_engines
def test_who_arrived_first_joins_first_whenever_the_other_was_submitted(make):
    """Rollout 1 arrives at 15 and is in the batch from 20 on; rollout 2 is submitted in its first step."""
    log = Log(make, settings_with(step=(10, 10, 10)))
    log.engines[0].submit(Request(0, 0, 5), 0)
    log.engines[0].submit(Request(1, 0, 1), 15)
    log.at(25, lambda: log.engines[0].submit(Request(2, 0, 1), 25))
    log.clock.run()
    assert [(tick, rollout_id) for tick, _, rollout_id, _ in log.entries] == [(30, 1), (40, 2), (50, 0)]


@both_engines
def test_chunks_of_a_prefill_let_the_batch_decode(make):
    """Steps of 10 ticks and of 4 tokens at most; a token of prefill takes a tick, a prefill 2 at its beginning.

    Rollout 0 decodes from 0 on. Rollout 1 arrives at 5 with 8 tokens: chunks of 3, 3 and 2 beside the one token of
    rollout 0 end at 10 + 2 + 3 + 10 = 25, at 38, and with its only token at 53. The last token of that step is the
    first of the 2 of rollout 2, so it lasts 2 + 2 + 1 + 10. The next step takes the other one and ends at 64.
    """
    given = replace(settings_with(step=(10, 10, 10), prefill=PrefillCost(2, 1, 0)), step_tokens=4)
    entries = log_of(make, given, rollouts=[(0, 0, 0, 9), (5, 1, 8, 1), (6, 2, 2, 1)])
    assert [(tick, rollout_id) for tick, _, rollout_id, _ in entries] == [(53, 1), (64, 2), (104, 0)]


# ---------------------------------------------------------------------------------------- weight updates


@both_engines
def test_keep_goes_on_after_the_pause(make):
    """Boundaries 10, 20; pause 3; 33 and on. The rollout that arrives in the pause has no token of version 0."""
    entries = log_of(
        make, settings_with(pause=3), rollouts=[(0, 0, 0, 5), (21, 1, 0, 1)], updates=[(12, WeightUpdate.KEEP)]
    )
    assert entries == [
        (23, "loaded", 1, 3),
        (33, "finished", 1, spans((1, 1))),
        (53, "finished", 0, spans((0, 2), (1, 5))),
    ]


@both_engines
def test_recompute_charges_the_prefill_of_everything_in_the_batch(make):
    """4 + 10 = 14, 24; pause to 27; then 4 + 2 tokens again and 3 that join: 27 + 6 + 3 + 10 = 46, 56, 66."""
    entries = log_of(
        make,
        settings_with(pause=3, prefill=TOKEN_PREFILL),
        rollouts=[(0, 0, 4, 5), (25, 1, 3, 1)],
        updates=[(15, WeightUpdate.RECOMPUTE)],
    )
    assert entries == [
        (27, "loaded", 1, 3),
        (46, "finished", 1, spans((1, 1))),
        (66, "finished", 0, spans((0, 2), (1, 5))),
    ]


@both_engines
def test_recompute_charges_nothing_for_a_rollout_that_leaves_at_the_same_boundary(make):
    """0 and 1 have 3 + 2 tokens each at 26; pause to 29. Of a cache of 10, 1 is preempted: 29 + 5 + 10 = 44, 0 is done.

    Only then is 1 prefilled: 44 + 5 + 10 = 59. If it is aborted in the pause instead, 0 ends at 44 just so.
    """
    rollouts, updates = [(0, 0, 3, 3), (0, 1, 3, 3)], [(17, WeightUpdate.RECOMPUTE)]
    loaded, done = (29, "loaded", 1, 3), (44, "finished", 0, spans((0, 2), (1, 3)))

    preempting = settings_with(prefill=TOKEN_PREFILL, pause=3, capacity=10)
    assert log_of(make, preempting, rollouts=rollouts, updates=updates) == [
        loaded,
        (29, "preempted", 1, 2),
        done,
        (59, "finished", 1, spans((0, 2), (1, 3))),
    ]
    large = settings_with(prefill=TOKEN_PREFILL, pause=3)
    assert log_of(make, large, rollouts=rollouts, updates=updates, aborts=[(27, 1)]) == [
        loaded,
        (29, "aborted", 1, spans((0, 2))),
        done,
    ]


@both_engines
def test_abort_ends_batch_and_queue_but_no_later_arrival(make):
    """Two slots, so 2 waits; 3 arrives together with the update and joins after the pause: 23 + 10."""
    entries = log_of(
        make,
        settings_with(pause=3),
        rollouts=[(0, 1, 0, 5), (0, 0, 0, 5), (0, 2, 0, 5), (15, 3, 0, 1)],
        updates=[(15, WeightUpdate.ABORT)],
    )
    assert entries == [
        (20, "aborted", 1, spans((0, 2))),
        (20, "aborted", 0, spans((0, 2))),
        (20, "aborted", 2, NO_TOKENS),
        (23, "loaded", 1, 3),
        (33, "finished", 3, spans((1, 1))),
    ]


@both_engines
def test_wait_finishes_earlier_arrivals_and_holds_later_ones(make):
    """One slot: rollout 0 ends at 30, rollout 1 at 40; pause to 43; rollout 2 ends at 53."""
    entries = log_of(
        make,
        settings_with(step=(10,), pause=3),
        rollouts=[(0, 0, 0, 3), (1, 1, 0, 1), (15, 2, 0, 1)],
        updates=[(12, WeightUpdate.WAIT)],
    )
    assert entries == [
        (30, "finished", 0, spans((0, 3))),
        (40, "finished", 1, spans((0, 1))),
        (43, "loaded", 1, 3),
        (53, "finished", 2, spans((1, 1))),
    ]


@both_engines
@pytest.mark.parametrize("kind", WeightUpdate)
def test_an_idle_engine_loads_at_once(make, kind):
    entries = log_of(make, settings_with(pause=3), rollouts=[(6, 0, 0, 1)], updates=[(5, kind)])
    assert entries == [(8, "loaded", 1, 3), (18, "finished", 0, spans((1, 1)))]


@both_engines
def test_an_update_exactly_at_a_boundary_waits_for_the_next(make):
    """Arrives at 10, loaded at 20, without a pause: the step from 20 on samples with it."""
    entries = log_of(make, settings_with(), rollouts=[(0, 0, 0, 3)], updates=[(10, WeightUpdate.KEEP)])
    assert entries == [(20, "loaded", 1, 0), (30, "finished", 0, spans((0, 2), (1, 3)))]


@both_engines
def test_an_update_is_taken_up_at_its_boundary_also_when_a_rollout_joins_before_it(make):
    """Both are known at 1: 1 joins at 20, weights of 35 are loaded from 40 to 43, the boundaries after it 3 later."""
    log = Log(make, settings_with(pause=3))
    engine = log.engines[0]
    log.at(0, lambda: engine.submit(Request(0, 0, 9), 0))
    log.at(1, lambda: engine.update(1, WeightUpdate.KEEP, 35))
    log.at(1, lambda: engine.submit(Request(1, 0, 5), 12))
    log.clock.run()
    assert log.entries == [
        (43, "loaded", 1, 3),
        (73, "finished", 1, spans((0, 2), (1, 5))),
        (93, "finished", 0, spans((0, 4), (1, 9))),
    ]


@both_engines
@pytest.mark.parametrize(("asked", "stops"), [(5, 10), (10, 20), (15, 20)])
def test_an_engine_asked_to_stand_still_ends_its_step_and_goes_on_under_new_weights(make, asked, stops):
    """Steps of 10, a pause of 4, weights at 55: it loads at 59 and prefills the 1 + n tokens it has, at 3 each."""
    log = Log(make, settings_with(prefill=PrefillCost(0, 3, 0), pause=4))
    engine, request = log.engines[0], Request(0, 1, 4)
    log.at(0, lambda: engine.submit(request, 0))
    log.at(asked + 3, engine.suspend)  # the first step lasts 3 longer: its prefill
    log.at(40, lambda: engine.update(1, WeightUpdate.RECOMPUTE, 55))
    log.clock.run()
    num_before = stops // 10
    finish = 59 + 3 * (1 + num_before) + 10 * (4 - num_before)
    assert log.entries == [(59, "loaded", 1, 59 - stops - 3), (finish, "finished", 0, spans((0, num_before), (1, 4)))]


# -------------------------------------------------------------------------------------------- KV cache


@both_engines
def test_the_last_admitted_is_preempted_and_first_in_the_queue_again(make):
    """10 tokens of cache, a tick of prefill per token.

    0 and 1 join with 3 + 3 tokens: 6 + 10 = 16, then 26. 10 tokens and 2 more do not fit: 1 leaves, ahead of 2,
    which would fit but has to wait. At 36 rollout 0 finishes; 1 (3 + 2 tokens) and 2 (1) join: 36 + 6 + 10 = 52.
    """
    given = settings_with(step=(10, 10, 10), prefill=TOKEN_PREFILL, capacity=10)
    entries = log_of(make, given, rollouts=[(0, 0, 3, 3), (0, 1, 3, 3), (17, 2, 1, 1)])
    assert entries == [
        (26, "preempted", 1, 2),
        (36, "finished", 0, spans((0, 3))),
        (52, "finished", 1, spans((0, 3))),
        (52, "finished", 2, spans((0, 1))),
    ]


@both_engines
@pytest.mark.parametrize(
    ("capacity", "rollouts", "preempted", "finished"),
    [
        # 2 + 2 + 1 tokens and a step of three. At 10, 3 + 3 and a step of two fit exactly: only 2 leaves.
        (8, [(0, 0, 2, 2), (0, 1, 2, 2), (0, 2, 1, 2)], [(10, 2)], [(20, 0), (20, 1), (30, 2)]),
        # At 10 there are 5 of 10: 6 of rollout 1 do not fit, the 1 of rollout 2 would. Both join at 20, in order.
        (10, [(0, 0, 4, 2), (1, 1, 6, 1), (2, 2, 1, 1)], [], [(20, 0), (30, 1), (30, 2)]),
    ],
)
def test_no_more_are_preempted_than_must_be_and_none_overtakes(make, capacity, rollouts, preempted, finished):
    entries = log_of(make, settings_with(step=(10, 10, 10), capacity=capacity), rollouts=rollouts)
    assert [(tick, rollout_id) for tick, kind, rollout_id, _ in entries if kind == "preempted"] == preempted
    assert [(tick, rollout_id) for tick, kind, rollout_id, _ in entries if kind == "finished"] == finished


# ------------------------------------------------------------------------------------------ the end


@both_engines
@pytest.mark.parametrize(
    ("until", "tokens"), [(9, 0), (10, 1), (11, 1), (29, 2), (30, 3), (45, 3), (55, 3), (64, 3), (65, 4)]
)
def test_at_the_end_a_rollout_has_the_tokens_of_the_steps_that_have_ended(make, until, tokens):
    """Boundaries 10, 20, 30, then a pause to 55, and 65; one rollout waits, one will arrive."""
    log = Log(make, settings_with(step=(10,), pause=25))
    for rollout_id, tick in ((2, 0), (1, 1), (0, 99)):
        log.engines[0].submit(Request(rollout_id, 5, 100), tick)
    log.engines[0].update(1, WeightUpdate.KEEP, 25)
    log.clock.run(until=until)
    pairs = [(0, min(tokens, 3))] * (tokens > 0) + [(1, tokens)] * (tokens > 3)
    assert log.end() == [(0, NO_TOKENS), (1, NO_TOKENS), (2, spans(*pairs))]
    log.clock.run()
    assert len(log.entries) == (until > 55)  # the weights; no more after the end


# ------------------------------------------------------------------------------------ queueing theory


@both_engines
def test_one_slot_is_a_queue_with_fixed_service_time(make):
    """Lindley: rollout k ends at max(its arrival, end of k - 1) + service, with arrivals at random (M/D/1)."""
    length, num_rollouts = 20, 300
    arrivals = np.random.default_rng(1).exponential(1.2 * length * 10, num_rollouts).cumsum().astype(int).tolist()
    rollouts = [(tick, rollout_id, 0, length) for rollout_id, tick in enumerate(arrivals)]
    end, expected = 0, []
    for tick in arrivals:
        end = max(tick, end) + length * 10
        expected.append(end)
    entries = log_of(make, settings_with(step=(10,)), rollouts=rollouts)
    assert [tick for tick, *_ in entries] == expected


class Refill(Log):
    """Replaces every finished rollout at once by one of the same length."""

    def rollout_finished(self, engine, request, spans):
        super().rollout_finished(engine, request, spans)
        self.engines[0].submit(Request(request.rollout_id + 1000, 0, spans.num_tokens), self.clock.now)


@both_engines
def test_a_slot_is_empty_for_one_step_between_two_rollouts_of_a_busy_engine(make):
    """Slots out of step with each other: a rollout started at a boundary joins at the next, so n of n + 1 steps.

    Rollouts join at 0, 10, .. 40, so 5 + 4 + 3 + 2 + 1 tokens are there at 50.
    """
    log = Refill(make, settings_with(step=(10,) * 5))
    for rollout_id in range(5):
        log.engines[0].submit(Request(rollout_id, 0, 24), max(0, 10 * rollout_id - 5))
    log.clock.run(until=50 + 10 * 25 * 40)
    num_tokens = sum(spans.num_tokens for _, spans in log.end()) + 24 * len(log.entries)
    assert num_tokens == 15 + 5 * 24 * 40


# ------------------------------------------------------- version history and prefix cache, by hand


def join(request, step, history):
    request.start_step, request.first_load = step, len(history.steps)


def test_a_token_has_the_version_that_its_engine_had_at_its_step():
    history = WeightHistory(0)
    history.loaded(1, 10)
    history.loaded(2, 10)  # nothing was sampled with version 1
    request = Request(0, prompt_tokens=5, length=100)
    join(request, 10, history)
    assert history.spans(request, 10) is NO_TOKENS
    assert history.spans(request, 13) == VersionSpans((2,), (3,))
    history.loaded(3, 13)
    assert history.spans(request, 13) == VersionSpans((2,), (3,))  # version 3 samples from the next step on
    history.loaded(4, 15)
    assert history.spans(request, 19) == VersionSpans((2, 3, 4), (3, 5, 9))


def test_tokens_from_before_a_preemption_keep_their_versions():
    history, request = WeightHistory(0), Request(0, prompt_tokens=5, length=100)
    join(request, 0, history)
    request.keep(history.spans(request, 4))
    history.loaded(1, 7)
    join(request, 8, history)
    assert history.spans(request, 10) == VersionSpans((0, 1), (4, 6))


def test_the_first_that_were_left_are_dropped_first_and_no_more_than_needed():
    cache = PrefixCache(100)
    for rollout_id in (3, 1, 2):
        cache.keep(rollout_id, 20)
    cache.make_room(40)
    assert list(cache.kept) == [3, 1, 2]
    cache.make_room(41)
    assert list(cache.kept) == [1, 2]
    cache.make_room(61)
    assert list(cache.kept) == [2]


def test_a_cache_is_given_away_once_and_left_again_last():
    cache = PrefixCache(100)
    cache.keep(1, 20)
    cache.keep(2, 30)
    assert (cache.take(1), cache.take(1)) == (20, 0)
    cache.keep(1, 25)
    assert list(cache.kept.items()) == [(2, 30), (1, 25)]
    cache.keep(2, 31)
    cache.make_room(100 - 56)
    assert list(cache.kept.items()) == [(1, 25), (2, 31)]
    cache.clear()
    assert cache.take(1) == 0
