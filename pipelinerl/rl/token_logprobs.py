"""Log-probabilities of tokens from logits, in little memory."""

from __future__ import annotations

from typing import Any

import torch

from pipelinerl.rl.tensor_checks import check

# Legend of shapes: N flat tokens of a packed row; V words of the vocabulary.

CHUNK_ELEMENTS = 2**25
"""Logits that are worked on at a time (count): 128 MiB in float32."""


def token_logprobs(logits_NV: torch.Tensor, token_N: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return the log-probability of each token under softmax(logits / temperature).

    Computed in float32 whatever the type of the logits (float64 stays), a few rows at a time in both directions:
    beyond the logits and their gradient it needs no memory of size [N, V]. It cannot be differentiated twice.

    Args:
        logits_NV: Logits before temperature, shape [N, V], each row where its token was predicted.
        token_N: Tokens, 0 to V - 1, shape [N], int64.
        temperature: Softmax temperature that the tokens were sampled with (no unit).

    Returns:
        Log-probabilities, shape [N] (nats), float32.

    Raises:
        ValueError: If shapes do not fit, ``token_N`` is not int64, or ``temperature`` is not above 0.
    """
    check(logits_NV.dim() == 2, "logits_NV must be two-dimensional", f"shape {tuple(logits_NV.shape)}")
    rows = tuple(logits_NV.shape[:1])
    check(tuple(token_N.shape) == rows, f"token_N must have shape {rows}", f"{tuple(token_N.shape)}")
    check(token_N.dtype == torch.int64, "token_N must be int64", token_N.dtype)
    check(temperature > 0, "temperature must be above 0", temperature)
    return _TokenLogprobs.apply(logits_NV, token_N, temperature)


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """Log-softmax at the tokens, whose backward pass computes the softmax again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, token_N: torch.Tensor, temperature: float) -> torch.Tensor:
        ctx.save_for_backward(logits_NV, token_N)
        ctx.temperature = temperature
        logprob_N = torch.empty(len(token_N), dtype=_precise(logits_NV), device=logits_NV.device)
        for rows in _chunks(logits_NV):
            scaled = logits_NV[rows].to(logprob_N.dtype) / temperature
            logprob_N[rows] = scaled.log_softmax(-1).gather(1, token_N[rows, None])[:, 0]
        return logprob_N

    @staticmethod
    def backward(ctx: Any, gradient_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, token_N = ctx.saved_tensors
        gradient_NV = torch.empty_like(logits_NV)
        scaled_gradient_N = gradient_N / ctx.temperature
        for rows in _chunks(logits_NV):  # (1[v = token] - softmax_v) * gradient / temperature
            scale = scaled_gradient_N[rows, None]
            softmax = (logits_NV[rows].to(gradient_N.dtype) / ctx.temperature).softmax(-1)
            gradient_NV[rows] = softmax.mul_(-scale).scatter_add_(1, token_N[rows, None], scale)
        return gradient_NV, None, None


def _precise(logits_NV: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits_NV.dtype, torch.float32)


def _chunks(logits_NV: torch.Tensor) -> list[slice]:
    num, width = logits_NV.shape
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(start, start + step) for start in range(0, num, step)]
