"""Attention on packed rows: every sequence attends to itself only.

On GPU it is torch's own variable-length FlashAttention, part of every build for CUDA, without a mask of
[tokens, tokens]; on Hopper FlashAttention 3, where its package is. On CPU each sequence is taken by itself. The
boundaries are made once a row and handed to all layers: transformers would find them anew in each, and the host would
wait for the GPU.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from pipelinerl.errors import ConfigError

# Legend of shapes: N tokens of a row; S sequences of it; A heads of queries, K heads of keys and values; D numbers of
# a head.

PACKED_ATTENTION = "packed"
"""Its name in transformers."""
NOT_SUPPORTED = ("softcap", "s_aux", "position_bias")
"""Features of some models that the kernel lacks."""
NEWEST_WITHOUT = (7, 5)
"""Compute capability: Turing has no FlashAttention."""


def register_packed_attention() -> str:
    """Register this attention with transformers; return its name."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def check_kernel(device: torch.device) -> None:
    """Raise ConfigError if a GPU has no kernel for sequences of variable length."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability <= NEWEST_WITHOUT:
        raise ConfigError(
            f"train.device='gpu' needs GPUs with FlashAttention, compute capability 8.0 (A100) or newer, "
            f"got {torch.cuda.get_device_name(device)} with {capability[0]}.{capability[1]}"
        )


@cache
def hopper_kernel(device: torch.device) -> Any:
    """Return FlashAttention 3 for sequences of variable length, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except (ImportError, OSError):  # a build for another torch
        return None
    return flash_attn_varlen_func


def sequence_arguments(boundary: torch.Tensor, longest: int) -> dict[str, Any]:
    """Return transformers' keyword arguments for attention over packed sequences, the longest of so many tokens.

    ``boundary``: first token of every sequence, and the number of tokens, shape [S + 1], int32.
    """
    return {"cu_seq_lens_q": boundary, "cu_seq_lens_k": boundary, "max_length_q": longest, "max_length_k": longest}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,  # noqa: ARG001  # there is none
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of every sequence of a row to itself (and no weights), shape [1, N, A, D of the values].

    See ``transformers.AttentionInterface`` and ``sequence_arguments``. ``query``: shape [1, A, N, D]; ``key``,
    ``value``: [1, K, N, D]. ``scaling`` None: D^-1/2. ``sliding_window``: tokens that a token sees, itself included.
    ``ConfigError`` if the kernel lacks a feature of the model.
    """
    if asked := [name for name in NOT_SUPPORTED if others.get(name) is not None]:
        raise ConfigError(f"train.model.path: the attention of {type(module).__name__} needs {asked[0]}, not supported")
    flash_3 = hopper_kernel(query.device)
    if query.device.type == "cpu" and flash_3 is None:
        return _one_by_one((query, key, value), cu_seq_lens_q, scaling, sliding_window), None
    from torch.nn.attention.varlen import varlen_attn

    width = value.shape[-1]
    if width < query.shape[-1]:
        value = pad(value, (0, query.shape[-1] - width))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    given = (
        *(one.squeeze(0).transpose(0, 1).contiguous() for one in (query, key, value)),
        *(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q),
    )
    if flash_3 is None:
        out = varlen_attn(*given, scale=scaling, window_size=window, enable_gqa=True)
    else:
        out = flash_3(*given, softmax_scale=scaling, causal=True, window_size=window)
        out = out[0] if isinstance(out, tuple) else out  # its first releases add the sums of the softmax
    return (out[..., :width] if width < out.shape[-1] else out)[None], None


def _one_by_one(
    tensors: tuple[torch.Tensor, ...], boundary: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    parts = []
    for begin, end in pairwise(boundary.tolist()):
        mask = None
        if window is not None and end - begin > window:
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool).tril().triu(1 - window)
        query, key, value = (tensor[:, :, begin:end] for tensor in tensors)
        part = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1)
