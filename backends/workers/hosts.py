"""Processes of environments and rewards on all machines of a Ray cluster, in turn.

Theory of operation. On each machine lives one actor, a *host*, that takes no accelerator and no core. It launches the
same processes as the driver would, and passes lines on; each that is waited for has a thread there. Time-outs are
the caller's. When a host's machine is gone, so are its processes; the next ones come up on machines that are left.
Output stays in the run's folder as the machine sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backends.workers.main import CLOSE_LIMIT_S
from backends.workers.processes import LONGEST_LINE, LocalWorker, Worker, WorkerFailedError, command
from pipelinerl.scheduler.events import EnvironmentFault

PLACING_S = 60.0
"""Longest start of a host, or of a process by it."""
PROCESSES = 1000
"""Of a host, at most."""


class Host:
    """Launches processes on its machine, and waits for each in a thread; an actor of Ray."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads = ThreadPoolExecutor(PROCESSES)

    async def call(self, what: str, *arguments: Any) -> Any:
        """Call one of the methods below in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, getattr(self, what), *arguments)

    def launch(self, kind: str, log: Path | None) -> int:
        """Launch a process and return its id."""
        words, environment = command(kind, log)
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
        )
        self._processes[process.pid] = process
        return process.pid

    def exchange(self, pid: int, line: bytes) -> bytes:
        """Send a line to a process and return its answer; an empty one if it has ended."""
        process = self._processes.get(pid)
        if process is None:
            return b""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline(LONGEST_LINE)
        except (OSError, ValueError):  # it has been killed
            return b""

    def end(self, pid: int, seconds: float) -> None:
        """Close a process's served object; end the process and its children."""
        process = self._processes.pop(pid, None)
        if process is None:
            return
        assert process.stdin is not None
        if seconds:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        process.wait()


class RemoteWorker:
    """A ``processes.Worker`` on another machine; ``pid`` is its id there."""

    def __init__(self, host: Any, pid: int) -> None:
        self._host, self._pid = host, pid
        self._alive = True

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def gone(self) -> bool:
        return not self._alive

    async def exchange(self, line: bytes) -> bytes:
        try:
            answer: bytes = await self._host.call.remote("exchange", self._pid, line)
        except RayError:
            answer = b""
        self._alive &= bool(answer)
        return answer

    def kill(self) -> None:
        self._alive = False
        self._host.call.remote("end", self._pid, 0.0)

    async def end(self) -> None:
        self._alive = False
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(2 * CLOSE_LIMIT_S):
                await self._host.call.remote("end", self._pid, CLOSE_LIMIT_S)


class Hosts:
    """The machines of the Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        self._hosts: dict[str, Any] = {}
        self._turn = itertools.count()

    async def launched(self, kind: str, log: Path | None) -> Worker:
        """Launch a process on the next machine (one: here). ``WorkerFailedError``: it is left out until it is back."""
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        if len(nodes) == 1:
            return await LocalWorker.launched(kind, log)
        self._hosts = {node: host for node, host in self._hosts.items() if node in nodes}
        node = nodes[next(self._turn) % len(nodes)]
        if node not in self._hosts:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_concurrency": 2 * PROCESSES, "scheduling_strategy": there}
            self._hosts[node] = ray.remote(Host).options(**options).remote()
        try:
            async with asyncio.timeout(PLACING_S):
                return RemoteWorker(self._hosts[node], await self._hosts[node].call.remote("launch", kind, log))
        except (RayError, TimeoutError) as error:
            self._hosts.pop(node, None)
            raise WorkerFailedError(EnvironmentFault.ERROR, "its machine does not answer") from error
