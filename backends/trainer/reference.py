"""The real reference model: the model at the start, or a teacher, frozen, in Ray actors of its own.

Theory of operation. One replica stands beside every rank of the trainer, on the same accelerator: the work is spread
as training is. A batch is packed into rows as the trainer packs it and split over the replicas, which do not
communicate. ``start`` and ``logprobs`` wait for all replicas; the first failure, or ``timeout_s``, ends the call, and
then only ``shutdown``, which kills without a wait, and ``start`` make sense.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray
import torch
import transformers
from numpy.typing import NDArray

from backends.interface import Sample
from backends.ray.actors import explain_fault, future_of
from backends.trainer.fused import compiled
from backends.trainer.model import PolicyModel, load_policy, row_tensors
from backends.trainer.packing import PackedRow, pack
from backends.workers.main import log_to
from pipelinerl.errors import ReferenceLostError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """Settings of a replica."""

    device: Literal["cpu", "gpu"]
    """CPU: float32. GPU: bfloat16; the process sees one GPU only."""
    model_path: str
    """In Hugging Face format."""
    temperature: float
    pack_tokens: int
    fused: bool = False
    """As the trainer: else equal weights would differ by rounding."""
    timeout_s: float
    """After it a start or a batch counts as hung."""
    logs: str | None = None
    """A file per replica. None: to where this process prints."""


class ReferenceModel:
    """One replica; usually the inside of a Ray actor."""

    def __init__(self, settings: ReferenceSettings, replica: int = 0) -> None:
        self._settings, self._replica = settings, replica

    def start(self) -> None:
        """Load the model, as the trainer loads it."""
        settings = self._settings
        log_to(settings.logs and f"{settings.logs}/reference-{self._replica}.log")
        transformers.utils.logging.disable_progress_bar()
        self._device = torch.device("cpu" if settings.device == "cpu" else "cuda:0")
        policy = load_policy(settings.model_path, device=settings.device).to(self._device)
        compiler = compiled if settings.fused else None
        self._model = PolicyModel(policy, temperature=settings.temperature, value_head=False, compiler=compiler)

    def logprobs(self, rows: Sequence[PackedRow]) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities of answer tokens (nats), by sample."""
        logprob: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for row in rows:
                if row.sample_index_S:
                    logprob_M, *_ = self._model(**row_tensors(row, self._device))
                    logprob |= row.split(logprob_M.cpu().numpy())
        return logprob


class RayReference:
    """A ``Reference``; Ray must have been initialised and runs each replica with ``options``."""

    def __init__(self, settings: ReferenceSettings, options: Sequence[dict[str, Any]]) -> None:
        self._settings, self._options = settings, options
        self._replicas: list[Any] = []

    async def start(self) -> None:
        actor = ray.remote(ReferenceModel)
        self._replicas = [
            actor.options(**options).remote(self._settings, replica) for replica, options in enumerate(self._options)
        ]
        await self._all("start", [replica.start.remote() for replica in self._replicas])

    async def logprobs(self, samples: list[Sample]) -> list[NDArray[np.float32]]:
        rows = pack(samples, pack_tokens=self._settings.pack_tokens, num_ranks=len(self._options))
        if not self._replicas:
            raise ReferenceLostError("reference model lost: phase=logprobs: it does not run")
        calls = [replica.logprobs.remote(own) for replica, own in zip(self._replicas, rows, strict=True)]
        logprob: dict[int, NDArray[np.float32]] = {}
        for own_logprob in await self._all("logprobs", calls):
            logprob |= own_logprob
        return [logprob[index] for index in range(len(samples))]

    async def shutdown(self) -> None:
        replicas, self._replicas = self._replicas, []
        for replica in replicas:
            ray.kill(replica)

    async def _all(self, phase: str, calls: Sequence[Any]) -> list[Any]:
        begin_s = time.monotonic()
        futures = [future_of(call) for call in calls]
        await asyncio.wait(futures, timeout=self._settings.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        seconds = f"after {time.monotonic() - begin_s:.1f} s"
        for replica, future in enumerate(futures):
            if (fault := future.exception() if future.done() else None) is not None:
                what, reason = explain_fault(fault)
                raise ReferenceLostError(
                    f"reference model {what}: phase={phase} replica={replica} {seconds}: {reason}"
                ) from fault
        if silent := [replica for replica, future in enumerate(futures) if not future.done()]:
            raise ReferenceLostError(f"reference model hangs: phase={phase} replicas={silent} {seconds}")
        return [future.result() for future in futures]
