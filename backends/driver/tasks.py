"""The asyncio tasks of a run, of which the first that fails ends it, and the clock of their time-outs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from pipelinerl.errors import RunInterruptedError

T = TypeVar("T")
LOG = logging.getLogger("pipelinerl")
TICK_S, LONGEST_TICK_S = 1.0, 10.0
"""Between two looks at the clock; if more passes the process stood still."""


class DriverLoop(asyncio.SelectorEventLoop):
    """Its clock stands while this process does (Ctrl-Z, a job scheduler's SIGSTOP): nobody else was late then."""

    _seen_s, _stood_s = math.inf, 0.0

    def __init__(self) -> None:
        super().__init__()
        self._tick()

    def time(self) -> float:
        """Return the seconds by which time-outs are counted."""
        now_s = super().time()
        gap_s = now_s - self._seen_s
        if gap_s > LONGEST_TICK_S:
            self._stood_s += gap_s
            LOG.warning("this process, or its event loop, stood still for %.0f s; time-outs do not count them", gap_s)
        self._seen_s = now_s
        return now_s - self._stood_s

    def _tick(self) -> None:
        self.call_later(TICK_S, self._tick)


async def all_of(*works: Awaitable[Any]) -> list[Any]:
    """Return the results of work done together; if some of it raises, or this is cancelled, the rest ends first."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class RunTasks:
    """Starts tasks and keeps the first failure."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        """Set at a stop of the scheduler, an interruption, or a failure."""
        self.failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; the run ends if it fails."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def fail(self, error: BaseException) -> None:
        """End the run with this error, unless another one came first."""
        self.failure = self.failure or error
        self.ended.set()

    async def unless_ended(self, work: Coroutine[Any, Any, T], interrupted: str) -> T:
        """Return the result of work; if the run ends first, raise its failure or ``RunInterruptedError``."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self.ended.wait())
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise self.failure or RunInterruptedError(interrupted)

    async def cancel_all(self) -> None:
        """Cancel every task and wait until all have ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (error := None if task.cancelled() else task.exception()) is not None:
            self.fail(error)
