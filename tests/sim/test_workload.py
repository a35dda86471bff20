"""The workload: what a group's lengths and rewards are, what a length source may hold, which sets are shipped."""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.workload import LengthConfig, WorkloadConfig
from pipelinerl.errors import ConfigError
from sim.workload import BLOCKS_KEPT, DRAWS_PER_BLOCK, Workload, grown_length, growth_factor, read_source, shipped_sets

ROOT = Path(__file__).parents[2]

KINDS = {
    "fixed": {"kind": "fixed", "max": 100},
    "uniform": {"kind": "uniform", "max": 1000},
    "lognormal": {"kind": "lognormal", "max": 1000, "mean": 300.0, "cv": 0.8},
    "empirical": {"kind": "empirical", "max": 16000, "mean": 4000.0, "source": "rgym_llama_400"},
    "too few answers": {"kind": "empirical", "max": 16000, "mean": 4000.0, "source": "skythought"},
}


def workload(*, group_size=8, seed=1, prompt_tokens=0, success_rate=0.5, **length):
    config = WorkloadConfig(
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        success_rate=success_rate,
        length=LengthConfig.model_validate(length),
    )
    return Workload(config, seed=seed)


def all_lengths(source, num_groups):
    """Lengths of the first groups, each of another prompt, shape [num_groups, group_size]."""
    return np.array([source.group(k, k).lengths for k in range(num_groups)])


def write(folder, text):
    path = Path(folder) / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def chi_square_p(observed, expected):
    """Chance of a statistic at least as large, for an even number n of degrees of freedom (closed form)."""
    observed = np.asarray(observed)
    half, half_df = float(((observed - expected) ** 2 / expected).sum()) / 2, (observed.size - 1) // 2
    assert observed.size % 2 == 1
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(half_df))


def assert_mean(values, mean, *, z=4.9):
    """Fails for 1 seed in 10^6 if the mean is right: |mean of values - mean| <= z standard errors."""
    values = np.asarray(values, dtype=float)
    assert abs(values.mean() - mean) <= z * values.std(ddof=1) / math.sqrt(values.size)


# ------------------------------------------------------------------------------------ any distribution


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_a_group_does_not_depend_on_what_was_asked_before(name, data):
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


def test_uniform_up_to_1_is_always_1():
    assert workload(group_size=2, kind="uniform", max=1).group(0, 0).lengths == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "cv", "longest"),
    [(573.0, 0.8, 2048), (4000.0, 1.0, 16000), (900.0, 0.5, 1000), (1.5, 0.5, 3), (2.4, 0.1, 10), (50.0, 3.0, 10**6)],
)
def test_lognormal_lengths_have_the_mean_after_cut_and_rounding(mean, cv, longest):
    """Fails for 1 seed in 10^6 if the code is right: 200 000 draws, z = 4.9. Means near 1 show any bias of rounding."""
    assert_mean(all_lengths(workload(kind="lognormal", max=longest, mean=mean, cv=cv), 25_000), mean)


def test_lognormal_lengths_have_the_cv_before_the_cut():
    """(X - mean)^2 has mean (cv mean)^2, plus at most 1/4 for rounding; 200 000 draws, z = 4.9: 1 seed in 10^6."""
    lengths = all_lengths(workload(kind="lognormal", max=10**9, mean=1000.0, cv=0.53), 25_000)
    assert_mean((lengths - 1000.0) ** 2, 530.0**2)


def test_lognormal_with_a_cap_of_four_uncut_means_cuts_one_in_fifty_at_cv_1():
    """With s^2 = ln 2 and a cap of 4 uncut means, P(cut) = Phi(-(ln 4 + s^2/2)/s) = Phi(-2.0814) = 0.01870.

    E[min(X, 4)] of X with mean 1 is taken as a sum over 10^6 quantiles, not from the closed form under test.
    Fails for 1 seed in 10^6: 200 000 draws, z = 4.9.
    """
    s = math.sqrt(math.log(2))
    z = np.array([NormalDist().inv_cdf((k + 0.5) / 100_000) for k in range(100_000)])
    mean = float(np.minimum(np.exp(s * z - s**2 / 2), 4.0).mean()) * 1000
    lengths = all_lengths(workload(kind="lognormal", max=4000, mean=mean, cv=1.0), 25_000)
    assert_mean(lengths == 4000, 0.01870)


@pytest.mark.parametrize(("cv", "ratio"), [(0.3, 1.48), (0.8, 2.34), (1.0, 2.66)])
def test_longest_of_8_lognormal_lengths_is_as_much_above_the_mean_as_known(cv, ratio):
    """E[max of 8] / mean of an uncut log-normal, rounded to 0.005; 25 000 groups, z = 4.9: 1 seed in 10^6."""
    longest = all_lengths(workload(kind="lognormal", max=10**9, mean=1e5, cv=cv), 25_000).max(axis=1) / 1e5
    assert abs(longest.mean() - ratio) <= 0.005 + 4.9 * longest.std() / math.sqrt(longest.size)


def test_a_lognormal_mean_of_1_makes_all_lengths_1_and_one_just_below_max_nearly_all_max():
    assert set(all_lengths(workload(kind="lognormal", max=50, mean=1.0, cv=1.0), 100).ravel()) == {1}
    lengths = all_lengths(workload(kind="lognormal", max=50, mean=50 - 1e-9, cv=1.0), 100)
    assert set(lengths.ravel()) == {50}


@pytest.mark.parametrize("cv", [1e-6, 1e3])
def test_the_extreme_cv_still_meet_the_mean(cv):
    """z = 4.9 on 200 000 draws; at cv = 10^-6 all draws are 99 or 100 and show the rounding: mean 99.5."""
    assert_mean(all_lengths(workload(kind="lognormal", max=1000, mean=99.5, cv=cv), 25_000), 99.5)


@pytest.mark.parametrize("cv", [1e-7, 1001.0, 1e300])
def test_a_cv_out_of_range_is_rejected(cv):
    with pytest.raises(
        ConfigError, match=rf"^workload\.length\.cv must be from 1e-06 to 1000, got {re.escape(str(cv))}$"
    ):
        workload(kind="lognormal", max=1000, mean=100.0, cv=cv)


@pytest.mark.parametrize("kind", ["lognormal", "empirical"])
def test_a_mean_below_one_token_is_rejected(kind):
    with pytest.raises(
        ConfigError, match=rf"^workload\.length\.mean must be at least 1 for kind='{kind}', .*, got 0\.9$"
    ):
        workload(kind=kind, max=1000, mean=0.9, cv=1.0, source="skythought")


def test_a_max_beyond_a_billion_tokens_is_rejected():
    with pytest.raises(ConfigError, match=r"^workload\.length\.max must be at most 1000000000, got 1000000001$"):
        workload(kind="uniform", max=10**9 + 1)
    assert max(workload(kind="uniform", max=10**9).group(0, 0).lengths) <= 10**9


def test_a_prompt_beyond_a_billion_tokens_is_rejected():
    with pytest.raises(ConfigError, match=r"^workload\.prompt_tokens must be at most 1000000000, got 1000000001$"):
        workload(kind="uniform", max=10, prompt_tokens=10**9 + 1)
    assert workload(kind="uniform", max=10, prompt_tokens=10**9).group(0, 0).prompt_tokens == 10**9


# --------------------------------------------------------------------------------------------- growth


@pytest.mark.parametrize(("version", "factor"), [(0, 1.0), (5, 2.0), (10, 3.0), (11, 3.0)])
def test_growth_is_linear_in_the_version_up_to_the_last_one_trained(version, factor):
    config = LengthConfig(kind="fixed", max=10, growth=3.0)
    assert growth_factor(config, version=version, optimizer_steps=11) == factor


def test_a_run_of_one_step_does_not_grow():
    assert growth_factor(LengthConfig(kind="fixed", max=10, growth=3.0), version=0, optimizer_steps=1) == 1.0


@pytest.mark.parametrize(
    ("length", "factor", "grown"), [(100, 1.3, 130), (100, 1.5, 140), (3, 0.6, 2), (1, 0.1, 1), (140, 0.5, 70)]
)
def test_grown_lengths_are_rounded_and_stay_between_1_and_max(length, factor, grown):
    assert grown_length(length, factor=factor, max_tokens=140) == grown


@given(st.integers(1, 10**9), st.integers(0, 1000), st.integers(1, 1000))
def test_without_growth_lengths_stay_as_they_are(length, version, optimizer_steps):
    factor = growth_factor(LengthConfig(kind="fixed", max=10), version=version, optimizer_steps=optimizer_steps)
    assert grown_length(length, factor=factor, max_tokens=10**9) == length


# ------------------------------------------------------------------------------------------ empirical

NUMBERED = "prompt_id,prompt_tokens,response_tokens,correct\n" + "".join(
    f"p{p},{10 + p},{100 * p + a},{a % 2}\n" for a in range(11) for p in range(1, 12)
)
"""11 prompts with 11 answers each, interleaved: answer a of prompt p has 100 p + a tokens and reward a mod 2."""


@settings(deadline=None)
@given(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(1, 20))
def test_a_group_is_drawn_from_the_answers_of_one_prompt_with_their_rewards(group_id, prompt_id, group_size):
    with tempfile.TemporaryDirectory() as folder:
        source = workload(group_size=group_size, kind="empirical", max=5000, source=write(folder, NUMBERED))
    group = source.group(group_id, prompt_id)
    prompts, answers = zip(*(divmod(length, 100) for length in group.lengths), strict=True)
    assert len(set(prompts)) == 1
    assert group.prompt_tokens == 10 + prompts[0]
    assert group.rewards == tuple(answer % 2 for answer in answers)
    assert set(answers) <= set(range(11))
    assert group_size > 11 or len(set(answers)) == group_size  # without replacement where there are enough


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["rgym_llama_400", "areal_nemotron"]), st.integers(0, 3000), st.integers(1, 32))
def test_a_group_of_a_shipped_set_is_a_part_of_one_prompt(name, k, group_size):
    group = workload(group_size=group_size, kind="empirical", max=10**6, source=name).group(k, k)
    drawn = Counter(zip(group.lengths, group.rewards, strict=True))
    prompts = [Counter(zip(p.lengths.tolist(), p.rewards.tolist(), strict=True)) for p in read_source(name)]
    assert any(drawn <= answers for answers in prompts)


def test_a_prompt_that_is_started_again_is_the_same_prompt_with_other_answers(tmp_path):
    source = workload(kind="empirical", max=5000, source=write(tmp_path, NUMBERED))
    groups = [source.group(group_id, 3) for group_id in range(50)]
    assert len({group.prompt_tokens for group in groups}) == 1
    assert len({group.lengths for group in groups}) > 40


def test_prompts_are_equally_likely(tmp_path):
    """Chi-square over 11 prompts, 22 000 draws; fails for 1 seed in 10^6 if the code is right."""
    source = workload(kind="empirical", max=5000, source=write(tmp_path, NUMBERED))
    drawn = Counter(source.group(0, k).prompt_tokens for k in range(22_000))
    assert len(drawn) == 11
    assert chi_square_p(list(drawn.values()), 2000) > 1e-6


@pytest.mark.parametrize("group_size", [1, 8, 11, 12])
def test_every_answer_is_equally_likely_in_every_place(tmp_path, group_size):
    """Chi-square over 11 answers in the first and the last place, 22 000 groups each.

    Fails for 1 seed in 250 000 over all sizes if the code is right. Size 12 is drawn with replacement.
    """
    source = workload(group_size=group_size, kind="empirical", max=5000, source=write(tmp_path, NUMBERED))
    answers = all_lengths(source, 22_000) % 100
    for place in (0, group_size - 1):
        assert chi_square_p(np.bincount(answers[:, place], minlength=11), 2000) > 1e-6


def test_every_set_of_answers_is_equally_likely(tmp_path):
    """Chi-square over the 55 pairs of 11 answers, 55 000 groups; fails for 1 seed in 10^6 if the code is right."""
    source = workload(group_size=2, kind="empirical", max=5000, source=write(tmp_path, NUMBERED))
    drawn = Counter(tuple(sorted(pair)) for pair in (all_lengths(source, 55_000) % 100).tolist())
    assert chi_square_p([drawn[pair] for pair in combinations(range(11), 2)], 1000) > 1e-6


def test_the_longest_of_8_is_that_of_whole_groups_and_not_of_pooled_answers():
    """E[longest of 8] over all prompts, exact; drawing single answers would give 2.41 means in place of 2.09.

    Fails for 1 seed in 10^6 if the code is right: 25 000 groups, z = 4.9.
    """
    exact = np.mean([expected_longest(prompt.lengths.tolist(), 8) for prompt in read_source("rgym_llama_400")])
    lengths = all_lengths(workload(kind="empirical", max=2048, source="rgym_llama_400"), 25_000)
    assert_mean(lengths.max(axis=1), exact)
    assert exact / lengths.mean() < 2.2


@pytest.mark.parametrize("name", ["rgym_llama_400", "rgym_llama_800", "skythought", "areal_deepscaler"])
def test_drawn_lengths_have_the_mean_after_scaling_and_cut(name):
    """Group means are independent: 10 000 of them, z = 4.9, fails for 1 seed in 10^6, plus half a token of rounding."""
    means = all_lengths(workload(kind="empirical", max=8000, mean=4000.0, source=name), 10_000).mean(axis=1)
    assert abs(means.mean() - 4000.0) <= 0.5 + 4.9 * means.std() / 100


PROMPT_LENGTHS = st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=6), min_size=1, max_size=5)


@pytest.mark.slow
@settings(deadline=None)
@given(PROMPT_LENGTHS, st.integers(2, 10_000), st.floats(0, 0.999))
def test_a_scaled_source_has_the_mean_asked_for_to_half_a_token(prompts, longest, share):
    """Every prompt counts the same. A group as large as a prompt has answers shows them all."""
    mean = 1 + share * (longest - 1)
    rows = [f"{p},{p},{tokens}\n" for p, lengths in enumerate(prompts) for tokens in lengths]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write(folder, "prompt_id,prompt_tokens,response_tokens\n" + "".join(rows))
        for size in {len(lengths) for lengths in prompts}:
            source = workload(group_size=size, kind="empirical", max=longest, mean=mean, source=path)
            groups = [source.group(k, k) for k in range(400)]  # misses one of 5 prompts once in 10^38
            found |= {g.prompt_tokens: np.mean(g.lengths) for g in groups if len(prompts[g.prompt_tokens]) == size}
    assert len(found) == len(prompts)
    assert abs(np.mean(list(found.values())) - mean) <= 0.5 + 1e-9


def test_one_factor_scales_all_lengths_before_the_cut(tmp_path):
    """100, 200, 900 cut at 1000 with mean 600: factor 2.666..., 267 + 533 + 1000 = 1800 = 3 * 600."""
    path = write(tmp_path, "prompt_id,response_tokens\na,100\na,200\na,900\n")
    source = workload(group_size=3, kind="empirical", max=1000, mean=600.0, source=path)
    assert sorted(source.group(0, 0).lengths) == [267, 533, 1000]


def test_without_a_mean_the_lengths_of_the_source_are_kept_and_cut(tmp_path):
    path = write(tmp_path, "prompt_id,response_tokens\na,100\na,0\na,900\n")
    source = workload(group_size=3, kind="empirical", max=500, source=path)
    assert sorted(source.group(0, 0).lengths) == [1, 100, 500]


def test_rewards_are_drawn_where_the_source_does_not_give_them(tmp_path):
    """Fails for 1 seed in 10^6 if the code is right: 80 000 rewards, z = 4.9."""
    path = write(tmp_path, "prompt_id,response_tokens\na,100\n")
    source = workload(kind="empirical", max=500, source=path, success_rate=0.2)
    rewards = [reward for k in range(10_000) for reward in source.group(k, k).rewards]
    assert_mean(rewards, 0.2)


def test_prompt_lengths_are_those_of_the_source_where_it_has_them(tmp_path):
    numbered = workload(kind="empirical", max=5000, source=write(tmp_path, NUMBERED), prompt_tokens=7)
    assert numbered.longest_rollout_tokens == 5021
    bare = workload(
        kind="empirical", max=5000, prompt_tokens=7, source=write(tmp_path, "prompt_id,response_tokens\na,100\n")
    )
    assert (bare.longest_rollout_tokens, bare.group(0, 0).prompt_tokens) == (5007, 7)
    assert workload(kind="fixed", max=5, prompt_tokens=7).longest_rollout_tokens == 12


# -------------------------------------------------------------------------------------------- sources


def test_a_source_is_read_in_the_order_of_the_file(tmp_path):
    """With a byte-order mark, spaces, an empty line, quotes, interleaved prompts; 0 tokens count as 1."""
    path = tmp_path / "mine.csv"
    text = '\ufeffcorrect, prompt_id ,response_tokens\r\n1,b,5\r\n0,"a, b",7\r\n\r\n0, b ,0\r\n'
    path.write_bytes(text.encode())
    prompts = read_source(str(path), prompt_tokens=3)
    assert [prompt.lengths.tolist() for prompt in prompts] == [[5, 1], [7]]
    assert [prompt.rewards.tolist() for prompt in prompts] == [[1.0, 0.0], [0.0]]
    assert [prompt.prompt_tokens for prompt in prompts] == [3, 3]


HEADER = "prompt_id,prompt_tokens,response_tokens,correct\n"
NUMBER = "must be a whole number from 0 to 1000000000"
FAULTS = {
    "nothing at all": ("", "line 1: column prompt_id is missing; needed: prompt_id, response_tokens"),
    "no lengths": ("prompt_id\n1\n", "line 1: column response_tokens is missing; needed: prompt_id, response_tokens"),
    "unknown column": (
        "prompt_id,response_token\n1,2\n",
        "line 1: 'response_token' is an unknown column; did you mean response_tokens? "
        "allowed, with commas in between: prompt_id, response_tokens, prompt_tokens, correct",
    ),
    "semicolons": (
        "a;b\n1;2\n",
        "line 1: 'a;b' is an unknown column; allowed, with commas in between: "
        "prompt_id, response_tokens, prompt_tokens, correct",
    ),
    "column twice": ("prompt_id,correct,correct\n", "line 1: column correct must stand there once, got 2"),
    "no rows": (HEADER, "line 1: there must be a row below the header, got none"),
    "cell too few": (
        HEADER + "1,2,3,1\n1,2,3\n",
        "line 3: there must be 4 cells (prompt_id, prompt_tokens, response_tokens, correct), got 3",
    ),
    "no prompt": (HEADER + " ,2,3,1\n", "line 2: prompt_id must not be empty, got ''"),
    "word": (HEADER + "1,2,many,1\n", f"line 2: response_tokens {NUMBER}, got 'many'"),
    "negative": (HEADER + "1,2,-3,1\n", f"line 2: response_tokens {NUMBER}, got '-3'"),
    "fraction": (HEADER + "1,2.5,3,1\n", f"line 2: prompt_tokens {NUMBER}, got '2.5'"),
    "empty cell": (HEADER + "1,2,,1\n", f"line 2: response_tokens {NUMBER}, got ''"),
    "too large": (HEADER + "1,2,1000000001,1\n", f"line 2: response_tokens {NUMBER}, got '1000000001'"),
    "very long": (HEADER + f"1,2,{'9' * 5000},1\n", f"line 2: response_tokens {NUMBER}, got '{'9' * 37}...'"),
    "other digits": (HEADER + "1,2,\u0663,1\n", f"line 2: response_tokens {NUMBER}, got '\u0663'"),
    "superscript": (HEADER + "1,2,\u00b2,1\n", f"line 2: response_tokens {NUMBER}, got '\u00b2'"),
    "two lines": (HEADER + '1,2,"3\n4",1\n', f"line 3: response_tokens {NUMBER}, got '3\\n4'"),
    "verdict": (HEADER + "1,2,3,2\n", "line 2: correct must be a whole number from 0 to 1, got '2'"),
    "two prompt lengths": (
        HEADER + "q,2,3,1\nr,5,3,1\nq,4,3,0\n",
        "line 4: prompt_tokens must be the same in all rows of prompt_id 'q', 2, got 4",
    ),
    "open quote": (HEADER + '1,2,"3,1\n', "line 2: not a comma-separated table: unexpected end of data"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_source_is_one_line_with_file_line_column_rule_and_value(tmp_path, fault):
    text, message = FAULTS[fault]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        workload(kind="empirical", max=10, source=path)
    assert str(error.value) == f"{path} {message}"


SHIPPED = "areal_deepscaler, areal_nemotron, rgym_llama_400, rgym_llama_800, skythought"


@pytest.mark.parametrize(
    ("source", "hint"), [("rgym_lama_400", "did you mean rgym_llama_400? "), ("my lengths", ""), ("", "")]
)
def test_an_unknown_set_is_answered_with_the_shipped_ones_and_the_nearest(source, hint):
    with pytest.raises(ConfigError) as error:
        workload(kind="empirical", max=10, source=source)
    assert str(error.value) == (
        f"workload.length.source must be a shipped set or the path of a .csv file, got {source!r}; "
        f"{hint}shipped sets: {SHIPPED}"
    )


def test_a_missing_file_is_answered_with_the_shipped_sets(tmp_path):
    path = tmp_path / "skythougt.csv"
    with pytest.raises(ConfigError) as error:
        read_source(str(path))
    assert str(error.value) == (
        f"cannot read workload.length.source {path}: No such file or directory; "
        f"did you mean skythought? shipped sets: {SHIPPED}"
    )


def test_a_file_that_is_not_text_is_rejected(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"prompt_id,response_tokens\n\xff,3\n")
    with pytest.raises(ConfigError) as error:
        read_source(str(path))
    assert str(error.value) == f"cannot read workload.length.source {path}: it is not UTF-8 text"


# --------------------------------------------------------------------------------------- shipped sets


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_length_sets", ROOT / "scripts" / "make_length_sets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected_longest(lengths, count):
    """E[max of count] = sum_i x_(i) C(i - 1, count - 1) / C(n, count), with the largest of the draw at rank i."""
    ways = sum(math.comb(rank, count - 1) * length for rank, length in enumerate(sorted(lengths)))
    return ways / math.comb(len(lengths), count)


def test_the_shipped_sets_are_these():
    assert ", ".join(shipped_sets()) == SHIPPED


STATISTICS = {
    # prompts, answers, mean, median, cv, p95, longest, correct, longest of 8 over the mean of a prompt, of 32
    "rgym_llama_400": (70, 50, 573, 427, 0.80, 2047, 2048, 0.09, 2.04, 2.86),
    "rgym_llama_800": (70, 50, 396, 335, 0.63, 715, 2048, 0.09, 1.76, 2.74),
    "skythought": (30, 11, 16654, 8424, 0.81, 32459, 32467, 0.33, 1.78, None),
    "areal_deepscaler": (18, 32, 3173, 3117, 0.38, 5222, 7783, 0.87, 1.38, 1.64),
    "areal_nemotron": (15, 32, 4584, 4162, 0.41, 8085, 11936, 0.79, 1.44, 1.75),
}
"""Computed from the source table when it was collected, rounded to the last digit given."""


@pytest.mark.parametrize("name", STATISTICS)
def test_a_shipped_set_has_the_statistics_of_its_source(name):
    prompts, answers, mean, median, cv, p95, longest, correct, longest_of_8, longest_of_32 = STATISTICS[name]
    groups = [prompt.lengths for prompt in read_source(name)]
    lengths = np.concatenate(groups)
    assert [len(group) for group in groups] == [answers] * prompts
    assert lengths.mean() == pytest.approx(mean, abs=0.5)
    assert np.median(lengths) == pytest.approx(median, abs=0.5)
    assert lengths.std() / lengths.mean() == pytest.approx(cv, abs=0.005)
    assert np.quantile(lengths, 0.95) == pytest.approx(p95, abs=0.5)
    assert lengths.max() == longest
    assert np.concatenate([p.rewards for p in read_source(name)]).mean() == pytest.approx(correct, abs=0.005)
    for count, ratio in ((8, longest_of_8), (32, longest_of_32)):
        if ratio is not None:
            ratios = [expected_longest(group.tolist(), count) / group.mean() for group in groups]
            assert np.mean(ratios) == pytest.approx(ratio, abs=0.005)


def test_both_steps_of_rgym_llama_answer_the_same_prompts():
    early, late = ([p.prompt_tokens for p in read_source(f"rgym_llama_{step}")] for step in (400, 800))
    assert early == late
    assert (min(early), max(early)) == (18, 339)


def test_expected_longest_is_the_mean_over_all_subsets():
    lengths = [3, 1, 4, 1, 5]
    subsets = [max(subset) for subset in combinations(lengths, 3)]
    assert expected_longest(lengths, 3) == pytest.approx(np.mean(subsets))
    assert script().expected_longest(lengths, 3) == pytest.approx(np.mean(subsets))


def test_the_readme_of_the_sets_states_what_is_in_them():
    """Its summary tables hold the rows that the script prints for the files beside it."""
    make = script()
    readme = (ROOT / "sim" / "data" / "README.md").read_text(encoding="utf-8").splitlines()
    for name in shipped_sets():
        text = (ROOT / "sim" / "data" / f"{name}.csv").read_text(encoding="utf-8")
        rows = [tuple(map(int, line.split(","))) for line in text.splitlines()[1:]]
        for line in make.summary(name, rows):
            assert line in readme


SOURCE_TABLE = (
    "source_id,model,benchmark,prompt_id,sample_id,prompt_tokens,response_tokens,correct\n"
    + "".join(f"skythought,ckpt{c},aime,{p},0,{50 + p},{1000 * p + c},1\n" for c in range(8) for p in (3, 1))
    + "".join(
        f"{source},{model},{benchmark},{p},{a},{90 + p},{a},{a % 2}\n"
        for source, model in (
            ("rgym_llama", "Llama-3B-RG-step400"),
            ("rgym_llama", "Llama-3B-RG-step800"),
            ("areal_32", "DeepScaleR-1.5B-Preview"),
            ("areal_32", "OpenMath-Nemotron-1.5B"),
        )
        for benchmark in ("aime", "amc")
        for p in (0, 1)
        for a in range(8)
    )
)


def test_the_script_sorts_by_prompt_numbers_prompts_over_benchmarks_and_drops_the_rest(tmp_path, capsys):
    source = tmp_path / "response_lengths.csv"
    source.write_text(SOURCE_TABLE, encoding="utf-8")
    assert script().main([str(source), str(tmp_path)]) == 0
    sky = (tmp_path / "skythought.csv").read_text(encoding="utf-8").splitlines()
    assert sky[:3] + sky[9:10] == [
        "prompt_id,prompt_tokens,response_tokens,correct",
        "0,53,3000,1",
        "0,53,3001,1",
        "1,51,1000,1",
    ]
    rgym = (tmp_path / "rgym_llama_400.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in rgym[1::8]] == ["0", "1", "2", "3"]
    assert rgym[1:3] == ["0,90,1,0", "0,90,1,1"]  # 0 tokens count as 1
    assert "| `areal_nemotron` | 4 x 8 |" in capsys.readouterr().out
    assert {path.stem for path in tmp_path.glob("*.csv")} == {*shipped_sets(), "response_lengths"}


def test_the_script_rejects_wrong_arguments_and_a_table_without_a_set(tmp_path, capsys):
    source = tmp_path / "response_lengths.csv"
    source.write_text(SOURCE_TABLE.replace("skythought", "other"), encoding="utf-8")
    assert script().main([str(source)]) == 2
    assert script().main([str(source), str(tmp_path)]) == 2
    usage, missing = capsys.readouterr().err.splitlines()
    assert usage == "usage: make_length_sets.py SOURCE_TABLE.csv FOLDER"
    assert missing == f"{source}: the table has no rows with source_id='skythought', model=None"
    assert list(tmp_path.glob("*.csv")) == [source]
