"""All-to-all between ranks, with its gradient: of heads (sequence parallelism) and of tokens (expert parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Counts = Sequence[int] | None
"""Rows for each rank, or from each. None: as many for each."""


def exchange(rows: torch.Tensor, group: Any, sent: Counts = None, arrived: Counts = None) -> torch.Tensor:
    """Send so many rows to each rank of a group, in order; return those that arrive. The gradient goes the way back.

    ``group``: torch's. None: on torch's device ``meta``, nothing is sent.
    """
    received: torch.Tensor = _Exchange.apply(rows, group, sent, arrived)
    return received


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, sent: Counts, arrived: Counts) -> torch.Tensor:
        ctx.way = group, sent, arrived
        return _exchanged(rows, group, sent, arrived)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, sent, arrived = ctx.way
        return _exchanged(gradient, group, arrived, sent), None, None, None


def _exchanged(rows: torch.Tensor, group: Any, sent: Counts, arrived: Counts) -> torch.Tensor:
    received = rows.new_empty(len(rows) if arrived is None else sum(arrived), *rows.shape[1:])
    if group is not None:
        torch.distributed.all_to_all_single(received, rows.contiguous(), arrived, sent, group=group)
    return received
