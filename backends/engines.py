"""All engines of a run by engine id, their weights, the restart of lost ones, and the seats of those given up.

Theory of operation. The scheduler knows *seats*: engine ids, each with room for H rollouts. Any call can find that an
engine is lost. However many calls do, the engine is started again once, and it gets the newest published weights before
it is *up* again. Who needs an engine waits until it is up. Rollouts also wait until the weights of their seat are
*known*: when a run is resumed from a checkpoint, engines have none that the scheduler knows of before the first
publication.

An engine that cannot be started costs its seat: the engine with the fewest seats serves it from then on. The scheduler
goes on as before; what is more than an engine's room waits in that engine. Without any engine the run fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

from backends.interface import Engine, Generated, GenerateRequest, UpdateTimes, Weights
from pipelinerl.errors import EngineLostError
from pipelinerl.scheduler.events import WeightUpdate

LOG = logging.getLogger("pipelinerl")
HOUR_S = 3600.0
"""Time over which losses are counted (seconds)."""


class EngineHandle:
    """An engine, and its state as the driver knows it (mutable)."""

    def __init__(self, engine_id: int, engine: Engine) -> None:
        self.engine_id = engine_id
        self.engine = engine
        self.version = 0  # that it has loaded
        self.up = asyncio.Event()  # it answers
        self.idle = asyncio.Event()  # no rollout is in progress
        self.idle.set()
        self.updating = asyncio.Lock()
        self.num_in_flight = 0

    def count(self, change: int) -> None:
        """Count rollouts in progress."""
        self.num_in_flight += change
        if self.num_in_flight:
            self.idle.clear()
        else:
            self.idle.set()


class EnginePool:
    """The engines of a run.

    Args:
        engines: By engine id; not yet started.
        restarts_per_hour: Losses within an hour, at most, per engine of the run (count).
        spawn: Starts a task; the run ends if it fails.
        on_update: Called with the times of every update.
        on_restart: Called when a lost engine is up again.
        bring_back: Has an engine that has been started again load ``newest``, then sets ``up``.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine],
        *,
        restarts_per_hour: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_update: Callable[[UpdateTimes], None],
        on_restart: Callable[[], None],
        bring_back: Callable[[EngineHandle], Coroutine[Any, Any, None]],
    ) -> None:
        self._seats = {engine_id: EngineHandle(engine_id, engine) for engine_id, engine in engines.items()}
        self._restarts_per_hour = restarts_per_hour
        self._known = {seat: asyncio.Event() for seat in self._seats}  # its weights are what they are said to be
        self._losses_s: deque[float] = deque()  # the times of those within an hour
        self._spawn, self._on_update, self._on_restart = spawn, on_update, on_restart
        self._bring_back = bring_back
        self.newest: Weights | None = None
        """Published last."""
        self._closing = False

    def __getitem__(self, seat: int) -> EngineHandle:
        """Return the engine that serves a seat."""
        return self._seats[seat]

    def __iter__(self) -> Iterator[EngineHandle]:
        """Yield the engines that have not been given up."""
        return (handle for seat, handle in self._seats.items() if handle.engine_id == seat)

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def seats(self) -> tuple[int, ...]:
        """The engine ids that the scheduler knows."""
        return tuple(self._seats)

    async def start(self) -> None:
        """Start all engines, at version 0; those that cannot be started, tried twice, are given up, unless none can.

        Raises:
            EngineLostError: If none can be started.
        """
        handles = list(self)
        lost = await _start(handles)
        if 0 < len(lost) < len(handles):  # what ails all of them is not tried twice
            for handle, error in lost.items():
                LOG.warning("engine %d is started once more: %s", handle.engine_id, error)
                await handle.engine.shutdown()
            lost = await _start(lost)
        for handle, error in lost.items():
            if len(lost) == len(handles):
                raise error
            await self._give_up(handle, error)

    def may_generate(self) -> None:
        """Say that the weights of all engines are what they say they are."""
        for known in self._known.values():
            known.set()

    async def serving(self, seat: int) -> EngineHandle:
        """Return the engine that serves a seat, when it is up."""
        while True:
            handle = self._seats[seat]
            await handle.up.wait()
            if handle is self._seats[seat]:
                return handle

    async def generating(self, seat: int) -> EngineHandle:
        """Return the engine that serves a seat, when it is up and may generate."""
        await self._known[seat].wait()
        return await self.serving(seat)

    async def load(self, weights: Weights) -> None:
        """Give all engines these weights, outside of the schedule; nothing is in progress."""
        self.newest = weights
        await asyncio.gather(*(self._bring_to(seat, weights, WeightUpdate.KEEP) for seat in self.seats))

    async def generate(self, handle: EngineHandle, request: GenerateRequest) -> Generated:
        """Generate one answer, over as many restarts as it takes."""
        while True:
            handle = await self.serving(handle.engine_id)
            try:
                return await handle.engine.generate(request)
            except EngineLostError as error:
                if self._closing:
                    raise
                self.lost(handle, error)

    async def update(self, seat: int, weights: Weights, weight_update: WeightUpdate) -> float:
        """Bring a seat's engine to a version, unless it is lost; return how long it stood still (s)."""
        if weight_update is WeightUpdate.WAIT:
            await self.drained([seat])  # the scheduler starts nothing on it meanwhile
        times = await self._bring_to(seat, weights, weight_update)
        if times is None:
            return 0.0
        self.count_update(times)
        return times.total_s

    def has(self, seat: int, version: int) -> bool:
        """Return whether a seat's engine is up and has this version, or a newer one."""
        return self._seats[seat].up.is_set() and self._seats[seat].version >= version

    def known(self, seat: int) -> None:
        """Say that a seat's weights are from now on what they are said to be, once its engine is up."""
        self._known[seat].set()

    def count_update(self, times: UpdateTimes) -> None:
        """Count an update that is part of the schedule."""
        self._on_update(times)

    async def drained(self, seats: Iterable[int] | None = None) -> None:
        """Wait until nothing is in progress on the engines of seats whose weights are known; None: of all."""
        for seat in self.seats if seats is None else seats:
            while self._known[seat].is_set() and not self._seats[seat].idle.is_set():
                await self._seats[seat].idle.wait()

    async def _bring_to(self, seat: int, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes | None:
        """Bring a seat's engine to a version; return None if another seat has, or a restart has or will."""
        while (handle := self._seats[seat]).up.is_set():
            async with handle.updating:
                if handle.version >= weights.version:
                    return None
                if not handle.up.is_set():
                    continue
                try:
                    times = await handle.engine.update(weights, weight_update)
                except EngineLostError as error:
                    self.lost(handle, error)
                    continue
                handle.version = weights.version
                return times
        return None

    def lost(self, handle: EngineHandle, error: EngineLostError) -> None:
        """Have a lost engine started again, once however many notice."""
        if not handle.up.is_set() or self._closing or self._seats[handle.engine_id] is not handle:
            return
        handle.up.clear()
        LOG.warning("engine %d lost: %s", handle.engine_id, error)
        self._spawn(self._restart(handle, error))

    async def _restart(self, handle: EngineHandle, error: EngineLostError) -> None:
        while True:
            self._count_loss(error)
            await handle.engine.shutdown()
            try:
                await handle.engine.start()
            except EngineLostError as again:
                await self._give_up(handle, again)
                return
            handle.version = 0
            try:
                await self._bring_back(handle)
            except EngineLostError as again:
                error = again
                LOG.warning("engine %d lost again: %s", handle.engine_id, error)
                continue
            self._on_restart()
            return

    def _count_loss(self, error: EngineLostError) -> None:
        now_s = time.monotonic()
        while self._losses_s and now_s - self._losses_s[0] >= HOUR_S:
            self._losses_s.popleft()
        if len(self._losses_s) >= self._restarts_per_hour * len(self._seats):
            raise error
        self._losses_s.append(now_s)

    async def _give_up(self, handle: EngineHandle, error: EngineLostError) -> None:
        """Have another engine serve the seats of one that cannot be started.

        Raises:
            EngineLostError: If there is none.
        """
        others = [one for one in self if one is not handle]
        if not others:
            raise error
        served = list(self._seats.values())
        host = min(others, key=lambda one: (not one.up.is_set(), served.count(one)))
        LOG.warning("engine %d given up, engine %d serves its seat: %s", handle.engine_id, host.engine_id, error)
        self._seats = {seat: host if its is handle else its for seat, its in self._seats.items()}
        host.count(handle.num_in_flight)
        handle.count(-handle.num_in_flight)
        handle.up.set()  # who waits for it looks again
        await handle.engine.shutdown()

    async def sleep(self) -> None:
        """Have all engines give their memory up, those that are being started again included."""
        await asyncio.gather(*(self._sleep(handle) for handle in self))

    async def _sleep(self, handle: EngineHandle) -> None:
        while handle is self._seats[handle.engine_id]:
            await handle.up.wait()
            try:
                await handle.engine.sleep()
            except EngineLostError as error:
                self.lost(handle, error)
            else:
                return

    async def wake(self) -> None:
        """Have all engines take their memory back; one that was lost asleep is awake when it is up again."""
        await asyncio.gather(*(self._wake(handle) for handle in self))

    async def _wake(self, handle: EngineHandle) -> None:
        try:
            await handle.engine.wake()
        except EngineLostError as error:
            self.lost(handle, error)

    def close(self) -> None:
        """Start no engine again from now on."""
        self._closing = True

    async def shutdown(self) -> None:
        """End all engines; log those that cannot be ended."""
        self.close()
        for result in await asyncio.gather(*(handle.engine.shutdown() for handle in self), return_exceptions=True):
            if isinstance(result, BaseException):
                LOG.warning("an engine could not be shut down: %s", result)


async def _start(handles: Iterable[EngineHandle]) -> dict[EngineHandle, EngineLostError]:
    """Start engines together; return those that could not be started, and why."""
    lost: dict[EngineHandle, EngineLostError] = {}
    starts = {handle: handle.engine.start() for handle in handles}
    for handle, end in zip(starts, await asyncio.gather(*starts.values(), return_exceptions=True), strict=True):
        match end:
            case None:
                handle.up.set()
            case EngineLostError():
                lost[handle] = end
            case _:
                raise end
    return lost
