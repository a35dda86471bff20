"""The part of every transport in vLLM's workers: nothing is loaded before all of it is verified.

Theory of operation. One update is three calls, each carried out by all workers before the next begins:

==========================  ============================================================================
``start_weight_update``     nothing to do yet
``update_weights``          every worker takes all weights in, and raises unless they are complete and right
``finish_weight_update``    every worker loads what it has; with tensor parallelism, its share of it
==========================  ============================================================================

So when ``update_weights`` fails on any worker, no weight has changed on any, and the update can be tried again.
When ``finish_weight_update`` fails there may be a mixture of versions: that engine is lost.

Between the two a worker sees all weights in the host's memory, whole: a file that it maps, or the row that they have
arrived in, of which there is one per machine. The GPU needs room for one parameter beside the model.

A plain model takes them by direct copies (``direct_copies.py``), any other by vLLM's reload (``version.load_weights``).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from backends.vllm.direct_copies import Swap, Tensors
from backends.vllm.version.workers import load_weights, transfer_bases

TransferEngine: Any = transfer_bases().WeightTransferEngine


class VerifiedTransferEngine(TransferEngine):  # type: ignore[misc]  # vLLM is Any to mypy
    """A worker's end of a transport, on CPU and GPU; ``receive`` is what transports differ in."""

    _verified: dict[str, torch.Tensor] | None = None
    _swap: Swap | None = None

    @abstractmethod
    def receive(self, update_info: Any) -> dict[str, torch.Tensor]:
        """Return the parameters by name, in the host's memory, verified.

        Args:
            update_info: What the trainer said of them.

        Raises:
            BackendError: If they are incomplete or differ from their checksums.
        """

    def start_weight_update(self) -> None:
        """Do nothing: the model stays whole until all weights are verified."""
        self._verified = None

    def receive_weights(self, update_info: Any) -> None:
        """Take the weights in, without loading them.

        Raises:
            BackendError: If they are incomplete or differ from their checksums.
        """
        self._verified = None
        self._verified = self.receive(update_info)

    def finish_weight_update(self) -> None:
        """Load what has been received."""
        if self._verified is None:
            raise RuntimeError("finish_weight_update called before update_weights")
        if self._swap is None:
            self._swap = Swap(self.model, self._reload)
        self._swap(self._verified)
        self._verified = None

    def _reload(self, tensors: Tensors) -> None:
        load_weights(self.model, self.model_config, tensors.items())

    def shutdown(self) -> None:
        """Forget what has been received."""
        self._verified = None
