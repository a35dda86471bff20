"""The real reference model: the model at the start, frozen, in Ray actors of its own.

Theory of operation. One replica stands beside every rank of the trainer, on the same accelerator: the work is spread
as training is, and a reference model of its own size never becomes the bottleneck of many ranks. A batch is packed
into rows as the trainer packs it and split over the replicas, which know nothing of each other. The first of them
that fails, or the time-out, ends the call for all; after that only ``shutdown``, then ``start``, make sense.

========================  ============================  =======================
call                      waits for                     limit
========================  ============================  =======================
``start``, ``logprobs``   all replicas                  ``timeout_s``
``shutdown``              nothing: it kills             --
========================  ============================  =======================
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

from backends.cores import keep_to
from backends.deepspeed.packing import PackedRow, pack
from backends.deepspeed.policy_model import PolicyModel, load_policy, row_tensors
from backends.deepspeed.ray_calls import explain_fault, future_of
from backends.interface import Sample
from backends.process_log import log_to
from pipelinerl.errors import ReferenceLostError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """Settings of a replica."""

    device: Literal["cpu", "gpu"]
    """CPU: float32. GPU: bfloat16; the process sees one GPU only."""
    model_path: str
    """Folder in Hugging Face format: the model that training began with."""
    temperature: float
    """Softmax temperature that answers are sampled with (no unit)."""
    pack_tokens: int
    """Tokens of one forward pass (tokens)."""
    timeout_s: float
    """Seconds after which a start or a batch counts as hung."""
    kept_to: frozenset[int] | None = None
    """Cores that the replicas keep to. None: any."""
    logs: str | None = None
    """Folder that replicas print into, a file each. None: to where this process does."""


class ReferenceModel:
    """One replica; usually the inside of a Ray actor."""

    def __init__(self, settings: ReferenceSettings, replica: int = 0) -> None:
        self._settings, self._replica = settings, replica
        keep_to(settings.kept_to)

    def start(self) -> None:
        """Load the model, as the trainer loads it."""
        settings = self._settings
        log_to(settings.logs and f"{settings.logs}/reference-{self._replica}.log")
        transformers.utils.logging.disable_progress_bar()
        self._device = torch.device("cpu" if settings.device == "cpu" else "cuda:0")
        policy = load_policy(settings.model_path, device=settings.device).to(self._device)
        self._model = PolicyModel(policy, temperature=settings.temperature, value_head=False)

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
    """A ``Reference``; see ``interface.py``. Ray must have been initialised.

    Args:
        settings: Of the replicas.
        options: Where Ray is to run each replica.
    """

    def __init__(self, settings: ReferenceSettings, options: Sequence[dict[str, Any]]) -> None:
        self._settings, self._options = settings, options
        self._replicas: list[Any] = []

    async def start(self) -> None:
        """Start the replicas; see ``interface.Reference``."""
        actor = ray.remote(ReferenceModel)
        self._replicas = [
            actor.options(**options).remote(self._settings, replica) for replica, options in enumerate(self._options)
        ]
        await self._all("start", [replica.start.remote() for replica in self._replicas])

    async def logprobs(self, samples: list[Sample]) -> list[NDArray[np.float32]]:
        """Return log-probabilities of answer tokens; see ``interface.Reference``.

        Raises:
            ReferenceLostError: If a replica fails or does not answer in time.
            ValueError: If a sample is longer than ``pack_tokens``, or its prompt is empty.
        """
        rows = pack(samples, pack_tokens=self._settings.pack_tokens, num_ranks=len(self._options))
        if not self._replicas:
            raise ReferenceLostError("reference model lost: phase=logprobs: it does not run")
        calls = [replica.logprobs.remote(own) for replica, own in zip(self._replicas, rows, strict=True)]
        logprob: dict[int, NDArray[np.float32]] = {}
        for own_logprob in await self._all("logprobs", calls):
            logprob |= own_logprob
        return [logprob[index] for index in range(len(samples))]

    async def shutdown(self) -> None:
        """End all replicas; a second call does nothing."""
        replicas, self._replicas = self._replicas, []
        for replica in replicas:
            ray.kill(replica)

    async def _all(self, phase: str, calls: Sequence[Any]) -> list[Any]:
        """Wait for calls, the i-th of them to replica i, and return the results in order."""
        begin_s = time.monotonic()
        futures = [future_of(call) for call in calls]
        await asyncio.wait(futures, timeout=self._settings.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        seconds = f"after {time.monotonic() - begin_s:.1f} s"
        for replica, future in enumerate(futures):
            fault = future.exception() if future.done() else None
            if fault is not None:
                what, reason = explain_fault(fault)
                raise ReferenceLostError(
                    f"reference model {what}: phase={phase} replica={replica} {seconds}: {reason}"
                ) from fault
        silent = [replica for replica, future in enumerate(futures) if not future.done()]
        if silent:
            raise ReferenceLostError(f"reference model hangs: phase={phase} replicas={silent} {seconds}")
        return [future.result() for future in futures]
