"""Simulated time: whole picoseconds, so n decode steps at once end at the same instant as n steps one by one.

Floating-point seconds would differ in the last bit, and with them, sooner or later, the order of events.
Coefficients are rounded to a picosecond each, 10^-10 of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

import simpy
from simpy.events import Event, EventPriority

TICKS_PER_S = 10**12

CLUSTER_PRIORITY = EventPriority(2)
"""Priority of the simulated cluster's own events; engine ``i`` runs at ``CLUSTER_PRIORITY + 1 + i``.

Events at the same tick run in this order, whenever they were scheduled: the order is the same with one
wake-up per decode step and with one per finished rollout.
"""


def to_ticks(seconds: float) -> int:
    """Return seconds as ticks, rounded to the nearest."""
    return round(seconds * TICKS_PER_S)


def to_seconds(ticks: int) -> float:
    """Return ticks as seconds."""
    return ticks / TICKS_PER_S


class Clock(simpy.Environment):
    """A SimPy environment whose time is whole ticks."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    now = property(attrgetter("_now"), doc="Ticks since the start, a whole number.")  # read in C: it is read often

    def run_until(self, done: Event) -> None:
        """Run until an event has happened or nothing is left, as ``run``, but without its calls.

        All events must be of the two classes below: none of them fails.
        """
        queue: list[Any] = self._queue
        while queue and done.callbacks is not None:
            self._now, _, _, event = heappop(queue)
            call = event.call  # a slot: faster than a call of the attribute
            call(event)


class Happening(Event):
    """An event that others wait for, with what ``run_until`` calls."""

    def call(self, _: Event) -> None:
        """Make the calls of those who wait."""
        callbacks, self.callbacks = self.callbacks, None  # type: ignore[assignment] # as in SimPy
        for callback in callbacks:
            callback(self)


class Wake(Event):
    """A call, with this event, after ``delay`` ticks (0 at least); at the same tick a low priority goes first.

    ``tag``: number by which the callee knows it.
    """

    __slots__ = ("_priority", "call", "tag")
    callbacks = property(lambda self: [self.call], lambda *_: None)  # for SimPy's run
    _value = None  # it carries no value
    _ok = True

    def __init__(
        self, clock: Clock, delay: int, priority: EventPriority, tag: int, call: Callable[[Any], None]
    ) -> None:
        self.env = clock
        self.call, self.tag = call, tag
        self._priority = priority
        clock.schedule(self, priority, delay)

    def again(self, at: int) -> None:
        """Schedule the call once more, at a tick from now on; the last one must have been made."""
        heappush(self.env._queue, (at, self._priority, next(self.env._eid), self))  # as schedule, without a call
