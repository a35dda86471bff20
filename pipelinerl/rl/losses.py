"""Losses on the tokens of a packed row, to be minimised; log-probabilities of tokens from hidden states.

``policy_loss`` returns the loss of every token; the caller adds them up over the tokens of the optimizer step and
divides by its sequences: ``loss_N.sum() / train_batch_size``. So long answers weigh more, except in ``gspo``.

With w = pi/mu of a token, W the product of w over its sequence, A the advantage, and sg[.] without a gradient:

=============  =================================================  ====================================================
reinforce      ``-sg[min(c, w)] A log pi``                        Piche et al. 2025 (arXiv:2509.19128), eq. 5; its c: 5
plain          ``-A log pi``                                      none: as if pi had sampled every token
sequence       ``-sg[min(c, W)] A log pi``                        unbiased as c grows; the variance grows with length
                                                                  and lag
ppo            ``-min(w A, clip(w, 1 - low, 1 + high) A)``        Schulman et al. 2017 (arXiv:1707.06347), eq. 7
cispo          ``-sg[clip(w, 1 - low, 1 + high)] A log pi``       MiniMax-M1 (arXiv:2506.13585), which clips from above
                                                                  only: ``clip_low`` near 1
gspo           ``-min(s A, clip(s, 1 - low, 1 + high) A) / n``,   Zheng et al. 2025 (arXiv:2507.18071), eq. 5 and 7,
               s = exp(mean log w of its sequence of n tokens)    which clips at 3e-4 and 4e-4: s is much closer to 1
topr           ``-sg[1 if A >= 0 else min(1, W)] A log pi``       Le Roux et al. 2025 (arXiv:2503.14286), tapered
                                                                  off-policy REINFORCE
=============  =================================================  ====================================================

At w = 1 (and c >= 1) all have the gradient of plain REINFORCE, -A d log pi; gspo has it divided by n: every sequence
counts once, as in its paper (ServiceNow/PipelineRL weighs it by n).

A mask makes the loss of a token 0 where a ratio r is out of ``mask_low`` to ``mask_high``; divisor, KL and value terms
stay. pi is that before the optimizer step, as in the papers. With c of at least the upper bound:

==========  ==========  ==============  ==============================================================================
mask        r           with            published as
==========  ==========  ==============  ==============================================================================
token       w           reinforce       IcePop, Ling Team 2025 (arXiv:2510.18855), at 0.5 and 5; its KL is unmasked too
token       w           reinforce       masked importance sampling (MIS) of tokens, ``mask_low`` 0
sequence    W           sequence        the same of sequences: Liu, Li et al. 2025, "When Speed Kills Stability"
geometric   s of gspo   any             geometric rejection: verl's ``geometric``, at 0.999 and 1.001 (its divisor drops
                                        masked tokens, and so does its KL); prime-rl's former ``geo_mask``, 0.1 and 10
==========  ==========  ==============  ==============================================================================

Shapes and types are checked. Values are not, since to look at them would make the host wait for the GPU: a NaN or an
infinity that no mask removes goes into the loss and is the caller's to find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch.autograd.function import once_differentiable

from pipelinerl.rl.config import LossConfig
from pipelinerl.util.arrays import check


def _check_shapes(like: str, tensor_N: torch.Tensor, **others: torch.Tensor) -> None:
    """Check that a tensor, named ``like``, has one dimension, and that the others have its shape."""
    shape = tuple(tensor_N.shape)
    check(len(shape) == 1, f"{like} must be one-dimensional", f"shape {shape}")
    for name, other in others.items():
        check(tuple(other.shape) == shape, f"{name} must have the shape of {like}, {shape}", tuple(other.shape))


# Log-probabilities and entropies from hidden states, the output layer in chunks: the logits of a whole pack, and their
# gradient, are 5 GB each for 16 384 tokens of a vocabulary of 152 064 in bfloat16. The backward pass computes each
# chunk's logits again. Shapes: N flat tokens of a packed row; C tokens of a chunk; H width of the model; V vocabulary.

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time (count)."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax of a chunk's logits, which it may overwrite."""

    logprobs: Callable[..., tuple[torch.Tensor, ...]]
    """Of logits_CV, token_C, temperature: logprob_C, entropy_C, and what the gradient keeps of them."""
    gradient: Callable[..., torch.Tensor]
    """Of logits_CV, token_C, scale_C, temperature, and what was kept: (1[v = token] - softmax_v) scale."""
    chunk_tokens: int
    num_kept: int = 0


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    token_N: torch.Tensor,
    *,
    temperature: float,
    softmax: Softmax | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each token under softmax(hidden weight^T / temperature), and the entropy of it.

    Both have shape [N] (nats), float32; no gradient flows through the entropies. Products are of the type of the
    weights; the softmax is of float32 at least (float64 stays), and so is the sum of the chunks' gradients of the
    weights. It cannot be differentiated twice.

    Args:
        hidden_NH: Last hidden states, shape [N, H], each where its token was predicted.
        weight_VH: The output layer, shape [V, H], of the same type.
        token_N: Tokens, 0 to V - 1, shape [N], int64.
        temperature: Softmax temperature that the tokens were sampled with (no unit).
        softmax: None: by torch, operation by operation.

    Raises:
        ValueError: If shapes do not fit, ``token_N`` is not int64, or ``temperature`` is not above 0.
    """
    check(hidden_NH.dim() == 2, "hidden_NH must be two-dimensional", f"shape {tuple(hidden_NH.shape)}")
    width = hidden_NH.shape[1]
    check(
        weight_VH.dim() == 2 and weight_VH.shape[1] == width,
        f"weight_VH must have shape (V, {width})",
        tuple(weight_VH.shape),
    )
    rows = tuple(hidden_NH.shape[:1])
    check(tuple(token_N.shape) == rows, f"token_N must have shape {rows}", tuple(token_N.shape))
    check(token_N.dtype == torch.int64, "token_N must be int64", token_N.dtype)
    check(temperature > 0, "temperature must be above 0", temperature)
    softmax = softmax or Softmax(_logprobs, _gradient, CHUNK_TOKENS)
    logprob_N, entropy_N = _OutputLayer.apply(hidden_NH, weight_VH, token_N, (temperature, softmax))
    return logprob_N, entropy_N


def _logprobs(logits_CV: torch.Tensor, token_C: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).div_(temperature)
    logits_CV = logits_CV.log_softmax(-1)
    entropy_C = -logits_CV.exp().mul_(logits_CV).sum(-1)
    return logits_CV.gather(1, token_C[:, None])[:, 0], entropy_C


def _gradient(logits_CV: torch.Tensor, token_C: torch.Tensor, scale_C: torch.Tensor, temperature: float) -> Any:
    dtype, scale_C1 = logits_CV.dtype, scale_C[:, None]
    logits_CV = logits_CV.to(scale_C.dtype).div_(temperature).softmax(-1)
    return logits_CV.mul_(-scale_C1).scatter_add_(1, token_C[:, None], scale_C1).to(dtype)


class _OutputLayer(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """Output layer and log-softmax at the tokens; keeps its inputs, and some numbers of a token."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, token_N: torch.Tensor, settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.settings = temperature, softmax = settings
        precise = torch.promote_types(hidden_NH.dtype, torch.float32)
        sums = [hidden_NH.new_empty(len(token_N), dtype=precise) for _ in range(2 + softmax.num_kept)]
        for rows in _chunks(len(token_N), softmax.chunk_tokens):
            found = softmax.logprobs(hidden_NH[rows] @ weight_VH.T, token_N[rows], temperature)
            for sum_N, sum_C in zip(sums, found, strict=True):
                sum_N[rows] = sum_C
        logprob_N, entropy_N, *kept = sums
        ctx.save_for_backward(hidden_NH, weight_VH, token_N, *kept)
        ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is Any to mypy
    def backward(
        ctx: Any, gradient_N: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_NH, weight_VH, token_N, *kept = ctx.saved_tensors
        temperature, softmax = ctx.settings
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        hidden_gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=gradient_N.dtype) if needs_weight else None
        scaled_N = gradient_N / temperature
        for rows in _chunks(len(token_N), softmax.chunk_tokens):
            given = token_N[rows], scaled_N[rows], temperature, *(kept_N[rows] for kept_N in kept)
            gradient_CV = softmax.gradient(hidden_NH[rows] @ weight_VH.T, *given)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH[rows] = gradient_CV @ weight_VH
            if weight_gradient_VH is not None:
                weight_gradient_VH += gradient_CV.T @ hidden_NH[rows]
        if weight_gradient_VH is not None:
            weight_gradient_VH = weight_gradient_VH.to(weight_VH.dtype)
        return hidden_gradient_NH, weight_gradient_VH, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


# Legend of shapes: N flat tokens of a packed row; S sequences in it; V words of the vocabulary.

LOG_RATIO_LIMIT = 20.0
"""Where abs(log w) is cut (nats): exp(20) = 5e8 times a gradient of 0 is 0, exp(100) would be inf and give NaN."""
KL_LOG_RATIO_LIMIT = 5.0
"""Where log ref - log pi is cut from above in ``kl_to_reference`` (nats)."""


def policy_loss(
    config: LossConfig,
    *,
    logprob_N: torch.Tensor,
    behaviour_logprob_N: torch.Tensor,
    advantage_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
) -> torch.Tensor:
    """Return the loss of each token by ``config.kind`` and ``config.mask``, shape [N], without KL and value terms.

    Args:
        config: Kind, truncation c, how far below and above 1 a ratio counts, and the mask.
        logprob_N: log pi of each token, shape [N] (nats), with gradient.
        behaviour_logprob_N: log mu of each token, shape [N] (nats). No gradient flows through it.
        advantage_N: A of each token, shape [N]: its sequence's, or R - v (not in ``gspo``; unchecked). No gradient.
        sequence_N: Sequence of each token, 0 to S - 1, shape [N], int64; sequences are whole.
        num_sequences: S (count).

    Raises:
        ValueError: If shapes differ, ``sequence_N`` is not int64 or ``num_sequences`` is below 0.
    """
    tokens = {"behaviour_logprob_N": behaviour_logprob_N, "advantage_N": advantage_N, "sequence_N": sequence_N}
    _check_shapes("logprob_N", logprob_N, **tokens)
    check(sequence_N.dtype == torch.int64, "sequence_N must be int64", sequence_N.dtype)
    check(num_sequences >= 0, "num_sequences must be at least 0", num_sequences)

    def sequence_sum(value_N: torch.Tensor) -> torch.Tensor:
        return value_N.new_zeros(num_sequences).index_add(0, sequence_N, value_N)

    def lengths() -> torch.Tensor:
        return sequence_sum(torch.ones_like(logprob_N)).clamp(min=1)

    def weighted(weight_N: torch.Tensor) -> torch.Tensor:
        return -weight_N * advantage_N * logprob_N

    low, high = 1 - config.clip_low, 1 + config.clip_high
    advantage_N = advantage_N.detach()
    log_ratio_N = logprob_N - behaviour_logprob_N.detach()
    detached_N = log_ratio_N.detach()
    match config.kind:
        case "reinforce":
            loss_N = weighted(_ratio(detached_N).clamp(max=config.truncation))
        case "plain":
            loss_N = weighted(torch.ones_like(detached_N))
        case "sequence":
            loss_N = weighted(_ratio(sequence_sum(detached_N)).clamp(max=config.truncation)[sequence_N])
        case "ppo":  # no gradient once w has moved far enough the way A points
            loss_N = _clipped_loss(_ratio(log_ratio_N), advantage_N, low, high)
        case "cispo":  # every token keeps a gradient, with a clipped weight
            loss_N = weighted(_ratio(detached_N).clamp(low, high))
        case "gspo":
            length_S = lengths()
            ratio_S = _ratio(sequence_sum(log_ratio_N) / length_S)
            loss_N = _clipped_loss(ratio_S[sequence_N], advantage_N, low, high) / length_S[sequence_N]
        case "topr":  # a bad sequence that has become unlikely is not pushed down further
            tapered_S = sequence_sum(detached_N).clamp(max=0).exp()
            # With a value head the sign of A differs within a sequence: each token goes by its own.
            loss_N = weighted(torch.where(advantage_N >= 0, torch.ones_like(detached_N), tapered_S[sequence_N]))
        case _:
            assert_never(config.kind)
    if config.mask is None:
        return loss_N
    masked_N = config.masked(detached_N, sequence_sum(detached_N)[sequence_N], lengths()[sequence_N])
    return loss_N.masked_fill(masked_N, 0.0)


def kl_to_reference(logprob_N: torch.Tensor, *, reference_logprob_N: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 >= 0 with d = log ref - log pi (nats), to be added to the loss times ``kl_coefficient``.

    For tokens sampled from pi its mean is KL(pi || ref); the mean of its gradient, (1 - ref/pi) d log pi, is that of
    KL(ref || pi). Both are 0 at pi = ref only. Tokens sampled from an older mu are not weighed for it. All shapes [N].

    d is cut at 5 from above: rare tokens with ref/pi > 148 would have all the gradient. It is not cut from below,
    where the gradient is at most 1: ServiceNow/PipelineRL cuts at -5 too, which frees just those tokens
    that have moved furthest from the reference.
    Source: Schulman 2020, "Approximating KL divergence", estimator k3; GRPO (arXiv:2402.03300), eq. 4.
    ``reference_logprob_N`` is at the same temperature. Raises ValueError if shapes differ.
    """
    _check_shapes("logprob_N", logprob_N, reference_logprob_N=reference_logprob_N)
    difference_N = (reference_logprob_N.detach() - logprob_N).clamp(max=KL_LOG_RATIO_LIMIT)
    return difference_N.expm1() - difference_N


def value_loss(value_N: torch.Tensor, *, reward_N: torch.Tensor) -> torch.Tensor:
    """Return 0.5 (v - R)^2 per token, shape [N], R of its sequence, to add times ``value_coefficient``.

    Raises ValueError if shapes differ.
    """
    _check_shapes("value_N", value_N, reward_N=reward_N)
    return 0.5 * (value_N - reward_N.detach()) ** 2


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clipped_loss(ratio_N: torch.Tensor, advantage_N: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N)
