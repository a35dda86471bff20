"""The real trainer: DeepSpeed ranks as Ray actors, called together.

Theory of operation. Every call goes to all ranks at once and returns when all have returned. Ranks carry calls out
in the order they were made, one at a time; but rank 0 sends weights, and all write their copies of a checkpoint, in
threads of their own, beside training. The first rank that fails, or the time-out, ends the call for all: the others
may hang in a collective that will never be complete. So nothing but ``shutdown`` can follow.

========================  ============================  =====================================
call                      waits for                     limit
========================  ============================  =====================================
``start``                 places for all ranks          ``placing_timeout_s``; then as every call
every call                all ranks                     ``step_timeout_s``
``send`` (broadcast)      rank 0 and all engines        ``step_timeout_s``; the group's own, much shorter; it goes on
                                                        beside the others
``shutdown``              all ranks that still answer   ``SHUTDOWN_TIMEOUT_S``; then it kills
========================  ============================  =====================================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from backends.deepspeed.packing import pack
from backends.deepspeed.publisher import ABORT_THREAD, TRANSFER_THREAD
from backends.deepspeed.rank import TrainerRank
from backends.deepspeed.rank_settings import RankSettings, rank_environment
from backends.deepspeed.ray_calls import explain_fault, future_of
from backends.deepspeed.step_meter import PHASES
from backends.facts import RankFacts
from backends.interface import Sample, TrainResult, Weights
from pipelinerl.errors import BackendError, PipelineRLError, TrainerLostError, TransferError

SHUTDOWN_TIMEOUT_S = 10.0
"""Time that ranks have to clean up before they are killed (seconds)."""
BLAME_TIMEOUT_S = 3.0
"""Time to look for a dead rank when another one reports an error (seconds)."""
SAVING_THREAD = "saving"
"""Ray's concurrency group of the calls that write a checkpoint."""
ADVICE = {
    "placing": "; their accelerators may be gone",
    "meet": "",
    "start": "",
    "load": "; without its folder in checkpoints/, --resume goes on from the checkpoint before it",
}
"""What to do after a fault in a phase in which going on from a checkpoint does not help."""
SAME_METRICS = frozenset({"gradient_norm", "learning_rate", "skipped", "peak_flops"})
"""Metrics that are the same on every rank."""
RANK_METRICS = frozenset({*PHASES, "peak_memory_gb"})
"""Metrics of which every rank has its own; all others are shares of a sum."""


class DeepSpeedTrainer:
    """A ``Trainer``; see ``interface.py``. Ray must have been initialised."""

    def __init__(
        self,
        settings: RankSettings,
        *,
        num_cpus: float,
        num_gpus: float,
        placing_timeout_s: float = 600.0,
        placement_group: PlacementGroup | None = None,
        bundle_indices: Sequence[int] = (),
    ) -> None:
        """Keep where ranks will run; ``start`` starts them.

        Args:
            settings: Of the ranks; ``rank`` is set here.
            num_cpus: CPU cores that Ray sets aside for a rank, and threads it computes with.
            num_gpus: GPUs that Ray sets aside for a rank.
            placing_timeout_s: Longest wait for Ray to make the ranks' processes (seconds).
            placement_group: Where ranks run; None: wherever there is room.
            bundle_indices: Bundle of the placement group for each rank.
        """
        self._settings, self._placing_timeout_s = settings, placing_timeout_s
        self._options: list[dict[str, Any]] = [
            {
                "num_cpus": num_cpus,
                "num_gpus": num_gpus,
                "runtime_env": {"env_vars": rank_environment(settings.device, num_threads=max(1, int(num_cpus)))},
            }
            for _ in range(settings.num_ranks)
        ]
        if placement_group is not None:
            for options, bundle in zip(self._options, bundle_indices, strict=True):
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement_group, bundle)
        self._ranks: list[Any] = []

    async def start(self) -> None:
        """Start the ranks and load the model, at version 0.

        Raises:
            TrainerLostError: If a rank fails or does not answer in time.
        """
        actor = ray.remote(concurrency_groups={TRANSFER_THREAD: 1, ABORT_THREAD: 1, SAVING_THREAD: 1})(TrainerRank)
        self._ranks = [
            actor.options(**options).remote(replace(self._settings, rank=rank))
            for rank, options in enumerate(self._options)
        ]
        ready = [rank.__ray_ready__.remote() for rank in self._ranks]
        await self._all("placing", ready, timeout_s=self._placing_timeout_s)
        ((address, port),) = await self._call("meet", "free_address", ranks=self._ranks[:1])
        heard = await self._call("meet", "address_towards", address)
        await self._call("start", "start", address, port, heard)

    async def train(self, samples: list[Sample], *, completes_step: bool) -> TrainResult:
        """See ``interface.Trainer``.

        Raises:
            TrainerLostError: If a rank fails or does not answer in time.
            ValueError: If a sample is longer than ``pack_tokens``.
        """
        rows = pack(samples, pack_tokens=self._settings.trainer.pack_tokens, num_ranks=len(self._ranks))
        calls = [
            rank.train.remote(own_rows, completes_step=completes_step)
            for rank, own_rows in zip(self._ranks, rows, strict=True)
        ]
        logprob: dict[int, NDArray[np.float32]] = {}
        metrics: dict[str, float] = {}
        for rank, (own_logprob, own_metrics) in enumerate(await self._all("train", calls)):
            logprob |= own_logprob
            for name, value in own_metrics.items():
                if name in RANK_METRICS:
                    metrics[f"rank{rank}/{name}"] = value
                else:
                    metrics[name] = value if name in SAME_METRICS else metrics.get(name, 0.0) + value
        return TrainResult([logprob[index] for index in range(len(samples))], metrics)

    async def publish(self, version: int) -> Weights:
        """See ``interface.Trainer``.

        Raises:
            TrainerLostError: If a rank fails or does not answer in time.
        """
        weights: Weights = (await self._call("publish", "publish", version))[0]
        return weights

    async def open_group(self) -> str:
        """See ``interface.Sender``; the group meets at rank 0.

        Raises:
            TrainerLostError: If rank 0 fails or does not answer in time.
        """
        meeting: str = await self._beside_training(TRANSFER_THREAD, "join", "open_group")
        return meeting

    async def join_group(self, names: Sequence[str], *, timeout_s: float) -> None:
        """See ``interface.Sender``.

        Raises:
            TransferError: If not all members come in time.
            TrainerLostError: If rank 0 fails or does not answer in time.
        """
        await self._transfer("join", "join_group", list(names), timeout_s)

    async def abort_group(self, meeting: str, why: str) -> None:
        """See ``interface.Sender``.

        Raises:
            TrainerLostError: If rank 0 fails or does not answer in time.
        """
        await self._beside_training(ABORT_THREAD, "abort", "abort_group", meeting, why)

    async def send(self, weights: Weights) -> None:
        """See ``interface.Trainer``. Files need no sending.

        Raises:
            TransferError: If an engine was lost, does not answer, or refuses what it received, time and again.
            TrainerLostError: If rank 0 fails or does not answer in time.
        """
        if self._settings.transport == "broadcast":
            await self._transfer("send", "send", weights.version)
        elif self._settings.transport == "streamed":
            fault = (await self._call("send", "stream", weights.version))[0]
            if fault is not None:
                raise TransferError(fault)

    async def _transfer(self, phase: str, method: str, *arguments: Any) -> None:
        fault = await self._beside_training(TRANSFER_THREAD, phase, method, *arguments)
        if fault is not None:
            raise TransferError(fault)

    async def _beside_training(self, thread: str, phase: str, method: str, *arguments: Any) -> Any:
        """Have rank 0 do something in a thread of its own."""
        call = getattr(self._ranks[0], method).options(concurrency_group=thread)
        return (await self._all(phase, [call.remote(*arguments)]))[0]

    async def snapshot(self) -> None:
        """See ``interface.Trainer``."""
        await self._call("snapshot", "snapshot")

    async def save(self, folder: Path) -> None:
        """See ``interface.Trainer``; all ranks must reach the folder."""
        await self._all(
            "save", [rank.save.options(concurrency_group=SAVING_THREAD).remote(folder) for rank in self._ranks]
        )

    async def load(self, folder: Path) -> None:
        """See ``interface.Trainer``."""
        await self._call("load", "load", folder)

    async def export(self, folder: Path) -> None:
        """See ``interface.Trainer``."""
        await self._call("export", "export", folder)

    async def self_test(self, num_bytes: int) -> tuple[RankFacts, ...]:
        """Have all ranks measure their devices and links; see ``self_test.py``."""
        return tuple(await self._call("self_test", "self_test", num_bytes))

    async def offload(self) -> None:
        """See ``interface.Trainer``."""
        await self._call("offload", "offload")

    async def reload(self) -> None:
        """See ``interface.Trainer``."""
        await self._call("reload", "reload")

    async def shutdown(self) -> None:
        """End all ranks; a second call does nothing."""
        ranks, self._ranks = self._ranks, []
        if ranks:
            await asyncio.wait([future_of(rank.shutdown.remote()) for rank in ranks], timeout=SHUTDOWN_TIMEOUT_S)
        for rank in ranks:
            ray.kill(rank)

    async def _call(self, phase: str, method: str, *arguments: Any, ranks: Sequence[Any] | None = None) -> list[Any]:
        """Call a method on all ranks, or on some, and return the results in order."""
        called = self._ranks if ranks is None else ranks
        return await self._all(phase, [getattr(rank, method).remote(*arguments) for rank in called])

    async def _all(self, phase: str, calls: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        """Wait for calls, the i-th of them to rank i, and return the results in order.

        Args:
            phase: What they are, for messages.
            calls: The calls.
            timeout_s: Longest wait (seconds). None: ``step_timeout_s``.

        Raises:
            TrainerLostError: With the rank that died, else the first that failed, else those that did not answer.
            BackendError: If a rank has given up on purpose: it would do so again.
        """
        begin_s = time.monotonic()
        futures = [future_of(call) for call in calls]
        timeout_s = timeout_s or self._settings.trainer.step_timeout_s
        done, pending = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if any(future.exception() for future in done) and pending:  # a complaint may come before the death it is about
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
            raise TrainerLostError(f"trainer hangs: phase={phase} ranks={silent} {seconds}")
        rank = min(faults, key=lambda rank: (not isinstance(faults[rank], RayActorError), rank))
        what, reason = explain_fault(faults[rank])
        error = BackendError if isinstance(faults[rank], PipelineRLError) else TrainerLostError  # Ray keeps the kind
        raise error(f"trainer {what}: phase={phase} rank={rank} {seconds}: {reason}") from faults[rank]
