"""Processes that serve environments or rewards; a failed one is replaced.

Theory of operation. A process is started when it is first needed, and serves one request after the other. A process
that dies, or does not answer in time, is killed with all that it has started, and its place is free: the next caller
gets a new process. As many start at a time as there are processors. ``take`` waits for a free place, then
``START_LIMIT_S`` for the start; ``ask`` waits the caller's time-out for an answer of at most ``LONGEST_ANSWER``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from backends.workers import main as worker_main
from backends.workers.main import CLOSE_LIMIT_S, LONGEST_ANSWER
from pipelinerl.errors import BackendError
from pipelinerl.rl.config import TaskConfig
from pipelinerl.scheduler.events import EnvironmentFault

START_LIMIT_S = 120.0
LONGEST_LINE = 16 * LONGEST_ANSWER
"""In bytes: JSON has up to 12 bytes for a character."""


class WorkerFailedError(BackendError):
    """A process, or its served object, has failed; that costs the rollout."""

    def __init__(self, fault: EnvironmentFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Worker(Protocol):
    """A process; one request at a time."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""

    async def exchange(self, line: bytes) -> bytes:
        """Send a line; return the reply, empty if the process ends without one."""

    def kill(self) -> None:
        """End the process and all that it has started, at once."""

    async def end(self) -> None:
        """Close the served object, within ``CLOSE_LIMIT_S``, and end the process."""


Launch = Callable[[str, Path | None], Awaitable[Worker]]
"""Launches a process that serves ``main.ENVIRONMENT`` or ``REWARDS``, and prints into a file."""


async def ask(worker: Worker, request: dict[str, Any], what: str, *, timeout_s: float) -> dict[str, Any]:
    """Return the answer; ``WorkerFailedError`` if there is none: the process is killed, unless its object raised."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = json.loads(await worker.exchange(json.dumps(request).encode() + b"\n"))
    except TimeoutError:
        worker.kill()
        raise WorkerFailedError(EnvironmentFault.TIMEOUT, f"its {what} took more than {timeout_s:g} s") from None
    except (ValueError, OSError) as error:  # the process has ended, or its reply is no JSON
        worker.kill()
        raise WorkerFailedError(EnvironmentFault.ERROR, f"its process ended in its {what}") from error
    except BaseException:  # cancelled: its next reply would answer this request
        worker.kill()
        raise
    if "fault" in answer:
        raise WorkerFailedError(EnvironmentFault.ERROR, f"its {what} {answer['fault']}")
    return dict(answer)


class LocalWorker:
    """A process on this machine."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._killed = False

    @classmethod
    async def launched(cls, kind: str, log: Path | None) -> LocalWorker:
        """Launch a process; the first request to it must be the table of its task."""
        words = [sys.executable, "-P", "-m", worker_main.__name__, kind, *([] if log is None else [str(log)])]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = await asyncio.create_subprocess_exec(
            *words, stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE, env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # so that Ctrl-C reaches only the caller
        )  # fmt: skip
        return cls(process)

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.returncode is None

    @property
    def gone(self) -> bool:
        return self._process.returncode is not None

    async def exchange(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        await self._process.stdin.drain()
        return await self._process.stdout.readline()

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._process.wait()
        self.kill()
        await self._process.wait()


class WorkerPool:
    """Up to ``number`` processes of one kind for a task; their output goes to ``log`` (None: the driver's)."""

    def __init__(
        self, kind: str, task: TaskConfig, *, number: int, log: Path | None, launch: Launch = LocalWorker.launched
    ) -> None:
        self._kind, self._task, self._log, self._launch = kind, task, log, launch
        self._places = asyncio.Semaphore(number)
        self._starts = asyncio.Semaphore(os.cpu_count() or 1)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def take(self) -> Worker:
        """Wait for a place, then return an idle or new process; ``WorkerFailedError`` if it cannot start."""
        await self._places.acquire()
        try:
            while self._idle and not self._idle[-1].alive:
                self._idle.pop()  # killed from outside
            return self._idle.pop() if self._idle else await self._started()
        except BaseException:
            self._places.release()
            raise

    def give_back(self, worker: Worker) -> None:
        """Take back a process that answers no request now."""
        if worker.alive:
            self._idle.append(worker)
        else:
            self._all = {one for one in self._all if not one.gone}
        self._places.release()

    async def shutdown(self) -> None:
        """End all processes."""
        await asyncio.gather(*(one.end() for one in self._all))

    async def _started(self) -> Worker:
        async with self._starts:
            one = await self._launch(self._kind, self._log)
            self._all.add(one)
            await ask(one, json.loads(self._task.model_dump_json()), "start", timeout_s=START_LIMIT_S)
        return one
