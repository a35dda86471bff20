"""The engines of a run: their weights, the restart of lost ones, the ids by which the scheduler knows them.

Theory of operation. An engine has a *place*: its accelerators, and the object that starts it there. Any call can find
that it is lost. Then it leaves: its requests end, and the scheduler hears of it by ``Fleet``. It is started again in
its place, once, however many calls notice the loss. With the newest published weights it is *up*, and joins under a
new id. A place where it cannot be started is given up: it joins again when its accelerators are back, as a place that
is added joins when there are any. Without any engine the run fails.

An engine that is removed takes nothing new. It ends with its last request, or after a notice: then its rollouts go on
elsewhere with all their tokens. Its place is free for the next engine that is added.

Calls of evaluations wait until their engine is up; where its place is given up, another engine answers. While an engine
waits for its requests to load weights, new ones wait until it is *open*.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

from backends.driver.tasks import all_of
from backends.interface import Engine, Generated, GenerateRequest, MoreEngines, UpdateTimes, Weights
from pipelinerl.errors import EngineLostError
from pipelinerl.scheduler.events import WeightUpdate

LOG = logging.getLogger("pipelinerl")
HOUR_S = 3600.0
RETRY_S = 20.0
"""Between two starts at a place that may have no accelerators."""
END_S = 30.0
"""For the requests of an engine that is removed to end, once they are aborted."""
K = TypeVar("K")
T = TypeVar("T")


class EngineHandle:
    """An engine, and its state as the driver knows it (mutable)."""

    def __init__(self, place: int, engine: Engine, *, engine_id: int | None) -> None:
        self.place, self.engine = place, engine
        self.engine_id = engine_id  # None: the scheduler does not know it
        self.reported = 0  # newest version that the scheduler knows of
        self.version = -1  # that it has loaded; older than any published
        self.loaded = asyncio.Event()  # anew for each version
        self.up = asyncio.Event()  # it answers
        self.idle = asyncio.Event()  # no request is in progress
        self.idle.set()
        self.open = asyncio.Event()  # it may be asked: it does not wait to load weights
        self.open.set()
        self.was_lost = False
        self.asked: set[int] = set()  # rollouts in progress
        self._num_closed = 0
        self.changing = asyncio.Lock()
        """Held while it starts, loads or sleeps."""

    async def load(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        """Load a version; ``changing`` is held."""
        times = await self.engine.update(weights, weight_update)
        self.version, before, self.loaded = weights.version, self.loaded, asyncio.Event()
        before.set()
        return times

    def lacks(self, weights: Weights) -> bool:
        """Return whether it is up with older weights."""
        return self.up.is_set() and self.version < weights.version

    async def generate(self, request: GenerateRequest) -> Generated:
        """Generate one answer; ``serving`` has just returned this engine."""
        self.asked.add(request.rollout_id)
        self.idle.clear()
        try:
            return await self.engine.generate(request)
        finally:
            self.asked.remove(request.rollout_id)
            if not self.asked:
                self.idle.set()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let nothing new begin inside the block."""
        self._num_closed += 1
        self.open.clear()
        try:
            yield
        finally:
            self._num_closed -= 1
            if not self._num_closed:
                self.open.set()


class Fleet(Protocol):
    """Hears of engines that come and go."""

    def leaves(self, engine_id: int) -> None:
        """An engine is lost or removed; its requests end."""

    def left(self, engine_id: int) -> None:
        """They have ended, those that wait for it excepted: ``generating`` returns None for them."""

    def joins(self, handle: EngineHandle) -> None:
        """An engine is up, and may get an id by ``name``."""


class EnginePool:
    """The engines of a run by place, not yet started.

    ``engine_ids``: of the scheduler, for as many places. ``restarts_per_hour``: losses per engine and hour that the run
    survives. ``bring_back`` loads ``newest`` into an engine that has started, then calls ``joins``. ``more`` None:
    engines cannot be added or removed, and places that are given up stay so.
    """

    def __init__(
        self,
        engines: dict[int, Engine],
        *,
        engine_ids: Iterable[int],
        restarts_per_hour: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        bring_back: Callable[[EngineHandle], Coroutine[Any, Any, None]],
        more: MoreEngines | None = None,
    ) -> None:
        self._engines, self._more = engines, more
        without = set[int]() if more is None else more.vacant | more.absent
        ids = zip_longest([(place, one) for place, one in engines.items() if place not in without], engine_ids)
        self._handles = [EngineHandle(*one, engine_id=engine_id) for one, engine_id in ids if one is not None]
        self._others: list[EngineHandle] = []  # that wait for accelerators, or for their last requests
        self._by_id = {one.engine_id: one for one in self._handles if one.engine_id is not None}
        self._restarts_per_hour = restarts_per_hour
        self._most_losses = restarts_per_hour * len(self._handles)
        self._losses_s: deque[float] = deque()  # the times of those within an hour
        self._spawn, self._bring_back = spawn, bring_back
        self.fleet: Fleet | None = None
        self.newest: Weights | None = None
        self.closing = False
        self.asleep = False  # or about to fall asleep: no evaluation may begin
        self._ending = asyncio.Lock()

    def __getitem__(self, engine_id: int) -> EngineHandle:
        return self._by_id[engine_id]

    def __contains__(self, engine_id: int) -> bool:
        return engine_id in self._by_id

    def __iter__(self) -> Iterator[EngineHandle]:
        """Yield the engines that are not removed, and whose places have not been given up."""
        return iter(tuple(self._handles))

    def states(self) -> Iterator[tuple[EngineHandle, str]]:
        """Yield all engines, also those that are leaving or wait for accelerators, by place, and their states."""
        for handle in sorted((*self._handles, *self._others), key=lambda one: one.place):
            if handle in self._handles:
                yield handle, "up" if handle.up.is_set() else "starts"
            else:
                yield handle, "not started" if handle.engine_id is None else "is leaving"

    async def start(self) -> None:
        """Start all engines; one that fails twice is given up. ``EngineLostError`` if all do."""
        for place in () if self._more is None else sorted(self._more.absent):
            self._wait_for_accelerators(place, 0.0)
        handles = list(self)
        lost = await _start(handles)
        if 0 < len(lost) < len(handles):  # if all fail, a second start would, too
            for handle, error in lost.items():
                LOG.warning("engine %d is started once more: %s", handle.place, error)
                await handle.engine.shutdown()
            lost = await _start(lost)
        for handle, error in lost.items():
            await self._give_up(handle, error)

    async def _serving(self, handle: EngineHandle) -> EngineHandle:
        """Wait until an engine is up and open; return it, or another one if its place is given up."""
        while True:
            if handle not in self._handles:
                handle = min(self._handles, key=lambda one: not one.up.is_set())
            await handle.up.wait()
            await handle.open.wait()
            if handle.up.is_set() and handle.open.is_set() and handle in self._handles:
                return handle

    async def generating(self, engine_id: int, version: int) -> EngineHandle | None:
        """Wait until an engine is open, and not older than a rollout's tokens; return None if it has left."""
        while (handle := self._by_id.get(engine_id)) is not None:
            if not handle.open.is_set():
                await handle.open.wait()
            elif max(0, handle.version) < version:
                await handle.loaded.wait()
            else:
                break
        return handle

    async def generate(self, handle: EngineHandle, request: GenerateRequest) -> Generated:
        """Generate one answer, over as many restarts as it takes."""
        while True:
            handle = await self._serving(handle)
            try:
                return await handle.generate(request)
            except EngineLostError as error:
                if self.closing:
                    raise
                self.lost(handle, error)

    async def update(self, handle: EngineHandle, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes | None:
        """Bring an engine to a version; return None if another call or a restart has done it, or will."""
        if weight_update is not WeightUpdate.WAIT:
            return await self._load(handle, weights, weight_update)
        with handle.closed():  # evaluations ask meanwhile
            while not handle.idle.is_set() and handle.lacks(weights):
                await handle.idle.wait()
            return await self._load(handle, weights, weight_update)

    async def _load(self, handle: EngineHandle, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes | None:
        if handle.up.is_set():
            async with handle.changing:
                if handle.lacks(weights) and not self.closing:
                    try:
                        return await handle.load(weights, weight_update)
                    except EngineLostError as error:
                        self.lost(handle, error)
        return None

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Wait until no engine has a request in progress; none gets one inside the block."""
        with contextlib.ExitStack() as stack:
            for handle in (handles := list(self)):
                stack.enter_context(handle.closed())
            for handle in handles:
                await handle.idle.wait()
            yield

    def name(self, handle: EngineHandle, engine_id: int) -> None:
        """Let the scheduler know an engine by a new id, with the version that it has."""
        handle.engine_id, handle.reported = engine_id, max(0, handle.version)
        self._by_id[engine_id] = handle

    def joins(self, handle: EngineHandle) -> None:
        """Note that an engine that has started has the newest weights."""
        if handle in self._others:
            assert self._more is not None
            self._others.remove(handle)
            self._handles.append(handle)
            self._more.absent.remove(handle.place)
        handle.up.set()
        if self.fleet is not None:
            self.fleet.joins(handle)

    def lost(self, handle: EngineHandle, error: EngineLostError) -> None:
        """Have a lost engine leave, and restart it; further reports of the same loss do nothing."""
        if not handle.up.is_set() or self.closing or handle not in self._handles:
            return
        handle.up.clear()
        handle.was_lost = True
        LOG.warning("engine %d lost: %s", handle.place, error)
        self._spawn(self._restart(handle, self._forget(handle), error))

    def _forget(self, handle: EngineHandle) -> int | None:
        """Take an engine's id away, and return it."""
        engine_id, handle.engine_id = handle.engine_id, None
        if engine_id is not None:
            del self._by_id[engine_id]
            if self.fleet is not None and handle not in self._others:  # else it is known
                self.fleet.leaves(engine_id)
        handle.loaded.set()
        return engine_id

    async def _restart(self, handle: EngineHandle, engine_id: int | None, error: EngineLostError) -> None:
        await handle.engine.shutdown()
        await handle.idle.wait()
        if engine_id is not None and self.fleet is not None:
            self.fleet.left(engine_id)
        while not self.closing:
            self._count_loss(error)
            async with handle.changing:
                await handle.engine.shutdown()
                if self.closing:
                    return
                try:
                    await handle.engine.start()
                except EngineLostError as again:
                    if not self.closing:
                        await self._give_up(handle, again)
                    return
                if self.closing:
                    await handle.engine.shutdown()
                    return
                handle.version = -1
            try:
                await self._bring_back(handle)
            except EngineLostError as again:
                error = again
                LOG.warning("engine %d lost again: %s", handle.place, error)
                continue
            return

    def _count_loss(self, error: EngineLostError) -> None:
        now_s = time.monotonic()
        while self._losses_s and now_s - self._losses_s[0] >= HOUR_S:
            self._losses_s.popleft()
        if len(self._losses_s) >= self._most_losses:
            raise error
        self._losses_s.append(now_s)

    async def _give_up(self, handle: EngineHandle, error: EngineLostError) -> None:
        """Go on without an engine that cannot be started; raise its error if there is no other."""
        if len(self._handles) == 1:
            raise error
        again = "" if self._more is None else "; it is tried again until it starts"
        LOG.warning("engine %d given up: %s%s", handle.place, error, again)
        self._handles.remove(handle)
        self._forget(handle)
        handle.up.set()  # wakes the calls that wait for it
        await handle.engine.shutdown()
        if self._more is not None:
            self._wait_for_accelerators(handle.place, RETRY_S, was_lost=handle.was_lost)

    # ---------------------------------------------------------------------------- engines added and removed

    @property
    def can_change(self) -> bool:
        """Whether engines can be added and removed."""
        return self._more is not None

    def add(self) -> None:
        """Start one more engine, which joins once it has accelerators and the newest weights."""
        assert self._more is not None
        if vacant := self._more.vacant - {one.place for one in self._others}:
            self._more.vacant.remove(place := min(vacant))
        else:
            self._engines[place := len(self._engines)] = self._more.make(len(self._engines))
        self._most_losses += self._restarts_per_hour
        self._wait_for_accelerators(place, 0.0)

    def _wait_for_accelerators(self, place: int, after_s: float, *, was_lost: bool = False) -> None:
        assert self._more is not None
        self._more.absent.add(place)
        handle = EngineHandle(place, self._engines[place], engine_id=None)
        handle.was_lost = was_lost
        self._others.append(handle)
        self._spawn(self._start_late(handle, after_s))

    async def _start_late(self, handle: EngineHandle, after_s: float) -> None:
        before = ""
        while not self.closing:
            await asyncio.sleep(after_s)
            after_s = RETRY_S
            try:
                await handle.engine.start()
                if not self.closing:
                    handle.version = -1
                    await self._bring_back(handle)
                    return
            except EngineLostError as error:
                if str(error) != before:
                    LOG.warning("engine %d has not started: %s", handle.place, before := str(error))
            await handle.engine.shutdown()

    def remove(self, engine_id: int, *, notice_s: float) -> None:
        """Have an engine leave for good; there are others."""
        assert self._more is not None
        assert self.fleet is not None
        assert len(self._handles) > 1
        handle = self._by_id[engine_id]
        LOG.warning("engine %d leaves within %g s", handle.place, notice_s)
        self._handles.remove(handle)
        self._others.append(handle)
        self._more.vacant.add(handle.place)
        self._most_losses -= self._restarts_per_hour
        self.fleet.leaves(engine_id)
        self._spawn(self._end(handle, engine_id, notice_s))

    async def _end(self, handle: EngineHandle, engine_id: int, notice_s: float) -> None:
        assert self.fleet is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(notice_s):
                await handle.idle.wait()
        self._forget(handle)
        with contextlib.suppress(TimeoutError, EngineLostError):
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(handle.engine.abort(rollout_id) for rollout_id in tuple(handle.asked)))
                await handle.idle.wait()
        handle.up.clear()  # a transfer to it that breaks off is no failure of the others
        async with handle.changing:
            await handle.engine.shutdown()
        await handle.idle.wait()
        self._others.remove(handle)
        self.fleet.left(engine_id)

    async def sleep(self) -> None:
        """Have all engines give up their memory; until ``wake`` none starts or loads."""
        await all_of(*(self._sleep(handle) for handle in self))

    async def _sleep(self, handle: EngineHandle) -> None:
        await handle.changing.acquire()
        try:
            await handle.engine.sleep()
        except EngineLostError as error:
            self.lost(handle, error)
            async with self._ending:
                await handle.engine.shutdown()  # it gives up its memory

    async def wake(self) -> None:
        """Have all engines take their memory back; lost ones start again."""
        await all_of(*(self._wake(handle) for handle in self))
        self.asleep = False

    async def _wake(self, handle: EngineHandle) -> None:
        try:
            await handle.engine.wake()
        except EngineLostError as error:
            self.lost(handle, error)
        handle.changing.release()

    def close(self) -> None:
        """Start no engine again from now on."""
        self.closing = True

    async def shutdown(self) -> None:
        """End all engines; log failures to end. A second call waits for the first."""
        self.close()
        async with self._ending:
            engines = [handle.engine for handle in (*self._handles, *self._others)]
            for result in await asyncio.gather(*(one.shutdown() for one in engines), return_exceptions=True):
                if isinstance(result, BaseException):
                    LOG.warning("an engine could not be shut down: %s", result)


async def _start(handles: Iterable[EngineHandle]) -> dict[EngineHandle, EngineLostError]:
    started, lost = await gathered({handle: handle.engine.start() for handle in handles})
    for handle in started:
        handle.up.set()
    return lost


async def gathered(work: Mapping[K, Awaitable[T]]) -> tuple[dict[K, T], dict[K, EngineLostError]]:
    """Return the results of work at engines, and the lost engines; raise any other exception once all have ended."""
    done: dict[K, T] = {}
    lost: dict[K, EngineLostError] = {}
    for one, end in zip(work, await asyncio.gather(*work.values(), return_exceptions=True), strict=True):
        if isinstance(end, EngineLostError):
            lost[one] = end
        elif isinstance(end, BaseException):
            raise end
        else:
            done[one] = end
    return done, lost
