"""Losses on the tokens of a packed row, to be minimised.

Each function returns the loss of every token; the caller adds them up over the tokens of the optimizer step and
divides by its sequences: ``loss_N.sum() / train_batch_size``. So long answers weigh more, except in ``gspo``.

With w = pi/mu of a token, A its advantage and sg[.] what no gradient flows through:

=============  =====================================================  ==================================
reinforce      ``-sg[min(c, w)] A log pi``                            arXiv:2509.19128, eq. 5
plain          ``-A log pi``                                          none: as if all were on-policy
sequence       ``-sg[min(c, W)] A log pi``,                           exact for whole sequences as c grows
               W = product of w over its sequence
ppo_clip       ``-min(w A, clip(w, 1 - low, 1 + high) A)``            arXiv:1707.06347, eq. 7
cispo          ``-sg[clip(w, 1 - low, 1 + high)] A log pi``           arXiv:2506.13585
gspo           ``-min(s A, clip(s, 1 - low, 1 + high) A) / n``,       arXiv:2507.18071, eq. 5 and 7
               s = exp(mean log w of its sequence of n tokens)
topr           ``-sg[1 if A >= 0 else min(1, W)] A log pi``,          arXiv:2503.14286
               W = product of w over its sequence
=============  =====================================================  ==================================

At w = 1 (and c >= 1) all have the gradient of plain REINFORCE, -A d log pi; gspo has it divided by n.

Arguments and result have one meaning in all of them:

======================  ==================================================================================
``logprob_N``           log pi of each token, shape [N] (nats), with gradient
``behaviour_logprob_N`` log mu of each token, shape [N] (nats); ``plain`` does not use it
``advantage_N``         A of each token, shape [N]: its sequence's, or R - v (not in ``gspo``; unchecked)
``sequence_N``          which sequence a token belongs to, 0 to S - 1, shape [N], int64; sequences are whole
``num_sequences``       S (count)
``truncation``          largest weight c (no unit)
``clip_low, clip_high`` how far below and above 1 a ratio counts (no unit)
returned                loss of each token, shape [N]
======================  ==================================================================================

No gradient ever flows through ``behaviour_logprob_N``, ``advantage_N``, ``reference_logprob_N`` or ``reward_N``.
Shapes, types and settings are checked. Values are not, since to look at them would make the host wait for the
GPU: a NaN or an infinity goes into the loss and is the caller's to find.
"""

from __future__ import annotations

from typing import Any, assert_never

import torch
from torch.autograd.function import once_differentiable

from pipelinerl.rl.config import LossConfig

# Checks of shapes, types and settings; values are not looked at, since the host would have to wait for the GPU.


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


# Log-probabilities and entropies from hidden states, the output layer in chunks: the logits of a whole pack, and their
# gradient, are 5 GB each for 16 384 tokens of a vocabulary of 152 064 in bfloat16. The backward pass computes each
# chunk's logits again. Shapes: N flat tokens of a packed row; C tokens of a chunk; H width of the model; V vocabulary.

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time (count)."""


def token_logprobs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, token_N: torch.Tensor, *, temperature: float
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
    """Return the loss of ``config.kind``, without KL and value terms; ValueError if shapes or a setting are wrong."""
    low, high = config.clip_low, config.clip_high
    tokens = {"behaviour_logprob_N": behaviour_logprob_N, "advantage_N": advantage_N}
    sequences: dict[str, Any] = {"sequence_N": sequence_N, "num_sequences": num_sequences}
    match config.kind:
        case "reinforce":
            return reinforce(logprob_N, **tokens, truncation=config.truncation)
        case "plain":
            return plain(logprob_N, **tokens)
        case "sequence":
            return sequence_weighted(logprob_N, **tokens, **sequences, truncation=config.truncation)
        case "ppo":
            return ppo_clip(logprob_N, **tokens, clip_low=low, clip_high=high)
        case "cispo":
            return cispo(logprob_N, **tokens, clip_low=low, clip_high=high)
        case "gspo":
            return gspo(logprob_N, **tokens, **sequences, clip_low=low, clip_high=high)
        case "topr":
            return topr(logprob_N, **tokens, **sequences)
        case _:
            assert_never(config.kind)


def reinforce(
    logprob_N: torch.Tensor, *, behaviour_logprob_N: torch.Tensor, advantage_N: torch.Tensor, truncation: float
) -> torch.Tensor:
    """Return -sg[min(c, w)] A log pi: REINFORCE with importance weights truncated from above.

    Source: Piche et al. 2025 (arXiv:2509.19128), eq. 5, with c = 5 in its experiments.
    Raises ValueError if shapes differ or ``truncation`` is not above 0.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check(truncation > 0, "truncation must be above 0", truncation)
    weight_N = _ratio(logprob_N.detach() - behaviour_logprob_N.detach()).clamp(max=truncation)
    return -weight_N * advantage_N.detach() * logprob_N


def plain(logprob_N: torch.Tensor, *, behaviour_logprob_N: torch.Tensor, advantage_N: torch.Tensor) -> torch.Tensor:
    """Return -A log pi: REINFORCE as if pi had sampled every token; ValueError if shapes differ."""
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    return -advantage_N.detach() * logprob_N


def sequence_weighted(
    logprob_N: torch.Tensor,
    *,
    behaviour_logprob_N: torch.Tensor,
    advantage_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    truncation: float,
) -> torch.Tensor:
    """Return -sg[min(c, W)] A log pi with W the product of the token ratios of the whole sequence.

    Without truncation this is the unbiased importance-weighted gradient; its variance grows with length and lag.
    Raises ValueError if shapes differ or ``truncation`` is not above 0.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check_sequences(logprob_N, sequence_N, num_sequences)
    check(truncation > 0, "truncation must be above 0", truncation)
    log_ratio_N = logprob_N.detach() - behaviour_logprob_N.detach()
    weight_S = _ratio(_sequence_sum(log_ratio_N, sequence_N, num_sequences)).clamp(max=truncation)
    return -weight_S[sequence_N] * advantage_N.detach() * logprob_N


def ppo_clip(
    logprob_N: torch.Tensor,
    *,
    behaviour_logprob_N: torch.Tensor,
    advantage_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Return -min(w A, clip(w, 1 - low, 1 + high) A): no gradient once w has moved far enough the way A points.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; GRPO (arXiv:2402.03300) uses it per token.
    Raises ValueError if shapes differ, ``clip_low`` is not in [0, 1) or ``clip_high`` is below 0.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check_clip(clip_low, clip_high)
    ratio_N = _ratio(logprob_N - behaviour_logprob_N.detach())
    return -_clipped_objective(ratio_N, advantage_N.detach(), clip_low, clip_high)


def cispo(
    logprob_N: torch.Tensor,
    *,
    behaviour_logprob_N: torch.Tensor,
    advantage_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Return -sg[clip(w, 1 - low, 1 + high)] A log pi: every token keeps a gradient, with a clipped weight.

    Source: MiniMax-M1 (arXiv:2506.13585); it clips from above only, which is ``clip_low`` near 1.
    Errors as of ``ppo_clip``.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check_clip(clip_low, clip_high)
    weight_N = _ratio(logprob_N.detach() - behaviour_logprob_N.detach()).clamp(1 - clip_low, 1 + clip_high)
    return -weight_N * advantage_N.detach() * logprob_N


def gspo(
    logprob_N: torch.Tensor,
    *,
    behaviour_logprob_N: torch.Tensor,
    advantage_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Return PPO's clipped objective of whole sequences, each shared evenly among its n tokens.

    s = exp(mean of log w), the n-th root of the product of the token ratios; the losses of a sequence's tokens sum
    to -min(s A, clip(s, 1 - low, 1 + high) A), so every sequence counts once, as in the paper. (ServiceNow/PipelineRL
    weighs it by n instead.) s lies much closer to 1 than a token's ratio: the paper clips at 3e-4 and 4e-4.
    Source: Zheng et al. 2025 (arXiv:2507.18071), eq. 5 and 7. Errors as of ``ppo_clip``.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check_sequences(logprob_N, sequence_N, num_sequences)
    check_clip(clip_low, clip_high)
    log_ratio_N = logprob_N - behaviour_logprob_N.detach()
    length_S = _sequence_sum(torch.ones_like(log_ratio_N), sequence_N, num_sequences)
    mean_S = _sequence_sum(log_ratio_N, sequence_N, num_sequences) / length_S.clamp(min=1)
    ratio_N = _ratio(mean_S)[sequence_N]
    return -_clipped_objective(ratio_N, advantage_N.detach(), clip_low, clip_high) / length_S[sequence_N]


def topr(
    logprob_N: torch.Tensor,
    *,
    behaviour_logprob_N: torch.Tensor,
    advantage_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
) -> torch.Tensor:
    """Return -sg[weight] A log pi with weight 1 for good sequences and clip(W, 0, 1) for bad ones.

    W is the product of the token ratios of the sequence. What has become unlikely is not pushed down further; what
    is good is pulled up with full weight however unlikely. Good and bad is the sign of the advantage; where that
    differs within a sequence (a value head), each token goes by its own.
    Source: Le Roux et al. 2025 (arXiv:2503.14286), tapered off-policy REINFORCE. Raises ValueError if shapes differ.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check_sequences(logprob_N, sequence_N, num_sequences)
    log_ratio_N = logprob_N.detach() - behaviour_logprob_N.detach()
    tapered_S = _sequence_sum(log_ratio_N, sequence_N, num_sequences).clamp(max=0).exp()
    advantage_N = advantage_N.detach()
    weight_N = torch.where(advantage_N >= 0, torch.ones_like(log_ratio_N), tapered_S[sequence_N])
    return -weight_N * advantage_N * logprob_N


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
    check_tokens(logprob_N, reference_logprob_N=reference_logprob_N)
    difference_N = (reference_logprob_N.detach() - logprob_N).clamp(max=KL_LOG_RATIO_LIMIT)
    return difference_N.expm1() - difference_N


def value_loss(value_N: torch.Tensor, *, reward_N: torch.Tensor) -> torch.Tensor:
    """Return 0.5 (v - R)^2 per token, shape [N], R of its sequence, to add times ``value_coefficient``.

    Raises ValueError if shapes differ.
    """
    check(value_N.dim() == 1, "value_N must be one-dimensional", f"shape {tuple(value_N.shape)}")
    check_shape("reward_N", reward_N, "value_N", value_N)
    return 0.5 * (value_N - reward_N.detach()) ** 2


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clipped_objective(
    ratio_N: torch.Tensor, advantage_N: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def _sequence_sum(value_N: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    return value_N.new_zeros(num_sequences).index_add(0, sequence_N, value_N)
