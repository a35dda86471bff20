"""An inference engine with continuous batching, advanced in closed form from event to event.

Theory of operation. The engine works in decode steps; between two steps is a *boundary*. At a boundary, in
this order:

1. rollouts that have all their tokens finish and leave;
2. requests that have arrived since the last boundary are taken up: aborted rollouts leave, new ones join the
   waiting queue, a weight update begins (rollouts that arrive after an update wait until it is done);
3. while the next step would overflow the KV cache, the rollout admitted last is preempted: its cache is
   dropped, it goes to the head of the waiting queue, and is prefilled again, tokens so far included, when it
   is admitted again (vLLM's preemption by recomputation);
4. unless something was just preempted, waiting rollouts are admitted first come first served while a slot is
   free and their tokens, and one more step of everybody, fit into the cache;
5. the next step starts. It lasts the prefill of what was admitted, plus ``batch_ticks[b] + context_ticks * C``.

A weight update replaces 3-5 once: the engine stands still for the pause, then it has a boundary again.
``wait`` first lets everything that arrived before it finish, ``abort`` ends it, ``recompute`` charges the
prefill of everything in the batch to the next step.

A request to stand still replaces 3-5 too, from the boundary at which it is taken up until an update is done; like
an empty engine it then takes requests up at once.

Between boundaries at which something happens, b is constant and C grows by b per step, so n steps last

    t(n) = prefill + n * (batch_ticks[b] + context_ticks * C) + context_ticks * b * n (n - 1) / 2

in whole ticks, exactly what n single steps last (``reference.py`` makes them one by one, to prove it).
The engine sleeps until the first boundary at which a rollout finishes, the cache would overflow, or a
request is to be taken up. One such boundary needs no wake-up of its own, because nobody outside sees it: a
single rollout joining the batch. The engine goes through it ahead of time, and takes it back (``_take_back``) if
it is asked for something before. So a rollout costs one wake-up and O(log H), whatever its length.

A request that arrives exactly at a boundary is taken up at the next one. An engine with an empty batch takes
requests up at once.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from simpy.events import EventPriority

from pipelinerl.scheduler.events import VersionSpans, WeightUpdate, joined
from sim.clock import WORLD_PRIORITY, Clock, Wake
from sim.costs import DecodeCost, PrefillCost
from sim.request import EngineHost, Request, TokenSource

NOT_PLANNED = -1
"""Tick of a wake-up that does not exist."""
UNLIMITED = 2**62
"""Capacity of a KV cache that never fills (tokens)."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is made of."""

    decode: DecodeCost
    prefill: PrefillCost
    kv_cache_tokens: int | None
    """Capacity (tokens); None: unlimited."""
    pause_ticks: int
    """Ticks the engine stands still to load weights."""
    tokens: TokenSource | None = None
    """What decides lengths while they are generated; None: rollouts come with their lengths."""


@dataclass(frozen=True, slots=True)
class Update:
    """Weights on their way."""

    at: int
    """Tick of their arrival."""
    version: int
    weight_update: WeightUpdate


class Engine:
    """An engine in closed form. See the top of this file."""

    # Beyond 30 attributes an access would be a look-up in a dictionary.
    __slots__ = (
        "_aborts",
        "_arrivals",
        "_asked",
        "_awake",
        "_batch_ticks",
        "_before_join",
        "_capacity",
        "_clock",
        "_context",
        "_context_ticks",
        "_finish_steps",
        "_finishing",
        "_host",
        "_index",
        "_num_arrivals",
        "_num_slots",
        "_pause_end",
        "_pause_ticks",
        "_prefill",
        "_prefill_ticks",
        "_priority",
        "_running",
        "_stand_at",
        "_step",
        "_still_since",
        "_tick",
        "_tokens",
        "_update",
        "_version_steps",
        "_versions",
        "_waiting",
        "_wake",
        "_wake_at",
        "_wake_steps",
        "version",
    )

    def __init__(self, clock: Clock, host: EngineHost, index: int, settings: EngineSettings) -> None:
        self.version = 0
        self._clock = clock
        self._host = host
        self._index = index
        self._priority = EventPriority(WORLD_PRIORITY + 1 + index)
        self._prefill = settings.prefill
        self._pause_ticks = settings.pause_ticks
        self._batch_ticks = settings.decode.batch_ticks
        self._context_ticks = settings.decode.context_ticks
        self._capacity = UNLIMITED if settings.kv_cache_tokens is None else settings.kv_cache_tokens
        self._num_slots = len(settings.decode.batch_ticks) - 1
        self._tokens = settings.tokens
        # Boundary: the last one, and what the batch looked like when it was left.
        self._tick = 0
        self._step = 0  # decode steps done
        self._context = 0  # tokens in the KV cache
        self._prefill_ticks = 0  # charged to the next step
        self._running: dict[int, Request] = {}  # in order of admission
        self._finishing: list[Request] = []  # in the order in which they will have all their tokens, then of admission
        self._finish_steps: list[int] = []  # the step at which each of them has
        self._waiting: deque[Request] = deque()
        # Weights: version ``_versions[i]`` samples from step ``_version_steps[i]`` on.
        self._version_steps = [0]
        self._versions = [0]
        self._pause_end: int | None = None
        self._still_since: int | None = None  # tick since which it stands still with what is in the batch
        # Requests not yet taken up; whether there are others than arrivals.
        self._asked = False
        self._update: Update | None = None  # at most one: the scheduler publishes one version at a time
        self._stand_at: int | None = None  # tick of the request to stand still
        self._aborts: deque[tuple[int, int]] = deque()  # (tick, rollout), in order
        self._arrivals: list[tuple[int, int, Request]] = []  # heap of (tick, number, sequence)
        self._num_arrivals = 0
        # The wake-up that counts, its tick, and the steps to it from the boundary before.
        self._wake: Wake | None = None
        self._wake_at = NOT_PLANNED
        self._wake_steps = 0
        # While the boundary above is ahead of the clock, and a rollout joins at it: tick, step, context and prefill
        # of the boundary before, and the arrival.
        self._before_join: tuple[int, int, int, int, tuple[int, int, Request]]
        self._awake = False

    # -------------------------------------------------------------------------------------- requests

    def submit(self, sequence: Request, at: int) -> None:
        """Have a rollout arrive at tick ``at``."""
        heapq.heappush(self._arrivals, (at, self._num_arrivals, sequence))
        self._num_arrivals += 1
        if not self._awake:
            self._requested()

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; no effect if it has ended."""
        self._aborts.append((self._clock.now, rollout_id))
        self._asked = True
        if not self._awake:
            self._requested()

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""
        assert self._update is None
        self._update = Update(at, version, weight_update)
        self._asked = True
        if not self._awake:
            self._requested()

    def stand_still(self) -> None:
        """Stop, with what is in progress, until new weights are loaded."""
        self._stand_at = self._clock.now
        self._asked = True
        if not self._awake:
            self._requested()

    def end(self) -> list[tuple[int, VersionSpans]]:
        """Return the rollouts in progress, in order of id, each with the tokens it has at this tick."""
        self._take_back()
        if self._is_decoding():
            self._step += self._first_boundary_after(self._clock.now)[0] - 1
        ended = [(sequence.rollout_id, self._spans(sequence)) for sequence in self._running.values()]
        arriving = [sequence for _, _, sequence in self._arrivals]
        ended += [(sequence.rollout_id, sequence.spans) for sequence in (*self._waiting, *arriving)]
        self._wake = None
        return sorted(ended, key=lambda pair: pair[0])

    def _is_decoding(self) -> bool:
        return bool(self._running) and self._pause_end is None and self._still_since is None

    def _requested(self) -> None:
        """Plan anew; not called in a boundary, at the end of which it plans anyway."""
        self._take_back()
        self._plan(self._clock.now)

    # ------------------------------------------------------------------------------------ boundaries

    def _woken(self, wake: Wake) -> None:
        """Go through a boundary."""
        if wake is not self._wake:
            return
        self._awake = True
        self._tick = now = taken_until = self._wake_at
        running = self._running
        if self._pause_end is not None:
            taken_until = now - 1
            self._finish_update()
        elif running and self._still_since is None:
            taken_until = now - 1
            steps = self._wake_steps
            self._step = step = self._step + steps
            self._context += steps * len(running)
            self._prefill_ticks = 0
            finishing, finish_steps = self._finishing, self._finish_steps
            while finish_steps and finish_steps[0] == step:
                del finish_steps[0]
                sequence = finishing.pop(0)
                del running[sequence.rollout_id]
                self._context -= sequence.prompt_tokens + sequence.length
                self._host.rollout_finished(self._index, sequence, self._spans(sequence))
        arrivals = self._arrivals
        if self._asked or (arrivals and arrivals[0][0] <= taken_until):
            self._take_requests(taken_until)
        if self._pause_end is None and self._still_since is None:
            if self._context + len(running) > self._capacity:
                self._preempt()
            elif self._waiting:
                self._admit()
        self._awake = False
        self._wake_at = NOT_PLANNED
        self._plan(now)

    def _take_back(self) -> None:
        """Take back a join at a boundary that is still to come."""
        if self._tick > self._clock.now:
            _, sequence = self._running.popitem()
            self._finishes_no_more(sequence)
            self._tick, self._step, self._context, self._prefill_ticks, arrival = self._before_join
            heapq.heappush(self._arrivals, arrival)

    def _take_requests(self, until: int) -> None:
        """Take up what has arrived up to tick ``until``."""
        while self._aborts and self._aborts[0][0] <= until:
            self._abort(self._aborts.popleft()[1])
        arrivals, update = self._arrivals, self._update
        while arrivals and arrivals[0][0] <= until and (update is None or arrivals[0][0] < update.at):
            self._waiting.append(heapq.heappop(arrivals)[2])
        if self._stand_at is not None and self._stand_at <= until:
            self._stand_at, self._still_since = None, self._tick
        if update is not None and update.at <= until:
            self._begin_update(update)
        self._asked = self._update is not None or bool(self._aborts) or self._stand_at is not None

    def _begin_update(self, update: Update) -> None:
        match update.weight_update:
            case WeightUpdate.ABORT:
                for rollout_id in [*self._running, *(sequence.rollout_id for sequence in self._waiting)]:
                    self._abort(rollout_id)
            case WeightUpdate.WAIT if self._still_since is None and (self._running or self._waiting):
                return
        self._pause_end = self._tick + self._pause_ticks

    def _preempt(self) -> None:
        """Send away what was admitted last until the next step fits."""
        while self._context + len(self._running) > self._capacity:
            _, sequence = self._running.popitem()
            self._leave(sequence)
            self._waiting.appendleft(sequence)
            self._host.rollout_preempted(self._index, sequence.rollout_id, sequence.spans.num_tokens)

    def _admit(self) -> None:
        """Let waiting rollouts join, first come first served, while they fit."""
        waiting = self._waiting
        while waiting and self._fits(waiting[0], self._context, len(self._running)):
            sequence = waiting.popleft()
            self._join_batch(sequence)
            self._prefill_ticks += self._prefill.ticks(sequence.tokens_to_prefill)

    def _join_batch(self, sequence: Request) -> None:
        """Take a rollout into the batch; its prefill is charged by the caller."""
        if self._tokens is not None:
            self._tokens.begin(sequence, self.version)
        sequence.start_step = self._step
        sequence.first_update = len(self._versions)
        self._running[sequence.rollout_id] = sequence
        self._context += sequence.tokens_to_prefill
        step = self._step + sequence.num_left
        place = bisect_right(self._finish_steps, step)
        self._finish_steps.insert(place, step)
        self._finishing.insert(place, sequence)

    def _finishes_no_more(self, sequence: Request) -> None:
        """Forget when a rollout would have had all its tokens."""
        first = bisect_left(self._finish_steps, sequence.finish_step)
        place = self._finishing.index(sequence, first)
        del self._finish_steps[place], self._finishing[place]

    def _fits(self, sequence: Request, context: int, batch: int) -> bool:
        """Return whether a rollout, and one more step of everybody, fit beside what is there."""
        return context + sequence.tokens_to_prefill + batch + 1 <= self._capacity and batch < self._num_slots

    def _leave(self, sequence: Request) -> None:
        """Note what a rollout has when it leaves the batch unfinished; it is out of ``_running`` already."""
        self._context -= sequence.tokens_to_prefill + self._step - sequence.start_step
        self._finishes_no_more(sequence)
        sequence.keep(self._spans(sequence))

    def _abort(self, rollout_id: int) -> None:
        sequence = self._running.pop(rollout_id, None)
        if sequence is not None:
            self._leave(sequence)
        else:
            waiting = [one for one in self._waiting if one.rollout_id == rollout_id]
            arriving = [entry for entry in self._arrivals if entry[2].rollout_id == rollout_id]
            if waiting:
                sequence = waiting[0]
                self._waiting.remove(sequence)
            elif arriving:
                sequence = arriving[0][2]
                self._arrivals.remove(arriving[0])
                heapq.heapify(self._arrivals)
            else:
                return  # it has finished meanwhile
        self._host.rollout_aborted(self._index, sequence)

    # --------------------------------------------------------------------------------------- weights

    def _finish_update(self) -> None:
        assert self._update is not None
        update, self._update, self._pause_end = self._update, None, None
        still_ticks = self._pause_ticks if self._still_since is None else self._tick - self._still_since
        self._still_since = None
        self.version = update.version
        if self._version_steps[-1] == self._step:
            self._versions[-1] = update.version
        else:
            self._version_steps.append(self._step)
            self._versions.append(update.version)
        if update.weight_update is WeightUpdate.RECOMPUTE:
            for sequence in self._running.values():
                tokens = sequence.tokens_to_prefill + self._step - sequence.start_step
                self._prefill_ticks += self._prefill.ticks(tokens)
        if self._tokens is not None and self._running:
            self._go_on(self._tokens, recompute=update.weight_update is WeightUpdate.RECOMPUTE)
        self._host.weights_loaded(self._index, update.version, still_ticks)

    def _go_on(self, tokens: TokenSource, *, recompute: bool) -> None:
        """Have a policy decide anew, with the weights just loaded, when what is in the batch finishes."""
        running = list(self._running.values())
        num_tokens = [one.spans.num_tokens + self._step - one.start_step for one in running]
        tokens.go_on(running, num_tokens, self.version, recompute=recompute)
        self._finishing = sorted(running, key=attrgetter("finish_step"))
        self._finish_steps = [one.finish_step for one in self._finishing]

    def _spans(self, sequence: Request) -> VersionSpans:
        """Return the spans of all tokens a running rollout has at this boundary."""
        start, step, steps, versions = sequence.start_step, self._step, self._version_steps, self._versions
        if step == start:
            return sequence.spans
        first, last = sequence.first_update, len(steps)
        if steps[-1] == step:
            last -= 1  # it samples nothing before the next step
        if first == last:
            spans = VersionSpans((versions[first - 1],), (step - start,))
        else:
            ends = [one - start for one in steps[first:last]]
            ends.append(step - start)
            spans = VersionSpans(tuple(versions[first - 1 : last]), tuple(ends))
        return joined(sequence.spans, spans) if sequence.spans.ends else spans

    # -------------------------------------------------------------------------------------- planning

    def _plan(self, now: int) -> None:
        """Schedule the wake-up at the next boundary at which something happens that others see."""
        if self._pause_end is not None:
            at = self._pause_end
        elif self._running and self._still_since is None:
            at = self._plan_steps()
        else:
            request = self._next_request()
            if request is None:
                return
            at = max(request, now)
        if at != self._wake_at:
            if self._wake is not None and self._wake_at == NOT_PLANNED:
                self._wake.again(at - now, self._priority, self._woken)
            else:
                self._wake = Wake(self._clock, at - now, self._priority, 0, self._woken)
            self._wake_at = at

    def _plan_steps(self) -> int:
        """Set the steps to the next wake-up, go through the join before it, if any, and return its tick."""
        arrivals, context, batch = self._arrivals, self._context, len(self._running)
        steps = self._finish_steps[0] - self._step
        if context + steps * batch > self._capacity:
            steps = (self._capacity - context) // batch
        request = self._next_request() if self._asked else arrivals[0][0] if arrivals else None
        if request is not None:
            to_request, at = self._first_boundary_after(request)
            if to_request < steps:
                at_request = context + to_request * batch
                if (
                    self._asked
                    or self._waiting
                    or len(arrivals) > 1
                    or not self._fits(sequence := arrivals[0][2], at_request, batch)
                ):
                    self._wake_steps = to_request
                    return at
                # All that happens at this boundary is that this rollout joins.
                self._before_join = (self._tick, self._step, context, self._prefill_ticks, heapq.heappop(arrivals))
                self._tick, self._context = at, at_request
                self._step += to_request
                self._prefill_ticks = self._prefill.ticks(sequence.tokens_to_prefill)
                self._join_batch(sequence)
                context, batch = self._context, batch + 1
                steps = self._finish_steps[0] - self._step
                if context + steps * batch > self._capacity:
                    steps = (self._capacity - context) // batch
        self._wake_steps = steps
        first = self._batch_ticks[batch] + self._context_ticks * context
        return self._tick + self._prefill_ticks + _steps_ticks(steps, first, self._context_ticks * batch)

    def _next_request(self) -> int | None:
        """Return the tick of the first request that can be taken up, if any."""
        update = self._update
        ticks = [self._aborts[0][0]] if self._aborts else []
        if self._arrivals and (update is None or self._arrivals[0][0] < update.at):
            ticks.append(self._arrivals[0][0])
        draining = update is not None and update.at < self._tick and update.weight_update is WeightUpdate.WAIT
        if update is not None and not draining:
            ticks.append(update.at)
        if self._stand_at is not None:
            ticks.append(self._stand_at)
        return min(ticks) if ticks else None

    def _first_boundary_after(self, tick: int) -> tuple[int, int]:
        """Return the steps to the first boundary after a tick, and the tick of that boundary; O(1)."""
        batch, start = len(self._running), self._tick + self._prefill_ticks
        first = self._batch_ticks[batch] + self._context_ticks * self._context
        rest = tick - start
        if first > rest:
            return 1, start + first
        growth = self._context_ticks * batch
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
