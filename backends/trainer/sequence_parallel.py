"""Rows that several ranks compute together: sequence parallelism by heads (Ulysses, arXiv:2309.14509).

Theory of operation. k consecutive ranks get the same rows. Each computes N/k consecutive tokens of a row, which is
padded with a sequence of its own. All but attention works token by token. Around attention, an all-to-all gives each
rank all tokens of A/k heads, and another brings the results of its tokens back. Heads of keys and values are repeated
until k divides them.

A loss needs whole sequences. So every rank gets the log-probabilities of all tokens and computes the loss of the whole
row. On each rank the gradient reaches that rank's tokens only. Summed over the ranks it is the gradient of one rank
alone; no factor k appears. The code that undoes an average over ranks therefore does not change.

DeepSpeed's ``UlyssesSPAttentionHF`` is not used: it gathers positions in every layer, needs three all-to-alls where one
does, and refuses values of another width than keys, and heads of keys that are neither a multiple nor a divisor of k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from backends.trainer.attention import packed_attention
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

# Legend of shapes: N tokens of a row, padding included; n = N/k tokens of this rank; M answer tokens of the row, m of
# them predicted on this rank; A heads of queries, K of keys and values; D numbers of a head; X numbers of a token.

SPREAD_ATTENTION = "packed_over_ranks"
"""Its name in transformers."""
ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow from the longest position that a rank sees."""
SIZES = (2, 4, 8)
"""Ranks of a row that are proposed where one is not enough (count)."""
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of a ``PolicyModel``."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share this rank's rows."""

    size: int
    """Paper symbol P, here k (count)."""
    place: int = 0
    """Of this rank: its part of a row."""
    ranks: Any = None
    """torch's group of processes. None: on torch's device ``meta``."""

    @classmethod
    def of(cls, size: int, rank: int) -> SequenceGroup:
        """Return the group of a rank; all ranks call it together."""
        group, _ = torch.distributed.new_subgroups(size)
        return cls(size, rank % size, group)

    def part(self, whole: torch.Tensor, padding: int) -> torch.Tensor:
        """Return this rank's part of the tokens of a row, shape [N, ...], after it has been padded."""
        each = -(-len(whole) // self.size)
        begin = self.place * each
        missing = self.size * each - len(whole)
        return torch.cat([whole, whole.new_full((missing, *whole.shape[1:]), padding)])[begin : begin + each]


def check_sequence_parallel(config: RunConfig, model_config: Any) -> None:
    """Check that ranks and heads divide by ``train.trainer.sequence_parallel``; else ``ConfigError``."""
    size = config.train_table.trainer.sequence_parallel
    for what, number in _divided(config, model_config).items():
        if number % size:
            raise ConfigError(f"train.trainer.sequence_parallel must divide the {number} {what}, got {size}")
    rope = (getattr(model_config.get_text_config(), "rope_parameters", None) or {}).get("rope_type")
    if size > 1 and rope in ROPE_BY_LENGTH:
        raise ConfigError(
            f"train.trainer.sequence_parallel must be 1 for a model with rope_type={rope!r}, as ranks would rotate "
            f"the same position differently, got {size}"
        )


def divides(config: RunConfig, model_config: Any, size: int) -> bool:
    """Return whether so many ranks may share rows."""
    return not any(number % size for number in _divided(config, model_config).values())


def _divided(config: RunConfig, model_config: Any) -> dict[str, int]:
    heads = model_config.get_text_config().num_attention_heads
    return {"ranks of the trainer": config.trainer_ranks, "attention heads": heads}


def spread(policy: Any, group: SequenceGroup) -> None:
    """Have the attention of a model, which was loaded by ``load_policy``, go over the ranks of a group."""
    AttentionInterface.register(SPREAD_ATTENTION, partial(spread_attention, group))
    policy.set_attn_implementation(SPREAD_ATTENTION)


def spread_attention(  # noqa: PLR0917  # transformers passes them by position
    group: SequenceGroup,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Return ``packed_attention`` of this rank's tokens to those of all ranks, shape [1, n, A, D of the values].

    ``query``: shape [1, A, n, D]; ``key``, ``value``: [1, K, n, D]. ``settings`` are of the whole row.
    """
    (_, heads, tokens, _), size = query.shape, group.size
    repeats = math.lcm(key.shape[1], size) // key.shape[1]
    if repeats > 1:
        key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
    tensors = (query, key, value)
    parts = [one[0].transpose(0, 1).reshape(tokens, size, -1) for one in tensors]  # [n, k, numbers of k-th of heads]
    whole_NX = exchange(torch.cat(parts, dim=-1).transpose(0, 1), group.ranks).flatten(0, 1)
    query, key, value = (
        part.unflatten(-1, (-1, one.shape[-1])).transpose(0, 1)[None]
        for part, one in zip(whole_NX.split([one.shape[-1] for one in parts], dim=-1), tensors, strict=True)
    )
    out, _ = packed_attention(module, query, key, value, attention_mask, **settings)
    back_knX = exchange(out.reshape(size, tokens, -1), group.ranks)
    return back_knX.transpose(0, 1).reshape(1, tokens, heads, -1), None


def over_ranks(model: Callable[..., Outputs], group: SequenceGroup) -> Callable[..., Outputs]:
    """Return a model that takes whole rows, and returns their values whole, from one whose attention is ``spread``.

    On every rank all values are the same; a gradient flows through those of its own tokens only.
    """

    def forward(
        *,
        token_N: torch.Tensor,
        position_N: torch.Tensor,
        boundary: torch.Tensor,
        longest: int,
        predictor_M: torch.Tensor,
        answer_M: torch.Tensor,
    ) -> Outputs:
        token_n, position_n = (group.part(one, 0) for one in (token_N, position_N))
        each = len(token_n)
        padding, begin = group.size * each - len(token_N), group.place * each
        if padding:
            boundary = pad(boundary, (0, 1), value=group.size * each)
        ends = torch.tensor([begin, begin + each], device=predictor_M.device)
        low, high = torch.searchsorted(predictor_M, ends).tolist()
        logprob_m, entropy_m, value_m = model(
            token_N=token_n,
            position_N=position_n,
            boundary=boundary,
            longest=max(longest, padding),
            predictor_M=predictor_M[low:high] - begin,
            answer_M=answer_M[low:high],
        )

        def whole(own_m: torch.Tensor) -> torch.Tensor:
            all_M = own_m.new_zeros(len(predictor_M))
            all_M[low:high] = own_m.detach()
            torch.distributed.all_reduce(all_M, group=group.ranks)  # others have zeros there
            return torch.cat([all_M[:low], own_m, all_M[high:]])

        return whole(logprob_m), whole(entropy_m), None if value_m is None else whole(value_m)

    return forward


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
