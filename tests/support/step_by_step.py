"""An inference engine that takes every decode step one by one: slow, and obviously right.

Tests prove with it that the closed form of ``sim.engine`` is exact, and it is the base of the comparison of speed. It
follows the boundary rules of docs/simulator.md to the letter and shares none of the arithmetic: one SimPy event per
boundary, one entry in a list per token, every sum made afresh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby

from simpy.events import EventPriority

from pipelinerl.config.environment import PrefixCaching
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate
from sim.clock import CLUSTER_PRIORITY, Clock, Wake
from sim.interface import EngineHost, EngineSettings, Request


class StepByStepEngine:
    """An engine that wakes at every boundary. docs/simulator.md has the rules."""

    def __init__(self, clock: Clock, host: EngineHost, engine_id: int, settings: EngineSettings) -> None:
        self.version = settings.version
        self._clock = clock
        self._host = host
        self._engine_id = engine_id
        self._settings = settings
        self._num_slots = len(settings.decode.batch_ticks) - 1
        self._running: list[Request] = []  # in order of admission
        self._waiting: list[Request] = []
        self._token_versions: dict[int, list[int]] = {}  # by rollout, the version that sampled each token
        self._row = 1 if settings.drafting is None else settings.drafting.row_tokens  # tokens of a rollout in a step
        self._joined_with: dict[int, int] = {}  # by rollout, the tokens it had when it joined the batch
        self._steps: dict[int, int] = {}  # and its steps since
        self._idle: dict[int, int] = {}  # rollouts between two turns -> tokens they have in the KV cache
        self._sent: dict[int, int] = {}  # rollouts that come with their KV cache -> tokens in it
        self._chunked: Request | None = None  # whose prefill is under way, in chunks
        self._chunked_tokens = 0  # of it that are in the KV cache
        self._prefill_ticks = 0  # charged to the next step
        self._step: tuple[int, int] | None = None  # under way: tick of its start, ticks of prefill in it
        self._recomputes = False  # whether running requests are prefilled again in the next step: their cache is old
        # Calls not yet taken up, each with the tick of its arrival.
        self._arrivals: list[tuple[int, Request]] = []
        self._calls: list[tuple[int, Callable[[], None]]] = []
        self._update: tuple[int, int, WeightUpdate] | None = None
        self._pausing = False
        self._suspend_at: int | None = None
        self._suspended_since: int | None = None
        self._at_boundary = False
        self._next_boundary: tuple[int, Wake] | None = None  # None: idle, and nothing is asked

    # -------------------------------------------------------------------------------------- requests

    def submit(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at``."""
        self._arrivals.append((at, request))
        self._arrivals.sort(key=lambda arrival: arrival[0])  # stable: in order of submission at the same tick
        self._wake_if_idle()

    def receive(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at`` whose KV cache an engine that only prefills has."""
        self._sent[request.rollout_id] = request.prompt_tokens + request.spans.num_tokens
        self.submit(request, at)

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; no effect if it has ended."""
        self._calls.append((self._clock.now, partial(self._abort, rollout_id)))
        self._wake_if_idle()

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""
        assert self._update is None
        self._update = (at, version, weight_update)
        self._wake_if_idle()

    def suspend(self) -> None:
        """Stop decoding, with everything in progress kept, until new weights are loaded."""
        self._suspend_at = self._clock.now
        self._wake_if_idle()

    def disturb(self, still_ticks: int, settings: EngineSettings) -> None:
        """Stand still for so many ticks, then decode and prefill at the costs of ``settings``."""
        self._calls.append((self._clock.now, partial(self._disturb, still_ticks, settings)))
        self._wake_if_idle()

    def kv_cache_share(self) -> float:
        """Return the share of the KV cache that requests in progress have."""
        held = 0 if self._chunked is None else self._cached(self._chunked) + self._row
        return (sum(map(self._cached, self._running)) + held) / self._settings.kv_cache_tokens

    def end(self) -> list[tuple[Request, VersionSpans]]:
        """Return the rollouts in progress, in order of id, each with the tokens it has at this tick."""
        if self._next_boundary is not None and self._next_boundary[0] == self._clock.now:
            self._end_step()  # it ends exactly now, so it counts
        self._count_time()
        self._next_boundary = None
        return [(one, self._spans(one)) for one in sorted(self._all(), key=lambda one: one.rollout_id)]

    # ------------------------------------------------------------------------------------ boundaries

    def _boundary(self, wake: Wake) -> None:
        """Follow the five rules, in their order."""
        if self._next_boundary is None or self._next_boundary[1] is not wake:
            return  # an idle engine was asked for something earlier
        now = self._clock.now
        idle = self._takes_up_at_once()
        self._at_boundary = True
        self._end_step()
        if self._pausing:
            self._end_pause()
        self._report_finished()
        self._take_calls(until=now if idle else now - 1)
        if not self._pausing and self._suspended_since is None:
            preempted = self._preempt()
            self._recompute_if_due()
            if not preempted:
                self._admit()
            self._drop_idle()
        self._at_boundary = False
        self._plan(now)

    def _end_step(self) -> None:
        """Add a token to every running rollout, unless the engine is paused or suspended."""
        self._count_time()
        if not self._pausing and self._suspended_since is None:
            gained = [(request, self._gained(request)) for request in self._running]
            for request, tokens in gained:
                self._tokens(request).extend([self.version] * tokens)

    def _gained(self, request: Request) -> int:
        """Return the tokens that the step gives a rollout: one, and drafted ones up to the first that is refused."""
        drafting, number = self._settings.drafting, request.rollout_id
        if drafting is None:
            return 1
        self._steps[number] += 1
        left = request.length - len(self._tokens(request))
        tokens = 1
        if self._drafts():
            chance = drafting.chances(number, self._joined_with[number], self._steps[number])[-1]
            acceptance = drafting.acceptance_of(self.version)
            while tokens < self._row and chance < acceptance**tokens:
                tokens += 1
        tokens = min(tokens, left)
        drafting.num_steps, drafting.num_tokens = drafting.num_steps + 1, drafting.num_tokens + tokens
        return tokens

    def _drafts(self) -> bool:
        """Whether rollouts of the batch draft in a step of so many."""
        drafting = self._settings.drafting
        return drafting is not None and (drafting.off_above is None or len(self._running) <= drafting.off_above)

    def _count_time(self) -> None:
        """Note how long the step that is under way has filled caches, which comes first, and decoded."""
        if self._step is None:
            return
        (start, prefill_ticks), self._step = self._step, None
        ticks = self._clock.now - start
        prefill_ticks = min(ticks, prefill_ticks)
        for request in self._running:
            request.prefill_ticks += prefill_ticks
            request.decode_ticks += ticks - prefill_ticks
        if self._chunked is not None:
            self._chunked.prefill_ticks += ticks

    def _report_finished(self) -> None:
        finished = [one for one in self._running if len(self._tokens(one)) == one.length]
        self._running = [one for one in self._running if one not in finished]
        for request in finished:
            spans = self._spans(request)
            if request.goes_on and self._settings.prefix_cache is not PrefixCaching.OFF:
                self._idle.pop(request.rollout_id, None)
                self._idle[request.rollout_id] = self._cached(request)
            del self._token_versions[request.rollout_id]
            self._host.rollout_finished(self._engine_id, request, spans)

    def _take_calls(self, until: int) -> None:
        while self._calls and self._calls[0][0] <= until:
            self._calls.pop(0)[1]()
        update_at = self._update[0] if self._update is not None else until + 1
        while self._arrivals and self._arrivals[0][0] <= until and self._arrivals[0][0] < update_at:
            self._waiting.append(self._arrivals.pop(0)[1])
        if self._suspend_at is not None and self._suspend_at <= until:
            self._suspend_at, self._suspended_since = None, self._clock.now
        if update_at <= until:
            self._begin_update()

    def _abort(self, rollout_id: int) -> None:
        for request in [one for one in self._all() if one.rollout_id == rollout_id]:
            self._end_early(request)

    def _disturb(self, still_ticks: int, costs: EngineSettings) -> None:
        self._settings = replace(self._settings, decode=costs.decode, prefill=costs.prefill)
        if self._running or self._chunked:
            self._prefill_ticks += still_ticks

    def _end_early(self, request: Request) -> None:
        request.keep(self._spans(request))  # in case it is submitted again
        self._running = [one for one in self._running if one is not request]
        self._waiting = [one for one in self._waiting if one is not request]
        self._chunked = None if self._chunked is request else self._chunked
        self._arrivals = [arrival for arrival in self._arrivals if arrival[1] is not request]
        del self._token_versions[request.rollout_id]
        self._host.rollout_aborted(self._engine_id, request)

    def _preempt(self) -> bool:
        """Make room for the next step, last in first out; return whether anything had to leave."""
        capacity = self._settings.kv_cache_tokens
        preempted = False
        while capacity is not None and self._used() > capacity:
            request = self._running.pop() if self._chunked is None else self._chunked
            self._chunked = None
            self._waiting.insert(0, request)
            num_tokens = len(self._token_versions[request.rollout_id])
            self._host.rollout_preempted(self._engine_id, request.rollout_id, num_tokens)
            preempted = True
        return preempted

    def _recompute_if_due(self) -> None:
        """Charge the prefill of requests that still run after new weights."""
        if self._recomputes:
            self._recomputes = False
            self._prefill_ticks += sum(self._settings.prefill.ticks(self._cached(one)) for one in self._running)
            if self._chunked is not None:
                self._chunked_tokens = 0
                self._prefill_ticks += self._settings.prefill.fixed_ticks

    def _admit(self) -> None:
        """Prefill in order of admission: started prompts, then waiting rollouts, first come first served."""
        most = self._settings.step_tokens
        left = 2**62 if most is None else max(1, most - self._row * len(self._running))
        if self._chunked is not None:
            left -= self._chunk(self._chunked, left)
        while self._chunked is None and self._waiting and self._fits(self._waiting[0]):
            self._chunked = request = self._waiting.pop(0)
            self._chunked_tokens = self._idle.pop(request.rollout_id, 0) + self._sent.pop(request.rollout_id, 0)
            if self._chunked_tokens < self._cached(request):
                self._prefill_ticks += self._settings.prefill.fixed_ticks
            left -= self._chunk(request, left)

    def _chunk(self, request: Request, left: int) -> int:
        """Prefill up to ``left`` tokens of a rollout, which joins the batch with its last one; return their number."""
        cost, done, whole = self._settings.prefill, self._chunked_tokens, self._cached(request)
        self._chunked_tokens = end = min(whole, done + left)
        self._prefill_ticks += cost.linear_ticks * (end - done) + cost.square_ticks * (end**2 - done**2)
        if end == whole:
            if self._settings.tokens is not None:
                request.keep(self._spans(request))
                self._settings.tokens.begin(request, self.version)
            self._chunked = None
            self._running.append(request)
            self._joined_with[request.rollout_id], self._steps[request.rollout_id] = len(self._tokens(request)), 0
        return end - done

    def _drop_idle(self) -> None:
        """Drop the caches of rollouts between two turns, the first that were left, until the next step fits."""
        capacity = self._settings.kv_cache_tokens
        while capacity is not None and self._idle and self._used() + sum(self._idle.values()) > capacity:
            del self._idle[next(iter(self._idle))]

    def _fits(self, request: Request) -> bool:
        """Return whether a slot is free, and room for its tokens and one more step of everybody."""
        capacity = self._settings.kv_cache_tokens
        batch = len(self._running) + 1
        room = capacity is None or self._context() + self._cached(request) + self._row * batch <= capacity
        return room and batch <= self._num_slots

    # --------------------------------------------------------------------------------------- weights

    def _begin_update(self) -> None:
        assert self._update is not None
        _, _, weight_update = self._update
        may_finish = self._suspended_since is None and (self._running or self._chunked or self._waiting)
        if weight_update is WeightUpdate.WAIT and may_finish:
            return
        if weight_update is WeightUpdate.ABORT:
            chunked = [] if self._chunked is None else [self._chunked]
            for request in [*self._running, *chunked, *self._waiting]:
                self._end_early(request)
        self._pausing = True

    def _end_pause(self) -> None:
        assert self._update is not None
        _, self.version, weight_update = self._update
        self._update = None
        self._pausing = False
        still_ticks = self._settings.pause_ticks
        if self._suspended_since is not None:
            still_ticks = self._clock.now - self._suspended_since
            self._suspended_since = None
        self._recomputes = weight_update is WeightUpdate.RECOMPUTE
        if self._recomputes or self._settings.prefix_cache is PrefixCaching.SALTED:
            self._idle.clear()
            self._sent.clear()
        if self._settings.tokens is not None and self._running:
            num_tokens = [len(self._tokens(one)) for one in self._running]
            self._settings.tokens.go_on(self._running, num_tokens, self.version, recompute=self._recomputes)
        self._host.weights_loaded(self._engine_id, self.version, still_ticks)

    # -------------------------------------------------------------------------------------- planning

    def _takes_up_at_once(self) -> bool:
        """Whether it makes no steps and waits for a request."""
        return not self._pausing and (not (self._running or self._chunked) or self._suspended_since is not None)

    def _wake_if_idle(self) -> None:
        """Schedule a boundary if the engine is idle and has a call to take up."""
        if not self._at_boundary and self._takes_up_at_once():
            self._plan(self._clock.now)

    def _plan(self, now: int) -> None:
        """Schedule the next boundary: the end of the pause, of the next step, or the first request."""
        decode = self._settings.decode
        if self._pausing:
            at = now + self._settings.pause_ticks
        elif not self._takes_up_at_once():
            token_ticks = decode.context_ticks + (decode.draft_context_ticks if self._drafts() else 0)
            step_ticks = decode.batch_ticks[len(self._running)] + token_ticks * self._context()
            at = now + self._prefill_ticks + step_ticks
            self._step = (now, self._prefill_ticks)
            self._prefill_ticks = 0
        else:
            calls = [one[0] for one in (*self._arrivals, *self._calls)]
            if self._update is not None:
                calls.append(self._update[0])
            if self._suspend_at is not None:
                calls.append(self._suspend_at)
            if not calls:
                self._next_boundary = None
                return
            at = max(now, min(calls))
        wake = Wake(self._clock, at - now, EventPriority(CLUSTER_PRIORITY + 1 + self._engine_id), 0, self._boundary)
        self._next_boundary = (at, wake)

    # ---------------------------------------------------------------------------------------- tokens

    def _tokens(self, request: Request) -> list[int]:
        """Return the versions of its tokens, one by one; those it came with are written out at first sight."""
        if request.rollout_id not in self._token_versions:
            given: list[int] = []
            for version, end in zip(request.spans.versions, request.spans.ends, strict=True):
                given += [version] * (end - len(given))
            self._token_versions[request.rollout_id] = given
        return self._token_versions[request.rollout_id]

    def _spans(self, request: Request) -> VersionSpans:
        """Return the versions of its tokens as runs of equal ones."""
        runs = [(version, len(list(run))) for version, run in groupby(self._tokens(request))]
        return VersionSpans(tuple(version for version, _ in runs), tuple(accumulate(length for _, length in runs)))

    def _cached(self, request: Request) -> int:
        """Return the tokens it has in the KV cache while it runs."""
        return request.prompt_tokens + len(self._tokens(request))

    def _context(self) -> int:
        """Return the tokens in the KV cache of running sequences."""
        return sum(self._cached(request) for request in self._running)

    def _used(self) -> int:
        """Return the tokens in the KV cache with the next step's, room for chunked prefills included."""
        held = 0 if self._chunked is None else self._cached(self._chunked) + self._row
        return self._context() + self._row * len(self._running) + held

    def _all(self) -> list[Request]:
        chunked = [] if self._chunked is None else [self._chunked]
        return [*self._running, *chunked, *self._waiting, *(request for _, request in self._arrivals)]
