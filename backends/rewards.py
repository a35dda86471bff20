"""Calls of a user's reward function, in threads or in processes; a call is awaited until its time-out at most."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.worker_main import REWARDS
from backends.workers import Launch, LocalWorker, WorkerPool, ask
from pipelinerl.rl.config import TaskConfig

REWARD_THREADS = 8
"""Rewards computed at a time by threads (count)."""


class RewardThreads:
    """Some threads at a time, each for one call.

    They are daemons: one that hangs is given up, its place is free again, and the process can end. A thread pool of
    the standard library would wait for it for ever.

    Args:
        number: Calls at a time (count).
    """

    def __init__(self, number: int = REWARD_THREADS) -> None:
        self._room = asyncio.Semaphore(number)

    async def call(self, function: Callable[..., float], *arguments: Any, timeout_s: float) -> float:
        """Call a function in a thread and return what it returns.

        Raises:
            TimeoutError: If it takes longer than ``timeout_s`` seconds, once a place was free.
            Exception: Whatever it raises.
        """
        async with self._room:
            loop = asyncio.get_running_loop()
            outcome: asyncio.Future[float] = loop.create_future()

            def run() -> None:
                try:
                    result, error = float(function(*arguments)), None
                except BaseException as raised:
                    result, error = 0.0, raised
                with contextlib.suppress(RuntimeError):  # the loop has been closed: no task waits any more
                    loop.call_soon_threadsafe(settle, result, error)

            def settle(result: float, error: BaseException | None) -> None:
                if outcome.done():  # given up
                    return
                if error is None:
                    outcome.set_result(result)
                else:
                    outcome.set_exception(error)

            threading.Thread(target=run, name="reward", daemon=True).start()
            try:
                await asyncio.wait({outcome}, timeout=timeout_s)
                if not outcome.done():
                    raise TimeoutError(f"no reward after {timeout_s:g} s (train.task.reward_timeout_s)")
                return outcome.result()
            finally:
                outcome.cancel()


class RewardProcesses:
    """Some processes, each with the task and one call at a time.

    One that dies or hangs is killed, and a new one takes its place. They know a problem by its index.

    Args:
        task: The task.
        number: Processes (count).
        log: File for what they print. None: it goes where the driver's goes.
        launch: Starts a process.
    """

    def __init__(
        self, task: TaskConfig, *, number: int, log: Path | None = None, launch: Launch = LocalWorker.launched
    ) -> None:
        self._timeout_s = task.reward_timeout_s
        self._workers = WorkerPool(REWARDS, task, number=number, log=log, launch=launch)

    async def reward(self, index: int, answer: str, *, held_out: bool) -> float:
        """Return the reward of an answer to a problem.

        Raises:
            WorkerFailedError: If there is none.
        """
        worker = await self._workers.take()
        try:
            request = {"index": index, "held_out": held_out, "answer": answer}
            return float((await ask(worker, request, "reward", timeout_s=self._timeout_s))["reward"])
        finally:
            self._workers.give_back(worker)

    async def shutdown(self) -> None:
        """End all processes."""
        await self._workers.shutdown()
