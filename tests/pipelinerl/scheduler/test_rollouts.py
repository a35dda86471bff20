"""The rollout pool: what the scheduler's own tests cannot see."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pipelinerl.scheduler.events import NO_TOKENS
from pipelinerl.scheduler.rollouts import RolloutPool


def started(pool):
    """Start one rollout, of a new group if need be, and return its number and its engine."""
    if pool.starting is None:
        pool.admit(0)
    command = pool.start_one()
    return command.rollout_id, command.engine


@pytest.mark.parametrize("num_left_at_once", [1, 2, 5])
def test_the_heap_of_engines_with_room_stays_small_while_slots_are_never_used(num_left_at_once):
    pool = RolloutPool(num_engines=4, slots_per_engine=10, group_size=1)
    in_flight = [started(pool) for _ in range(20)]
    largest = 0
    for _ in range(2000):
        for _ in range(num_left_at_once):
            pool.leave_engine(*in_flight.pop(0), NO_TOKENS)
        in_flight += [started(pool) for _ in range(num_left_at_once)]
        largest = max(largest, len(pool._roomy))
    assert largest <= pool._roomy_limit == 32


@given(
    num_engines=st.integers(1, 4),
    slots=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["start", "leave", "hold", "release"]), st.integers(0, 99)), max_size=80),
)
def test_a_rollout_starts_where_most_slots_are_free(num_engines, slots, moves):
    """Against a list of slots in use: the first engine of those with fewest, among those that are not held."""
    pool = RolloutPool(num_engines=num_engines, slots_per_engine=slots, group_size=1)
    used, held, in_flight = [0] * num_engines, [False] * num_engines, []
    for what, pick in moves:
        engine = pick % num_engines
        free = [slots - used[one] if not held[one] else 0 for one in range(num_engines)]
        if what == "start" and any(free):
            in_flight.append(started(pool))
            assert in_flight[-1][1] == free.index(max(free))
            used[in_flight[-1][1]] += 1
        elif what == "leave" and in_flight:
            rollout_id, engine = in_flight.pop(pick % len(in_flight))
            pool.leave_engine(rollout_id, engine, NO_TOKENS)
            used[engine] -= 1
        elif what == "hold" and not held[engine]:
            pool.hold(engine)
            held[engine] = True
        elif what == "release":
            pool.release(engine)
            held[engine] = False
        assert pool.num_free == sum(slots - used[one] for one in range(num_engines) if not held[one])
