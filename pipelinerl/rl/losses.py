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

from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.tensor_checks import check, check_clip, check_sequences, check_shape, check_tokens

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
    """Return the loss that ``config.kind`` names, with its clipping. The caller adds the KL and value terms.

    Raises:
        ValueError: If shapes differ or a setting is out of range.
    """
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

    Raises:
        ValueError: If shapes differ or ``truncation`` is not above 0.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check(truncation > 0, "truncation must be above 0", truncation)
    weight_N = _ratio(logprob_N.detach() - behaviour_logprob_N.detach()).clamp(max=truncation)
    return -weight_N * advantage_N.detach() * logprob_N


def plain(logprob_N: torch.Tensor, *, behaviour_logprob_N: torch.Tensor, advantage_N: torch.Tensor) -> torch.Tensor:
    """Return -A log pi: REINFORCE as if pi had sampled every token, biased by whatever mu differs from it.

    Raises:
        ValueError: If shapes differ.
    """
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

    Raises:
        ValueError: If shapes differ or ``truncation`` is not above 0.
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

    Raises:
        ValueError: If shapes differ, ``clip_low`` is not in [0, 1) or ``clip_high`` is below 0.
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

    Raises:
        ValueError: If shapes differ, ``clip_low`` is not in [0, 1) or ``clip_high`` is below 0.
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
    Source: Zheng et al. 2025 (arXiv:2507.18071), eq. 5 and 7.

    Raises:
        ValueError: If shapes differ, ``clip_low`` is not in [0, 1) or ``clip_high`` is below 0.
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
    Source: Le Roux et al. 2025 (arXiv:2503.14286), tapered off-policy REINFORCE.

    Raises:
        ValueError: If shapes differ.
    """
    check_tokens(logprob_N, behaviour_logprob_N=behaviour_logprob_N, advantage_N=advantage_N)
    check_sequences(logprob_N, sequence_N, num_sequences)
    log_ratio_N = logprob_N.detach() - behaviour_logprob_N.detach()
    tapered_S = _sequence_sum(log_ratio_N, sequence_N, num_sequences).clamp(max=0).exp()
    advantage_N = advantage_N.detach()
    weight_N = torch.where(advantage_N >= 0, torch.ones_like(log_ratio_N), tapered_S[sequence_N])
    return -weight_N * advantage_N * logprob_N


def kl_to_reference(logprob_N: torch.Tensor, *, reference_logprob_N: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = log ref - log pi, to be added to the loss times ``kl_coefficient``.

    For tokens sampled from pi its mean is KL(pi || ref); the mean of its gradient, (1 - ref/pi) d log pi, is that of
    KL(ref || pi). Both are 0 at pi = ref only. Tokens sampled from an older mu are not weighed for it.

    d is cut at 5 from above: rare tokens with ref/pi > 148 would have all the gradient. It is not cut from below,
    where the gradient is at most 1: ServiceNow/PipelineRL cuts at -5 too, which frees just those tokens
    that have moved furthest from the reference.
    Source: Schulman 2020, "Approximating KL divergence", estimator k3; GRPO (arXiv:2402.03300), eq. 4.

    Args:
        logprob_N: log pi of each token, shape [N] (nats), with gradient.
        reference_logprob_N: Its log-probability under the reference model, at the same temperature, shape [N] (nats).

    Returns:
        Estimate of each token (nats), at least 0, shape [N].

    Raises:
        ValueError: If shapes differ.
    """
    check_tokens(logprob_N, reference_logprob_N=reference_logprob_N)
    difference_N = (reference_logprob_N.detach() - logprob_N).clamp(max=KL_LOG_RATIO_LIMIT)
    return difference_N.expm1() - difference_N


def value_loss(value_N: torch.Tensor, *, reward_N: torch.Tensor) -> torch.Tensor:
    """Return 0.5 (v - R)^2, to be added to the loss times ``value_coefficient``.

    Args:
        value_N: v at each token, shape [N], with gradient.
        reward_N: R of its sequence, shape [N].

    Returns:
        Loss of each token, shape [N].

    Raises:
        ValueError: If shapes differ.
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
