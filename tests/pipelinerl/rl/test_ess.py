"""Effective sample size and KL divergence: golden numbers, identities, and log-normal weights in closed form."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.ess import RatioMeans, RatioStats, ess_of_log_weights, kl_estimate

LOG_WEIGHTS = arrays(np.float64, st.integers(1, 30), elements=st.floats(-30, 30))
SMALL_LOG_RATIOS = arrays(np.float64, st.integers(1, 20), elements=st.floats(-3, 3))


def lognormal_quantiles(sigma: float, num: int = 20_000) -> np.ndarray:
    """Logarithms of log-normal weights of mean 1, one from the middle of each of equally likely parts."""
    normal = NormalDist()
    return np.array([sigma * normal.inv_cdf((i + 0.5) / num) - sigma**2 / 2 for i in range(num)])


# ESS


@pytest.mark.parametrize(
    ("log_weight", "ess"),
    [
        ([0.0, 0.0, math.log(2)], 16 / 18),
        ([5000.0, 5000.0, 5000.0 + math.log(2)], 16 / 18),  # beyond the range of floats
        ([-5000.0, -5000.0, -5000.0 + math.log(2)], 16 / 18),
        ([math.log(0.1)] * 7, 1.0),
        ([math.log(3)], 1.0),
        ([-math.inf] * 3 + [math.log(5)], 0.25),
    ],
)
def test_ess_by_hand(log_weight, ess) -> None:
    assert ess_of_log_weights(log_weight) == pytest.approx(ess)


@given(LOG_WEIGHTS)
def test_logarithms_of_weights_give_the_formula_between_1_over_n_and_1(log_weight: np.ndarray) -> None:
    weight = np.exp(log_weight)
    formula = weight.sum() ** 2 / (weight.size * (weight**2).sum())
    assert ess_of_log_weights(log_weight) == pytest.approx(formula)
    assert 1 / log_weight.size <= ess_of_log_weights(log_weight) <= 1


@given(LOG_WEIGHTS, st.floats(-1e4, 1e4))
def test_a_factor_on_all_weights_changes_nothing(log_weight: np.ndarray, log_factor: float) -> None:
    assert ess_of_log_weights(log_weight + log_factor) == pytest.approx(ess_of_log_weights(log_weight), rel=1e-6)


@given(SMALL_LOG_RATIOS, st.floats(0.05, 20))
def test_truncation_is_that_of_the_weights_and_never_lowers_the_ess(log_weight: np.ndarray, cap: float) -> None:
    truncated = ess_of_log_weights(log_weight, truncation=cap)
    assert truncated == pytest.approx(ess_of_log_weights(np.log(np.minimum(np.exp(log_weight), cap))))
    assert truncated >= ess_of_log_weights(log_weight) * (1 - 1e-12)


def test_log_normal_weights_have_ess_exp_of_minus_sigma_squared() -> None:
    """Fails for 1 seed in 10^6 if the code is right (n = 200 000, z = 4.9).

    To first order the relative error of (mean w)^2 / mean w^2 is the mean of 2 w - w^2 / E w^2, whose variance
    follows from E w^k = exp(sigma^2 k (k - 1) / 2).
    """
    num, variance = 200_000, 0.25
    log_weight = np.random.default_rng(1).normal(-variance / 2, math.sqrt(variance), num)
    spread = 4 * math.exp(variance) - 4 * math.exp(2 * variance) + math.exp(4 * variance) - 1
    tolerance = 4.9 * math.sqrt(spread / num)
    assert tolerance < 0.006
    assert ess_of_log_weights(log_weight) == pytest.approx(math.exp(-variance), rel=tolerance)


@pytest.mark.parametrize(("sigma", "truncated"), [(0.1, 0.996), (0.3, 0.971), (0.5, 0.928), (0.8, 0.840), (1.0, 0.773)])
def test_truncated_at_1_02_the_ess_reads_too_high(sigma, truncated) -> None:
    """Log-normal weights of mean 1, whose ESS is exp(-sigma^2): integrals by hand, against quantiles."""
    assert ess_of_log_weights(lognormal_quantiles(sigma), truncation=1.02) == pytest.approx(truncated, abs=6e-4)


def test_truncated_at_5_the_ess_reads_nearly_right_until_weights_are_bad() -> None:
    assert ess_of_log_weights(lognormal_quantiles(0.5), truncation=5) == pytest.approx(0.78, abs=5e-3)
    assert ess_of_log_weights(lognormal_quantiles(1.0), truncation=5) == pytest.approx(0.48, abs=5e-3)


# KL divergence


@pytest.mark.parametrize(
    ("log_ratio", "kl"),
    [
        ([math.log(2)], 1 - math.log(2)),
        ([0.0, 0.0], 0.0),
        ([1e-6], 0.5e-12),  # half the square of a small log ratio
        ([1e3], math.inf),  # one token beyond the largest float, without a warning
        ([709.7, 709.7], math.inf),  # a sum of two
    ],
)
def test_kl_by_hand(log_ratio, kl) -> None:
    assert kl_estimate(log_ratio) == pytest.approx(kl, rel=1e-6, abs=0)


def test_kl_is_exact_in_expectation_under_mu() -> None:
    """Token k occurs mu_k * 10 times of 10, so the mean over the tokens is the expectation."""
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    token = np.repeat([0, 1, 2], [5, 3, 2])
    assert kl_estimate(np.log(pi / mu)[token]) == pytest.approx(float((mu * np.log(mu / pi)).sum()))


@given(arrays(np.float64, st.integers(1, 20), elements=st.floats(-1e3, 1e3)))
def test_kl_is_never_negative(log_ratio: np.ndarray) -> None:
    assert kl_estimate(log_ratio) >= 0


# Sums over an optimizer step


def test_the_metrics_of_two_answers() -> None:
    stats = RatioStats(LossConfig(truncation=1.5))
    stats.add(np.log([2.0, 0.5]), np.array([1, 0]))
    stats.add(np.log([1.0, 2.0]), np.array([0, 3]))
    kl = {ratio: ratio - 1 - math.log(ratio) for ratio in (0.5, 1.0, 2.0)}
    assert stats.metrics() == pytest.approx(
        {
            "ess/token_raw": 5.5**2 / (4 * 9.25),
            "ess/token_truncated": 4.5**2 / (4 * 5.75),  # 1.5, 0.5, 1, 1.5
            "ess/sequence_raw": 3**2 / (2 * 5),  # 1, 2
            "ess/lag_0": 1.5**2 / (2 * 1.25),
            "ess/lag_1": 1.0,
            "ess/lag_3": 1.0,
            "mismatch/kl": (2 * kl[2.0] + kl[0.5] + kl[1.0]) / 4,
            "mismatch/truncated_share": 0.5,
        }
    )
    assert list(stats.ess_by_lag()) == [0, 1, 3]  # and no answer is wholly of lag 0


def test_the_floor_counts_answers_of_lag_0_alone() -> None:
    stats = RatioStats(LossConfig())
    stats.add(np.log([3.0, 3.0]), [1, 0])  # its last token was sampled on keys and values of older weights
    stats.add(np.log([2.0, 1.0]), [0, 0])
    stats.add(np.log([0.5, 1.0]), [0, 0])
    metrics = stats.metrics()
    assert metrics["mismatch/kl_at_lag_0"] == pytest.approx(((1 - math.log(2)) + (math.log(2) - 0.5)) / 4)
    assert metrics["mismatch/log_ratio_abs_max_at_lag_0"] == pytest.approx(math.log(2))


def test_a_lag_0_of_equal_log_probabilities_reads_zero() -> None:
    stats = RatioStats(LossConfig())
    stats.add([0.0, 0.0], [0, 0])
    stats.add([0.0, 0.7], [0, 1])
    assert stats.metrics()["mismatch/kl_at_lag_0"] == 0.0
    assert stats.metrics()["mismatch/log_ratio_abs_max_at_lag_0"] == 0.0


def test_a_weight_of_exactly_c_is_not_truncated() -> None:
    stats = RatioStats(LossConfig(truncation=1.0))
    stats.add([0.0, 0.1], [0, 0])
    assert stats.metrics()["mismatch/truncated_share"] == 0.5


@pytest.mark.parametrize(
    ("mask", "high", "weights"),  # of the answers (4, 1/4, 1), (2, 2): products 1 and 4, geometric means 1 and 2
    [
        ("token", 3.0, [0, 0.25, 1, 1.5, 1.5]),
        ("sequence", 3.0, [1.5, 0.25, 1, 0, 0]),
        ("geometric", 3.0, [1.5, 0.25, 1, 1.5, 1.5]),
        ("geometric", 1.9, [1.5, 0.25, 1, 0, 0]),
        ("token", 1.0, [0, 0.25, 1, 0, 0]),
    ],
)
def test_masked_tokens_have_no_weight_and_a_share(mask, high, weights) -> None:
    """Truncated at 1.5; the raw weights do not know the mask."""
    stats = RatioStats(LossConfig(truncation=1.5, mask=mask, mask_low=0.2, mask_high=high))
    stats.add(np.log([4.0, 0.25, 1.0]), [2, 2, 2])
    stats.add(np.log([2.0, 2.0]), [1, 1])
    w = np.array(weights)
    expected = {"ess/token_truncated": w.sum() ** 2 / (5 * (w**2).sum()), "mismatch/masked_share": np.mean(w == 0)}
    expected |= {"ess/token_raw": 9.25**2 / (5 * 25.0625), "mismatch/truncated_share": 0.6}
    assert {name: stats.metrics()[name] for name in expected} == pytest.approx(expected)


def test_a_step_whose_tokens_are_all_masked_has_no_effective_sample() -> None:
    stats = RatioStats(LossConfig(mask="geometric", mask_low=0.5, mask_high=5))
    stats.add([3.0, 2.0], [4, 4])
    metrics = stats.metrics()
    assert (metrics["ess/token_truncated"], metrics["mismatch/masked_share"]) == (0.0, 1.0)


def test_without_answers_there_is_nothing_to_log() -> None:
    assert RatioStats(LossConfig()).metrics() == {}
    assert RatioStats(LossConfig()).ess_by_lag() == {}


def test_turns_have_an_ess_of_their_own() -> None:
    """Weights 2 and 1/2 in turn 1; 1 and 2 in turn 2. The other answer has a turn: weight 1. A run is their mean."""
    stats, run = RatioStats(LossConfig()), RatioMeans()
    stats.add(np.log([2.0, 0.5, 1.0, 2.0]), np.zeros(4, int), np.array([1, 1, 2, 2]))
    stats.add([0.0], [0], np.array([1]))
    by_turn = {"ess/turn_1": 3.5**2 / (3 * 5.25), "ess/turn_2": 9 / 10}
    assert {name: ess for name, ess in stats.metrics().items() if "turn" in name} == pytest.approx(by_turn)
    run.add(stats.metrics())
    run.add({"ess/turn_2": 0.5})
    report, _ = run.summary()
    assert report is not None
    assert report.by_turn == pytest.approx({1: 7 / 9, 2: 0.7})


def test_a_run_is_the_mean_of_its_steps() -> None:
    """Two steps by hand; a metric that only one step has is the mean, or the largest, over that one."""
    run = RatioMeans()
    assert run.summary() == (None, None)
    run.add({})  # a step without an answer
    assert run.summary() == (None, None)
    run.add(
        {
            "reward/mean": 0.5, "ess/token_raw": 0.75, "ess/token_truncated": 0.875, "ess/sequence_raw": 0.5,
            "ess/lag_10": 0.25, "ess/lag_2": 0.5, "mismatch/kl": 0.5, "mismatch/truncated_share": 0.125,
        },
    )  # fmt: skip
    ess, mismatch = run.summary()
    assert mismatch.to_dict() == {"kl": 0.5}
    assert list(ess.by_lag) == [2, 10]
    run.add(
        {
            "ess/token_raw": 0.25, "ess/token_truncated": 0.375, "ess/sequence_raw": 0.25, "ess/lag_0": 1.0,
            "ess/lag_2": 0.25, "mismatch/kl": 0.25, "mismatch/kl_at_lag_0": 0.125,
            "mismatch/log_ratio_abs_max_at_lag_0": 0.0625,
        },
    )  # fmt: skip
    ess, mismatch = run.summary()
    assert ess.to_dict() == {
        "mean": 0.5,
        "min": 0.25,
        "truncated_mean": 0.625,
        "sequence_mean": 0.375,
        "by_lag": {"0": 1.0, "2": 0.375, "10": 0.25},
    }
    assert mismatch.to_dict() == {"kl": 0.375, "kl_at_lag_0": 0.125, "log_ratio_abs_max_at_lag_0": 0.0625}


@settings(deadline=None)
@given(st.lists(SMALL_LOG_RATIOS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_sums_by_answer_equal_sums_over_all_tokens_in_any_order(answers, random) -> None:
    pairs = [(answer, np.array([random.randrange(3) for _ in answer])) for answer in answers]
    random.shuffle(pairs)
    stats = RatioStats(LossConfig(truncation=2.0))
    for log_ratio, lag in pairs:
        stats.add(log_ratio, lag)
    metrics = stats.metrics()
    token, lags = np.concatenate([log_ratio for log_ratio, _ in pairs]), np.concatenate([lag for _, lag in pairs])
    assert metrics["ess/token_raw"] == pytest.approx(ess_of_log_weights(token))
    assert metrics["ess/token_truncated"] == pytest.approx(ess_of_log_weights(token, truncation=2.0))
    assert metrics["ess/sequence_raw"] == pytest.approx(ess_of_log_weights([one.sum() for one in answers]))
    assert metrics["mismatch/kl"] == pytest.approx(kl_estimate(token), rel=1e-9, abs=1e-15)
    assert metrics["mismatch/truncated_share"] == pytest.approx(np.mean(token > math.log(2)))
    for lag, ess in stats.ess_by_lag().items():
        assert ess == pytest.approx(ess_of_log_weights(token[lags == lag]))


def test_long_answers_do_not_overflow() -> None:
    stats = RatioStats(LossConfig())
    for sign in (1, -1):
        stats.add(np.full(8192, 0.5 * sign, dtype=np.float32), np.zeros(8192, dtype=np.int64))
    assert stats.metrics()["ess/sequence_raw"] == 0.5


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 2**15))
def test_tokens_in_float32_are_summed_in_float64(seed: int, num: int) -> None:
    log_ratio = np.random.default_rng(seed).normal(0, 0.01, num).astype(np.float32)
    assert kl_estimate(log_ratio) == kl_estimate(log_ratio.astype(np.float64))


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ess_of_log_weights([]), r"log_weight_N must be one-dimensional and not empty, got shape \(0,\)"),
        (lambda: ess_of_log_weights([[1.0]]), r"log_weight_N must be one-dimensional and not empty, got .*\(1, 1\)"),
        (lambda: ess_of_log_weights([0.0, math.inf]), "log_weight_N must be below infinity, got inf"),
        (lambda: ess_of_log_weights([0.0, math.nan]), "log_weight_N must be below infinity, got nan"),
        (lambda: ess_of_log_weights([-math.inf]), "log_weight_N must have a weight above 0, got none of 1"),
        (lambda: ess_of_log_weights([0.0], truncation=0.0), "truncation must be above 0, got 0.0"),
        (lambda: ess_of_log_weights([0.0], truncation=math.nan), "truncation must be above 0, got nan"),
        (lambda: kl_estimate([]), r"log_ratio_N must be one-dimensional and not empty, got shape \(0,\)"),
        (lambda: kl_estimate([math.nan]), "log_ratio_N must be finite, got nan"),
    ],
)
def test_wrong_input_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


@pytest.mark.parametrize(
    ("log_ratio", "lag", "message"),
    [
        ([], np.array([], dtype=np.int64), r"log_ratio_T must be one-dimensional and not empty, got shape \(0,\)"),
        ([math.inf], [0], "log_ratio_T must be finite, got inf"),
        ([0.0], [0, 1], r"lag_T must have the shape of log_ratio_T, \(1,\), got \(2,\)"),
        ([0.0], [0.5], "lag_T must be whole numbers, got float64"),
        ([0.0, 0.0], [0, -1], "lag_T must be at least 0, got -1"),
    ],
)
def test_a_wrong_answer_is_refused_and_leaves_the_sums_alone(log_ratio, lag, message) -> None:
    stats = RatioStats(LossConfig())
    with pytest.raises(ValueError, match=f"^{message}$"):
        stats.add(log_ratio, lag)
    assert stats.metrics() == {}
