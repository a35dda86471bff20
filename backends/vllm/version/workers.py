"""vLLM's workers: their transports, and how weights get into their models."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

IN_PLACE = "PIPELINERL_PARAMETERS_IN_PLACE"
"""Variable of vLLM's processes for ``keep_parameters_in_place``."""
RECEIVER = "pipelinerl"
"""Name of the worker's end of all transports in vLLM."""


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
    own loader have the weights, and packs again into the same storage, or quantizes again (``arguments.EIGHT_BIT``; on
    CPU in bfloat16 vLLM 0.32 has the bits of an engine started with these weights).
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if next(model.parameters()).device.type == "cpu":
        # The kernel of experts packs them for the CPU when it is made: reloaded experts would stay unpacked, and be
        # read as if they were packed. So the kernel is made again.
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
    initialize_layerwise_reload(model)
    try:
        model.load_weights(iter(weights))
    finally:  # missing parameters are put back, and another try is possible
        finalize_layerwise_reload(model, model_config)


def adapter_request(folder: str) -> Any:
    """Return what asks for the adapters in a folder.

    Workers read them before the first decode step, and anew before the first one after an update of weights.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=1, lora_path=folder)


def keep_parameters_in_place() -> None:
    """Keep linear layers on CPU from being packed for oneDNN: a packed parameter cannot be changed."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def adapt_to_cpu() -> None:
    """Replace two functions before vLLM takes them into use; on GPUs nothing changes.

    Where its processes wait for each other and yield the core, they sleep for 0.1 ms: there are few cores for all.
    vLLM 0.32's kernel of speculative decoding turns temperatures into whole numbers and writes them into a copy:
    drafted tokens are then accepted, and log-probabilities given, at whatever temperature the memory held.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.utils import cpu_triton_utils

    def expand(out_N: Any, in_B: Any, ends_B: Any, replace_from: float, replace_to: float, *_: Any) -> None:
        """Repeat the value of each sequence for its drafted tokens, which end before ``ends_B``."""
        counts_B = torch.diff(ends_B, prepend=ends_B.new_zeros(1))
        values_N = in_B.repeat_interleave(counts_B.long())
        out_N.copy_(values_N.masked_fill(values_N == replace_from, replace_to))

    shm_broadcast.sched_yield = lambda: time.sleep(1e-4)
    cpu_triton_utils._expand_kernel_impl = expand
