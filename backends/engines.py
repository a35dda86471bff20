"""All engines of a run by engine id, their weights, and the restart of lost ones.

Theory of operation. Any call can find that an engine is lost. However many calls do, the engine is started again once,
and it gets the newest published weights before it is *up* again. A task that needs an engine waits until it is up, and
until it *may generate*: when a run is resumed from a checkpoint, engines have no weights that the scheduler knows of
before the first publication.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from backends.interface import Engine, Generated, GenerateRequest, UpdateTimes, Weights
from pipelinerl.errors import EngineLostError
from pipelinerl.scheduler.events import WeightUpdate

LOG = logging.getLogger("pipelinerl")


class EngineHandle:
    """An engine, and its state as the driver knows it (mutable)."""

    def __init__(self, engine_id: int, engine: Engine) -> None:
        self.engine_id = engine_id
        self.engine = engine
        self.version = 0  # that it has loaded
        self.up = asyncio.Event()  # it answers
        self.may_generate = asyncio.Event()  # its weights are what it says they are
        self.idle = asyncio.Event()  # no rollout is in progress
        self.idle.set()
        self._num_in_flight = 0

    def count(self, change: int) -> None:
        """Count rollouts in progress."""
        self._num_in_flight += change
        if self._num_in_flight:
            self.idle.clear()
        else:
            self.idle.set()


class EnginePool:
    """The engines of a run.

    Args:
        engines: By engine id; not yet started.
        restarts: Times a lost engine is started again, in all (count).
        spawn: Starts a task; the run ends if it fails.
        on_update: Called with the times of every update.
        on_restart: Called when a lost engine is up again.
        bring_back: Has an engine that has been started again load ``newest``, then sets ``up``.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine],
        *,
        restarts: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_update: Callable[[UpdateTimes], None],
        on_restart: Callable[[], None],
        bring_back: Callable[[EngineHandle], Coroutine[Any, Any, None]],
    ) -> None:
        self._handles = {engine_id: EngineHandle(engine_id, engine) for engine_id, engine in engines.items()}
        self._restarts_left = restarts
        self._spawn, self._on_update, self._on_restart = spawn, on_update, on_restart
        self._bring_back = bring_back
        self.newest: Weights | None = None
        """Published last."""
        self._closing = False

    def __getitem__(self, engine_id: int) -> EngineHandle:
        return self._handles[engine_id]

    def __iter__(self) -> Iterator[EngineHandle]:
        return iter(self._handles.values())

    def __len__(self) -> int:
        return len(self._handles)

    async def start(self) -> None:
        """Start all engines, at version 0."""
        await asyncio.gather(*(handle.engine.start() for handle in self))
        for handle in self:
            handle.up.set()

    def may_generate(self) -> None:
        """Say that the weights of all engines are what they say they are."""
        for handle in self:
            handle.may_generate.set()

    async def load(self, weights: Weights) -> None:
        """Give all engines these weights, outside of the schedule; nothing is in progress."""
        self.newest = weights
        await asyncio.gather(*(self._bring_to(handle, weights, WeightUpdate.KEEP) for handle in self))

    async def generate(self, handle: EngineHandle, request: GenerateRequest) -> Generated:
        """Generate one answer, over as many restarts as it takes."""
        while True:
            await handle.up.wait()
            try:
                return await handle.engine.generate(request)
            except EngineLostError as error:
                self.lost(handle, error)

    async def update(self, handle: EngineHandle, weights: Weights, weight_update: WeightUpdate) -> float:
        """Bring an engine to a version, over as many restarts as it takes; return how long it stood still (s)."""
        if weight_update is WeightUpdate.WAIT and handle.may_generate.is_set():
            await handle.idle.wait()  # the scheduler starts nothing on it meanwhile
        times = await self._bring_to(handle, weights, weight_update)
        if times is None:
            return 0.0
        self._on_update(times)
        return times.total_s

    async def _bring_to(
        self, handle: EngineHandle, weights: Weights, weight_update: WeightUpdate
    ) -> UpdateTimes | None:
        """Bring an engine to a version; return None if a restart has brought it there."""
        while True:
            await handle.up.wait()
            if handle.version >= weights.version:
                return None
            try:
                times = await handle.engine.update(weights, weight_update)
            except EngineLostError as error:
                self.lost(handle, error)
                continue
            handle.version = weights.version
            return times

    def lost(self, handle: EngineHandle, error: EngineLostError) -> None:
        """Have a lost engine started again, once however many notice."""
        if not handle.up.is_set() or self._closing:
            return
        handle.up.clear()
        LOG.warning("engine %d lost: %s", handle.engine_id, error)
        self._spawn(self._restart(handle, error))

    async def _restart(self, handle: EngineHandle, error: EngineLostError) -> None:
        while True:
            if not self._restarts_left:
                raise error
            self._restarts_left -= 1
            try:
                await handle.engine.shutdown()
                await handle.engine.start()
                handle.version = 0
                await self._bring_back(handle)
            except EngineLostError as again:
                error = again
                LOG.warning("engine %d lost again: %s", handle.engine_id, error)
                continue
            self._on_restart()
            return

    async def sleep(self) -> None:
        """Have all engines give their memory up, those that are being started again included."""
        await asyncio.gather(*(self._sleep(handle) for handle in self))

    async def _sleep(self, handle: EngineHandle) -> None:
        while True:
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
