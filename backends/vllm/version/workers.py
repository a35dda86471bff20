"""vLLM's workers: their transports, and how weights get into their models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

IN_PLACE = "PIPELINERL_PARAMETERS_IN_PLACE"
"""Variable of vLLM's processes for ``keep_parameters_in_place``."""


RECEIVER = "pipelinerl"
"""In vLLM, of the worker's end of all transports."""


class StreamedWorker:
    """What vLLM's workers can be asked besides, where weights are streamed."""

    weight_transfer_engine: Any

    def transfer_fault(self) -> str:
        """Return why the weights have not come in full; empty: they have."""
        return str(self.weight_transfer_engine.fault)


def transfer_bases() -> Any:
    """Return vLLM's module of base classes for weight transfer on workers."""
    from vllm.distributed.weight_transfer import base

    return base


def register_receiver(module: str, name: str) -> None:
    """Register the class of the worker's end with this process's vLLM; a second call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if RECEIVER not in Factory._registry:
        Factory.register_engine(RECEIVER, module, name)


def load_weights(model: Any, model_config: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Load a checkpoint's weights into a worker's model, in place.

    The model's parameters may be packed or fused after loading. vLLM's layerwise reload undoes that, lets the model's
    own loader have the weights, and packs again into the same storage. It is made for plain, unquantised models.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if next(model.parameters()).device.type == "cpu":
        # Experts are packed for the CPU where their kernel is made, which is once: reloaded ones would stay unpacked,
        # and be read as if they were not. So it is made again.
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
    initialize_layerwise_reload(model)
    try:
        model.load_weights(iter(weights))
    finally:  # what has not come is put back, and it can be tried again
        finalize_layerwise_reload(model, model_config)


def keep_parameters_in_place() -> None:
    """Keep linear layers on CPU from being packed for oneDNN, out of which no parameter can be changed."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
