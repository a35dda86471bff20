"""Losses: golden numbers by hand, gradients of the written formulas, identities on and off the policy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

torch = pytest.importorskip("torch")

from pipelinerl.rl import losses  # noqa: E402
from pipelinerl.rl.config import LossConfig  # noqa: E402

LN2 = math.log(2)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
KINDS = ("reinforce", "plain", "sequence", "ppo", "cispo", "gspo", "topr")
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**31)
relaxed = settings(deadline=None, max_examples=50)  # the first call into torch may take long


def tensor(values, *, gradient=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=gradient)


def gradient(loss, *inputs):
    """Gradients of the sum of a loss; None where it does not depend on an input."""
    return torch.autograd.grad(loss.sum(), inputs, allow_unused=True, retain_graph=True)


def loss_of(kind, logprob_N, tokens, **settings):
    return losses.policy_loss(LossConfig(kind=kind, **settings), logprob_N=logprob_N, **tokens)


def of_sequences(lengths, seed, spread=0.5):
    """Tokens of some sequences with one advantage each, pi and mu different unless ``spread`` is 0."""
    rng = np.random.default_rng(seed)
    sequence_N = np.repeat(np.arange(len(lengths)), lengths)
    logprob_N = -rng.exponential(1.0, sequence_N.size)
    return tensor(logprob_N.tolist(), gradient=True), {
        "behaviour_logprob_N": tensor((logprob_N + spread * rng.normal(size=sequence_N.size)).tolist()),
        "advantage_N": tensor(rng.normal(size=len(lengths))[sequence_N].tolist()),
        "sequence_N": torch.tensor(sequence_N),
        "num_sequences": len(lengths),
    }


# Golden numbers


@pytest.mark.parametrize(
    ("kind", "settings", "ratios", "advantages", "sequences", "losses_N", "gradient_N"),
    [
        ("reinforce", {"truncation": 1.5}, [2, 1, 0.5], [1, -2, 3], None, None, [-1.5, 2, -1.5]),
        # Clipped only where the ratio has moved the way the advantage points.
        ("ppo", CLIP, [2, 2, 0.5, 0.5, 1.1], [1, -1, 1, -1, -3], None, [-1.3, 2, -0.5, 0.8, 3.3], [0, 2, -0.5, 0, 3.3]),
        # Clipped on both sides; every token keeps a gradient.
        ("cispo", CLIP, [2, 2, 0.5, 0.5, 1.1], [1, -1, 1, -1, -3], None, None, [-1.3, 1.3, -0.8, 0.8, 3.3]),
        # Geometric means 1 of (2, 1/2), 2 of (2), 2 of (4, 2, 1), 1.2 of (1.2); the third is clipped at 1.3.
        ("gspo", CLIP, [2, 2, 0.5, 4, 2, 1.2, 1], [1, -1, 1, 3, 3, 2, 3], [0, 1, 0, 2, 2, 3, 2],
            [-0.5, 2, -0.5, -1.3, -1.3, -2.4, -1.3], [-0.5, 2, -0.5, 0, 0, -2.4, 0]),
        # Products: 1/4 of a good sequence; 1/4 and 4 of bad ones.
        ("topr", {}, [0.5, 0.5, 0.5, 0.5, 8, 0.5], [1, 1, -1, -1, -1, -1], [0, 0, 1, 1, 2, 2], None,
            [-1, -1, 0.25, 0.25, 1, 1]),
        # With a value head signs differ within a sequence: each token goes by its own.
        ("topr", {}, [0.5, 0.5], [1, -1], [0, 0], None, [-1, 0.25]),
        # IcePop: 6 and 0.4 are out of 0.5 to 5; both bounds are inside. Masked importance sampling: 0.4 stays.
        ("reinforce", {"mask": "token"}, [5, 6, 0.5, 0.4, 2], [1, 1, -2, 1, 3], [0, 0, 0, 1, 1], None,
            [-5, 0, 1, 0, -6]),
        ("reinforce", {"mask": "token", "mask_low": 0}, [5, 6, 0.5, 0.4, 2], [1, 1, -2, 1, 3], [0, 0, 0, 1, 1], None,
            [-5, 0, 1, -0.4, -6]),
        # Products 4, 8 and 1/8: of masked sequences nothing stays, of the others the product is the weight.
        ("sequence", {"mask": "sequence", "mask_low": 0}, [8, 0.5, 8, 1, 0.125], [1, 1, 1, 1, 2], [0, 0, 1, 1, 2], None,
            [-4, -4, 0, 0, -0.25]),
        # Geometric means 2, 1 and 1/2, within 0.6 to 1.5 the second only.
        ("plain", {"mask": "geometric", "mask_low": 0.6, "mask_high": 1.5}, [1, 4, 8, 0.125, 0.5], [1, 1, -1, 2, 1],
            [0, 0, 1, 1, 2], None, [0, 0, 1, -2, 0]),
        ("ppo", {**CLIP, "mask": "geometric", "mask_low": 0.6, "mask_high": 1.5}, [1, 4, 8, 0.125, 0.5],
            [1, 1, -1, 2, 1], [0, 0, 1, 1, 2], [0, 0, 8, -0.25, 0], [0, 0, 8, -0.25, 0]),
    ],
)  # fmt: skip
def test_losses_and_gradients_by_hand(kind, settings, ratios, advantages, sequences, losses_N, gradient_N) -> None:
    """Tokens of pi = 1/2; without ``losses_N`` the loss is linear in log pi = -ln 2: gradient times that."""
    logprob_N = tensor([-LN2] * len(ratios), gradient=True)
    sequence_N = torch.tensor(sequences or range(len(ratios)))
    tokens = {"behaviour_logprob_N": -LN2 - tensor(ratios).log(), "advantage_N": tensor(advantages)}
    loss_N = loss_of(kind, logprob_N, {**tokens, "sequence_N": sequence_N, "num_sequences": len(ratios)}, **settings)
    assert loss_N.tolist() == pytest.approx(losses_N or [-LN2 * one for one in gradient_N])
    assert gradient(loss_N, logprob_N)[0].tolist() == pytest.approx(gradient_N)


def test_kl_of_a_token_twice_as_likely_under_the_reference() -> None:
    logprob_N = tensor([-LN2, -2 * LN2], gradient=True)
    kl_N = losses.kl_to_reference(logprob_N, reference_logprob_N=tensor([-2 * LN2, -LN2]))
    assert kl_N.tolist() == pytest.approx([0.5 - 1 + LN2, 2 - 1 - LN2])
    assert gradient(kl_N, logprob_N)[0].tolist() == pytest.approx([0.5, -1])  # 1 - ref/pi


def test_value_loss_is_half_the_squared_error() -> None:
    value_N = tensor([0.25, 1.0], gradient=True)
    loss_N = losses.value_loss(value_N, reward_N=tensor([1.0, 1.0]))
    assert loss_N.tolist() == [0.5 * 0.75**2, 0.0]
    assert gradient(loss_N, value_N)[0].tolist() == [-0.75, 0.0]


# Gradients of the written formulas


def token_formula(kind, logprob_N, mu_N, advantage_N):
    """The objective of one token, from plain numbers."""
    w = math.exp(logprob_N.item() - mu_N.item())
    a = advantage_N.item()
    match kind:
        case "reinforce":
            return min(5.0, w) * a * logprob_N
        case "plain":
            return a * logprob_N
        case "cispo":
            return min(max(w, 0.8), 1.2) * a * logprob_N
        case "ppo":
            ratio = torch.exp(logprob_N - mu_N)
            return min(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a)


def sequence_formula(kind, logprob_T, mu_T, advantage):
    """The objective of one sequence."""
    match kind:
        case "gspo":
            s = torch.exp((logprob_T - mu_T).mean())
            return min(s * advantage, torch.clamp(s, 0.8, 1.2) * advantage)
        case "sequence":
            return min(5.0, math.exp((logprob_T - mu_T).sum().item())) * advantage * logprob_T.sum()
        case "topr":
            weight = 1.0 if advantage >= 0 else min(1.0, math.exp((logprob_T - mu_T).sum().item()))
            return weight * advantage * logprob_T.sum()
        case _:
            pairs = zip(logprob_T, mu_T, strict=True)
            return sum(token_formula(kind, logprob, mu, advantage) for logprob, mu in pairs)


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(lengths=LENGTHS, seed=SEEDS)
def test_loss_and_gradient_follow_the_formula(kind, lengths, seed) -> None:
    logprob_N, tokens = of_sequences(lengths, seed)
    loss_N = loss_of(kind, logprob_N, tokens)
    expected = 0.0
    for i in range(len(lengths)):
        mine = tokens["sequence_N"] == i
        mu_T, advantage = tokens["behaviour_logprob_N"][mine], tokens["advantage_N"][mine][0]
        expected = expected - sequence_formula(kind, logprob_N[mine], mu_T, advantage)
    assert loss_N.sum().item() == pytest.approx(expected.item())
    assert gradient(loss_N, logprob_N)[0].tolist() == pytest.approx(gradient(expected, logprob_N)[0].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_mu_or_the_advantage(kind) -> None:
    logprob_N, tokens = of_sequences([3, 2], seed=1)
    tokens["behaviour_logprob_N"].requires_grad_()
    tokens["advantage_N"].requires_grad_()
    loss_N = loss_of(kind, logprob_N, tokens)
    assert gradient(loss_N, tokens["behaviour_logprob_N"], tokens["advantage_N"]) == (None, None)


def test_no_gradient_reaches_the_reference_or_the_reward() -> None:
    logprob_N, other_N = tensor([-1.0], gradient=True), tensor([-2.0], gradient=True)
    assert gradient(losses.kl_to_reference(logprob_N, reference_logprob_N=other_N), other_N) == (None,)
    assert gradient(losses.value_loss(logprob_N, reward_N=other_N), other_N) == (None,)


MASKS = ("token", "sequence", "geometric")


@settings(deadline=None, max_examples=100)
@given(kind=st.sampled_from(KINDS), mask=st.sampled_from(MASKS), lengths=LENGTHS, seed=SEEDS)
def test_a_mask_removes_the_tokens_out_of_bounds_and_leaves_the_others_alone(kind, mask, lengths, seed) -> None:
    logprob_N, tokens = of_sequences(lengths, seed)
    w_N = (logprob_N.detach() - tokens["behaviour_logprob_N"]).exp().tolist()
    ratio_N = []
    for place in np.split(np.arange(len(w_N)), np.cumsum(lengths)[:-1]):
        product = math.prod(w_N[i] for i in place)
        ratio_N += {
            "token": [w_N[i] for i in place],
            "sequence": [product] * len(place),
            "geometric": [product ** (1 / len(place))] * len(place),
        }[mask]
    kept_N = tensor([float(0.8 <= one <= 1.25) for one in ratio_N])
    free_N = loss_of(kind, logprob_N, tokens)
    loss_N = loss_of(kind, logprob_N, tokens, mask=mask, mask_low=0.8, mask_high=1.25)
    assert torch.equal(loss_N, free_N * kept_N)
    assert torch.equal(gradient(loss_N, logprob_N)[0], gradient(free_N * kept_N, logprob_N)[0])


@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from(KINDS),
    mask=st.sampled_from(MASKS),
    lengths=LENGTHS,
    seed=SEEDS,
    spread=st.sampled_from([0, 0.5, 50.0]),
)
def test_a_mask_that_is_wide_open_or_on_the_policy_changes_no_bit(kind, mask, lengths, seed, spread) -> None:
    """On the policy the narrowest mask, 1 to 1, keeps every token."""
    logprob_N, tokens = of_sequences(lengths, seed, spread)
    bounds = {"mask_low": 0, "mask_high": 1e300} if spread else {"mask_low": 1, "mask_high": 1}
    free_N, loss_N = loss_of(kind, logprob_N, tokens), loss_of(kind, logprob_N, tokens, mask=mask, **bounds)
    assert torch.equal(loss_N, free_N)
    assert torch.equal(gradient(loss_N, logprob_N)[0], gradient(free_N, logprob_N)[0])


@relaxed
@given(lengths=LENGTHS, seed=SEEDS)
def test_the_weight_of_a_token_under_icepop_is_0_or_within_the_bounds(lengths, seed) -> None:
    logprob_N, tokens = of_sequences(lengths, seed, spread=2)
    tokens["advantage_N"] = torch.ones_like(logprob_N)
    weight_N = -gradient(loss_of("reinforce", logprob_N, tokens, mask="token"), logprob_N)[0]
    assert all(one == 0 or 0.5 <= one <= 5 for one in weight_N.tolist())


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_masked_loss_has_the_gradient_of_finite_differences(kind, mask) -> None:
    """Of the kinds whose weight has a gradient; some tokens are masked and some are not, all away from the bounds."""
    logprob_N, tokens = of_sequences([3, 2, 4], seed=2)

    def loss(moved_N):
        return loss_of(kind, moved_N, tokens, mask=mask, mask_low=0.8, mask_high=1.25)

    assert 0 < torch.count_nonzero(loss(logprob_N)) < 9
    assert torch.autograd.gradcheck(loss, [logprob_N])


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_not_a_number_is_not_masked_away(mask) -> None:
    logprob_N, tokens = of_sequences([2], seed=3)
    tokens["behaviour_logprob_N"][0] = math.nan
    assert loss_of("reinforce", logprob_N, tokens, mask=mask, mask_low=0.5, mask_high=5).isnan().any()


@pytest.mark.parametrize("name", ["mask_low", "mask_high"])
def test_bounds_without_a_mask_are_refused(name) -> None:
    with pytest.raises(ValidationError, match=f"{name} needs mask='token', 'sequence' or 'geometric', .* {name}=1"):
        LossConfig(**{name: 1})


# Identities


@relaxed
@given(lengths=LENGTHS, seed=SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_policy_the_gradient_is_plain_reinforce(kind, lengths, seed) -> None:
    """pi = mu makes every weight 1. d w = w d log pi = d log pi, so ppo's gradient is -A too; in gspo
    d s = s mean(d log pi) leaves -A / n for each of the n tokens of a sequence.
    """
    logprob_N, tokens = of_sequences(lengths, seed, spread=0)
    loss_N = loss_of(kind, logprob_N, tokens)
    divisor = torch.bincount(tokens["sequence_N"])[tokens["sequence_N"]] if kind == "gspo" else 1
    assert gradient(loss_N, logprob_N)[0].tolist() == pytest.approx((-tokens["advantage_N"] / divisor).tolist())


@relaxed
@given(lengths=LENGTHS, seed=SEEDS)
def test_without_truncation_or_clipping_token_losses_are_plain_importance_sampling(lengths, seed) -> None:
    logprob_N, tokens = of_sequences(lengths, seed)
    weight_N = (logprob_N.detach() - tokens["behaviour_logprob_N"]).exp()
    plain = (-weight_N * tokens["advantage_N"]).tolist()
    wide = {"clip_low": 1 - 1e-12, "clip_high": 1e12}
    for kind, wide_settings in (("reinforce", {"truncation": 1e300}), ("ppo", wide), ("cispo", wide)):
        loss_N = loss_of(kind, logprob_N, tokens, **wide_settings)
        assert gradient(loss_N, logprob_N)[0].tolist() == pytest.approx(plain)


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(lengths=LENGTHS, seed=SEEDS)
def test_sequences_in_one_row_have_the_losses_of_each_alone_in_any_order(kind, lengths, seed) -> None:
    logprob_N, tokens = of_sequences(lengths, seed)
    shuffle_N = torch.tensor(np.random.default_rng(seed).permutation(len(logprob_N)))
    shuffled = {name: value[shuffle_N] if name.endswith("_N") else value for name, value in tokens.items()}
    alone = []
    for i in range(len(lengths)):
        mine = tokens["sequence_N"] == i
        own = {name: value[mine] if name.endswith("_N") else 1 for name, value in tokens.items()}
        alone += loss_of(kind, logprob_N[mine], {**own, "sequence_N": own["sequence_N"] - i}).tolist()
    together_N = loss_of(kind, logprob_N[shuffle_N], shuffled)
    assert together_N.tolist() == pytest.approx([alone[i] for i in shuffle_N])


def test_kl_has_the_value_of_one_divergence_and_the_gradient_of_the_other() -> None:
    logits_V, reference_V = tensor([0.3, -1.0, 0.8], gradient=True), tensor([0.5, 0.3, 0.2]).log()
    logprob_V = logits_V.log_softmax(0)
    kl_V = losses.kl_to_reference(logprob_V, reference_logprob_N=reference_V)
    mean_gradient = gradient(logprob_V.detach().exp() * kl_V, logits_V)[0]
    pi_to_reference = (logprob_V.exp() * (logprob_V - reference_V)).sum()
    reference_to_pi = (reference_V.exp() * (reference_V - logprob_V)).sum()
    assert (logprob_V.exp() * kl_V).sum().item() == pytest.approx(pi_to_reference.item())
    assert mean_gradient.tolist() == pytest.approx(gradient(reference_to_pi, logits_V)[0].tolist())


def test_kl_is_cut_where_the_reference_is_far_likelier_and_pulls_back_where_the_model_is() -> None:
    logprob_N = tensor([-6.0, -0.1], gradient=True)
    kl_N = losses.kl_to_reference(logprob_N, reference_logprob_N=tensor([-0.5, -8.1]))
    assert kl_N.tolist() == pytest.approx([math.exp(5) - 6, math.exp(-8) - 1 + 8])
    assert gradient(kl_N, logprob_N)[0].tolist() == pytest.approx([0.0, 1 - math.exp(-8)])


# Numbers that must not become NaN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, "sequence"])
@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_absurd_ratios_give_finite_losses_and_gradients(kind, mask, log_ratio, advantage) -> None:
    logprob_N = torch.tensor([-1.0, -1.0], requires_grad=True)
    tokens = {
        "behaviour_logprob_N": torch.tensor([-1.0 - log_ratio] * 2),
        "advantage_N": torch.tensor([advantage] * 2),
        "sequence_N": torch.tensor([0, 0]),
        "num_sequences": 1,
    }
    loss_N = loss_of(kind, logprob_N, tokens, mask=mask)
    assert torch.isfinite(loss_N).all()
    assert torch.isfinite(gradient(loss_N, logprob_N)[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_tokens_has_no_loss_and_a_sequence_without_tokens_does_no_harm(kind) -> None:
    logprob_N, tokens = of_sequences([2], seed=3)
    none = {name: value[:0] if name.endswith("_N") else 0 for name, value in tokens.items()}
    assert loss_of(kind, logprob_N[:0], none).tolist() == []
    loss_N, more_N = (loss_of(kind, logprob_N, {**tokens, "num_sequences": num}) for num in (1, 2))
    assert more_N.tolist() == loss_N.tolist()
    assert torch.isfinite(gradient(more_N, logprob_N)[0]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprob_N": torch.zeros(1, 2)}, r"logprob_N must be one-dimensional, got shape \(1, 2\)"),
        (
            {"behaviour_logprob_N": torch.zeros(1)},
            r"behaviour_logprob_N must have the shape of logprob_N, .*got \(1,\)",
        ),
        ({"advantage_N": torch.zeros(1)}, r"advantage_N must have the shape of logprob_N, \(2,\), got \(1,\)"),
        ({"sequence_N": torch.tensor([0])}, r"sequence_N must have the shape of logprob_N, \(2,\), got \(1,\)"),
        ({"sequence_N": torch.tensor([0.0, 0.0])}, r"sequence_N must be int64, got torch\.float32"),
        ({"num_sequences": -1}, "num_sequences must be at least 0, got -1"),
    ],
)
def test_wrong_shapes_and_types_are_refused(changes, message) -> None:
    logprob_N, tokens = of_sequences([2], seed=3)
    with pytest.raises(ValueError, match=f"^{message}$"):
        losses.policy_loss(LossConfig(), **{"logprob_N": logprob_N, **tokens, **changes})


@pytest.mark.parametrize(
    "wrong",
    [
        {"truncation": 0.0},
        {"truncation": math.nan},
        {"clip_low": 1.0},
        {"clip_low": -0.1},
        {"clip_high": -0.1},
        {"mask": "token", "mask_low": 1.1},
        {"mask": "token", "mask_high": 0.9},
        {"mask": "none"},
        {"teacher": "/teacher", "kind": "gspo"},
        {"value_coefficient": 0.5, "kind": "gspo"},
        {"teacher": "/teacher", "kl_coefficient": 0.1},
        {"teacher": "/teacher", "value_coefficient": 0.5},
    ],
)
def test_a_setting_out_of_range_is_refused(wrong) -> None:
    with pytest.raises(ValidationError):
        LossConfig(**wrong)


def test_wrong_shapes_of_reference_value_and_reward_are_refused() -> None:
    two, three = tensor([0.0] * 2), tensor([0.0] * 3)
    with pytest.raises(ValueError, match=r"^reference_logprob_N must have the shape of logprob_N, \(2,\), got \(3,\)$"):
        losses.kl_to_reference(two, reference_logprob_N=three)
    with pytest.raises(ValueError, match=r"^reward_N must have the shape of value_N, \(2,\), got \(3,\)$"):
        losses.value_loss(two, reward_N=three)
    with pytest.raises(ValueError, match=r"^value_N must be one-dimensional, got shape \(2, 1\)$"):
        losses.value_loss(two[:, None], reward_N=two)
