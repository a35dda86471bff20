"""Engines and trainer ranks as Ray actors: the objects that the driver calls.

Theory of operation of ``RayEngine``. The actor supervises vLLM's processes, and ``RayEngine`` the actor. Placing the
actor has a time limit, as its machine may be gone, and starting vLLM has another; the first placing has the limit of
the start, as machines read all packages for the first time. Later the actor reports what its requests have generated,
every ``stream_tokens`` decode steps, and every ``BEAT_S`` as a sign of life: without one for ``generate_timeout_s`` it
hangs, and every call in progress ends. Ray reports a dead actor. A request that ends with it has what was reported.

Theory of operation of ``RayTrainer``. Every call goes to all ranks and returns when all have returned. Ranks carry out
calls in order, one at a time; but rank 0 sends weights, and all ranks write checkpoints, in threads beside training.
The first rank that fails, or the time-out, ends the call for all: the others may hang in a collective that stays
incomplete. So only ``shutdown`` can follow.

========================  ============================  =====================================
call of the trainer       waits for                     limit
========================  ============================  =====================================
``start``                 places, then all ranks        ``placing_timeout_s``, then ``start_timeout_s``
every call                all ranks                     ``step_timeout_s``
``send``                  rank 0 and all engines        ``step_timeout_s``; the group's own, much shorter
``shutdown``              all ranks that still answer   ``RANKS_SHUTDOWN_TIMEOUT_S``; then it kills
========================  ============================  =====================================
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backends import interface
from backends.trainer.packing import pack
from backends.trainer.settings import RankSettings, rank_environment
from backends.vllm.engine import VLLMEngine
from backends.vllm.process import VLLMSettings, remove_shared_memory, slow_down
from pipelinerl.config.faults import FaultConfig
from pipelinerl.errors import (
    BackendError,
    EngineLostError,
    PipelineRLError,
    TrainerLostError,
    TrainerUnplacedError,
    TransferError,
)
from pipelinerl.scheduler.events import WeightUpdate
from pipelinerl.util.user_code import first_line, kind_and_line

RANKS_SHUTDOWN_TIMEOUT_S = 10.0
BLAME_TIMEOUT_S = 3.0
"""For a dead rank when another one reports an error."""
TRANSFER_THREAD = "transfer"
"""Ray's concurrency group of calls that send."""
ABORT_THREAD = "abort"
"""The same of calls that end a transfer under way."""
SAVING_THREAD = "saving"
"""The same of calls that write a checkpoint."""
ADVICE = {
    "placing": "; their accelerators may be gone",
    "meet": "",
    "start": "",
    "load": "; without its folder in checkpoints/, --resume goes on from the checkpoint before it",
}
"""After a fault in a phase in which going on from a checkpoint does not help."""
SAME_METRICS = frozenset({"gradient_norm", "learning_rate", "skipped", "peak_flops", "recomputed_layers"})
RANK_METRICS = frozenset({*interface.PHASES, "peak_memory_gb"})
"""All other metrics are shares of a sum."""


class RayTrainer:
    """A ``Trainer`` of ranks that are Ray actors; see ``interface.py``. Ray must have been initialised."""

    def __init__(
        self,
        rank: type,
        settings: RankSettings,
        options: Sequence[dict[str, Any]],
        *,
        placing_timeout_s: float = 600.0,
        recomputed: Callable[[float], int] | None = None,
    ) -> None:
        """Keep where ranks will run; ``start`` starts them.

        ``rank`` is a ``TrainerRank``; ``options`` are Ray's for each. ``settings.rank`` is set here.
        ``placing_timeout_s``: longest wait for Ray to make the processes. ``recomputed`` chooses the layers that all
        recompute, by the memory of the smallest GPU (bytes). None: ``settings`` say it.
        """
        self._rank, self._settings, self._placing_timeout_s = rank, settings, placing_timeout_s
        self._recomputed = recomputed
        self._options = [
            {
                **one,
                "runtime_env": {
                    "env_vars": rank_environment(settings.device, num_threads=max(1, int(one["num_cpus"])))
                },
            }
            for one in options
        ]
        self._ranks: list[Any] = []

    async def start(self) -> None:
        actor = ray.remote(concurrency_groups={TRANSFER_THREAD: 1, ABORT_THREAD: 1, SAVING_THREAD: 1})(self._rank)
        self._ranks = [
            actor.options(**options).remote(replace(self._settings, rank=rank))
            for rank, options in enumerate(self._options)
        ]
        ready = [rank.__ray_ready__.remote() for rank in self._ranks]
        await self._all("placing", ready, timeout_s=self._placing_timeout_s)
        ((address, port),) = await self._call("meet", "free_address", ranks=self._ranks[:1])
        members = await self._call("meet", "address_towards", address)
        recomputed = None
        if self._recomputed is not None:
            memory = await self._call("meet", "__ray_call__", lambda _: torch.cuda.mem_get_info(0)[1])
            recomputed = await asyncio.to_thread(self._recomputed, min(memory))  # seconds, while engines start
        starts = [rank.start.remote(address, port, members, recomputed) for rank in self._ranks]
        await self._all("start", starts, timeout_s=self._settings.trainer.start_timeout_s)

    async def train(self, samples: list[interface.Sample], *, completes_step: bool) -> interface.TrainResult:
        trainer = self._settings.trainer
        size = trainer.sequence_parallel  # so many ranks get the same rows
        rows = pack(samples, pack_tokens=trainer.row_tokens, num_ranks=len(self._ranks) // size)
        calls = [
            rank.train.remote(rows[number // size], completes_step=completes_step)
            for number, rank in enumerate(self._ranks)
        ]
        logprob: dict[int, NDArray[np.float32]] = {}
        metrics: dict[str, float] = {}
        for rank, (own_logprob, own_metrics) in enumerate(await self._all("train", calls)):
            first = rank % size == 0  # others have the same log-probabilities and sums
            logprob |= own_logprob if first else {}
            for name, value in own_metrics.items():
                if name in RANK_METRICS:
                    metrics[f"rank{rank}/{name}"] = value
                elif first:
                    metrics[name] = value if name in SAME_METRICS else metrics.get(name, 0.0) + value
        return interface.TrainResult([logprob[index] for index in range(len(samples))], metrics)

    async def publish(self, version: int) -> interface.Weights:
        weights: interface.Weights = (await self._call("publish", "publish", version))[0]
        return weights

    async def open_group(self) -> str:
        rendezvous: str = await self._beside_training(TRANSFER_THREAD, "join", "open_group")
        return rendezvous

    async def join_group(self, names: Sequence[str], *, timeout_s: float) -> None:
        await self._transfer("join", "join_group", list(names), timeout_s)

    async def abort_group(self, rendezvous: str, why: str) -> None:
        await self._beside_training(ABORT_THREAD, "abort", "abort_group", rendezvous, why)

    async def send(self, weights: interface.Weights) -> None:
        if not self._settings.transport.in_folder:
            await self._transfer("send", "send", weights.version)

    async def _transfer(self, phase: str, method: str, *arguments: Any) -> None:
        if (fault := await self._beside_training(TRANSFER_THREAD, phase, method, *arguments)) is not None:
            raise TransferError(fault)

    async def _beside_training(self, thread: str, phase: str, method: str, *arguments: Any) -> Any:
        call = getattr(self._ranks[0], method).options(concurrency_group=thread)
        return (await self._all(phase, [call.remote(*arguments)]))[0]

    async def snapshot(self) -> None:
        await self._call("snapshot", "snapshot")

    async def save(self, folder: Path) -> dict[str, str]:
        parts = await self._all(
            "save", [rank.save.options(concurrency_group=SAVING_THREAD).remote(folder) for rank in self._ranks]
        )
        return {name: digest for part in parts for name, digest in part.items()}

    async def load(self, folder: Path) -> None:
        await self._call("load", "load", folder)

    async def export(self, folder: Path) -> None:
        await self._call("export", "export", folder)

    async def self_test(self, num_bytes: int) -> tuple[interface.RankFacts, ...]:
        """Have all ranks measure their devices and links; see ``rank.self_test``."""
        return tuple(await self._call("self_test", "self_test", num_bytes))

    async def offload(self) -> None:
        await self._call("offload", "offload")

    async def reload(self) -> None:
        await self._call("reload", "reload")

    async def suffer(self, fault: FaultConfig) -> None:
        for rank in self._ranks[fault.rank or 0 :][:1]:  # it may have gone on with fewer
            ray.kill(rank)

    async def shutdown(self) -> None:
        ranks, self._ranks = self._ranks, []
        if ranks:
            await asyncio.wait([future_of(rank.shutdown.remote()) for rank in ranks], timeout=RANKS_SHUTDOWN_TIMEOUT_S)
        for rank in ranks:
            ray.kill(rank)

    async def _call(self, phase: str, method: str, *arguments: Any, ranks: Sequence[Any] | None = None) -> list[Any]:
        called = self._ranks if ranks is None else ranks
        return await self._all(phase, [getattr(rank, method).remote(*arguments) for rank in called])

    async def _all(self, phase: str, calls: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        """Wait for calls, the i-th of them to rank i, and return the results in order.

        Raises:
            TrainerLostError: Naming the rank that died, else the first that failed, else all that did not answer.
            BackendError: If a rank has given up on purpose: it would do so again.
        """
        begin_s = time.monotonic()
        futures = [future_of(call) for call in calls]
        timeout_s = timeout_s or self._settings.trainer.step_timeout_s
        done, pending = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if any(future.exception() for future in done) and pending:  # an error may come before the death that caused it
            await asyncio.wait(pending, timeout=BLAME_TIMEOUT_S)
        faults = {
            rank: fault
            for rank, future in enumerate(futures)
            if future.done() and (fault := future.exception()) is not None
        }
        if not faults and not pending:
            return [future.result() for future in futures]
        seconds = f"after {time.monotonic() - begin_s:.1f} s{ADVICE.get(phase, '; go on from a checkpoint')}"
        if not faults:
            silent = [rank for rank, future in enumerate(futures) if not future.done()]
            unplaced = TrainerUnplacedError if phase == "placing" else TrainerLostError
            raise unplaced(f"trainer hangs: phase={phase} ranks={silent} {seconds}")
        rank = min(faults, key=lambda rank: (not isinstance(faults[rank], RayActorError), rank))
        what, reason = explain_fault(faults[rank])
        error = BackendError if isinstance(faults[rank], PipelineRLError) else TrainerLostError  # Ray keeps the class
        raise error(f"trainer {what}: phase={phase} rank={rank} {seconds}: {reason}") from faults[rank]


def future_of(call: Any) -> asyncio.Future[Any]:
    """Return a call's future. Its exception counts as seen: when an actor fails, others fail unawaited."""
    future = asyncio.wrap_future(call.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def explain_fault(fault: BaseException) -> tuple[str, str]:
    """Return "died" or "failed", and the reason in one line."""
    cause = fault.cause if isinstance(fault, RayTaskError) else fault
    what = "died" if isinstance(fault, RayActorError) else "failed"
    return what, kind_and_line(cause)


SHUTDOWN_TIMEOUT_S = 30.0
PLACING_S = 60.0
"""For Ray to restart the actor's process on its reserved accelerators."""
BEAT_S = 5.0


class RayEngine:
    """An ``interface.Engine`` in a process of its own; ``start`` after a loss makes a new process."""

    def __init__(self, settings: VLLMSettings, options: dict[str, Any]) -> None:
        self._settings, self._options = settings, options
        self._actor: Any = None
        self._shared_memory: set[str] = set()
        self.host = self._node = ""  # of its machine, and of this in Ray's cluster
        self._reports: dict[tuple[int, int], list[bytes]] = {}  # of requests in progress; others come too late
        self._hung, self._lost = asyncio.Event(), asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._cut = False
        self.num_started = 0

    async def start(self) -> None:
        self.num_started += 1
        self._cut = False
        self._hung, self._lost = asyncio.Event(), asyncio.Event()
        self._actor = ray.remote(VLLMEngine).options(**self._options).remote(self._settings)
        phase, limit_s = "placing", PLACING_S if self.num_started > 1 else self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                self.host, self._node = await self._call("__ray_call__", lambda _: _this_node())
            phase, limit_s = "start", self._settings.start_timeout_s
            async with asyncio.timeout(limit_s):
                await self._call("start")
                await self._call("__ray_call__", lambda _: gc.freeze())  # imports are no garbage
                self._shared_memory = await self._call("shared_memory")
        except TimeoutError:
            raise self._loss(phase, f"no answer for {limit_s:g} s; its accelerators may be gone") from None
        self._watcher = asyncio.create_task(self._watch())

    async def generate(self, request: interface.GenerateRequest) -> interface.Generated:
        key = request.rollout_id, len(request.prompt_tokens)  # a later request of the rollout has a longer prompt
        reports = self._reports[key] = []
        try:
            generated: interface.Generated = await self._call("generate", request)
        except interface.AnswerLostError:
            raise
        except EngineLostError as error:
            raise interface.AnswerLostError(
                str(error), interface.Generated.so_far([pickle.loads(one) for one in reports])
            ) from None
        finally:
            self._reports.pop(key, None)
        return generated

    async def abort(self, rollout_id: int) -> None:
        await self._call("abort", rollout_id)

    async def suffer(self, fault: FaultConfig) -> None:
        match fault.kind:
            case "kill":
                ray.kill(self._actor)
            case "cut":
                self._cut = True
            case _:
                with contextlib.suppress(RayError, EngineLostError):  # it has been lost meanwhile
                    pid = await self._call("__ray_call__", lambda _: os.getpid())
                    await _future(_on(self._node, slow_down, pid, fault.seconds, fault.factor or math.inf))

    async def update(self, weights: interface.Weights, weight_update: WeightUpdate) -> interface.UpdateTimes:
        if self._cut:
            self._lost.set()
            raise self._loss("update", "its transfer of weights was cut by a fault of the schedule")
        times: interface.UpdateTimes = await self._call("update", weights, weight_update)
        return times

    async def join_group(self, rendezvous: str, *, first_worker: int) -> None:
        await self._call("join_group", rendezvous, first_worker=first_worker)

    async def until_lost(self) -> None:
        await self._lost.wait()

    async def checksums(self) -> dict[str, str]:
        checksums: dict[str, str] = await self._call("checksums")
        return checksums

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def shutdown(self) -> None:
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
                if self._node and not self._hung.is_set():  # else it has no process, or none that answers
                    await asyncio.wait_for(_future(actor.shutdown.remote()), SHUTDOWN_TIMEOUT_S)
                    left = set()
        finally:  # also when cancelled: no other object holds the actor
            ray.kill(actor)
        if left:
            with contextlib.suppress(RayError, TimeoutError):  # its machine may be gone, too
                await asyncio.wait_for(_future(_on(self._node, remove_shared_memory, left)), SHUTDOWN_TIMEOUT_S)

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        actor, lost = self._actor, self._lost
        if actor is None:
            raise EngineLostError(f"engine {self._settings.engine_id} lost: phase={method}; it is being started again")
        call = asyncio.ensure_future(_future(getattr(actor, method).remote(*arguments, **keywords)))
        hung = asyncio.ensure_future(self._hung.wait())
        try:
            await asyncio.wait({call, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                silent_s = self._settings.generate_timeout_s
                raise self._loss(method, f"no sign of life of its process for {silent_s:g} s")
            return call.result()
        except RayTaskError as error:
            if isinstance(error.cause, EngineLostError):
                lost.set()
            raise error.cause from None
        except RayError as error:
            lost.set()
            raise self._loss(method, first_line(error)) from None
        finally:
            call.cancel()
            hung.cancel()

    def _loss(self, phase: str, why: str) -> EngineLostError:
        return EngineLostError(f"engine {self._settings.engine_id} lost: phase={phase}: {why}")

    async def _watch(self) -> None:
        """Take reports; find that the actor's process hangs, or that it or vLLM is lost while nobody calls it."""
        while not self._lost.is_set():
            try:
                async with asyncio.timeout(BEAT_S + self._settings.generate_timeout_s):
                    report = await _future(self._actor.report.remote(BEAT_S))
                for key, generated in report.items():
                    if key in self._reports:
                        self._reports[key].append(generated)
            except TimeoutError:
                self._hung.set()
                self._lost.set()
            except RayError:  # calls in progress raise it, too
                self._lost.set()


async def _future(reference: Any) -> Any:
    return await reference


def _this_node() -> tuple[str, str]:
    return socket.gethostname(), str(ray.get_runtime_context().get_node_id())


def _on(node: str, function: Callable[..., Any], *arguments: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(function).options(scheduling_strategy=there).remote(*arguments)
