"""Weights from the trainer's rank 0 to all engines' workers over NCCL, through vLLM's own transfer engine.

Not run by any test: it needs GPUs. Written against vLLM 0.32; 0.33 has another ``WeightSource``.

vLLM's trainer side would also call the engines. Here every engine is called by its own ``VLLMEngine``, at the same
time: its ``init_transfer`` meets the constructor of ``NcclSender``, its ``update`` meets ``send``. Both sides take
all parameters in the order of their names, in packed buffers of vLLM's default size.

All engines take part in every update. When one is lost, so is the group; a new one is made by all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo


class NcclSender:
    """The trainer's end of the group, on its rank 0."""

    def __init__(self, master_address: str, master_port: int, *, world_size: int) -> None:
        """Join the group as its first member; returns when all others have joined.

        Args:
            master_address: Where the members meet: this machine.
            master_port: A free port of it.
            world_size: This sender and all workers of all engines (count).
        """
        self._source = _HeldWeights()
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(master_address, master_port, world_size, rank=0),
            client=_EnginesAreCalledElsewhere(),
            source=self._source,
        )

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Send parameters from the host's memory to all workers of all engines; returns when they have them."""
        self._source.tensors = tensors
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class _HeldWeights(WeightSource):  # type: ignore[misc]  # vLLM is Any to mypy
    """Parameters in the host's memory, in the order of their names, moved to the GPU one at a time."""

    tensors: dict[str, torch.Tensor]

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(self.tensors.items())]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(self.tensors):
            yield name, self.tensors[name].to("cuda")


class _EnginesAreCalledElsewhere:
    """What vLLM's trainer side calls the engines with: does nothing (see the head of this file)."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
