"""The batch of an engine: its closed form against steps made one by one, and the join that can be undone."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.engine import DecodeBatch, TimedBatch
from sim.interface import DecodeCost, Request

COST = DecodeCost((0, 10, 12, 15), 1)
"""Three slots; a tick per token of context."""


def batch_of(*requests, capacity=None, prefill_ticks=0):
    """Requests are (prompt tokens, length); rollout ids count from 0."""
    batch = DecodeBatch(COST, capacity)
    for rollout_id, (prompt_tokens, length) in enumerate(requests):
        batch.join(Request(rollout_id, prompt_tokens, length), prefill_ticks)
    return batch


def ids(batch):
    """Rollouts in order of admission."""
    return [request.rollout_id for request in batch.admitted()]


def state(batch):
    """Everything that a batch answers, and the ids in it."""
    change = batch.next_change()
    return batch.tick, batch.step, batch.context_tokens, batch.prefill_ticks, ids(batch), change


def test_the_next_change_is_the_first_finish():
    """Contexts 4, 6, 8 in steps of 12 + C ticks: 16 + 18 + 20, and 3 ticks of prefill for each request."""
    batch = batch_of((1, 5), (3, 3), prefill_ticks=3)
    assert batch.next_change() == (3, 6 + 16 + 18 + 20)


def test_requests_that_finish_leave_with_their_tokens():
    batch = batch_of((1, 3), (3, 3), (0, 4))
    assert [request.rollout_id for request in batch.advance(3, 100)] == [0, 1]
    assert ids(batch) == [2]
    assert (batch.tick, batch.step, batch.context_tokens, batch.prefill_ticks) == (100, 3, 3, 0)
    assert batch.advance(1, 113)[0].rollout_id == 2
    assert batch.context_tokens == 0


@pytest.mark.parametrize(("capacity", "steps"), [(4, 0), (5, 0), (6, 1), (9, 2), (10, 3), (None, 5)])
def test_the_next_change_is_where_the_cache_would_overflow(capacity, steps):
    """4 tokens and 2 more per step; requests of 5 tokens."""
    batch = batch_of((1, 5), (3, 5), capacity=capacity)
    assert batch.next_change()[0] == steps


def test_a_request_that_leaves_unfinished_takes_its_cache_with_it():
    batch = batch_of((1, 5), (3, 9))
    batch.advance(2, 50)
    first, _ = batch.admitted()
    assert batch.cached_tokens(first) == 3
    batch.leave(first)
    assert (batch.context_tokens, ids(batch), batch.next_change()[0]) == (5, [1], 7)


@pytest.mark.parametrize(
    ("capacity", "after_steps", "fits"), [(8, 0, True), (7, 0, False), (8, 1, False), (10, 1, True)]
)
def test_a_request_fits_with_one_more_step_of_everybody(capacity, after_steps, fits):
    """1 + 3 tokens in the cache, 1 more joins, and three tokens in the next step."""
    assert batch_of((1, 5), (3, 5), capacity=capacity).fits(Request(2, 1, 1), after_steps) == fits


def test_a_request_needs_a_free_slot():
    assert not batch_of((0, 1), (0, 1), (0, 1)).fits(Request(3, 0, 1))


def test_new_lengths_change_who_finishes_first():
    batch = batch_of((0, 2), (0, 5))
    batch.advance(1, 20)
    for request, length in zip(batch.admitted(), (9, 4), strict=True):
        request.finish_at(length)
    batch.lengths_changed()
    assert batch.next_change()[0] == 3
    assert [request.rollout_id for request in batch.advance(3, 90)] == [1]


sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(3, 40)), min_size=1, max_size=2)


@settings(derandomize=True, deadline=None)
@given(requests=sizes, joining=st.tuples(st.integers(0, 9), st.integers(1, 40)), steps=st.integers(1, 2))
def test_a_join_ahead_is_steps_and_a_join_and_can_be_undone(requests, joining, steps):
    ahead, by_hand = batch_of(*requests, prefill_ticks=7), batch_of(*requests, prefill_ticks=7)
    before = state(ahead)
    _, tick, _ = ahead.first_boundary_after(0)
    for _ in range(2):  # the same again after it was undone
        ahead.join(Request(9, *joining), 5, steps, tick)
        after = state(ahead)
        ahead.undo_join()
        assert state(ahead) == before
    assert by_hand.advance(steps, tick) == []
    by_hand.join(Request(9, *joining), 5)
    assert after == state(by_hand)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(3, 40)), min_size=1, max_size=3),
    joining=st.tuples(st.integers(0, 9), st.integers(1, 40)),
    start=st.integers(0, 100),
    arrival=st.integers(100, 250),
    until=st.just(10**6) | st.integers(-1, 250),
    capacity=st.none() | st.integers(20, 90),
)
def test_a_join_ahead_is_found_as_by_its_parts(requests, joining, start, arrival, until, capacity):
    """``TimedBatch`` finds the boundary, asks for room, joins and finds the next change, one by one."""
    fast, slow = (kind(COST, capacity) for kind in (DecodeBatch, TimedBatch))
    for batch in (fast, slow):
        for rollout_id, request in enumerate(requests):
            batch.join(Request(rollout_id, *request), 7)
    assume(fast.next_change()[0] > 1)
    newcomers = Request(9, *joining), Request(9, *joining)
    for batch in (fast, slow):
        batch.advance(1, start)
    for _ in range(2):  # the same again after it was undone
        answers = [
            batch.join_ahead(one, 5, arrival, until) for batch, one in ((fast, newcomers[0]), (slow, newcomers[1]))
        ]
        assert answers[0] == answers[1]
        assert state(fast) == state(slow)
        if answers[0][0]:
            fast.undo_join()
            slow.undo_join()
            assert state(fast) == state(slow)
    if answers[0][0]:
        for batch, one in ((fast, newcomers[0]), (slow, newcomers[1])):
            batch.join_ahead(one, 5, arrival, until)
    while fast.running and (change := fast.next_change())[0]:
        assert change == slow.next_change()
        ended = [[one.rollout_id for one in batch.advance(*change)] for batch in (fast, slow)]
        assert ended[0] == ended[1]


def test_a_join_that_was_undone_leaves_the_ticks_of_prefill_as_they_were():
    """7 ticks of prefill, then contexts 1, 2, 3 in steps of 10 + C ticks: 11 + 12 + 13."""
    batch, request = TimedBatch(COST, None), Request(0, 1, 3)
    batch.join(request, 7)
    batch.join(Request(1, 0, 1), 5, 1, 7 + 11)
    batch.undo_join()
    assert batch.advance(3, 7 + 36) == [request]
    assert (request.prefill_ticks, request.decode_ticks) == (7, 36)


@settings(derandomize=True, deadline=None)
@given(
    requests=sizes,
    unit=st.sampled_from([1, 10**15 + 7]),
    context_ticks=st.integers(0, 3),
    prefill_ticks=st.integers(0, 20),
    share=st.floats(0, 1),
)
def test_the_first_boundary_after_a_tick_is_found_without_making_the_steps(
    requests, unit, context_ticks, prefill_ticks, share
):
    """Steps of ``unit`` (and a few ticks per token) one by one, up to the first that ends after the tick."""
    cost = DecodeCost((0, unit, unit), context_ticks)
    batch = DecodeBatch(cost, None)
    for rollout_id, (prompt_tokens, length) in enumerate(requests):
        batch.join(Request(rollout_id, prompt_tokens, 100 * length), prefill_ticks)
    num_steps = batch.next_change()[0]
    ends, context = [prefill_ticks * len(requests)], sum(prompt_tokens for prompt_tokens, _ in requests)
    for _ in range(num_steps):
        ends.append(ends[-1] + unit + context_ticks * context)
        context += len(requests)
    assert batch.next_change() == (num_steps, ends[-1])
    for tick in (int(share * (ends[-1] - 1)), ends[int(share * (num_steps - 1))]):
        steps = next(number for number, end in enumerate(ends) if number and end > tick)
        assert batch.first_boundary_after(tick) == (steps, ends[steps], steps < num_steps)
