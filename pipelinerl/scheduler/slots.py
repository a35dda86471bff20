"""The slots of all engines: which engine has most of them free.

Theory of operation. Each engine has the same number of slots. A rollout takes a slot of the engine with most free
ones; of equals, of the one with the lowest id. An engine that is *held* gives none until it is released, and one with
a *limit* withholds the rest of its slots. This is asked twice per rollout, so it is answered in O(log engines) with one
number per engine, its *load*:

    load = (slots in use + withheld) * ID_LIMIT + id,  and + slots per engine * ID_LIMIT while the engine is held

The least load is that of the engine asked for, and an engine has a free slot if its load is below
``slots per engine * ID_LIMIT``. A heap holds the loads below that. An entry that is no longer the load of its engine is
*stale* and skipped when popped; while some slots are never used, stale entries are never popped, so the heap is made
anew when most of it is stale. The last load that fell stays out of the heap, since its engine mostly takes the next
rollout.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heappushpop

from pipelinerl.errors import SchedulerError

ID_LIMIT = 1 << 16
"""Engine ids are below this."""

NO_LOAD = -1
ABSENT = 1 << 62
"""Load in place of an engine that is not there."""


class EngineSlots:
    """Slots of engines, by engine id: at first those below ``num_engines`` (mutable, can be pickled)."""

    def __init__(self, num_engines: int, *, slots_per_engine: int) -> None:
        assert num_engines <= ID_LIMIT
        self._loads = list(range(num_engines))  # by engine
        self._slots_per_engine = slots_per_engine
        self._full = slots_per_engine * ID_LIMIT  # from this load on an engine has no free slot
        self._heap: list[int]
        self._last_freed: int  # not yet in the heap, unless that was made anew
        self._make_heap()
        self._held: set[int] = set()
        self._withheld: dict[int, int] = {}  # slots, by engine with a limit
        self.num_free = slots_per_engine * num_engines  # of engines that are not held

    def take(self) -> int:
        """Take a slot of the engine with most free ones, and return its id. There must be one (``num_free``)."""
        heap, loads = self._heap, self._loads
        load, self._last_freed = self._last_freed, NO_LOAD
        load = heappop(heap) if load == NO_LOAD else heappushpop(heap, load)
        while loads[engine := load % ID_LIMIT] != load:
            load = heappop(heap)  # that entry is stale
        loads[engine] = load = load + ID_LIMIT
        self.num_free -= 1
        if load < self._full:
            self._push(load)
        return engine

    def has_free(self, engine: int) -> bool:
        """Return whether this engine, if it is there, has a free slot to give."""
        return 0 <= engine < len(self._loads) and self._loads[engine] < self._full

    def take_near(self, engine: int) -> int:
        """Take a slot of this engine if it has a free one, else as ``take``, and return the engine."""
        if not self.has_free(engine):
            return self.take()
        load = self._loads[engine]
        if self._last_freed == load:
            self._last_freed = NO_LOAD
        self._loads[engine] = load = load + ID_LIMIT
        self.num_free -= 1
        if load < self._full:
            self._push(load)
        return engine

    def free(self, engine: int) -> None:
        """Give back a slot that was taken."""
        self._loads[engine] = load = self._loads[engine] - ID_LIMIT
        if load < self._full:  # it is not held
            self.num_free += 1
            if self._last_freed != NO_LOAD:
                self._push(self._last_freed)
            self._last_freed = load

    def __contains__(self, engine: int) -> bool:
        return 0 <= engine < len(self._loads) and self._loads[engine] != ABSENT

    def hold(self, engine: int) -> None:
        """Withhold the slots of an engine that is not held, until it is released."""
        assert engine not in self._held
        self._held.add(engine)
        self.num_free -= self._num_free_on(engine)
        self._loads[engine] += self._full

    def release(self, engine: int) -> None:
        """Give slots of this engine again, if it is held."""
        if engine in self._held:
            self._held.remove(engine)
            self._loads[engine] = load = self._loads[engine] - self._full
            self.num_free += self._num_free_on(engine)
            if load < self._full:
                self._push(load)

    def limit(self, engine: int, most: int) -> None:
        """Have an engine give at most so many slots; those in use beyond stay in use until they are freed."""
        more = self._slots_per_engine - most - self._withheld.get(engine, 0)
        if not more:
            return
        before = 0 if self.is_held(engine) else self._num_free_on(engine)
        self._withheld[engine] = self._slots_per_engine - most
        self._loads[engine] = load = self._loads[engine] + more * ID_LIMIT
        if not self.is_held(engine):
            self.num_free += self._num_free_on(engine) - before
            if load < self._full:
                self._push(load)

    def is_held(self, engine: int) -> bool:
        """Return whether the slots of an engine are withheld."""
        return engine in self._held

    def add(self, engine: int) -> None:
        """Add an engine, held."""
        assert engine not in self
        if engine >= ID_LIMIT:
            raise SchedulerError(f"engine ids must be below {ID_LIMIT}, got {engine}")
        self._loads += [ABSENT] * (engine + 1 - len(self._loads))
        self._loads[engine] = self._full + engine
        self._held.add(engine)
        self._make_heap()

    def remove(self, engine: int) -> None:
        """Remove an engine that is held and has no slot in use. O(largest id)."""
        assert engine in self
        self._held.remove(engine)
        self._loads[engine] = ABSENT
        self._withheld.pop(engine, None)
        self._make_heap()

    def num_used(self, engine: int) -> int:
        """Return the slots in use of an engine (count)."""
        num_not_given = self._slots_per_engine * self.is_held(engine) + self._withheld.get(engine, 0)
        return self._loads[engine] // ID_LIMIT - num_not_given

    def _num_free_on(self, engine: int) -> int:
        return max(0, self._slots_per_engine - self._loads[engine] // ID_LIMIT)

    def _push(self, load: int) -> None:
        heappush(self._heap, load)
        if len(self._heap) > self._heap_limit:
            self._make_heap()

    def _make_heap(self) -> None:
        self._heap = [one for one in self._loads if one < self._full]
        heapify(self._heap)
        self._heap_limit, self._last_freed = 8 * sum(one != ABSENT for one in self._loads), NO_LOAD
