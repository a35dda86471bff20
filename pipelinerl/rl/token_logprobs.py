"""Log-probabilities of tokens, and the entropy they were sampled at, from hidden states: the output layer in chunks.

The logits of a pack, [tokens, vocabulary], and their gradient are what a trainer of a small model would need most of
its memory for: 5 GB each for 16 384 tokens of a vocabulary of 152 064 in bfloat16. Here ``CHUNK_TOKENS`` tokens have
logits at a time, in both directions: the backward pass computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pipelinerl.rl.tensor_checks import check

# Legend of shapes: N flat tokens of a packed row; C tokens of a chunk of it; H width of the model; V words of the
# vocabulary.

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time (count)."""


def token_logprobs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, token_N: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each token under softmax(hidden weight^T / temperature), and the entropy of it.

    Products are of the type of the weights; the softmax is of float32 at least (float64 stays), and so is the sum of
    the chunks' gradients of the weights. It cannot be differentiated twice.

    Args:
        hidden_NH: Last hidden states, shape [N, H], each where its token was predicted.
        weight_VH: The output layer, shape [V, H], of the same type.
        token_N: Tokens, 0 to V - 1, shape [N], int64.
        temperature: Softmax temperature that the tokens were sampled with (no unit).

    Returns:
        Log-probabilities and entropies, both of shape [N] (nats), float32. No gradient flows through the entropies.

    Raises:
        ValueError: If shapes do not fit, ``token_N`` is not int64, or ``temperature`` is not above 0.
    """
    check(hidden_NH.dim() == 2, "hidden_NH must be two-dimensional", f"shape {tuple(hidden_NH.shape)}")
    width = hidden_NH.shape[1]
    check(
        weight_VH.dim() == 2 and weight_VH.shape[1] == width,
        f"weight_VH must have shape (V, {width})",
        f"{tuple(weight_VH.shape)}",
    )
    rows = tuple(hidden_NH.shape[:1])
    check(tuple(token_N.shape) == rows, f"token_N must have shape {rows}", f"{tuple(token_N.shape)}")
    check(token_N.dtype == torch.int64, "token_N must be int64", token_N.dtype)
    check(temperature > 0, "temperature must be above 0", temperature)
    logprob_N, entropy_N = _OutputLayer.apply(hidden_NH, weight_VH, token_N, temperature)
    return logprob_N, entropy_N


class _OutputLayer(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """Output layer and log-softmax at the tokens; keeps its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, token_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden_NH, weight_VH, token_N)
        ctx.temperature = temperature
        precise = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprob_N, entropy_N = (hidden_NH.new_empty(len(token_N), dtype=precise) for _ in range(2))
        for rows in _chunks(len(token_N)):
            logprob_CV = (hidden_NH[rows] @ weight_VH.T).to(precise).div_(temperature).log_softmax(-1)
            logprob_N[rows] = logprob_CV.gather(1, token_N[rows, None])[:, 0]
            entropy_N[rows] = -logprob_CV.exp().mul_(logprob_CV).sum(-1)
        ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is Any to mypy
    def backward(
        ctx: Any, gradient_N: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_NH, weight_VH, token_N = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        hidden_gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=gradient_N.dtype) if needs_weight else None
        scaled_N = gradient_N / ctx.temperature
        for rows in _chunks(len(token_N)):  # (1[v = token] - softmax_v) * gradient / temperature
            logits_CV = (hidden_NH[rows] @ weight_VH.T).to(gradient_N.dtype).div_(ctx.temperature)
            scale_C1 = scaled_N[rows, None]
            gradient_CV = logits_CV.softmax(-1).mul_(-scale_C1).scatter_add_(1, token_N[rows, None], scale_C1)
            del logits_CV
            gradient_CV = gradient_CV.to(weight_VH.dtype)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH[rows] = gradient_CV @ weight_VH
            if weight_gradient_VH is not None:
                weight_gradient_VH += gradient_CV.T @ hidden_NH[rows]
        if weight_gradient_VH is not None:
            weight_gradient_VH = weight_gradient_VH.to(weight_VH.dtype)
        return hidden_gradient_NH, weight_gradient_VH, None, None


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, num_tokens, CHUNK_TOKENS)]
