"""Parameters that ZeRO-3 splits over the ranks: split at the start, whole for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


class Zero3:
    """A ``Sharding``: ZeRO-3's."""

    def empty(self, weight: Any) -> torch.Tensor:
        """Return it; see ``Sharding``."""
        return torch.empty(getattr(weight, "ds_shape", weight.shape), dtype=weight.dtype, device="meta")

    @contextlib.contextmanager
    def whole(self, weights: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Put them together; see ``Sharding``."""
        import deepspeed

        parted = [one for one in weights.values() if hasattr(one, "ds_id")]
        with deepspeed.zero.GatheredParameters(parted) if parted else contextlib.nullcontext():
            yield weights
