"""The slots of engines, against a list of engines that is searched."""

import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pipelinerl.scheduler.slots import EngineSlots

MOVES = ["take", "take_near", "free", "hold", "release", "add", "remove", "limit"]


class SlowSlots:
    """The same, by a search of all engines."""

    def __init__(self, num_engines, *, slots_per_engine):
        self.used_on = dict.fromkeys(range(num_engines), 0)
        self.most = {}
        self.held = set()
        self.slots_per_engine = slots_per_engine

    @property
    def num_free(self):
        return sum(max(0, self.free_on(engine)) for engine in self.used_on if engine not in self.held)

    def free_on(self, engine):
        return self.most.get(engine, self.slots_per_engine) - self.used_on[engine]

    def has_free(self, engine):
        return engine in self.used_on and self.free_on(engine) > 0 and engine not in self.held

    def take(self):
        return self.take_near(min(self.used_on.keys() - self.held, key=lambda one: (-self.free_on(one), one)))

    def take_near(self, engine):
        if not self.has_free(engine):
            return self.take()
        self.used_on[engine] += 1
        return engine

    def free(self, engine):
        self.used_on[engine] -= 1

    def hold(self, engine):
        self.held.add(engine)

    def release(self, engine):
        self.held.discard(engine)

    def add(self, engine):
        self.used_on[engine] = 0
        self.held.add(engine)

    def remove(self, engine):
        del self.used_on[engine]
        self.held.remove(engine)
        self.most.pop(engine, None)

    def limit(self, engine, most):
        self.most[engine] = most


@given(
    num_engines=st.integers(1, 5),
    slots_per_engine=st.integers(1, 4),
    moves=st.lists(
        st.tuples(st.sampled_from(MOVES), st.integers(0, 99)),
        min_size=40, max_size=120,
    ),
)  # fmt: skip
def test_a_slot_comes_from_the_engine_with_most_free_slots(num_engines, slots_per_engine, moves):
    fast, slow = (make(num_engines, slots_per_engine=slots_per_engine) for make in (EngineSlots, SlowSlots))
    engines, taken, gone = list(range(num_engines)), [], []
    for move, pick in moves:
        engine = engines[pick % len(engines)]
        if move.startswith("take") and slow.num_free:
            arguments = (engine,) if move == "take_near" else ()
            taken.append(getattr(slow, move)(*arguments))
            assert getattr(fast, move)(*arguments) == taken[-1]
        elif move == "free" and taken:
            engine = taken.pop(pick % len(taken))
            fast.free(engine)
            slow.free(engine)
        elif move == "add":
            engines = [*engines, max(engines + gone) + 1 + pick % 3]
            fast.add(engines[-1])
            slow.add(engines[-1])
        elif move == "remove" and engine in slow.held and engine not in taken and len(engines) > 1:
            assert not fast.num_used(engine)
            fast.remove(engine)
            slow.remove(engine)
            gone.append(engine)
            engines = [one for one in engines if one != engine]
        elif move == "limit":
            fast.limit(engine, 1 + pick % slots_per_engine)
            slow.limit(engine, 1 + pick % slots_per_engine)
        elif move == "release" or (move == "hold" and engine not in slow.held):
            getattr(fast, move)(engine)
            getattr(slow, move)(engine)
        assert fast.num_free == slow.num_free
        for one in range(-1, max(engines + gone) + 3):
            assert fast.has_free(one) == slow.has_free(one)
            assert (one in fast) == (one in slow.used_on)
        assert [fast.is_held(one) for one in engines] == [one in slow.held for one in engines]
        assert [fast.num_used(one) for one in engines] == [taken.count(one) for one in engines]


@pytest.mark.parametrize("num_freed_at_once", [1, 2, 5])
def test_the_state_stays_small_while_slots_are_never_used(num_freed_at_once):
    """Pickled, as nothing else shows the size: four engines, and at most eight entries for each."""
    slots = EngineSlots(4, slots_per_engine=10)
    taken = [slots.take() for _ in range(20)]
    sizes = []
    for _ in range(2000):
        for _ in range(num_freed_at_once):
            slots.free(taken.pop(0))
        taken += [slots.take() for _ in range(num_freed_at_once)]
        sizes.append(len(pickle.dumps(slots)))
    assert max(sizes) < 400
