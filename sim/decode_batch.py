"""The batch of an engine: which requests decode together, and when each finishes.

With b requests and C tokens in the KV cache a decode step lasts ``batch_ticks[b] + context_ticks * C``. While no
request joins or leaves, b is constant and C grows by b per step, so n steps last

    t(n) = prefill + n * (batch_ticks[b] + context_ticks * C) + context_ticks * b * n (n - 1) / 2

in whole ticks, exactly as long as n single steps (``step_by_step.py`` makes them one by one, to prove it).

The state is that at a *boundary* between two steps. ``join`` can go to a boundary that is still to come, and
``undo_join`` restores the state before.

Every rollout costs a few of these calls, most of the time of a simulation: hence the local variables.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from operator import attrgetter

from sim.interface import DecodeCost, Request

UNLIMITED = 2**62
"""Capacity of a KV cache that never fills (tokens)."""


class DecodeBatch:
    """The requests that decode together, as they were at the last boundary (mutable).

    ``decode`` has an entry per slot; ``kv_cache_tokens`` is None where it is unlimited.
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

    def join(self, request: Request, prefill_ticks: int, steps: int = 0, tick: int = 0) -> None:
        """Add a request at this boundary, or ``steps`` after it, none of which ends a request, at ``tick``.

        ``prefill_ticks`` are charged to the next step; ``steps`` are fewer than to ``next_change()``.
        """
        requests = self.requests
        step, context_tokens = self.step, self.context_tokens
        if steps:
            self._before_join = (self.tick, step, context_tokens, self.prefill_ticks)
            self.tick = tick
            self.step = step = step + steps
            context_tokens += steps * len(requests)
            self.prefill_ticks = prefill_ticks
        else:
            self.prefill_ticks += prefill_ticks
        self.context_tokens = context_tokens + request.tokens_to_prefill
        request.start_step = step
        requests[request.rollout_id] = request
        finish_step, finish_steps = step + request.num_left, self._finish_steps
        place = bisect_right(finish_steps, finish_step)
        finish_steps.insert(place, finish_step)
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

    def undo_join(self) -> None:
        """Restore the state before the last call, which must have been a ``join`` after steps."""
        self.leave(next(reversed(self.requests.values())))
        self.tick, self.step, self.context_tokens, self.prefill_ticks = self._before_join

    def worked_ticks(self) -> int:
        """Return the ticks with steps, for ``TimedBatch``; not counted here."""
        return 0

    # ------------------------------------------------------------------------------------------ steps

    def advance(self, steps: int, tick: int) -> list[Request]:
        """Make decode steps, the last of which ends at ``tick``; remove and return the requests that finish then."""
        requests, finish_steps = self.requests, self._finish_steps
        self.tick = tick
        self.step = step = self.step + steps
        self.prefill_ticks = 0
        context_tokens = self.context_tokens + steps * len(requests)
        finished = []
        while finish_steps and finish_steps[0] == step:
            del finish_steps[0]
            request = self._finishing.pop(0)
            del requests[request.rollout_id]
            context_tokens -= request.prompt_tokens + request.length
            finished.append(request)
        self.context_tokens = context_tokens
        return finished

    def stand_still(self, until: int) -> None:
        """Make no step until a tick, which is a boundary then."""
        self.tick = until

    def break_off(self, at: int) -> None:
        """Have the step that is under way end at a tick, before its time."""
        self.tick = at

    def next_change(self) -> tuple[int, int]:
        """Return steps to, and tick of, the first boundary where a request finishes or the next step would not fit."""
        context, size = self.context_tokens, len(self.requests)
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
            + self._batch_ticks[len(self.requests)]
            + (self._context_ticks * self.context_tokens)
        )

    def first_boundary_after(self, tick: int) -> tuple[int, int, bool]:
        """Return steps to, and tick of, the first boundary after a tick, and if ``next_change()`` is later; O(1)."""
        context, size, context_ticks = self.context_tokens, len(self.requests), self._context_ticks
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


def _steps_ticks(steps: int, first: int, growth: int) -> int:
    """Return the ticks of steps of which the first lasts ``first`` and each one ``growth`` longer than the last."""
    return steps * first + growth * (steps * (steps - 1) // 2)
