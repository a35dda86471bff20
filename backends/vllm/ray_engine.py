"""A vLLM engine in a Ray actor: the engine that the driver calls.

Theory of operation. The actor looks after vLLM's processes, and this object after the actor. Placing it has a time
limit, which ends the wait for a machine that is gone, and its start has another. The first time no machine is gone, but
each reads all packages for the first time, perhaps over a network: then both have that of the start. From then on it is
asked for a sign of life every ``BEAT_S``: when it gives none for ``generate_timeout_s`` it hangs, and every call in
progress ends. A dead actor is reported by Ray. What any call finds, that the engine is lost, ends ``until_lost``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backends.interface import Generated, GenerateRequest, UpdateTimes, Weights
from backends.vllm.engine import VLLMEngine
from backends.vllm.process import VLLMSettings, remove_shared_memory
from pipelinerl.errors import EngineLostError
from pipelinerl.scheduler.events import WeightUpdate

SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds an engine has to end before its process is killed."""
PLACING_S = 60.0
"""Seconds that Ray has to make the actor's process again, on accelerators that were set aside."""
BEAT_S = 5.0
"""Seconds between two signs of life."""


class RayEngine:
    """An ``interface.Engine`` in a process of its own; ``start`` after a loss makes a new process.

    Args:
        settings: Of the engine.
        options: Where Ray is to run it.
    """

    def __init__(self, settings: VLLMSettings, options: dict[str, Any]) -> None:
        self._settings, self._options = settings, options
        self._actor: Any = None
        self._shared_memory: set[str] = set()
        self._node = ""  # of Ray's cluster, where that is
        self._hung, self._lost = asyncio.Event(), asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self.num_started = 0

    async def start(self) -> None:
        """Start the process and load the model, at version 0.

        Raises:
            EngineLostError: If that fails, or takes too long; it can be placed nowhere then, or it hangs.
        """
        self.num_started += 1
        self._hung, self._lost = asyncio.Event(), asyncio.Event()
        self._actor = ray.remote(VLLMEngine).options(**self._options).remote(self._settings)
        phase, limit_s = "placing", PLACING_S if self.num_started > 1 else self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                self._node = await self._call("__ray_call__", lambda _: _this_node())
            phase, limit_s = "start", self._settings.start_timeout_s
            async with asyncio.timeout(limit_s):
                await self._call("start")
                await self._call("__ray_call__", lambda _: gc.freeze())  # see backends/garbage.py; it ends with it
                self._shared_memory = await self._call("shared_memory")
        except TimeoutError:
            raise EngineLostError(
                f"engine {self._settings.engine_id} lost: phase={phase}: no answer for {limit_s:g} s; "
                "its accelerators may be gone"
            ) from None
        self._watcher = asyncio.create_task(self._watch())

    async def generate(self, request: GenerateRequest) -> Generated:
        """Generate one answer; see ``interface.Engine``."""
        generated: Generated = await self._call("generate", request)
        return generated

    async def abort(self, rollout_id: int) -> None:
        """End a request early; see ``interface.Engine``."""
        await self._call("abort", rollout_id)

    async def update(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        """Load new weights; see ``interface.Engine``."""
        times: UpdateTimes = await self._call("update", weights, weight_update)
        return times

    async def join_group(self, meeting: str, *, first_worker: int) -> None:
        """Join the group that weights arrive through; see ``group.Receiver``."""
        await self._call("join_group", meeting, first_worker=first_worker)

    async def until_lost(self) -> None:
        """Wait until the engine is lost, or has been shut down; see ``interface.Receiver``."""
        await self._lost.wait()

    async def checksums(self) -> dict[str, str]:
        """Return the checksums that the last update was verified against; see ``interface.Engine``."""
        checksums: dict[str, str] = await self._call("checksums")
        return checksums

    async def sleep(self) -> None:
        """Give the memory up for training; see ``interface.Engine``."""
        await self._call("sleep")

    async def wake(self) -> None:
        """Take the memory back."""
        await self._call("wake")

    async def shutdown(self) -> None:
        """End the process; a second call does nothing."""
        actor, self._actor = self._actor, None
        self._lost.set()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        if actor is None:
            return
        left, self._shared_memory = self._shared_memory, set()
        try:
            with contextlib.suppress(RayError, TimeoutError):
                if not self._hung.is_set():
                    await asyncio.wait_for(_future(actor.shutdown.remote()), SHUTDOWN_TIMEOUT_S)
                    left = set()
        finally:  # also when cancelled: no other object holds the actor
            ray.kill(actor)
        if left:
            with contextlib.suppress(RayError, TimeoutError):  # its machine may be gone, too
                await asyncio.wait_for(_future(_removal(left, self._node)), SHUTDOWN_TIMEOUT_S)

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        actor, lost = self._actor, self._lost
        if actor is None:
            raise EngineLostError(f"engine {self._settings.engine_id} lost: phase={method}; it is being started again")
        call = asyncio.ensure_future(_future(getattr(actor, method).remote(*arguments, **keywords)))
        hung = asyncio.ensure_future(self._hung.wait())
        try:
            await asyncio.wait({call, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineLostError(
                    f"engine {self._settings.engine_id} lost: phase={method}: no sign of life of its process for "
                    f"{self._settings.generate_timeout_s:g} s"
                )
            return call.result()
        except RayTaskError as error:
            if isinstance(error.cause, EngineLostError):
                lost.set()
            raise error.cause from None
        except RayError as error:
            lost.set()
            what = str(error).strip().partition("\n")[0]
            raise EngineLostError(f"engine {self._settings.engine_id} lost: phase={method}: {what}") from None
        finally:
            call.cancel()
            hung.cancel()

    async def _watch(self) -> None:
        """Find that the actor's process hangs, or that it or vLLM is lost while nobody calls it."""
        while not self._lost.is_set():
            await asyncio.sleep(BEAT_S)
            try:
                async with asyncio.timeout(self._settings.generate_timeout_s):
                    await _future(self._actor.is_there.remote())
            except TimeoutError:
                self._hung.set()
                self._lost.set()
            except RayError:  # who calls it is told
                self._lost.set()


async def _future(reference: Any) -> Any:
    return await reference


def _this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _removal(paths: set[str], node: str) -> Any:
    """Remove what a killed engine has left in the shared memory of its machine."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(remove_shared_memory).options(scheduling_strategy=there).remote(paths)
