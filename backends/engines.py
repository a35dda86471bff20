"""All engines of a run: their weights, and how a lost one comes back.

Theory of operation. An engine that is lost is noticed by whoever called it last; however many notice, it is started
again once, and gets the newest published weights before it is *up* again. Whoever needs an engine waits until it
is up, and until it *may generate*: when a run goes on from a checkpoint, engines have no weights that the scheduler
knows of before the first publication.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from backends.interface import Engine, Generated, GenerateRequest, UpdateTimes, Weights
from pipelinerl.errors import EngineLostError
from pipelinerl.scheduler.events import WeightUpdate

LOG = logging.getLogger("pipelinerl")


class EngineHandle:
    """An engine and what is known of it (mutable)."""

    def __init__(self, index: int, engine: Engine) -> None:
        self.index = index
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
        engines: Not yet started.
        restarts: Times a lost engine is started again, in all (count).
        spawn: Starts a task; the run ends if it fails.
        on_update: Told the times of every update.
        on_restart: Called when a lost engine is up again.
        bring_back: Has an engine that has been started again load ``newest``, then sets ``up``.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        restarts: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_update: Callable[[UpdateTimes], None],
        on_restart: Callable[[], None],
        bring_back: Callable[[EngineHandle], Coroutine[Any, Any, None]],
    ) -> None:
        self.seats = [EngineHandle(index, engine) for index, engine in enumerate(engines)]
        self._restarts_left = restarts
        self._spawn, self._on_update, self._on_restart = spawn, on_update, on_restart
        self._bring_back = bring_back
        self.newest: Weights | None = None
        self._closing = False

    async def start(self) -> None:
        """Start all engines, at version 0."""
        await asyncio.gather(*(seat.engine.start() for seat in self.seats))
        for seat in self.seats:
            seat.up.set()

    def may_generate(self) -> None:
        """Say that the weights of all engines are what they say they are."""
        for seat in self.seats:
            seat.may_generate.set()

    def published(self, weights: Weights) -> None:
        """Take note of the newest weights."""
        self.newest = weights

    async def load(self, weights: Weights) -> None:
        """Give all engines these weights, outside of the schedule; nothing is in progress."""
        self.newest = weights
        await asyncio.gather(*(self._bring_to(seat, weights, WeightUpdate.KEEP) for seat in self.seats))

    async def generate(self, seat: EngineHandle, request: GenerateRequest) -> Generated:
        """Generate one answer, over as many restarts as it takes."""
        while True:
            await seat.up.wait()
            try:
                return await seat.engine.generate(request)
            except EngineLostError as error:
                self.lost(seat, error)

    async def drained(self) -> None:
        """Return when no rollout is in progress on any engine that may generate; nothing is started meanwhile."""
        await asyncio.gather(*(seat.idle.wait() for seat in self.seats if seat.may_generate.is_set()))

    async def update(self, seat: EngineHandle, weights: Weights, weight_update: WeightUpdate) -> float:
        """Bring an engine to a version, over as many restarts as it takes; return how long it stood still (s)."""
        if weight_update is WeightUpdate.WAIT and seat.may_generate.is_set():
            await seat.idle.wait()  # the scheduler starts nothing on it meanwhile
        times = await self._bring_to(seat, weights, weight_update)
        if times is None:
            return 0.0
        self._on_update(times)
        return times.total_s

    async def _bring_to(self, seat: EngineHandle, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes | None:
        """Bring an engine to a version; return None if a restart has brought it there."""
        while True:
            await seat.up.wait()
            if seat.version >= weights.version:
                return None
            try:
                times = await seat.engine.update(weights, weight_update)
            except EngineLostError as error:
                self.lost(seat, error)
                continue
            seat.version = weights.version
            return times

    def lost(self, seat: EngineHandle, error: EngineLostError) -> None:
        """Have a lost engine started again, once however many notice."""
        if not seat.up.is_set() or self._closing:
            return
        seat.up.clear()
        LOG.warning("engine %d lost: %s", seat.index, error)
        self._spawn(self._restart(seat, error))

    async def _restart(self, seat: EngineHandle, error: EngineLostError) -> None:
        while True:
            if not self._restarts_left:
                raise error
            self._restarts_left -= 1
            try:
                await seat.engine.shutdown()
                await seat.engine.start()
                seat.version = 0
                await self._bring_back(seat)
            except EngineLostError as again:
                error = again
                LOG.warning("engine %d lost again: %s", seat.index, error)
                continue
            self._on_restart()
            return

    async def sleep(self) -> None:
        """Have all engines give their memory up, those that are being started again included."""
        await asyncio.gather(*(self._sleep(seat) for seat in self.seats))

    async def _sleep(self, seat: EngineHandle) -> None:
        while True:
            await seat.up.wait()
            try:
                await seat.engine.sleep()
            except EngineLostError as error:
                self.lost(seat, error)
            else:
                return

    async def wake(self) -> None:
        """Have all engines take their memory back; one that was lost asleep is awake when it is up again."""
        await asyncio.gather(*(self._wake(seat) for seat in self.seats))

    async def _wake(self, seat: EngineHandle) -> None:
        try:
            await seat.engine.wake()
        except EngineLostError as error:
            self.lost(seat, error)

    def close(self) -> None:
        """Start no engine again from now on."""
        self._closing = True

    async def shutdown(self) -> None:
        """End all engines; log those that cannot be ended."""
        self.close()
        for result in await asyncio.gather(*(seat.engine.shutdown() for seat in self.seats), return_exceptions=True):
            if isinstance(result, BaseException):
                LOG.warning("an engine could not be shut down: %s", result)
