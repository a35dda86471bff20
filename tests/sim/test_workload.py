"""The workload: lengths and rewards of a group, by distribution and version."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import all_lengths, assert_mean, chi_square_p, workload

from pipelinerl.config.run import LengthConfig
from pipelinerl.errors import ConfigError
from sim.workload import BLOCKS_KEPT, DRAWS_PER_BLOCK, grown_length, growth_factor

KINDS = {
    "fixed": {"kind": "fixed", "max": 100},
    "uniform": {"kind": "uniform", "max": 1000},
    "lognormal": {"kind": "lognormal", "max": 1000, "mean": 300.0, "cv": 0.8},
    "empirical": {"kind": "empirical", "max": 16000, "mean": 4000.0, "source": "rgym_llama_400"},
    "too few answers": {"kind": "empirical", "max": 16000, "mean": 4000.0, "source": "skythought"},
}


# ------------------------------------------------------------------------------------ any distribution


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_a_group_does_not_depend_on_earlier_calls(name, data):
    """Ids over 12 blocks, more than are kept, in any order, against a workload that was asked nothing else."""
    ids = st.tuples(st.integers(0, 12 * 1024), st.integers(0, 12 * DRAWS_PER_BLOCK))
    asked = data.draw(st.lists(ids, min_size=1, max_size=20))
    used = workload(group_size=16, **KINDS[name])
    for group_id, prompt_id in asked:
        used.group(group_id, prompt_id)
    assert BLOCKS_KEPT < 12
    assert used.group(*asked[0]) == workload(group_size=16, **KINDS[name]).group(*asked[0])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("group_size", [1, 8, 12, DRAWS_PER_BLOCK + 1])
def test_a_group_has_as_many_lengths_and_rewards_as_rollouts_within_the_limits(name, group_size):
    source = workload(group_size=group_size, **KINDS[name])
    for group_id in (0, 1, 5000):
        group = source.group(group_id, group_id)
        assert len(group.lengths) == len(group.rewards) == group_size
        assert all(type(length) is int and 1 <= length <= KINDS[name]["max"] for length in group.lengths)
        assert set(group.rewards) <= {0.0, 1.0}


@pytest.mark.parametrize("name", KINDS)
def test_groups_and_seeds_have_draws_of_their_own(name):
    """By chance 400 Bernoulli rewards agree once in 2^400; the empirical sets differ in their lengths as well."""
    first, again, second = (workload(seed=seed, **KINDS[name]) for seed in (1, 1, 2))
    early = [first.group(k, k) for k in range(50)]
    assert early == [again.group(k, k) for k in range(50)]
    assert early != [first.group(k, k) for k in range(1024, 1074)]
    assert early != [second.group(k, k) for k in range(50)]


def test_scenarios_that_differ_in_the_tail_share_their_random_numbers():
    """The longest rollout of a group stays the longest when only cv changes: both are exp(m + s z) of the same z."""
    short, long = (workload(kind="lognormal", max=10**9, mean=1e5, cv=cv) for cv in (0.5, 1.0))
    for k in range(100):
        assert np.argsort(short.group(k, k).lengths).tolist() == np.argsort(long.group(k, k).lengths).tolist()


def test_rewards_do_not_follow_lengths():
    """Correlation of 80 000 independent pairs has standard error 1/283: fails for 1 seed in 10^6 (z = 4.9)."""
    source = workload(kind="uniform", max=1000)
    groups = [source.group(k, k) for k in range(10_000)]
    lengths = np.array([group.lengths for group in groups]).ravel()
    rewards = np.array([group.rewards for group in groups]).ravel()
    assert abs(np.corrcoef(lengths, rewards)[0, 1]) < 4.9 / math.sqrt(lengths.size)


@pytest.mark.parametrize("rate", [0.0, 0.09, 1.0])
def test_rewards_are_1_with_the_success_rate(rate):
    """Fails for 1 seed in 10^6 if the code is right: 80 000 rewards, z = 4.9; never at rates 0 and 1."""
    source = workload(kind="fixed", max=5, success_rate=rate)
    rewards = [reward for k in range(10_000) for reward in source.group(k, k).rewards]
    assert abs(np.mean(rewards) - rate) <= 4.9 * math.sqrt(rate * (1 - rate) / len(rewards))


# -------------------------------------------------------------------------- fixed, uniform, log-normal


def test_fixed_lengths_are_all_max():
    group = workload(group_size=3, prompt_tokens=7, kind="fixed", max=100).group(5, 2)
    assert (group.prompt_tokens, group.lengths) == (7, (100, 100, 100))


def test_uniform_lengths_are_equally_likely_from_1_to_max():
    """Chi-square over 11 lengths, 88 000 draws; fails for 1 seed in 10^6 if the code is right."""
    lengths = all_lengths(workload(kind="uniform", max=11), 11_000)
    assert chi_square_p(np.bincount(lengths.ravel(), minlength=12)[1:], 8000) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "cv", "longest"),
    [
        (573.0, 0.8, 2048), (4000.0, 1.0, 16000), (900.0, 0.5, 1000), (1.5, 0.5, 3), (2.4, 0.1, 10), (50.0, 3.0, 10**6),
        (99.5, 1e-6, 1000), (99.5, 1e3, 1000),
    ],
)  # fmt: skip
def test_lognormal_lengths_have_the_mean_after_cut_and_rounding(mean, cv, longest):
    """Fails for 1 seed in 10^6 if the code is right: 200 000 draws, z = 4.9. Means near 1 show any bias of rounding.

    So does the least cv: there all draws are 99 or 100.
    """
    assert_mean(all_lengths(workload(kind="lognormal", max=longest, mean=mean, cv=cv), 25_000), mean)


def test_lognormal_lengths_have_the_cv_before_the_cut():
    """(X - mean)^2 has mean (cv mean)^2, plus at most 1/4 for rounding; 200 000 draws, z = 4.9: 1 seed in 10^6."""
    lengths = all_lengths(workload(kind="lognormal", max=10**9, mean=1000.0, cv=0.53), 25_000)
    assert_mean((lengths - 1000.0) ** 2, 530.0**2)


@pytest.mark.slow
@pytest.mark.parametrize(("cv", "ratio"), [(0.3, 1.48), (0.8, 2.34), (1.0, 2.66)])
def test_longest_of_8_lognormal_lengths_is_as_much_above_the_mean_as_known(cv, ratio):
    """E[max of 8] / mean of an uncut log-normal, rounded to 0.005; 25 000 groups, z = 4.9: 1 seed in 10^6."""
    longest = all_lengths(workload(kind="lognormal", max=10**9, mean=1e5, cv=cv), 25_000).max(axis=1) / 1e5
    assert abs(longest.mean() - ratio) <= 0.005 + 4.9 * longest.std() / math.sqrt(longest.size)


def test_a_lognormal_mean_of_1_makes_all_lengths_1_and_one_just_below_max_nearly_all_max():
    assert set(all_lengths(workload(kind="lognormal", max=50, mean=1.0, cv=1.0), 100).ravel()) == {1}
    lengths = all_lengths(workload(kind="lognormal", max=50, mean=50 - 1e-9, cv=1.0), 100)
    assert set(lengths.ravel()) == {50}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"cv": 1e-7}, r"length\.cv must be from 1e-06 to 1000, got 1e-07"),
        ({"cv": 1001.0}, r"length\.cv must be from 1e-06 to 1000, got 1001\.0"),
        ({"cv": 1e300}, r"length\.cv must be from 1e-06 to 1000, got 1e\+300"),
        ({"mean": 0.9}, r"length\.mean must be at least 1 for kind='lognormal', .*, got 0\.9"),
        (
            {"mean": 0.9, "kind": "empirical", "source": "skythought"},
            r"length\.mean must be at least 1 for kind='empirical', .*, got 0\.9",
        ),
    ],
)
def test_lengths_out_of_range_are_rejected(settings, line):
    lognormal = {"kind": "lognormal", "max": 1000, "mean": 100.0, "cv": 1.0}
    with pytest.raises(ConfigError, match=rf"^workload\.{line}$"):
        workload(**{**lognormal, **settings})


def test_a_billion_tokens_are_accepted():
    group = workload(kind="uniform", max=10**9, prompt_tokens=10**9).group(0, 0)
    assert max(group.lengths) <= group.prompt_tokens == 10**9


# --------------------------------------------------------------------------------------------- growth


@pytest.mark.parametrize(
    ("version", "steps", "factor"), [(0, 11, 1.0), (5, 11, 2.0), (10, 11, 3.0), (11, 11, 3.0), (0, 1, 1.0)]
)
def test_growth_is_linear_in_the_version_up_to_the_last_one_trained(version, steps, factor):
    config = LengthConfig(kind="fixed", max=10, growth=3.0)
    assert growth_factor(config, version=version, optimizer_steps=steps) == factor


@pytest.mark.parametrize(
    ("length", "factor", "grown"), [(100, 1.3, 130), (100, 1.5, 140), (3, 0.6, 2), (1, 0.1, 1), (140, 0.5, 70)]
)
def test_grown_lengths_are_rounded_and_stay_between_1_and_max(length, factor, grown):
    assert grown_length(length, factor=factor, max_tokens=140) == grown


@given(st.integers(1, 10**9), st.integers(0, 1000), st.integers(1, 1000))
def test_without_growth_lengths_stay_as_they_are(length, version, optimizer_steps):
    factor = growth_factor(LengthConfig(kind="fixed", max=10), version=version, optimizer_steps=optimizer_steps)
    assert grown_length(length, factor=factor, max_tokens=10**9) == length
