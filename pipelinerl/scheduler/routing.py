"""Which engine takes a rollout: the policies of ``scheduler.routing``.

Theory of operation. The pool asks a router two questions: on which engine does a rollout *begin*, and where does it *go
on* after a turn. ``begin`` is asked while some engine has a free slot. The engine named may be full: the rollout waits
for it, first come first served. An engine that leaves gives back the rollouts that wait for it, and these begin again.

Nobody waits for ever. A rollout that waits for an engine starts when as many turns have ended there as rollouts waited
before it; those have slots and end. A rollout that no engine is named for is asked again when a slot is free; an engine
that gives slots and has no rollouts is named.

``most_free`` needs no router, nor do rollouts with one turn, except under ``hash``: ``EngineSlots`` has the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from hashlib import blake2b
from typing import assert_never

from pipelinerl.scheduler.events import Routing
from pipelinerl.scheduler.slots import EngineSlots


class Router(ABC):
    """Open rollouts by engine, with their contexts, those included whose environment acts (mutable, can be pickled)."""

    def __init__(self, num_engines: int) -> None:
        self._tokens = dict.fromkeys(range(num_engines), 0)  # of context, by engine; also of those that are leaving
        self._taking = dict.fromkeys(range(num_engines))  # engines that are not leaving
        self._held: dict[int, tuple[int, int]] = {}  # rollout -> its engine, its tokens
        self._longest = 0

    @abstractmethod
    def begin(self, rollout_id: int, slots: EngineSlots) -> int | None:
        """Return the engine of a rollout that has none, or None: it begins nowhere yet. There must be a free slot."""

    @abstractmethod
    def go_on(self, rollout_id: int, home: int, context: int, slots: EngineSlots) -> int:
        """Return the engine on which a rollout of ``context`` tokens, last on ``home``, waits for a slot."""

    def hold(self, rollout_id: int, engine: int, tokens: int) -> None:
        """Count a rollout on an engine with its context (tokens), in place of an earlier count."""
        if (before := self._held.get(rollout_id)) is not None:
            self._tokens[before[0]] -= before[1]
        self._held[rollout_id] = (engine, tokens)
        self._tokens[engine] += tokens

    def rest(self, rollout_id: int) -> None:  # noqa: B027 - most routers count it as before
        """Note that the environment of a rollout acts."""

    def drop(self, rollout_id: int) -> None:
        """Count a rollout no more, if it is counted."""
        if (before := self._held.pop(rollout_id, None)) is not None:
            self._tokens[before[0]] -= before[1]

    def tokens(self, rollout_id: int) -> int:
        """Return the context of a rollout when it was counted last (tokens)."""
        return self._held.get(rollout_id, (0, 0))[1]

    def see(self, tokens: int) -> None:
        """Note the length of a context (tokens)."""
        if tokens > self._longest:  # noqa: PLR1730 - a call would cost more, once per turn
            self._longest = tokens

    def add(self, engine: int) -> None:
        """Add an engine without rollouts, unless it is there."""
        self._tokens.setdefault(engine, 0)
        self._taking.setdefault(engine)

    def close(self, engine: int) -> None:
        """Name an engine no more."""
        self._taking.pop(engine, None)

    def remove(self, engine: int) -> None:
        """Forget an engine, and what is counted on it."""
        for rollout_id in [one for one, held in self._held.items() if held[0] == engine]:
            self.drop(rollout_id)
        self._tokens.pop(engine, None)


class RoomRouter(Router):
    """Begins where there is room in the KV cache; goes on there.

    If the contexts of an engine's rollouts, those included whose environment acts, do not fit into its KV cache
    together, each that comes back has lost its own, and all is prefilled again: more open rollouts then give less. So a
    rollout begins

    * on the engine whose rollouts have the fewest tokens of context, of those with a free slot;
    * if these and the longest context seen so far fit into the KV cache there, or if the engine has no rollouts.

    For later turns it waits for its engine, since elsewhere all its context would be prefilled again and take others'
    room. If its engine has no free slot and another has no rollouts, it moves.

    Source: ThunderAgent (arXiv:2602.13692), which counts contexts as here, and pauses rollouts besides.
    ``kv_cache_tokens``: of an engine. None: it never fills.
    """

    def __init__(self, num_engines: int, kv_cache_tokens: int | None) -> None:
        super().__init__(num_engines)
        self._capacity = kv_cache_tokens

    def begin(self, rollout_id: int, slots: EngineSlots) -> int | None:  # noqa: ARG002 - any rollout
        """Return the engine with fewest tokens, if it has room."""
        if not self._fits_beside(min(self._tokens.values())):
            return None
        tokens, engine = min((tokens, one) for one, tokens in self._tokens.items() if slots.has_free(one))
        return engine if self._fits_beside(tokens) else None

    def go_on(self, rollout_id: int, home: int, context: int, slots: EngineSlots) -> int:  # noqa: ARG002 - any rollout
        """Return its last engine, or one without rollouts."""
        if slots.has_free(home) or min(self._tokens.values()):
            return home
        return min((one for one, tokens in self._tokens.items() if not tokens and slots.has_free(one)), default=home)

    def _fits_beside(self, tokens: int) -> bool:
        return not tokens or self._capacity is None or tokens + self._longest <= self._capacity


class StickyRouter(Router):
    """Begins where the fewest rollouts are open; goes on there.

    As ``sticky_least_loaded`` of SkyRL #1791 and of vLLM's router (#235).
    """

    def begin(self, rollout_id: int, slots: EngineSlots) -> int | None:  # noqa: ARG002 - any rollout
        """Return the engine with the fewest open rollouts, of those with a free slot."""
        num_open = dict.fromkeys(self._tokens, 0)
        for engine, _ in self._held.values():
            num_open[engine] += 1
        return min(filter(slots.has_free, num_open), key=lambda one: (num_open[one], one))

    def go_on(self, rollout_id: int, home: int, context: int, slots: EngineSlots) -> int:  # noqa: ARG002
        """Return its last engine."""
        return home


class HashRouter(Router):
    """The engine with the largest hash of rollout and engine: one that joins or leaves moves only its own share.

    Source: rendezvous hashing (Thaler and Ravishankar 1998). vLLM's router hashes the session alike, which prime-rl
    #2822 makes the rollout.
    """

    def begin(self, rollout_id: int, slots: EngineSlots) -> int | None:  # noqa: ARG002 - whatever their load
        """Return the engine with the largest hash."""
        return max(self._taking, key=lambda engine: _hash(rollout_id, engine), default=None)

    def go_on(self, rollout_id: int, home: int, context: int, slots: EngineSlots) -> int:  # noqa: ARG002
        """Return the engine with the largest hash: another than before, if that has joined since."""
        return max(self._taking, key=lambda engine: _hash(rollout_id, engine))


def _hash(rollout_id: int, engine: int) -> bytes:
    return blake2b(b"%d %d" % (rollout_id, engine), digest_size=8).digest()


PREFILL_WEIGHT = 16
"""Tokens of context in progress that cost as much as one to prefill. Of 1, 8, 16, 32, 64 it is within 2 % of the
fastest in ``examples/routing.toml`` and ``examples/agents.toml``; 1, the default of Dynamo, is about half as fast."""


class CostRouter(Router):
    """The engine of least cost: ``PREFILL_WEIGHT`` x tokens of the rollout cached nowhere there + tokens in progress.

    As the KV router of NVIDIA's Dynamo (docs, "KV cache routing": weight x prefill blocks + active decode blocks, here
    in tokens), which knows the caches from events of its engines. Here the last engine of a rollout is expected to hold
    the same share of each whose environment acts: what its capacity leaves to all of these, each with its context at
    the start of its last turn. If new weights have dropped it, the rollout goes on where nothing is gained.

    A rollout goes on where it was, even without a free slot, or where one is free. ``kv_cache_tokens``: of an engine.
    None: it never fills. 0: nothing is cached, so the least loaded engine is taken.
    """

    def __init__(self, num_engines: int, kv_cache_tokens: int | None) -> None:
        super().__init__(num_engines)
        self._capacity = kv_cache_tokens
        self._resting: set[int] = set()
        self._resting_tokens = dict.fromkeys(range(num_engines), 0)  # of context, by engine

    def begin(self, rollout_id: int, slots: EngineSlots) -> int | None:  # noqa: ARG002 - any rollout
        """Return the engine with the fewest tokens in progress, of those with a free slot."""
        return min(filter(slots.has_free, self._tokens), key=lambda one: self._rank(one, 0, slots))

    def go_on(self, rollout_id: int, home: int, context: int, slots: EngineSlots) -> int:  # noqa: ARG002 - as counted
        """Return the engine of least cost; the context counts everywhere alike."""
        choice = [one for one in self._taking if one == home or slots.has_free(one)]
        cached = self._cached(rollout_id, home)
        return min(choice, key=lambda one: self._rank(one, cached if one == home else 0, slots))

    def _rank(self, engine: int, cached: int, slots: EngineSlots) -> tuple[int, bool, int, int]:
        full, used = not slots.has_free(engine), slots.num_used(engine)
        return self._tokens[engine] - self._resting_tokens[engine] - PREFILL_WEIGHT * cached, full, used, engine

    def _cached(self, rollout_id: int, home: int) -> int:
        own, resting = self._held[rollout_id][1], self._resting_tokens[home]
        if self._capacity is None or not resting:
            return own
        left = self._capacity - (self._tokens[home] - resting)
        return own * max(0, min(left, resting)) // resting

    def rest(self, rollout_id: int) -> None:
        """Count a rollout as in progress no more."""
        engine, tokens = self._held[rollout_id]
        self._resting.add(rollout_id)
        self._resting_tokens[engine] += tokens

    def hold(self, rollout_id: int, engine: int, tokens: int) -> None:
        """Count a rollout as in progress."""
        self._wake(rollout_id)
        super().hold(rollout_id, engine, tokens)

    def drop(self, rollout_id: int) -> None:
        """Count a rollout no more."""
        self._wake(rollout_id)
        super().drop(rollout_id)

    def _wake(self, rollout_id: int) -> None:
        if rollout_id in self._resting:
            self._resting.remove(rollout_id)
            engine, tokens = self._held[rollout_id]
            self._resting_tokens[engine] -= tokens

    def add(self, engine: int) -> None:
        """Add an engine without rollouts."""
        super().add(engine)
        self._resting_tokens.setdefault(engine, 0)


def make_router(routing: Routing, num_engines: int, *, turns: bool, kv_cache_tokens: int | None) -> Router | None:
    """Return the router of a run; None: its slots decide.

    ``turns``: whether rollouts have environments. ``kv_cache_tokens``: of an engine; None: it never fills; 0: none of
    it outlasts a turn.
    """
    match routing:
        case Routing.HASH:
            return HashRouter(num_engines)
        case Routing.MOST_FREE:
            return None
        case _ if not turns:
            return None
        case Routing.ROOM:
            return None if kv_cache_tokens == 0 else RoomRouter(num_engines, kv_cache_tokens)
        case Routing.STICKY:
            return StickyRouter(num_engines)
        case Routing.LEAST_LOADED:
            return CostRouter(num_engines, 0)
        case Routing.CACHE_AWARE:
            return CostRouter(num_engines, kv_cache_tokens)
        case _:
            assert_never(routing)
