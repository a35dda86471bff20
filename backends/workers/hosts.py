"""Processes of environments and rewards on all machines of a Ray cluster, in turn.

Theory of operation. On each machine lives one actor, a *host*, that takes no accelerator and no core. It launches the
same processes as the driver would, and passes lines on. Time-outs are the caller's. When the machine of a host is gone,
so are its processes; the next ones start on the machines that are left. A process writes its output into the run's
folder as its machine sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backends.workers.main import CLOSE_LIMIT_S
from backends.workers.processes import LocalWorker, Worker, WorkerFailedError
from pipelinerl.scheduler.events import EnvironmentFault

PLACING_S = 60.0
"""Longest start of a host, or of a process by it."""
CALLS = 2000
"""Of a host at a time, at most."""


class Host:
    """Launches processes on its machine; an actor of Ray. A process has a number."""

    def __init__(self) -> None:
        self._workers: dict[int, LocalWorker] = {}

    async def launch(self, kind: str, log: Path | None) -> int:
        """Launch a process and return its number."""
        worker = await LocalWorker.launched(kind, log)
        self._workers[id(worker)] = worker
        return id(worker)

    async def exchange(self, number: int, line: bytes) -> bytes:
        """Send a line to a process and return its answer."""
        return await self._workers[number].exchange(line)

    async def end(self, number: int, *, at_once: bool) -> None:
        """End a process and its children, if that has not been done; unless ``at_once``, its object is closed first."""
        if (worker := self._workers.pop(number, None)) is not None:
            if at_once:
                worker.kill()
            await worker.end()


class RemoteWorker:
    """A ``processes.Worker`` on the machine of a host."""

    def __init__(self, host: Any, number: int) -> None:
        self._host, self._number = host, number
        self._alive = True

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def gone(self) -> bool:
        return not self._alive

    async def exchange(self, line: bytes) -> bytes:
        try:
            answer: bytes = await self._host.exchange.remote(self._number, line)
        except RayError:  # its machine is gone, or the process gives no answer
            answer = b""
        self._alive &= bool(answer)
        return answer

    def kill(self) -> None:
        self._alive = False
        self._host.end.remote(self._number, at_once=True)

    async def end(self) -> None:
        self._alive = False
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(2 * CLOSE_LIMIT_S):
                await self._host.end.remote(self._number, at_once=False)


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
            options = {"num_cpus": 0, "max_concurrency": CALLS, "scheduling_strategy": there}
            self._hosts[node] = ray.remote(Host).options(**options).remote()
        try:
            async with asyncio.timeout(PLACING_S):
                return RemoteWorker(self._hosts[node], await self._hosts[node].launch.remote(kind, log))
        except (RayError, TimeoutError) as error:
            self._hosts.pop(node, None)
            raise WorkerFailedError(EnvironmentFault.ERROR, "its machine does not answer") from error
