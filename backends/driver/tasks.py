"""The asyncio tasks of a run: the first one that fails ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pipelinerl.errors import RunInterruptedError

T = TypeVar("T")


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
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)
