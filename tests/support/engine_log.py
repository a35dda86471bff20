"""Engines of the simulator by themselves: settings in ticks, and a log of their reports."""

from __future__ import annotations

import pytest
from step_by_step import StepByStepEngine

from pipelinerl.scheduler.events import VersionSpans
from sim.clock import CLUSTER_PRIORITY, Clock, Wake
from sim.engine import ClosedFormEngine
from sim.interface import DecodeCost, EngineSettings, PrefillCost, Request

both_engines = pytest.mark.parametrize("make", [ClosedFormEngine, StepByStepEngine])

NO_PREFILL = PrefillCost(0, 0, 0)
TOKEN_PREFILL = PrefillCost(0, 1, 0)
"""A tick per token."""


def settings_with(*, step=(10, 10), context=0, prefill=NO_PREFILL, capacity=None, pause=0):
    """An engine with as many slots as ``step`` has entries, one for each number of requests."""
    return EngineSettings(DecodeCost((0, *step), context), prefill, capacity, pause)


class ForwardClock(Clock):
    """A clock that nobody can turn back (SimPy would let them)."""

    def step(self):
        assert self.peek() >= self.now
        super().step()


class Log:
    """Writes down the reports of engines."""

    def __init__(self, make, given, *, num_engines=1):
        self.clock = ForwardClock()
        self.entries = []
        self.engines = [make(self.clock, self, index, given) for index in range(num_engines)]

    def at(self, tick, call):
        """Have ``call`` called at a tick, before the engines have their turn."""
        Wake(self.clock, tick - self.clock.now, CLUSTER_PRIORITY, 0, lambda _: call())

    def end(self, engine=0):
        """What the engine has in progress at this tick: rollouts, and their tokens."""
        return [(request.rollout_id, spans) for request, spans in self.engines[engine].end()]

    def rollout_finished(self, engine, request, spans):
        self.entries.append((self.clock.now, "finished", request.rollout_id, spans))

    def rollout_aborted(self, engine, request):
        self.entries.append((self.clock.now, "aborted", request.rollout_id, request.spans))

    def rollout_preempted(self, engine, rollout_id, num_tokens):
        self.entries.append((self.clock.now, "preempted", rollout_id, num_tokens))

    def weights_loaded(self, engine, version, pause_ticks):
        self.entries.append((self.clock.now, "loaded", version, pause_ticks))


def log_of(make, given, *, rollouts=(), updates=(), aborts=()):
    """What an engine reports of rollouts (tick, id, prompt tokens, length), updates (tick, kind), aborts (tick, id)."""
    log = Log(make, given)
    for tick, *rollout in rollouts:
        log.engines[0].submit(Request(*rollout), tick)
    for version, (tick, kind) in enumerate(updates, start=1):
        log.engines[0].update(version, kind, tick)
    for tick, rollout_id in aborts:
        log.at(tick, lambda rollout_id=rollout_id: log.engines[0].abort(rollout_id))
    log.clock.run()
    return log.entries


def spans(*pairs):
    """Spans of (version, end) pairs."""
    return VersionSpans(tuple(version for version, _ in pairs), tuple(end for _, end in pairs))
