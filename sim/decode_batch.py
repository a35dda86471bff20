"""The batch of an engine: which requests decode together, and when each finishes.

With b requests and C tokens in the KV cache a decode step lasts ``batch_ticks[b] + context_ticks * C``. While no
request joins or leaves, b is constant and C grows by b per step, so n steps last

    t(n) = prefill + n * (batch_ticks[b] + context_ticks * C) + context_ticks * b * n (n - 1) / 2

in whole ticks, exactly as long as n single steps (``step_by_step.py`` makes them one by one, to prove it).

The state is that at a *boundary* between two steps. ``join_ahead`` goes to a boundary that is still to come, and
``undo_join`` restores the state before.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from operator import attrgetter

from sim.costs import DecodeCost
from sim.request import Request

UNLIMITED = 2**62
"""Capacity of a KV cache that never fills (tokens)."""


class DecodeBatch:
    """The requests that decode together, as they were at the last boundary (mutable).

    Args:
        decode: Duration of a step; it has an entry per slot.
        kv_cache_tokens: Capacity (tokens); None: unlimited.
    """

    __slots__ = (
        "_batch_ticks",
        "_before_join",
        "_context_ticks",
        "_finish_steps",
        "_finishing",
        "_num_slots",
        "capacity",
        "context_tokens",
        "prefill_ticks",
        "requests",
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
        self.requests: dict[int, Request] = {}  # by rollout, in order of admission
        self._finishing: list[Request] = []  # in the order in which they will have all their tokens, then of admission
        self._finish_steps: list[int] = []  # the step at which each of them has
        self._before_join = (0, 0, 0, 0)  # tick, step, context and prefill

    # ---------------------------------------------------------------------------------------- requests

    def join(self, request: Request, prefill_ticks: int) -> None:
        """Add a request, and charge its prefill to the next step."""
        request.start_step = self.step
        self.requests[request.rollout_id] = request
        self.context_tokens += request.tokens_to_prefill
        self.prefill_ticks += prefill_ticks
        step = self.step + request.num_left
        place = bisect_right(self._finish_steps, step)
        self._finish_steps.insert(place, step)
        self._finishing.insert(place, request)

    def leave(self, request: Request) -> None:
        """Remove a request that is unfinished."""
        del self.requests[request.rollout_id]
        self.context_tokens -= self.cached_tokens(request)
        first = bisect_left(self._finish_steps, request.finish_step)
        place = self._finishing.index(request, first)
        del self._finish_steps[place], self._finishing[place]

    def lengths_changed(self) -> None:
        """Sort the requests again by when they finish."""
        self._finishing = sorted(self.requests.values(), key=attrgetter("finish_step"))
        self._finish_steps = [request.finish_step for request in self._finishing]

    def cached_tokens(self, request: Request) -> int:
        """Return the tokens that a request of the batch has in the KV cache."""
        return request.tokens_to_prefill + self.step - request.start_step

    def fits(self, request: Request, after_steps: int = 0) -> bool:
        """Return whether one more request has a slot, and room for its tokens and one more step of everybody."""
        size = len(self.requests)
        used = self.context_tokens + after_steps * size + request.tokens_to_prefill
        return used + size + 1 <= self.capacity and size < self._num_slots

    def join_ahead(self, request: Request, steps: int, tick: int, prefill_ticks: int) -> None:
        """Make steps, none of which ends a request, and add a request at the boundary after them.

        Args:
            request: The request.
            steps: Decode steps, fewer than ``steps_to_change()``.
            tick: Of the boundary.
            prefill_ticks: Prefill of the request.
        """
        self._before_join = (self.tick, self.step, self.context_tokens, self.prefill_ticks)
        self.tick = tick
        self.step += steps
        self.context_tokens += steps * len(self.requests)
        self.prefill_ticks = 0
        self.join(request, prefill_ticks)

    def undo_join(self) -> None:
        """Restore the state before the last call, which must have been ``join_ahead``."""
        self.leave(next(reversed(self.requests.values())))
        self.tick, self.step, self.context_tokens, self.prefill_ticks = self._before_join

    # ------------------------------------------------------------------------------------------ steps

    def advance(self, steps: int, tick: int) -> list[Request]:
        """Make decode steps, the last of which ends at ``tick``; remove and return the requests that finish then."""
        self.tick = tick
        self.step = step = self.step + steps
        self.context_tokens += steps * len(self.requests)
        self.prefill_ticks = 0
        finished, finish_steps = [], self._finish_steps
        while finish_steps and finish_steps[0] == step:
            del finish_steps[0]
            request = self._finishing.pop(0)
            del self.requests[request.rollout_id]
            self.context_tokens -= request.prompt_tokens + request.length
            finished.append(request)
        return finished

    def steps_to_change(self) -> int:
        """Return the steps to the first boundary at which a request finishes or the next step would not fit."""
        steps, context, size = self._finish_steps[0] - self.step, self.context_tokens, len(self.requests)
        if context + steps * size > self.capacity:
            steps = (self.capacity - context) // size
        return steps

    def next_change(self) -> tuple[int, int]:
        """Return ``steps_to_change()``, and the tick of that boundary."""
        context, size = self.context_tokens, len(self.requests)
        steps = self._finish_steps[0] - self.step
        if context + steps * size > self.capacity:
            steps = (self.capacity - context) // size
        first = self._batch_ticks[size] + self._context_ticks * context
        return steps, self.tick + self.prefill_ticks + _steps_ticks(steps, first, self._context_ticks * size)

    def first_boundary_after(self, tick: int) -> tuple[int, int]:
        """Return the steps to the first boundary after a tick, and the tick of that boundary; O(1)."""
        size, start = len(self.requests), self.tick + self.prefill_ticks
        first = self._batch_ticks[size] + self._context_ticks * self.context_tokens
        rest = tick - start
        if first > rest:
            return 1, start + first
        growth = self._context_ticks * size
        two = 2 * first + growth
        if two > rest:  # mostly it is one of these two
            return 2, start + two
        # Root of growth/2 n^2 + linear n = rest, in the form that is stable for small growth; a float
        # is a step off at most, which the two loops put right in whole numbers.
        linear = first - growth / 2
        steps = 1 + int(2 * rest / (linear + math.sqrt(linear * linear + 2 * growth * rest)))
        while _steps_ticks(steps - 1, first, growth) > rest:
            steps -= 1
        while (ticks := _steps_ticks(steps, first, growth)) <= rest:
            steps += 1
        return steps, start + ticks


def _steps_ticks(steps: int, first: int, growth: int) -> int:
    """Return the ticks of steps of which the first lasts ``first`` and each one ``growth`` longer than the last."""
    return steps * first + growth * (steps * (steps - 1) // 2)
