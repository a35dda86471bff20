"""An inference engine with continuous batching, advanced in closed form from event to event.

Theory of operation. The engine works in decode steps; between two steps is a *boundary*. docs/simulator.md has the five
rules of a boundary, in their order ("Boundary rules"). Rule 1 removes requests that have all their tokens; requests
that arrive after an update (rule 2) wait until it is done; preemption (rule 3) is vLLM's, by recomputation: tokens so
far are prefilled again. The step of rule 5 lasts the prefill of the requests admitted, and a step of the batch
(``DecodeBatch``).

With ``step_tokens`` prefill is chunked (``ChunkedPrefill``): each chunk is an event.

A weight update replaces 3-5 once: the engine pauses to load, then it has a boundary again. ``wait`` first lets
everything that arrived before it finish, ``abort`` ends it, ``recompute`` charges the prefill of everything in
the batch to the next step.

A suspension replaces 3-5 too, from the boundary at which it is taken up until an update is done; like an empty
engine, a suspended one then takes calls up at once.

The engine sleeps until the first boundary at which a request finishes, the cache would overflow, or a call is to be
taken up. One such boundary needs no wake-up of its own, since it is invisible outside: a single request joins the
batch. The batch goes through it ahead of time (``join``); a call from outside before its tick undoes it. So a
rollout costs one wake-up and O(log H), whatever its length; one more where lengths are chosen when it joins.

Between two turns the KV cache of a rollout stays in room that the batch does not need (``PrefixCache``), until new
weights drop it, unless ``prefix_cache = "kept"``.

A call that arrives exactly at a boundary is taken up at the next one. An engine with an empty batch takes calls
up at once.

With ``[engine.speculation]`` the batch is a ``SpeculativeBatch``: a sequence gets 1 to k + 1 tokens a step, drawn
beforehand for each of its steps. It needs room for k + 1 tokens in a step, and takes as many of ``step_tokens``.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import SupportsInt

import numpy as np
from numpy.typing import NDArray
from simpy.events import EventPriority

from pipelinerl.config.environment import PrefixCaching
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate, joined
from sim.clock import CLUSTER_PRIORITY, Clock, Wake
from sim.interface import DecodeCost, Drafting, EngineHost, EngineSettings, PrefillCost, Request

# ------------------------------------------------------------------------------------------- batch

UNLIMITED = 2**62
"""Capacity of a KV cache that never fills (tokens)."""


class DecodeBatch:
    """The requests that decode together, as they were at the last boundary, and when each finishes (mutable).

    With b requests and C tokens in the KV cache a decode step lasts ``batch_ticks[b] + context_ticks * C``. While no
    request joins or leaves, b is constant and C grows by b per step, so n steps last

        t(n) = prefill + n * (batch_ticks[b] + context_ticks * C) + context_ticks * b * n (n - 1) / 2

    in whole ticks, exactly as long as n single steps (``step_by_step.py`` makes them one by one, to prove it). ``join``
    can go to a boundary that is still to come, and ``undo_join`` restores the state before. Most of the time of a
    simulation is spent here: hence the local variables.

    ``decode`` has an entry per slot; ``kv_cache_tokens`` is None where it is unlimited.
    """

    __slots__ = (
        "_batch_ticks",
        "_before_join",
        "_context_ticks",
        "_finish_steps",
        "_num_joined",
        "_num_slots",
        "capacity",
        "context_tokens",
        "prefill_ticks",
        "running",
        "step",
        "tick",
    )

    def __init__(self, decode: DecodeCost, kv_cache_tokens: int | None) -> None:
        self._batch_ticks = decode.batch_ticks
        self._context_ticks = decode.context_ticks
        self._num_slots = len(decode.batch_ticks) - 1
        self.capacity = UNLIMITED if kv_cache_tokens is None else kv_cache_tokens
        self.tick = 0  # of the boundary
        self.step = 0  # decode steps done
        self.context_tokens = 0  # in the KV cache
        self.prefill_ticks = 0  # charged to the next step
        self.running: list[Request] = []  # in the order in which they will have all their tokens, then of admission
        self._finish_steps: list[int] = []  # the step at which each of them has
        self._num_joined = 0
        self._before_join: tuple[int, int, int, int, Request]  # tick, step, context and prefill; the one that joined

    # ---------------------------------------------------------------------------------------- requests

    def join(self, request: Request, prefill_ticks: int, steps: int = 0, tick: int = 0) -> None:
        """Add a request at this boundary, or ``steps`` after it, none of which ends a request, at ``tick``.

        ``prefill_ticks`` are charged to the next step; ``steps`` are fewer than to ``next_change()``.
        """
        step, context_tokens = self.step, self.context_tokens
        if steps:
            self._before_join = (self.tick, step, context_tokens, self.prefill_ticks, request)
            self.tick = tick
            self.step = step = step + steps
            context_tokens += steps * len(self.running)
            self.prefill_ticks = prefill_ticks
        else:
            self.prefill_ticks += prefill_ticks
        self.context_tokens = context_tokens + request.tokens_to_prefill
        request.start_step = step
        request.place = self._num_joined = self._num_joined + 1
        finish_step, finish_steps = step + request.num_left, self._finish_steps
        place = bisect_right(finish_steps, finish_step)
        finish_steps.insert(place, finish_step)
        self.running.insert(place, request)

    def join_ahead(self, request: Request, prefill_ticks: int, arrival: int, until: int) -> tuple[bool, int, int]:
        """Add a request at the first boundary after its arrival if that is not after ``until``, and as in ``join``.

        Return whether it was added, and steps to, and tick of, the next change; or else that boundary, if it comes
        first. As ``TimedBatch.join_ahead``, without calls: this comes once per rollout.
        """
        context_ticks, finish_steps, running = self._context_ticks, self._finish_steps, self.running
        context, capacity, size = self.context_tokens, self.capacity, len(running)
        ticks = self._batch_ticks[size] + context_ticks * context
        steps, at = 1, self.tick + self.prefill_ticks + ticks
        if at <= arrival:
            steps, at = 2, at + ticks + context_ticks * size
            if at <= arrival:
                steps, at, _ = self.first_boundary_after(arrival)
        step, used = self.step + steps, context + steps * size + size
        if step >= finish_steps[0] or used > capacity:
            return False, *self.next_change()
        used += request.tokens_to_prefill + 1
        if until < at or used > capacity or size == self._num_slots:
            return False, steps, at
        self._before_join = (self.tick, self.step, context, self.prefill_ticks, request)
        size += 1
        self.tick, self.prefill_ticks = at, prefill_ticks
        self.step = request.start_step = step
        self.context_tokens = context = used - size
        request.place = self._num_joined = self._num_joined + 1
        finish_step = step + request.num_left
        place = bisect_right(finish_steps, finish_step)
        finish_steps.insert(place, finish_step)
        running.insert(place, request)
        steps = finish_steps[0] - step
        if context + steps * size > capacity:
            steps = (capacity - context) // size
        read = steps * context + size * (steps * (steps - 1) // 2)
        return True, steps, at + prefill_ticks + steps * self._batch_ticks[size] + context_ticks * read

    def leave(self, request: Request) -> None:
        """Remove a request that is unfinished."""
        self.context_tokens -= self.cached_tokens(request)
        first = bisect_left(self._finish_steps, request.finish_step)
        place = self.running.index(request, first)
        del self._finish_steps[place], self.running[place]

    def admitted(self) -> list[Request]:
        """Return the requests in order of admission."""
        return sorted(self.running, key=attrgetter("place"))

    def lengths_changed(self) -> None:
        """Sort the requests again by when they finish."""
        self.running = sorted(self.admitted(), key=attrgetter("finish_step"))
        self._finish_steps = [request.finish_step for request in self.running]

    def cached_tokens(self, request: Request) -> int:
        """Return the tokens that a request of the batch has in the KV cache."""
        return request.tokens_to_prefill + self.step - request.start_step

    def fits(self, request: Request, after_steps: int = 0) -> bool:
        """Return whether one more request has a slot, and room for its tokens and one more step of everybody."""
        size = len(self.running)
        used = self.context_tokens + after_steps * size + request.tokens_to_prefill
        return used + size + 1 <= self.capacity and size < self._num_slots

    def used_in(self, steps: int) -> int:
        """Return the tokens in the KV cache during the last of so many steps, room for its tokens included."""
        return self.context_tokens + steps * len(self.running)

    def sample_with(self, version: int) -> None:
        """Have another version sample from this boundary on."""

    def undo_join(self) -> None:
        """Restore the state before the last call, which must have been a ``join`` after steps."""
        *before, request = self._before_join
        self.leave(request)
        self.tick, self.step, self.context_tokens, self.prefill_ticks = before

    def worked_ticks(self) -> int:
        """Return the ticks with steps, for ``TimedBatch``; not counted here."""
        return 0

    # ------------------------------------------------------------------------------------------ steps

    def advance(self, steps: int, tick: int) -> list[Request]:
        """Make decode steps, the last of which ends at ``tick``; remove and return the requests that finish then."""
        running, finish_steps = self.running, self._finish_steps
        self.tick = tick
        self.step = step = self.step + steps
        self.prefill_ticks = 0
        self.context_tokens += steps * len(running)
        finished = []
        while finish_steps and finish_steps[0] == step:
            del finish_steps[0]
            request = running.pop(0)
            self.context_tokens -= request.prompt_tokens + request.length
            finished.append(request)
        return finished

    def stand_still(self, until: int) -> None:
        """Make no step until a tick, which is a boundary then."""
        self.tick = until

    def go_on_at(self, decode: DecodeCost) -> None:
        """Make the steps from this boundary on at another cost."""
        self._batch_ticks, self._context_ticks = decode.batch_ticks, decode.context_ticks

    def break_off(self, at: int) -> None:
        """Have the step that is under way end at a tick, before its time."""
        self.tick = at

    def next_change(self) -> tuple[int, int]:
        """Return steps to, and tick of, the first boundary where a request finishes or the next step would not fit."""
        context, size = self.context_tokens, len(self.running)
        steps = self._finish_steps[0] - self.step
        if context + steps * size > self.capacity:
            steps = (self.capacity - context) // size
        read = steps * context + size * (steps * (steps - 1) // 2)  # tokens of context, over all steps
        ticks = steps * self._batch_ticks[size] + self._context_ticks * read
        return steps, self.tick + self.prefill_ticks + ticks

    def next_boundary(self) -> int:
        """Return the tick of the next boundary."""
        return (
            self.tick
            + self.prefill_ticks
            + self._batch_ticks[len(self.running)]
            + (self._context_ticks * self.context_tokens)
        )

    def first_boundary_after(self, tick: int) -> tuple[int, int, bool]:
        """Return steps to, and tick of, the first boundary after a tick, and if ``next_change()`` is later; O(1)."""
        context, size, context_ticks = self.context_tokens, len(self.running), self._context_ticks
        steps, start = 1, self.tick + self.prefill_ticks
        ticks = first = self._batch_ticks[size] + context_ticks * context
        rest = tick - start
        if ticks <= rest:  # mostly it is one of the next two
            growth = context_ticks * size
            steps, ticks = 2, 2 * first + growth
        if ticks <= rest:
            # Root of growth/2 n^2 + linear n = rest, in the form that is stable for small growth; a float
            # is a step off at most, which the two loops put right in whole numbers.
            linear = first - growth / 2
            steps = 1 + int(2 * rest / (linear + math.sqrt(linear * linear + 2 * growth * rest)))
            while _steps_ticks(steps - 1, first, growth) > rest:
                steps -= 1
            while (ticks := _steps_ticks(steps, first, growth)) <= rest:
                steps += 1
        # Strictly before the next finish, and a step after it fits.
        before = steps < self._finish_steps[0] - self.step and context + (steps + 1) * size <= self.capacity
        return steps, start + ticks, before


class TimedBatch(DecodeBatch):
    """Counts the ticks of prefill and decode that each request spends in the batch: two sums, less those at its join.

    Prefill comes first in a step.
    """

    __slots__ = ("_prefilled_before_join", "_prefilled_ticks", "_still_ticks")

    def __init__(self, decode: DecodeCost, kv_cache_tokens: int | None) -> None:
        super().__init__(decode, kv_cache_tokens)
        self._prefilled_ticks = self._still_ticks = 0  # up to the boundary: of all prefill; without a step
        self._prefilled_before_join = 0

    def worked_ticks(self) -> int:
        """Return the ticks up to the boundary, less those without a step."""
        return self.tick - self._still_ticks

    def join(self, request: Request, prefill_ticks: int, steps: int = 0, tick: int = 0) -> None:
        """Add a request."""
        if steps:
            self._prefilled_before_join = self._prefilled_ticks
            self._prefilled_ticks += self.prefill_ticks
        super().join(request, prefill_ticks, steps, tick)
        self._count(request, -1)

    def join_ahead(self, request: Request, prefill_ticks: int, arrival: int, until: int) -> tuple[bool, int, int]:
        """Add a request at the first boundary after its arrival if that is not after ``until``, and as in ``join``."""
        steps, at, before_change = self.first_boundary_after(arrival)
        if before_change and (until < at or not self.fits(request, steps)):
            return False, steps, at
        if before_change:
            self.join(request, prefill_ticks, steps, at)
        return before_change, *self.next_change()

    def leave(self, request: Request) -> None:
        """Remove a request that is unfinished."""
        super().leave(request)
        self._count(request, 1)

    def undo_join(self) -> None:
        """Restore the state before the last call."""
        super().undo_join()
        self._prefilled_ticks = self._prefilled_before_join

    def advance(self, steps: int, tick: int) -> list[Request]:
        """Make decode steps."""
        self._prefilled_ticks += self.prefill_ticks
        finished = super().advance(steps, tick)
        for request in finished:
            self._count(request, 1)
        return finished

    def stand_still(self, until: int) -> None:
        """Make no step until a tick."""
        self._still_ticks += until - self.tick
        super().stand_still(until)

    def break_off(self, at: int) -> None:
        """End the current step at a tick."""
        self._prefilled_ticks += min(self.prefill_ticks, at - self.tick)
        super().break_off(at)

    def _count(self, request: Request, sign: int) -> None:
        request.prefill_ticks += sign * self._prefilled_ticks
        request.decode_ticks += sign * (self.worked_ticks() - self._prefilled_ticks)


class SpeculativeBatch(TimedBatch):
    """A batch in which a step gives a sequence 1 to k + 1 tokens.

    The tokens of each step of a request are drawn when it joins (``Drafting.gains``), so its last step is known, and
    so are the tokens of the whole batch in each step to come: with their sums C(i) before step i, n steps last

        t(n) = prefill + n * batch_ticks[b] + context_ticks * (C(1) + ... + C(n))

    exactly. What follows is drawn again, from the same numbers, where its law changes: with new weights, and where the
    batch comes to more or fewer sequences than ``off_above``.
    """

    __slots__ = ("_acceptance", "_decode", "_drafting", "_drafts", "_gains", "_gains_from", "_since")

    def __init__(self, decode: DecodeCost, kv_cache_tokens: int | None, drafting: Drafting, version: int) -> None:
        super().__init__(decode, kv_cache_tokens)
        self._drafting, self._acceptance = drafting, drafting.acceptance_of(version)
        self._drafts = True  # whether the next step drafts
        self._gains = np.zeros(1, dtype=np.int64)  # tokens of all requests by step, from ``_gains_from`` on
        self._gains_from = self._since = 0  # no join is undone beyond the step ``_since``
        self.go_on_at(decode)

    def go_on_at(self, decode: DecodeCost) -> None:
        """Make the steps from this boundary on at another cost."""
        super().go_on_at(decode)
        self._decode = decode
        self._choose()

    # ---------------------------------------------------------------------------------------- requests

    def join(self, request: Request, prefill_ticks: int, steps: int = 0, tick: int = 0) -> None:
        """Add a request."""
        gained = self._gained(steps) - steps * len(self.running)
        request.path = np.zeros(1, dtype=np.int64)
        self._draw(request, 0)
        super().join(request, prefill_ticks, steps, tick)
        self.context_tokens += gained
        self._add(request, 1)
        self._choose()

    def leave(self, request: Request) -> None:
        """Remove a request that is unfinished."""
        super().leave(request)
        self._add(request, -1)
        self._drafting.count(request, self.step)
        self._choose()

    def lengths_changed(self) -> None:
        """Draw what follows again, and sort the requests by when they finish."""
        self._gains[self.step - self._gains_from :] = 0
        for request in self.admitted():
            self._draw(request, self.step - request.start_step)
            self._add(request, 1)
        super().lengths_changed()

    def cached_tokens(self, request: Request) -> int:
        """Return the tokens that a request of the batch has in the KV cache."""
        return request.tokens_to_prefill + int(request.path[self.step - request.start_step])

    def fits(self, request: Request, after_steps: int = 0) -> bool:
        """Return whether one more request has a slot, and room for its tokens and one more step of everybody."""
        size = len(self.running) + 1
        used = self.context_tokens + self._gained(after_steps) + request.tokens_to_prefill
        return used + size * self._drafting.row_tokens <= self.capacity and size <= self._num_slots

    def used_in(self, steps: int) -> int:
        """Return the tokens in the KV cache during the last of so many steps, room for its tokens included."""
        return self.context_tokens + self._gained(steps - 1) + len(self.running) * self._drafting.row_tokens

    def sample_with(self, version: int) -> None:
        """Have another version sample from this boundary on."""
        acceptance = self._drafting.acceptance_of(version)
        if acceptance != self._acceptance:
            self._acceptance = acceptance
            self.lengths_changed()

    def _draw(self, request: Request, steps: int) -> None:
        """Draw the tokens of a request from its step ``steps`` in this batch on, and with them its last step."""
        kept, had = request.path[: steps + 1], request.spans.num_tokens
        length = request.length - had
        left = length - int(kept[-1])
        if self._drafts and left:
            gains = self._drafting.gains(request.rollout_id, had, range(steps, steps + left), self._acceptance)
            path = kept[-1] + gains.cumsum()
            path = path[: int(path.searchsorted(length)) + 1]
            path[-1] = length
        else:
            path = np.arange(length - left + 1, length + 1)
        request.path = np.concatenate([kept, path])
        request.num_left = len(request.path) - 1

    def _add(self, request: Request, sign: int) -> None:
        """Add the tokens that a request still gets to those of the batch, or take them away."""
        gains = np.diff(request.path[self.step - request.start_step :])
        start = self.step - self._gains_from
        if (end := start + len(gains)) > len(self._gains):
            self._gains = np.concatenate([self._gains[self._since - self._gains_from :], np.zeros(end, dtype=np.int64)])
            self._gains_from, start = self._since, self.step - self._since
        self._gains[start : start + len(gains)] += sign * gains

    def _choose(self) -> None:
        """Draft or not, by the number of sequences."""
        off_above = self._drafting.off_above
        drafts = off_above is None or len(self.running) <= off_above
        self._context_ticks = self._decode.context_ticks + drafts * self._decode.draft_context_ticks
        if drafts is not self._drafts:
            self._drafts = drafts
            self.lengths_changed()

    # ------------------------------------------------------------------------------------------ steps

    def advance(self, steps: int, tick: int) -> list[Request]:
        """Make decode steps."""
        gained = self._gained(steps) - steps * len(self.running)
        finished = super().advance(steps, tick)
        self.context_tokens += gained
        self._since = self.step
        for request in finished:
            self._drafting.count(request, self.step)
        self._choose()
        return finished

    def next_change(self) -> tuple[int, int]:
        """Return steps to, and tick of, the first boundary where a request finishes or the next step would not fit."""
        context_N = self._contexts()[:-1]
        steps = int(context_N.searchsorted(self._room(), side="right"))
        return steps, self._tick_after(steps, context_N[:steps].sum())

    def first_boundary_after(self, tick: int) -> tuple[int, int, bool]:
        """Return steps to, and tick of, the first boundary after a tick, and if ``next_change()`` is later."""
        context_N = self._contexts()
        read_N = context_N[:-1].cumsum()
        steps = 1 + bisect_right(range(len(read_N)), tick, key=lambda n: self._tick_after(n + 1, read_N[n]))
        if steps > len(read_N):
            return steps, NEVER, False
        before = steps < len(read_N) and bool(context_N[steps] <= self._room())
        return steps, self._tick_after(steps, read_N[steps - 1]), before

    def _room(self) -> int:
        """Return the most tokens before a step that fits."""
        return self.capacity - len(self.running) * self._drafting.row_tokens

    def _contexts(self) -> NDArray[np.int64]:
        """Return the tokens in the KV cache at this boundary and the next ones, up to the first finish."""
        gains = self._gains[self.step - self._gains_from : self._finish_steps[0] - self._gains_from]
        context_N: NDArray[np.int64] = self.context_tokens + np.concatenate([np.zeros_like(gains[:1]), gains.cumsum()])
        return context_N

    def _gained(self, steps: int) -> int:
        start = self.step - self._gains_from
        return int(self._gains[start : start + steps].sum()) if steps else 0

    def _tick_after(self, steps: int, read_tokens: SupportsInt) -> int:
        """Return the tick after steps that read so many tokens of context in all."""
        ticks = steps * self._batch_ticks[len(self.running)] + self._context_ticks * int(read_tokens)
        return self.tick + self.prefill_ticks + ticks


def _steps_ticks(steps: int, first: int, growth: int) -> int:
    """Return the ticks of steps of which the first lasts ``first`` and each one ``growth`` longer than the last."""
    return steps * first + growth * (steps * (steps - 1) // 2)


# --------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class Update:
    """Weights on their way."""

    at: int
    """Tick of their arrival."""
    version: int
    weight_update: WeightUpdate


class WeightHistory:
    """Which version sampled at which decode step (mutable): version ``versions[i]`` from step ``steps[i]`` on."""

    def __init__(self, version: int) -> None:
        self.steps = [0]
        self.versions = [version]

    def loaded(self, version: int, step: int) -> None:
        """Record that another version samples from a step on."""
        if self.steps[-1] == step:
            self.versions[-1] = version
        else:
            self.steps.append(step)
            self.versions.append(version)

    def spans(self, request: Request, step: int) -> VersionSpans:
        """Return the spans of all tokens that a request of the batch has at the boundary before a step."""
        start, first = request.start_step, request.first_load
        if step == start:
            return request.spans
        steps, versions, last = self.steps, self.versions, len(self.steps)
        if steps[-1] == step:
            last -= 1  # it samples nothing before the next step
        if first == last:
            spans = VersionSpans((versions[first - 1],), (step - start,))
        else:
            ends = (*[one - start for one in steps[first:last]], step - start)
            spans = VersionSpans(tuple(versions[first - 1 : last]), ends)
        return joined(request.spans, spans) if request.spans.ends else spans


class SpeculativeHistory(WeightHistory):
    """The same where a step gives a request the tokens of its path."""

    def spans(self, request: Request, step: int) -> VersionSpans:
        """Return the spans of all tokens that a request of the batch has at the boundary before a step."""
        start, first = request.start_step, request.first_load
        if step == start:
            return request.spans
        last = bisect_left(self.steps, step)  # the newest samples nothing before its step
        ends = [int(request.path[one - start]) for one in (*self.steps[first:last], step)]
        spans = VersionSpans(tuple(self.versions[first - 1 : last]), tuple(ends))
        return joined(request.spans, spans) if request.spans.ends else spans


# ------------------------------------------------------------------------------------- KV caches


class PrefixCache:
    """KV caches that an engine keeps of rollouts between two turns (mutable).

    Before a step that would not fit otherwise, whole caches are dropped, least recently used first. (vLLM drops
    blocks, the ends of a sequence first.) A rollout that comes back prefills only tokens that are not cached.
    ``capacity``: the whole KV cache, running requests included (tokens).
    """

    __slots__ = ("_capacity", "_tokens", "kept")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = 0
        self.kept: dict[int, int] = {}
        """Tokens of each rollout, in the order in which they were left."""

    def keep(self, rollout_id: int, tokens: int) -> None:
        """Keep the cache of a rollout whose turn has ended."""
        self._tokens += tokens - self.kept.pop(rollout_id, 0)
        self.kept[rollout_id] = tokens

    def take(self, rollout_id: int) -> int:
        """Move the cache of a rollout to the batch, and return its tokens; 0 without one."""
        tokens = self.kept.pop(rollout_id, 0)
        self._tokens -= tokens
        return tokens

    def take_for(self, request: Request) -> int:
        """As ``take``, for a request that is admitted, which counts them."""
        tokens = self.take(request.rollout_id)
        request.cached_tokens += tokens
        return tokens

    def has_room(self, used: int) -> bool:
        """Return whether the caches fit beside ``used`` tokens of running requests."""
        return self._tokens + used <= self._capacity

    def make_room(self, used: int) -> None:
        """Drop caches until the others fit beside ``used`` tokens of running requests."""
        while self.kept and self._tokens + used > self._capacity:
            self.take(next(iter(self.kept)))

    def clear(self) -> None:
        """Drop all caches."""
        self.kept.clear()
        self._tokens = 0


# ------------------------------------------------------------------------------- chunked prefill


class ChunkedPrefill:
    """A prefill that takes several steps, if one is under way (mutable).

    As in vLLM (``max_num_batched_tokens``; Sarathi-Serve, arXiv:2403.02310) a step has a limit of tokens: those of the
    requests of the batch, ``row_tokens`` each, then prefill in order of admission. The rest of a prefill waits for the
    next step; meanwhile no request is admitted. From its admission on the request holds a slot and room for all tokens
    and one more step, which the capacity of ``batch`` excludes; it joins the batch with its last chunk. The chunks
    together take as long
    as the whole prefill at once.
    """

    def __init__(self, batch: DecodeBatch, cost: PrefillCost, row_tokens: int) -> None:
        self.request: Request | None = None
        self.held_tokens = 0
        """Room that it holds in the KV cache (tokens)."""
        self._cached_tokens = 0
        self._batch, self.cost, self._row_tokens = batch, cost, row_tokens

    def begin(self, request: Request, cached_tokens: int) -> None:
        """Admit a request with ``cached_tokens`` in the KV cache; ``go_on`` makes its chunks."""
        batch, self.request, self._cached_tokens = self._batch, request, cached_tokens
        self.held_tokens = request.tokens_to_prefill + self._row_tokens
        batch.capacity -= self.held_tokens
        batch.prefill_ticks += self.cost.fixed_ticks
        request.prefill_ticks -= batch.worked_ticks()

    def go_on(self, request: Request, tokens: int) -> tuple[int, int | None]:
        """Make a chunk of at most ``tokens`` in the next step; return its tokens, and the ticks of the last chunk."""
        cached, whole = self._cached_tokens, request.tokens_to_prefill
        self._cached_tokens = end = min(whole, cached + tokens)
        ticks = self.cost.more_ticks(end, cached)
        if end == whole:
            self.release()
            return end - cached, ticks
        self._batch.prefill_ticks += ticks
        return end - cached, None

    def begin_again(self) -> None:
        """Prefill from the first token again, with new weights."""
        if self.request is not None:
            self._cached_tokens = 0
            self._batch.prefill_ticks += self.cost.fixed_ticks

    def release(self) -> list[Request]:
        """Revoke the admission and return the request, if there is one."""
        if self.request is None:
            return []
        batch, request, self.request = self._batch, self.request, None
        batch.capacity += self.held_tokens
        self.held_tokens = 0
        request.prefill_ticks += batch.worked_ticks()
        return [request]


# ---------------------------------------------------------------------------------------- engine

NOT_PLANNED = -1
NEVER = 2**100


class ClosedFormEngine:
    """An engine in closed form. See the top of this file."""

    # Beyond 30 attributes, access is a look-up in a dictionary.
    __slots__ = (
        "_arrivals",
        "_awake",
        "_batch",
        "_cache",
        "_calls",
        "_calls_at",
        "_calm",
        "_can_do_more",
        "_chunked",
        "_clock",
        "_drops_old_caches",
        "_engine_id",
        "_host",
        "_joined",
        "_keeps_caches",
        "_num_arrivals",
        "_pause_end",
        "_pause_ticks",
        "_prefill",
        "_priority",
        "_recomputes",
        "_rollout_finished",
        "_row_tokens",
        "_step_tokens",
        "_suspend_at",
        "_suspended_since",
        "_tokens",
        "_update",
        "_waiting",
        "_wake",
        "_wake_at",
        "_wake_calls_at",
        "_wake_steps",
        "_weights",
        "version",
    )

    def __init__(self, clock: Clock, host: EngineHost, engine_id: int, settings: EngineSettings) -> None:
        self.version = settings.version
        self._clock = clock
        self._host, self._rollout_finished = host, host.rollout_finished
        self._engine_id = engine_id
        self._priority = EventPriority(CLUSTER_PRIORITY + 1 + engine_id)
        self._prefill = settings.prefill
        self._pause_ticks = settings.pause_ticks
        self._tokens = settings.tokens
        self._step_tokens = UNLIMITED if settings.step_tokens is None else settings.step_tokens
        self._batch: DecodeBatch  # at the last boundary
        self._row_tokens = 1  # of a request in a step, at most
        if (drafting := settings.drafting) is not None:
            self._batch = SpeculativeBatch(settings.decode, settings.kv_cache_tokens, drafting, settings.version)
            self._row_tokens = drafting.row_tokens
        else:
            batch = TimedBatch if settings.counts_time else DecodeBatch
            self._batch = batch(settings.decode, settings.kv_cache_tokens)
        self._keeps_caches = settings.prefix_cache is not PrefixCaching.OFF
        self._cache = PrefixCache(self._batch.capacity if self._keeps_caches else UNLIMITED)
        self._drops_old_caches = settings.prefix_cache is PrefixCaching.SALTED
        # Whether a boundary may choose lengths, cut a prefill or drop caches: asked only then, not per rollout.
        self._can_do_more = self._keeps_caches or settings.tokens is not None or settings.step_tokens is not None
        self._waiting: deque[Request] = deque()
        self._chunked = ChunkedPrefill(self._batch, settings.prefill, self._row_tokens)
        self._weights = (WeightHistory if drafting is None else SpeculativeHistory)(settings.version)
        self._pause_end: int | None = None
        self._recomputes = False  # the next step prefills what is in the batch, whose KV cache is of older weights
        self._suspended_since: int | None = None  # tick
        # Calls not yet taken up; the tick of the first that is no arrival.
        self._calls_at = NEVER
        self._update: Update | None = None  # at most one: the scheduler publishes one version at a time
        self._suspend_at: int | None = None  # tick of the call
        self._calls: deque[tuple[int, Callable[[], None]]] = deque()  # (tick, what to do), in order
        self._arrivals: list[tuple[int, int, Request]] = []  # heap of (tick, number, request)
        self._num_arrivals = 0
        # The only wake-up that counts, its tick, and the steps to it from the boundary before.
        self._wake: Wake | None = None
        self._wake_at = NOT_PLANNED
        self._wake_calls_at = NOT_PLANNED  # it may call before: it is then put off
        self._wake_steps = 0
        self._joined: tuple[int, int, Request] | None = None  # arrival that joined at a boundary before that wake-up
        self._awake = False
        self._calm = True  # nothing waits, and nothing but steps happens at the next boundary unless a call comes

    # ----------------------------------------------------------------------------------------- calls

    def submit(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at``."""
        heapq.heappush(self._arrivals, (at, self._num_arrivals, request))
        self._num_arrivals += 1
        if not self._awake:
            self._plan_anew()

    def receive(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at`` whose KV cache is elsewhere, and comes when it is admitted."""
        self._cache.keep(request.rollout_id, request.tokens_to_prefill)
        self.submit(request, at)

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; no effect if it has ended."""
        self._calls.append((self._clock.now, partial(self._abort, rollout_id)))
        self._plan_call(self._clock.now)

    def disturb(self, still_ticks: int, settings: EngineSettings) -> None:
        """Stand still for so many ticks, then decode and prefill at the costs of ``settings``."""
        self._calls.append((self._clock.now, partial(self._disturb, still_ticks, settings)))
        self._plan_call(self._clock.now)

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""
        assert self._update is None
        self._update = Update(at, version, weight_update)
        self._plan_call(at)

    def suspend(self) -> None:
        """Stop decoding, with everything in progress kept, until new weights are loaded."""
        self._suspend_at = self._clock.now
        self._plan_call(self._clock.now)

    def kv_cache_share(self) -> float:
        """Return the share of the KV cache that requests in progress had at the last boundary."""
        held, batch = self._chunked.held_tokens, self._batch
        return (batch.context_tokens + held) / (batch.capacity + held)

    def end(self) -> list[tuple[Request, VersionSpans]]:
        """Return the rollouts in progress, in order of id, each with the tokens it has at this tick."""
        self._undo_join()
        batch, now = self._batch, self._clock.now
        if self._pause_end is None and self._suspended_since is None and (batch.running or self._chunked.request):
            if batch.running:
                batch.step += batch.first_boundary_after(now)[0] - 1
            batch.break_off(now)
        else:
            batch.stand_still(now)
        ended = [(request, self._weights.spans(request, batch.step)) for request in batch.admitted()]
        for request, _ in ended:
            batch.leave(request)
        arriving = [request for _, _, request in self._arrivals]
        ended += [(request, request.spans) for request in (*self._chunked.release(), *self._waiting, *arriving)]
        self._wake = None
        return sorted(ended, key=lambda pair: pair[0].rollout_id)

    def _plan_call(self, at: int) -> None:
        self._calls_at = min(self._calls_at, at)
        if not self._awake:
            self._plan_anew()

    def _plan_anew(self) -> None:
        """Plan again because of a call; not needed inside a boundary, which ends with a plan."""
        self._undo_join()
        now = self._clock.now
        at = self._next_wake(now)
        assert at is not None  # the call at the latest
        if self._wake is None or at < self._wake_calls_at or self._wake_at == NOT_PLANNED:
            self._wake = Wake(self._clock, at - now, self._priority, 0, self._woken)
            self._wake_calls_at = at
        self._wake_at = at

    # ------------------------------------------------------------------------------------ boundaries

    def _woken(self, wake: Wake) -> None:
        if wake is not self._wake:
            return
        now = taken_until = self._wake_at
        if self._wake_calls_at < now:
            self._wake_calls_at = now
            wake.again(now)
            return
        self._awake = True
        batch, kept, steps = self._batch, self._cache.kept, self._wake_steps
        if kept:
            self._keep_join()
        self._joined = None
        if steps:
            taken_until -= 1
            if kept:  # for the last of these steps, which needs most
                self._cache.make_room(batch.used_in(steps) + self._chunked.held_tokens)
            report = self._rollout_finished  # a call of an attribute is slower
            for request in batch.advance(steps, now):
                if request.goes_on and self._keeps_caches:
                    self._cache.keep(request.rollout_id, request.prompt_tokens + request.length)
                report(self._engine_id, request, self._weights.spans(request, batch.step))
        else:
            batch.stand_still(now)
            if self._pause_end is not None:
                taken_until -= 1
                self._finish_update()
        arrivals = self._arrivals
        if self._calls_at <= taken_until or (arrivals and arrivals[0][0] <= taken_until):
            self._take_calls(taken_until)
        size = len(batch.running)  # below, used_in(1) without a call
        if self._calm and size and batch.context_tokens + size * self._row_tokens <= batch.capacity:
            at: int | None = self._plan_steps()
        else:
            at = self._go_through_rules(now)
        self._awake = False
        if at is None:
            self._wake_at = NOT_PLANNED
            return
        self._wake_at = self._wake_calls_at = at
        wake.again(at)

    def _go_through_rules(self, now: int) -> int | None:
        """Make rules 3 to 5 of a boundary, and plan the next wake-up; return its tick, if any."""
        batch = self._batch
        decodes = self._pause_end is None and self._suspended_since is None
        if decodes:
            preempts = batch.used_in(1) > batch.capacity
            if preempts:
                self._preempt()
            if self._recomputes:
                self._recompute()
            if not preempts and (self._waiting or self._chunked.request is not None):
                self._admit()
        self._calm = decodes and not self._waiting and self._chunked.request is None
        return self._next_wake(now)

    def _undo_join(self) -> None:
        """Undo a join at a boundary that is still to come; one that has been stays."""
        if self._joined is None:
            return
        if self._batch.tick > self._clock.now:
            self._batch.undo_join()
            heapq.heappush(self._arrivals, self._joined)
        else:
            self._keep_join()
        self._joined = None

    def _keep_join(self) -> None:
        """Take the cache of the request that has joined at a boundary before this one, if any."""
        if self._joined is not None:
            self._cache.take_for(self._joined[2])

    def _take_calls(self, until: int) -> None:
        self._calm = False
        while self._calls and self._calls[0][0] <= until:
            self._calls.popleft()[1]()
        arrivals, update = self._arrivals, self._update
        while arrivals and arrivals[0][0] <= until and (update is None or arrivals[0][0] < update.at):
            self._waiting.append(heapq.heappop(arrivals)[2])
        if self._suspend_at is not None and self._suspend_at <= until:
            self._suspend_at, self._suspended_since = None, self._batch.tick
        if update is not None and update.at <= until:
            self._begin_update(update)
        self._calls_at = self._first_call(NEVER if self._update is None else self._update.at)

    def _begin_update(self, update: Update) -> None:
        in_batch, chunked = self._batch.running, self._chunked.request
        match update.weight_update:
            case WeightUpdate.ABORT:
                for request in self._batch.admitted():
                    self._leave(request)
                    self._host.rollout_aborted(self._engine_id, request)
                for request in [*([chunked] if chunked else []), *self._waiting]:
                    self._abort(request.rollout_id)
            case WeightUpdate.WAIT if self._suspended_since is None and (in_batch or chunked or self._waiting):
                return
        self._pause_end = self._batch.tick + self._pause_ticks

    def _preempt(self) -> None:
        """Preempt the requests admitted last until the next step fits."""
        batch = self._batch
        while batch.used_in(1) > batch.capacity:
            if self._chunked.request is not None:
                (request,) = self._chunked.release()
            else:
                request = max(batch.running, key=attrgetter("place"))
                self._leave(request)
            self._waiting.appendleft(request)
            self._host.rollout_preempted(self._engine_id, request.rollout_id, request.spans.num_tokens)

    def _recompute(self) -> None:
        """Charge the prefill of the batch to the next step; chunks begin again."""
        batch, self._recomputes = self._batch, False
        self._chunked.begin_again()
        batch.prefill_ticks += sum(self._prefill.ticks(batch.cached_tokens(one)) for one in batch.running)

    def _admit(self) -> None:
        """Go on with a prefill, then add waiting requests to the batch, first come first served, while they fit."""
        waiting, batch = self._waiting, self._batch
        left = max(1, self._step_tokens - len(batch.running) * self._row_tokens)
        if (chunked := self._chunked.request) is not None:
            left -= self._chunk(chunked, left)
        while self._chunked.request is None and waiting and batch.fits(waiting[0]):
            request = waiting.popleft()
            cached = self._cache.take_for(request) if self._cache.kept else 0
            if (tokens := request.tokens_to_prefill - cached) > left:
                self._chunked.begin(request, cached)
                self._chunk(request, left)
                return
            left -= tokens
            if self._tokens is not None:
                self._tokens.begin(request, self.version)
            request.first_load = len(self._weights.steps)
            batch.join(request, self._prefill.ticks(request.tokens_to_prefill, cached))

    def _chunk(self, request: Request, left: int) -> int:
        """Make a chunk of at most ``left`` tokens in the next step, and return its tokens."""
        tokens, last_ticks = self._chunked.go_on(request, left)
        if last_ticks is not None:
            if self._tokens is not None:
                self._tokens.begin(request, self.version)
            request.first_load = len(self._weights.steps)
            self._batch.join(request, last_ticks)
        return tokens

    def _leave(self, request: Request) -> None:
        """Take a request out of the batch unfinished; it keeps the tokens it has."""
        self._batch.leave(request)
        request.keep(self._weights.spans(request, self._batch.step))

    def _abort(self, rollout_id: int) -> None:
        request = next((one for one in self._batch.running if one.rollout_id == rollout_id), None)
        if request is not None:
            self._leave(request)
        elif (chunked := self._chunked.request) is not None and chunked.rollout_id == rollout_id:
            (request,) = self._chunked.release()
        else:
            waiting = [one for one in self._waiting if one.rollout_id == rollout_id]
            arriving = [entry for entry in self._arrivals if entry[2].rollout_id == rollout_id]
            if waiting:
                request = waiting[0]
                self._waiting.remove(request)
            elif arriving:
                request = arriving[0][2]
                self._arrivals.remove(arriving[0])
                heapq.heapify(self._arrivals)
            else:
                return  # it has finished meanwhile
        self._host.rollout_aborted(self._engine_id, request)

    def _disturb(self, still_ticks: int, settings: EngineSettings) -> None:
        """Charge the ticks to the next step; without a request nobody sees them."""
        self._batch.go_on_at(settings.decode)
        self._prefill = self._chunked.cost = settings.prefill
        if self._batch.running or self._chunked.request:
            self._batch.prefill_ticks += still_ticks

    def _finish_update(self) -> None:
        assert self._update is not None
        batch = self._batch
        update, self._update, self._pause_end = self._update, None, None
        still_ticks = self._pause_ticks if self._suspended_since is None else batch.tick - self._suspended_since
        self._suspended_since = None
        self.version = update.version
        self._weights.loaded(update.version, batch.step)
        self._recomputes = recompute = update.weight_update is WeightUpdate.RECOMPUTE
        if recompute or self._drops_old_caches:
            self._cache.clear()
        batch.sample_with(update.version)
        if self._tokens is not None and batch.running:
            running = batch.admitted()
            num_tokens = [batch.cached_tokens(request) - request.prompt_tokens for request in running]
            self._tokens.go_on(running, num_tokens, self.version, recompute=recompute)
            batch.lengths_changed()
        self._host.weights_loaded(self._engine_id, update.version, still_ticks)

    # -------------------------------------------------------------------------------------- planning

    def _next_wake(self, now: int) -> int | None:
        """Return the tick of the next boundary at which something happens that others see, if any."""
        if self._pause_end is None and self._suspended_since is None and (self._batch.running or self._chunked.request):
            return self._plan_steps()
        self._wake_steps = 0
        if self._pause_end is not None:
            return self._pause_end
        call_at = self._next_call()
        return None if call_at == NEVER else max(call_at, now)

    def _plan_steps(self) -> int:
        """Plan the steps to the next wake-up, with a join in between if that is possible; return its tick."""
        batch, arrivals = self._batch, self._arrivals
        if self._chunked.request is not None:
            self._wake_steps = 1
            return batch.next_boundary()
        if arrivals and (arrival := arrivals[0][0]) < self._calls_at:
            request, until, kept = arrivals[0][2], self._calls_at, self._cache.kept
            cached = kept.get(request.rollout_id, 0) if kept else 0
            if self._waiting or len(arrivals) != 1 or (self._can_do_more and self._does_more(request, cached, arrival)):
                until = NOT_PLANNED
            ticks = self._prefill.ticks(request.tokens_to_prefill, cached)
            joined, self._wake_steps, at = batch.join_ahead(request, ticks, arrival, until)
            if not joined:
                return at  # no call can be taken up before: all come after this arrival
            self._joined = heapq.heappop(arrivals)
            request.first_load = len(self._weights.steps)
        else:
            self._wake_steps, at = batch.next_change()
        if self._calls_at < at and (call_at := self._next_call()) < at:
            self._wake_steps, at, _ = batch.first_boundary_after(call_at)
        return at

    def _does_more(self, request: Request, cached: int, arrival: int) -> bool:
        """Return whether more happens at the boundary after an arrival than that this request joins."""
        batch, cache = self._batch, self._cache
        room = self._step_tokens - len(batch.running) * self._row_tokens
        if self._tokens is not None or request.tokens_to_prefill - cached > room:
            return True
        return bool(cache.kept) and not cache.has_room(batch.used_in(batch.first_boundary_after(arrival)[0]))

    def _next_call(self) -> int:
        """Return the tick of the first call that can be taken up, or ``NEVER``."""
        at, update = self._calls_at, self._update
        if update is not None and update.at < self._batch.tick and update.weight_update is WeightUpdate.WAIT:
            at = self._first_call(NEVER)  # the engine drains until it can begin
        if self._arrivals and (update is None or self._arrivals[0][0] < update.at):
            at = min(at, self._arrivals[0][0])
        return at

    def _first_call(self, at: int) -> int:
        """Return the first tick of aborts, disturbances, a suspension, and ``at``."""
        if self._calls:
            at = min(at, self._calls[0][0])
        return at if self._suspend_at is None else min(at, self._suspend_at)
