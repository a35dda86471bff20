"""The environments of a run, each in a process of its own, and what becomes of one that fails.

Theory of operation. A process is started when it is first needed, and serves one rollout after the other. One that
dies, or does not answer in time, is killed with all that it has started, and its place is free: the next rollout gets a
new process. An environment that raises, or answers with what is no observation, costs the rollout only.

=================  ==========================================  ===========================
what               waits for                                   limit
=================  ==========================================  ===========================
``open``           a free place, then a process that starts,   ``START_LIMIT_S``,
                   then its reset                              ``reset_timeout_s``
``step``           the answer to a turn                        ``step_timeout_s``
starts at a time   processors                                  as many as there are
an answer          --                                          ``LONGEST_ANSWER``
=================  ==========================================  ===========================
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from backends import environment_worker
from backends.environment_worker import CLOSE_LIMIT_S, LONGEST_ANSWER
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.errors import BackendError
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.environments import Observation, Turn
from pipelinerl.scheduler.events import EnvironmentFault

START_LIMIT_S = 120.0
"""Longest start of an environment's process (s)."""
LONGEST_LINE = 16 * LONGEST_ANSWER
"""Longest line of a process (bytes): JSON has up to 12 bytes for a character."""


class EnvironmentFailedError(BackendError):
    """An environment has failed; it costs the rollout."""

    def __init__(self, fault: EnvironmentFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class _Environment:
    """A process; one request at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._killed = False

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._killed and self._process.returncode is None

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self._process.returncode is not None

    @classmethod
    async def launched(cls, log: Path | None) -> _Environment:
        """Return one that has been launched; its first request has to be the table of its task."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", environment_worker.__name__, *([] if log is None else [str(log)]),
            stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE, process_group=0,  # so that Ctrl-C reaches only the caller
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        )  # fmt: skip
        return cls(process)

    async def ask(self, request: dict[str, Any], what: str, *, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            EnvironmentFailedError: If there is none; the process has been killed, unless the environment raised.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
                answer = json.loads(await self._process.stdout.readline())
        except TimeoutError:
            self.kill()
            raise EnvironmentFailedError(
                EnvironmentFault.TIMEOUT, f"its {what} took more than {timeout_s:g} s"
            ) from None
        except (ValueError, OSError) as error:  # nothing more comes, or what is no answer
            self.kill()
            raise EnvironmentFailedError(EnvironmentFault.ERROR, f"its process ended in its {what}") from error
        except BaseException:  # cancelled: its next answer would be that to this request
            self.kill()
            raise
        if "fault" in answer:
            raise EnvironmentFailedError(EnvironmentFault.ERROR, f"its {what} {answer['fault']}")
        return dict(answer)

    def kill(self) -> None:
        """End the process and all that it has started, at once."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Let the environment close, for ``CLOSE_LIMIT_S`` at most, and end the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._process.wait()
        self.kill()
        await self._process.wait()


class EnvironmentPool:
    """So many environments.

    Args:
        task: Names the environment.
        config: Its time-outs.
        number: Environments (count).
        log: File for what they print. None: it goes where the driver's goes.
    """

    def __init__(self, task: TaskConfig, config: EnvironmentConfig, *, number: int, log: Path | None = None) -> None:
        self._task, self._config, self._log = task, config, log
        self._places = asyncio.Semaphore(number)
        self._starts = asyncio.Semaphore(os.cpu_count() or 1)
        self._idle: list[_Environment] = []
        self._of: dict[int, _Environment] = {}
        self._all: set[_Environment] = set()

    def __contains__(self, rollout_id: int) -> bool:
        """Return whether a rollout has an environment."""
        return rollout_id in self._of

    async def open(self, rollout_id: int, index: int, *, held_out: bool = False) -> Observation:
        """Give a rollout an environment, when there is a free one; return its prompt.

        Raises:
            EnvironmentFailedError: If that fails; the rollout has none then.
        """
        await self._places.acquire()
        try:
            while self._idle and not self._idle[-1].alive:
                self._idle.pop()  # its process was killed by somebody else
            one = self._idle.pop() if self._idle else await self._started()
        except BaseException:
            self._places.release()
            raise
        self._of[rollout_id] = one
        request = {"index": index, "held_out": held_out}
        return await self._asked(rollout_id, request, "reset", timeout_s=self._config.reset_timeout_s)

    async def step(self, rollout_id: int, turn: Turn) -> Observation:
        """Return what a rollout's environment answers.

        Raises:
            EnvironmentFailedError: If it fails; the rollout has none then.
        """
        request = {"tokens": turn.tokens, "text": turn.text}
        return await self._asked(rollout_id, request, "step", timeout_s=self._config.step_timeout_s)

    def release(self, rollout_id: int) -> None:
        """Take a rollout's environment back, if it has one; it is not asked anything just now."""
        one = self._of.pop(rollout_id, None)
        if one is None:
            return
        if one.alive:
            self._idle.append(one)
        else:
            self._all = {one for one in self._all if not one.gone}
        self._places.release()

    async def shutdown(self) -> None:
        """End all processes."""
        await asyncio.gather(*(one.end() for one in self._all))

    async def _started(self) -> _Environment:
        async with self._starts:
            one = await _Environment.launched(self._log)
            self._all.add(one)
            await one.ask(json.loads(self._task.model_dump_json()), "start", timeout_s=START_LIMIT_S)
        return one

    async def _asked(self, rollout_id: int, request: dict[str, Any], what: str, *, timeout_s: float) -> Observation:
        try:
            answer = await self._of[rollout_id].ask(request, what, timeout_s=timeout_s)
        except BaseException:
            self.release(rollout_id)
            raise
        content = answer["content"]
        return Observation(content if isinstance(content, str) else tuple(content), answer["reward"], answer["done"])
