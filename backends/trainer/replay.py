"""Router replay: each token of a mixture goes to the experts that the engine used.

Engine and trainer round differently, so a router may choose other experts in training; log-probabilities then differ
by more than rounding. Replay changes the choice only. The router still computes the probabilities of all experts with
the present weights; the engine's experts get theirs. So the router keeps its gradient.
Source: Ma et al. 2025, "Rollout Routing Replay" (arXiv:2510.11370).

A router chooses by ``topk`` of one number for each expert. That call, of the right width and number, is answered with
the engine's experts, whatever the router does before and after it; the call that chooses groups has another width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from backends.interface import UNKNOWN
from backends.trainer.model import decoder_layers
from backends.trainer.packing import PackedRow
from backends.trainer.sequence_parallel import SequenceGroup

# Legend of shapes: N tokens of a row; L layers; K experts of a token; E experts of a layer.


class ReplayedRoutes(TorchFunctionMode):  # type: ignore[misc]  # torch is Any to mypy
    """Replaces a router's choice of K of E experts by ``routed_NK``, while it is entered."""

    def __init__(self, replay: Replay, routed_NK: torch.Tensor) -> None:
        super().__init__()
        self._replay, self._routed_NK = replay, routed_NK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the indices of a choice, and its values by those at the indices."""
        chosen = func(*args, **(kwargs or {}))
        if func not in {torch.topk, torch.Tensor.topk}:
            return chosen
        values_NE, routed_NK = args[0], self._routed_NK
        if values_NE.shape[-1] != self._replay.num_experts or chosen.indices.shape != routed_NK.shape:
            return chosen
        self._replay.replaced += 1
        index_NK = torch.where(routed_NK == UNKNOWN, chosen.indices, routed_NK)
        return torch.return_types.topk((values_NE.gather(-1, index_NK), index_NK))


def num_experts(model_config: Any) -> int:
    """Return the routed experts of a layer; 0 of a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((getattr(model_config, name) for name in names if getattr(model_config, name, None)), 0)


class Replay:
    """Makes all routers of a policy replay the routes of the present row, also where layers are recomputed."""

    def __init__(self, policy: Any, group: SequenceGroup | None = None) -> None:
        """``group``: of ranks that share rows, of which a policy has its part."""
        self.num_experts, self._group = num_experts(policy.config), group
        self.routed_NLK: torch.Tensor | None = None
        """Of the row, int64; it stays until its backward pass is done. None: routers choose."""
        self.replaced = 0
        """Choices of all rows that were replaced (count)."""
        for index, layer in enumerate(decoder_layers(policy)):
            layer.forward = partial(self._forward, layer.forward, index)

    def begin(self, row: PackedRow, device: torch.device) -> None:
        """Replay the routes of a row from now on, if it has any."""
        self.routed_NLK = None
        if row.routed_NLK is not None:
            whole_NLK = torch.tensor(row.routed_NLK, dtype=torch.int64, device=device)
            self.routed_NLK = whole_NLK if self._group is None else self._group.part(whole_NLK, UNKNOWN)

    def _forward(self, forward: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        if self.routed_NLK is None:
            return forward(*args, **kwargs)
        with ReplayedRoutes(self, self.routed_NLK[:, layer]):
            return forward(*args, **kwargs)
