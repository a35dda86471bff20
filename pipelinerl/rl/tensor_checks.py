"""Checks of shapes, types and settings; values are not looked at, since the host would have to wait for the GPU."""

from __future__ import annotations

import torch


def check_tokens(logprob_N: torch.Tensor, **others: torch.Tensor) -> None:
    """Check that log-probabilities have one dimension, and that the others have their shape."""
    check(logprob_N.dim() == 1, "logprob_N must be one-dimensional", f"shape {tuple(logprob_N.shape)}")
    for name, other in others.items():
        check_shape(name, other, "logprob_N", logprob_N)


def check_sequences(logprob_N: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int) -> None:
    """Check the sequence that each token belongs to."""
    check_shape("sequence_N", sequence_N, "logprob_N", logprob_N)
    check(sequence_N.dtype == torch.int64, "sequence_N must be int64", sequence_N.dtype)
    check(num_sequences >= 0, "num_sequences must be at least 0", num_sequences)


def check_shape(name: str, tensor: torch.Tensor, like: str, other: torch.Tensor) -> None:
    """Check that a tensor has the shape of another one."""
    shape = tuple(other.shape)
    check(tuple(tensor.shape) == shape, f"{name} must have the shape of {like}, {shape}", f"{tuple(tensor.shape)}")


def check_clip(clip_low: float, clip_high: float) -> None:
    """Check how far below and above 1 a ratio counts."""
    check(0 <= clip_low < 1, "clip_low must be at least 0 and below 1", clip_low)
    check(clip_high >= 0, "clip_high must be at least 0", clip_high)


def check(holds: bool, rule: str, got: object) -> None:
    """Raise ``ValueError`` with the rule and what came instead, unless it holds."""
    if not holds:
        raise ValueError(f"{rule}, got {got}")
