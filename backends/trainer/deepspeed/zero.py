"""Parameters that ZeRO-3 splits over the ranks: split at the start, whole for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def split(model: torch.nn.Module, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Split a model that is whole on rank 0, without memory elsewhere; rank 0 reads one parameter after the other."""
    import deepspeed  # reads DS_ACCELERATOR when it is imported

    splitter, reads = deepspeed.zero.Init(config_dict_or_path=config), torch.distributed.get_rank() == 0
    for parameter in model.parameters():
        # A copy even in the same type: broadcasts must not write into the pages of the file.
        whole = parameter.data
        parameter.data = whole.to(dtype, copy=True) if reads else torch.empty_like(whole, dtype=dtype)
        splitter._convert_to_zero_parameters([parameter])
    buffers = [dict(model.named_buffers())]  # only rank 0 has read the checkpoint
    torch.distributed.broadcast_object_list(buffers, src=0)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[0][name].to(splitter.local_device)


def gathered_parameters(parameters: list[Any]) -> AbstractContextManager[None]:
    """Return a context in which split parameters are whole; all ranks enter it together."""
    import deepspeed

    gathering: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameters)
    return gathering
