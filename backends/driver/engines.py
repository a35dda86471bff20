"""The engines of a run by engine id: their weights, the restart of lost ones, the replacement of those given up.

Theory of operation. The scheduler knows engine ids, each with room for H rollouts. Any call can find that an engine is
lost; it is restarted once, however many calls notice the loss, and gets the newest published weights before it is *up*
again. Calls wait until their engine is up; rollouts also until its version is *confirmed*: after a resume, the
scheduler knows the weights of an engine only from the first publication on.

An engine that cannot be started is given up: the engine that serves the fewest ids serves its id, too. For the
scheduler nothing changes; rollouts beyond an engine's room wait in it. While an engine drains, requests of all its ids,
and of evaluations, wait until it is *open*. Without any engine the run fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from backends.interface import Engine, Generated, GenerateRequest, UpdateTimes, Weights
from pipelinerl.errors import EngineLostError
from pipelinerl.scheduler.events import WeightUpdate

LOG = logging.getLogger("pipelinerl")
HOUR_S = 3600.0
K = TypeVar("K")
T = TypeVar("T")


class EngineHandle:
    """An engine, and its state as the driver knows it (mutable)."""

    def __init__(self, engine_id: int, engine: Engine) -> None:
        self.engine_id = engine_id
        self.engine = engine
        self.version = -1  # that it has loaded; older than any published
        self.loaded = asyncio.Event()  # anew for each version
        self.up = asyncio.Event()  # it answers
        self.idle = asyncio.Event()  # no request is in progress
        self.idle.set()
        self.open = asyncio.Event()  # it may be asked: it is not drained
        self.open.set()
        self._num_asked = self._num_closed = 0
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
        self._num_asked += 1
        self.idle.clear()
        try:
            return await self.engine.generate(request)
        finally:
            self._num_asked -= 1
            if not self._num_asked:
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


class EnginePool:
    """The engines of a run by engine id, not yet started.

    ``restarts_per_hour``: losses per engine and hour that the run survives. ``bring_back`` loads ``newest`` into a
    restarted engine, then sets ``up``.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine],
        *,
        restarts_per_hour: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        bring_back: Callable[[EngineHandle], Coroutine[Any, Any, None]],
    ) -> None:
        self._serving = {engine_id: EngineHandle(engine_id, engine) for engine_id, engine in engines.items()}
        self._restarts_per_hour = restarts_per_hour
        self._confirmed = {engine_id: asyncio.Event() for engine_id in self._serving}
        self._losses_s: deque[float] = deque()  # the times of those within an hour
        self._spawn, self._bring_back = spawn, bring_back
        self.newest: Weights | None = None
        self.closing = False
        self._ending = asyncio.Lock()

    def __getitem__(self, engine_id: int) -> EngineHandle:
        return self._serving[engine_id]

    def __iter__(self) -> Iterator[EngineHandle]:
        """Yield the engines that have not been given up."""
        return (handle for engine_id, handle in self._serving.items() if handle.engine_id == engine_id)

    @property
    def engine_ids(self) -> tuple[int, ...]:
        """Engine ids that the scheduler knows."""
        return tuple(self._serving)

    async def start(self) -> None:
        """Start all engines; one that fails twice is given up. ``EngineLostError`` if all do."""
        handles = list(self)
        lost = await _start(handles)
        if 0 < len(lost) < len(handles):  # if all fail, a second start would, too
            for handle, error in lost.items():
                LOG.warning("engine %d is started once more: %s", handle.engine_id, error)
                await handle.engine.shutdown()
            lost = await _start(lost)
        for handle, error in lost.items():
            if len(lost) == len(handles):
                raise error
            await self._give_up(handle, error)

    async def serving(self, engine_id: int) -> EngineHandle:
        """Wait until the engine of an id is up and open; return it."""
        while True:
            handle = self._serving[engine_id]
            await handle.up.wait()
            await handle.open.wait()
            if handle.up.is_set() and handle.open.is_set() and handle is self._serving[engine_id]:
                return handle

    async def generating(self, engine_id: int, version: int) -> EngineHandle:
        """Wait until the engine of an id is up, open, its version confirmed, and not older than a rollout's tokens."""
        await self._confirmed[engine_id].wait()
        while max(0, (handle := await self.serving(engine_id)).version) < version:
            await handle.loaded.wait()
        return handle

    async def generate(self, handle: EngineHandle, request: GenerateRequest) -> Generated:
        """Generate one answer, over as many restarts as it takes."""
        while True:
            handle = await self.serving(handle.engine_id)
            try:
                return await handle.generate(request)
            except EngineLostError as error:
                if self.closing:
                    raise
                self.lost(handle, error)

    async def update(self, engine_id: int, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes | None:
        """Bring the engine of an id to a version; return None if another call or a restart has done it, or will."""
        if weight_update is not WeightUpdate.WAIT:
            return await self._load(engine_id, weights, weight_update)
        with self._serving[engine_id].closed():  # the scheduler starts rollouts of its other ids meanwhile
            while not (handle := self._serving[engine_id]).idle.is_set() and handle.lacks(weights):
                await handle.idle.wait()
            return await self._load(engine_id, weights, weight_update)

    async def _load(self, engine_id: int, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes | None:
        if (handle := self._serving[engine_id]).up.is_set():
            async with handle.changing:
                if handle.lacks(weights) and not self.closing:
                    try:
                        return await handle.load(weights, weight_update)
                    except EngineLostError as error:
                        self.lost(handle, error)
        return None

    def confirm(self, engine_id: int) -> None:
        """Confirm the version of an id, which generates from now on: its engine has it whenever it is up."""
        self._confirmed[engine_id].set()

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Wait until no engine has a request in progress; none gets one inside the block."""
        with contextlib.ExitStack() as stack:
            for handle in (handles := list(self)):
                stack.enter_context(handle.closed())
            for handle in handles:
                await handle.idle.wait()
            yield

    def lost(self, handle: EngineHandle, error: EngineLostError) -> None:
        """Restart a lost engine; further reports of the same loss do nothing."""
        if not handle.up.is_set() or self.closing or self._serving[handle.engine_id] is not handle:
            return
        handle.up.clear()
        LOG.warning("engine %d lost: %s", handle.engine_id, error)
        self._spawn(self._restart(handle, error))

    async def _restart(self, handle: EngineHandle, error: EngineLostError) -> None:
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
                LOG.warning("engine %d lost again: %s", handle.engine_id, error)
                continue
            return

    def _count_loss(self, error: EngineLostError) -> None:
        now_s = time.monotonic()
        while self._losses_s and now_s - self._losses_s[0] >= HOUR_S:
            self._losses_s.popleft()
        if len(self._losses_s) >= self._restarts_per_hour * len(self._serving):
            raise error
        self._losses_s.append(now_s)

    async def _give_up(self, handle: EngineHandle, error: EngineLostError) -> None:
        """Give the ids of an engine that cannot start to another engine; ``EngineLostError`` if there is none."""
        others = [one for one in self if one is not handle]
        if not others:
            raise error
        served = list(self._serving.values())
        host = min(others, key=lambda one: (not one.up.is_set(), served.count(one)))
        LOG.warning("engine %d given up, engine %d serves its id: %s", handle.engine_id, host.engine_id, error)
        self._serving = {engine_id: host if its is handle else its for engine_id, its in self._serving.items()}
        handle.up.set()  # wakes the calls that wait for it: ``serving`` returns the new engine
        handle.loaded.set()
        await handle.engine.shutdown()

    async def sleep(self) -> None:
        """Have all engines give up their memory; until ``wake`` none starts or loads."""
        await asyncio.gather(*(self._sleep(handle) for handle in self))

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
        await asyncio.gather(*(self._wake(handle) for handle in self))

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
            for result in await asyncio.gather(*(handle.engine.shutdown() for handle in self), return_exceptions=True):
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
