"""A rank's part of weight publishing: the policy's weights for the transport's sender, and the group that it sends to.

All ranks gather the parameters together; rank 0 has them whole. ``send`` and ``abort_group`` come from threads of their
own while training goes on. The driver never publishes and sends at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from backends.interface import Weights
from backends.lora import adapter_shapes
from backends.trainer.model import PolicyModel, gathered, saved_buckets, saved_shapes
from backends.transfer.group import GroupHost
from backends.transfer.row import parameters_of
from backends.transfer.transport import Parameters, SenderContext, ends_of
from backends.transfer.verify import check_names, checkpoint_shapes
from pipelinerl.config.train import LoraConfig
from pipelinerl.hardware.transport import WeightTransport


class PolicyWeights:
    """A ``WeightSource``: the weights of a policy under the names of its checkpoint."""

    def __init__(self, model: PolicyModel, *, receives: bool, device: torch.device) -> None:
        self._model, self._receives, self.device = model, receives, device

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters, part by part, in a part in the order of their names."""
        return tuple(one for part in saved_buckets(self._model) for one in parameters_of(part))

    def buckets(self, *, everywhere: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the weights part by part; see ``WeightSource``."""
        return gathered(self._model, receive=self._receives or everywhere)


class Publisher:
    """One rank's part; ``rank`` 0 sends, ``folder`` is for files, ``model_path`` the engines' model."""

    def __init__(
        self,
        rank: int,
        *,
        device: Literal["cpu", "gpu"],
        transport: WeightTransport,
        folder: Path,
        model_path: str,
        lora: LoraConfig | None = None,
    ) -> None:
        self._receives, self._model_path, self._lora = rank == 0, model_path, lora
        self._device = torch.device("cuda:0" if device == "gpu" else "cpu")
        self.group = GroupHost()
        self._sender = ends_of(transport.ends).sender(SenderContext(self._receives, folder, self.group))
        self._source: PolicyWeights | None = None

    def check(self, model: PolicyModel) -> None:
        """Raise ``WeightMismatchError`` on rank 0 if names or shapes of weights differ from the engines' model."""
        if self._receives:
            shapes = {name: tuple(weight.shape) for name, weight in saved_shapes(model).items()}
            wanted = checkpoint_shapes(self._model_path)
            if self._lora is not None:
                wanted = adapter_shapes(wanted, self._lora.rank)
            check_names(shapes, wanted, source="weights to be sent")

    def publish(self, model: PolicyModel, version: int) -> Weights | None:
        """Make the weights ready to be sent; all ranks call it together. None on other ranks than 0."""
        self._source = self._source or PolicyWeights(model, receives=self._receives, device=self._device)
        return self._sender.publish(self._source, version)

    def send(self, version: int) -> str | None:
        """Send the newest published weights; return the fault, if any. Rank 0 only."""
        return self._sender.send(version)

    def close(self) -> None:
        """Free the published weights and leave the group."""
        self._sender.close()
        self.group.close()

    def join_group(self, names: Sequence[str], timeout_s: float) -> str | None:
        """Join the group opened last; return the fault, if any, when all have joined; see ``GroupHost.join``."""
        return self.group.join(names, self._source.parameters if self._source else (), timeout_s)
