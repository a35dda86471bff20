"""The worker's end of every transport inside vLLM's processes: nothing is loaded before all of it is verified.

Theory of operation. One update is three calls, each carried out by all workers before the next begins:

==========================  ============================================================================
``start_weight_update``     nothing to do yet
``update_weights``          every worker receives all weights, and raises unless they are complete and right
``finish_weight_update``    every worker loads them; with tensor parallelism, its share of them
==========================  ============================================================================

So when ``update_weights`` fails on any worker, no weight has changed on any, and the update can be repeated. When
``finish_weight_update`` fails there may be a mixture of versions: that engine is lost. Between the two a worker sees
all weights in the host's memory; the GPU needs room for one parameter beside the model.

A plain model takes weights by direct copies (``direct_copies.py``), or only what has changed, where the transport
knows that; any other by vLLM's reload. Adapters are written into a file, which vLLM reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.interface import Weights
from backends.lora import WEIGHTS_FILE
from backends.transfer.file import write_tensors
from backends.transfer.transport import DeltaReceiver, Membership, WeightReceiver, ends_of
from backends.transfer.verify import checkpoint_shapes
from backends.vllm.direct_copies import Swap
from backends.vllm.version.workers import load_weights, transfer_bases
from pipelinerl.errors import BackendError

TransferEngine: Any = transfer_bases().WeightTransferEngine
InitInfo: Any = transfer_bases().WeightTransferInitInfo
UpdateInfo: Any = transfer_bases().WeightTransferUpdateInfo


@dataclass
class JoinInfo(InitInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """A group to join."""

    ends: str
    folder: str
    """Of the model, or of the adapters that the weights are."""
    rendezvous: str
    first_worker: int
    """Of this engine among all, from 1."""
    timeout_s: float


@dataclass
class WeightsInfo(UpdateInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Published weights."""

    ends: str
    folder: str
    """As in ``JoinInfo``."""
    version: int
    """Fields of ``interface.Weights``."""
    location: str
    checksums: dict[str, str]


class VLLMReceiver(TransferEngine):  # type: ignore[misc]  # vLLM is Any to mypy
    """A worker's end, on CPU and GPU, for every transport."""

    init_info_cls = JoinInfo
    update_info_cls = WeightsInfo
    _receiver: WeightReceiver | None = None
    _folder = ""
    _verified: tuple[Weights, dict[str, torch.Tensor]] | None = None
    _swap: Swap | None = None
    _held: Weights | None = None
    """The weights in the model, if it got them whole or as a delta."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Begin to join a group; the sender learns when all have joined."""
        config = self.parallel_config
        own: int = config.data_parallel_index * config.world_size + config.rank
        member = Membership(
            rendezvous=init_info.rendezvous,
            worker=init_info.first_worker + own,
            shapes=checkpoint_shapes(init_info.folder),
            device=self.device,
            timeout_s=init_info.timeout_s,
        )
        self._of(init_info).join(member)

    def start_weight_update(self) -> None:
        """Change no weights: the model stays whole until new ones are verified."""
        self._verified = None

    def receive_weights(self, update_info: WeightsInfo) -> None:
        """Receive the weights; ``BackendError`` if they are incomplete or not right."""
        self._verified = None
        weights = Weights(update_info.version, update_info.location, update_info.checksums)
        self._verified = weights, dict(self._of(update_info).receive(weights))

    def finish_weight_update(self) -> None:
        """Load the received weights; ``BackendError`` if none have come, or they have changed."""
        if self._verified is None:
            raise BackendError("no weights have come")
        (weights, tensors), self._verified = self._verified, None
        assert self._receiver is not None
        if self.vllm_config.lora_config is not None:
            write_tensors(Path(self._folder) / WEIGHTS_FILE, tensors)  # vLLM reads it before the next decode step
            self._receiver.loaded(weights)
            return
        held, self._held = self._held, None
        if self._swap is None:
            self._swap = Swap(self.model, lambda new: load_weights(self.model, self.model_config, new.items()))
        delta = self._receiver.delta(weights, held) if held and isinstance(self._receiver, DeltaReceiver) else None
        if delta is None or not self._swap.patch(delta):
            self._swap(tensors)
        self._receiver.loaded(weights)
        self._held = weights

    def shutdown(self) -> None:
        """Leave the group and forget received weights."""
        self._verified = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _of(self, info: JoinInfo | WeightsInfo) -> WeightReceiver:
        if self._receiver is None:
            self._receiver, self._folder = ends_of(info.ends).receiver(info.folder), info.folder
        return self._receiver
