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
single rollout joining the batch. It is looked through (``_join``), and made up for when the engine is next
awake or asked. So a rollout costs one wake-up and O(log H), whatever its length.

A request that arrives exactly at a boundary is taken up at the next one. An engine with an empty batch takes
requests up at once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from simpy.events import EventPriority

from pipelinerl.events import VersionSpans, WeightUpdate, joined
from sim.clock import WORLD_PRIORITY, Clock, Wake
from sim.costs import DecodeCost, PrefillCost
from sim.sequence import EngineHost, Sequence, TokenSource

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
        "_awake",
        "_batch_ticks",
        "_capacity",
        "_clock",
        "_context",
        "_context_ticks",
        "_finishes",
        "_host",
        "_index",
        "_join",
        "_next_order",
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
        "_wake_at",
        "_wake_steps",
        "_wake_tag",
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
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._finishes: list[tuple[int, int, Sequence]] = []  # heap of (step, order of admission, sequence)
        self._next_order = index << 40  # no two engines give the same: a rollout may leave one and join another
        self._waiting: deque[Sequence] = deque()
        # Weights: version ``_versions[i]`` samples from step ``_version_steps[i]`` on.
        self._version_steps = [0]
        self._versions = [0]
        self._pause_end: int | None = None
        self._still_since: int | None = None  # tick since which it stands still with what is in the batch
        # Requests not yet taken up.
        self._update: Update | None = None  # at most one: the scheduler publishes one version at a time
        self._stand_at: int | None = None  # tick of the request to stand still
        self._aborts: deque[tuple[int, int]] = deque()  # (tick, rollout), in order
        self._arrivals: list[tuple[int, int, Sequence]] = []  # heap of (tick, number, sequence)
        self._num_arrivals = 0
        # The wake-up that counts, and the steps from the boundary before it.
        self._wake_at = NOT_PLANNED
        self._wake_steps = 0
        self._wake_tag = 0
        self._join: tuple[int, int, int] | None = None  # steps to a planned join, its tick, and ticks of its prefill
        self._awake = False

    # -------------------------------------------------------------------------------------- requests

    def submit(self, sequence: Sequence, at: int) -> None:
        """Have a rollout arrive at tick ``at``."""
        heapq.heappush(self._arrivals, (at, self._num_arrivals, sequence))
        self._num_arrivals += 1
        if not self._awake:
            self._requested()

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; no effect if it has ended."""
        self._aborts.append((self._clock.now, rollout_id))
        if not self._awake:
            self._requested()

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""
        assert self._update is None
        self._update = Update(at, version, weight_update)
        if not self._awake:
            self._requested()

    def stand_still(self) -> None:
        """Stop, with what is in progress, until new weights are loaded."""
        self._stand_at = self._clock.now
        if not self._awake:
            self._requested()

    def end(self) -> list[tuple[int, VersionSpans]]:
        """Return the rollouts in progress, in order of id, each with the tokens it has at this tick."""
        self._catch_up()
        if self._is_decoding():
            self._step += self._first_boundary_after(self._clock.now)[0] - 1
        ended = [(sequence.rollout_id, self._spans(sequence)) for sequence in self._running.values()]
        arriving = [sequence for _, _, sequence in self._arrivals]
        ended += [(sequence.rollout_id, sequence.spans) for sequence in (*self._waiting, *arriving)]
        self._wake_tag += 1  # no more wake-ups
        return sorted(ended, key=lambda pair: pair[0])

    def _is_decoding(self) -> bool:
        return bool(self._running) and self._pause_end is None and self._still_since is None

    def _requested(self) -> None:
        """Plan anew; not called in a boundary, at the end of which it plans anyway."""
        self._catch_up()
        self._plan(self._clock.now)

    # ------------------------------------------------------------------------------------ boundaries

    def _woken(self, wake: Wake) -> None:
        """Go through a boundary."""
        if wake.tag != self._wake_tag:
            return
        self._awake = True
        now = self._wake_at
        if self._join is not None:
            self._make_join(self._join)
        self._tick = taken_until = now
        if self._pause_end is not None:
            taken_until = now - 1
            self._finish_update()
        elif self._running and self._still_since is None:
            taken_until = now - 1
            self._step += self._wake_steps
            self._context += self._wake_steps * len(self._running)
            self._prefill_ticks = 0
            self._report_finished()
        arrivals = self._arrivals
        if (arrivals and arrivals[0][0] <= taken_until) or not self._is_quiet():
            self._take_requests(taken_until)
        if self._pause_end is None and self._still_since is None:
            if self._context + len(self._running) > self._capacity:
                self._preempt()
            elif self._waiting:
                self._admit()
        self._awake = False
        self._wake_at = NOT_PLANNED
        self._plan(now)

    def _catch_up(self) -> None:
        """Go through the planned join if its boundary has passed."""
        if self._join is not None and self._join[1] <= self._clock.now:
            self._make_join(self._join)

    def _make_join(self, join: tuple[int, int, int]) -> None:
        self._join = None
        steps, self._tick, self._prefill_ticks = join
        self._step += steps
        self._context += steps * len(self._running)
        self._join_batch(heapq.heappop(self._arrivals)[2])  # the first: others may have been submitted since

    def _report_finished(self) -> None:
        finishes, running, host, step = self._finishes, self._running, self._host, self._step
        while finishes and finishes[0][0] <= step:
            _, order, sequence = heapq.heappop(finishes)
            if sequence.order != order:
                continue  # it has left the batch before
            del running[sequence.rollout_id]
            self._context -= sequence.prompt_tokens + sequence.length
            host.rollout_finished(self._index, sequence, self._spans(sequence))

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

    def _is_quiet(self) -> bool:
        """Return whether nothing is requested but that rollouts join."""
        return self._update is None and not self._aborts and self._stand_at is None

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

    def _join_batch(self, sequence: Sequence) -> None:
        """Take a rollout into the batch; its prefill is charged by the caller."""
        if self._tokens is not None:
            self._tokens.begin(sequence, self.version)
        sequence.order = order = self._next_order
        self._next_order += 1
        sequence.start_step = step = self._step
        sequence.first_update = len(self._versions)
        self._running[sequence.rollout_id] = sequence
        self._context += sequence.tokens_to_prefill
        heapq.heappush(self._finishes, (step + sequence.num_left, order, sequence))

    def _fits(self, sequence: Sequence, context: int, batch: int) -> bool:
        """Return whether a rollout, and one more step of everybody, fit beside what is there."""
        return context + sequence.tokens_to_prefill + batch + 1 <= self._capacity and batch < self._num_slots

    def _leave(self, sequence: Sequence) -> None:
        """Note what a rollout has when it leaves the batch unfinished; it is out of ``_running`` already."""
        self._context -= sequence.tokens_to_prefill + self._step - sequence.start_step
        sequence.keep(self._spans(sequence))
        sequence.order = -1

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
        self._host.rollout_aborted(self._index, rollout_id, sequence.spans)

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
        self._finishes = [(one.start_step + one.num_left, one.order, one) for one in running]
        heapq.heapify(self._finishes)

    def _spans(self, sequence: Sequence) -> VersionSpans:
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
        self._join = None
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
            self._wake_at = at
            self._wake_tag += 1
            Wake(self._clock, at - now, self._priority, self._wake_tag, self._woken)

    def _plan_steps(self) -> int:
        """Set the steps to the next wake-up, and the join before it, if any; return its tick."""
        finishes, arrivals, context, batch = self._finishes, self._arrivals, self._context, len(self._running)
        while finishes[0][2].order != finishes[0][1]:
            heapq.heappop(finishes)
        finish_step, step, tick = finishes[0][0], self._step, self._tick
        steps = finish_step - step
        if context + steps * batch > self._capacity:
            steps = (self._capacity - context) // batch
        quiet = self._is_quiet()
        request = (arrivals[0][0] if arrivals else None) if quiet else self._next_request()
        if request is not None:
            to_request, at = self._first_boundary_after(request)
            if to_request < steps:
                context += to_request * batch
                self._wake_steps = to_request
                if not quiet or len(arrivals) > 1 or self._waiting:
                    return at
                sequence = arrivals[0][2]
                tokens = sequence.tokens_to_prefill
                context += tokens
                batch += 1
                if context + batch > self._capacity or batch > self._num_slots:
                    return at
                # Look through this boundary: all that happens at it is that this rollout joins.
                if self._tokens is not None:
                    self._tokens.begin(sequence, self.version)
                prefill_ticks = self._prefill.ticks(tokens)
                self._join = (to_request, at, prefill_ticks)
                steps = finish_step - step - to_request
                steps = min(steps, sequence.num_left)
                if context + steps * batch > self._capacity:
                    steps = (self._capacity - context) // batch
                self._wake_steps = steps
                return at + self._duration(steps, context, batch, prefill_ticks)
        self._wake_steps = steps
        return tick + self._duration(steps, context, batch, self._prefill_ticks)

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

    def _duration(self, steps: int, context: int, batch: int, prefill_ticks: int) -> int:
        """Return the ticks of ``steps`` steps, t(n) at the top of this file."""
        first = self._batch_ticks[batch] + self._context_ticks * context
        return prefill_ticks + steps * first + self._context_ticks * batch * (steps * (steps - 1) // 2)

    def _first_boundary_after(self, tick: int) -> tuple[int, int]:
        """Return the steps to the first boundary after a tick, and the tick of that boundary; O(1)."""
        context, batch, prefill_ticks, start = self._context, len(self._running), self._prefill_ticks, self._tick
        first = self._batch_ticks[batch] + self._context_ticks * context
        rest = tick - start - prefill_ticks
        if first > rest:
            return 1, start + prefill_ticks + first
        # Root of growth/2 n^2 + linear n = rest, in the form that is stable for small growth; a float
        # is a step off at most, which the two loops put right in whole numbers.
        growth = self._context_ticks * batch
        linear = first - growth / 2
        steps = int(2 * rest / (linear + math.sqrt(linear * linear + 2 * growth * rest)))
        while start + self._duration(steps, context, batch, prefill_ticks) > tick:
            steps -= 1
        while (at := start + self._duration(steps, context, batch, prefill_ticks)) <= tick:
            steps += 1
        return steps, at
