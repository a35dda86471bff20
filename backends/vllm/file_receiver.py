"""How vLLM's workers receive weights from a file; runs inside vLLM's processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backends.transfer.weights_check import checkpoint_shapes
from backends.transfer.weights_file import read_verified
from backends.vllm.verified_receiver import VerifiedTransferEngine
from backends.vllm.version.workers import transfer_bases

InitInfo: Any = transfer_bases().WeightTransferInitInfo
UpdateInfo: Any = transfer_bases().WeightTransferUpdateInfo


@dataclass
class NoInitInfo(InitInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """A file needs no meeting beforehand."""


@dataclass
class FileUpdateInfo(UpdateInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Where the weights of one version are."""

    path: str
    """File in safetensors format, with Hugging Face names."""
    checksums: dict[str, str]
    """SHA-256 of each parameter's bytes."""


class FileTransferEngine(VerifiedTransferEngine):
    """A worker's end of the file transport; see ``verified_receiver.py``."""

    init_info_cls = NoInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing: there is no group of processes to join."""

    def receive(self, update_info: FileUpdateInfo) -> dict[str, torch.Tensor]:
        """Map the file and verify it."""
        return read_verified(update_info.path, update_info.checksums, checkpoint_shapes(self.model_config.model))
