"""How much memory a piece of torch code needs, counted by its tensors; on the device ``meta`` nothing is computed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to mypy
    """Counts the bytes of all tensors that are made while it is entered, for as long as they live.

    What an operation needs within itself is not seen, nor what an allocator wastes.

    Args:
        known: Tensors that are there already; views of them count nothing.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        """Bytes that live."""
        self.peak = 0
        """Most that did at once (bytes)."""
        self._known = [tensor.untyped_storage() for tensor in known]  # held, so that none takes the place of another
        self._seen = {id(storage) for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it has made."""
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, made)
        return made

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._seen:
            self._seen.add(id(storage))
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return tensor

    def _free(self, name: int, num_bytes: int) -> None:
        self._seen.discard(name)
        self.now -= num_bytes
