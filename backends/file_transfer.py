"""How vLLM's workers receive weights from a file; runs inside vLLM's processes.

Theory of operation. One update is three calls, each carried out by all workers before the next begins:

==========================  ============================================================================
``start_weight_update``     nothing to do yet
``update_weights``          every worker reads the whole file, and raises unless it is complete and right
``finish_weight_update``    every worker loads what it has read; with tensor parallelism, its share of it
==========================  ============================================================================

So when ``update_weights`` fails on any worker, no weight has changed on any, and the update can be tried again.
When ``finish_weight_update`` fails there may be a mixture of versions: that engine is lost.

The model's parameters may be packed or fused after loading. vLLM's layerwise reload undoes that, lets the
model's own loader have the Hugging Face parameters, and packs again into the same storage. It is made for plain,
unquantised models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from backends.weights_file import checkpoint_shapes, read_verified


@dataclass
class NoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """A file needs no meeting beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Where the weights of one version are."""

    path: str
    """File in safetensors format, with Hugging Face names."""
    checksums: dict[str, str]
    """SHA-256 of each parameter's bytes."""


class FileTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is Any to mypy
    """A worker's end of the file transport, on CPU and GPU."""

    init_info_cls = NoInitInfo
    update_info_cls = FileUpdateInfo
    _verified: dict[str, torch.Tensor] | None = None

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing: there is no group of processes to join."""

    def start_weight_update(self) -> None:
        """Do nothing: the model stays whole until all weights are verified."""
        self._verified = None

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Read the weights, without loading them.

        Raises:
            BackendError: If the file is missing, incomplete, or differs from its checksums.
        """
        shapes = checkpoint_shapes(self.model_config.model)
        self._verified = read_verified(update_info.path, update_info.checksums, shapes)

    def finish_weight_update(self) -> None:
        """Load what has been received."""
        if self._verified is None:
            raise RuntimeError("finish_weight_update called before update_weights")
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(self._verified.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        self._verified = None

    def shutdown(self) -> None:
        """Forget what has been read."""
        self._verified = None
