"""Lengths from a source: draws, allowed contents, reports of faults."""

import tempfile
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import message
from workloads import (
    NUMBERED,
    SHIPPED,
    all_lengths,
    assert_mean,
    chi_square_p,
    drawn_from,
    expected_longest,
    workload,
    write,
)

from sim.workload import read_source

# ------------------------------------------------------------------------------------------ empirical


@settings(deadline=None)
@given(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(1, 20))
def test_a_group_is_drawn_from_the_answers_of_one_prompt_with_their_rewards(group_id, prompt_id, group_size):
    with tempfile.TemporaryDirectory() as folder:
        source = drawn_from(folder, NUMBERED, group_size=group_size)
    group = source.group(group_id, prompt_id)
    prompts, answers = zip(*(divmod(length, 100) for length in group.lengths), strict=True)
    assert len(set(prompts)) == 1
    assert group.prompt_tokens == 10 + prompts[0]
    assert group.rewards == tuple(answer % 2 for answer in answers)
    assert set(answers) <= set(range(11))
    assert group_size > 11 or len(set(answers)) == group_size  # without replacement where there are enough


def test_a_prompt_that_is_started_again_is_the_same_prompt_with_other_answers(tmp_path):
    source = drawn_from(tmp_path, NUMBERED)
    groups = [source.group(group_id, 3) for group_id in range(50)]
    assert len({group.prompt_tokens for group in groups}) == 1
    assert len({group.lengths for group in groups}) > 40


def test_prompts_are_equally_likely(tmp_path):
    """Chi-square over 11 prompts, 22 000 draws; fails for 1 seed in 10^6 if the code is right."""
    source = drawn_from(tmp_path, NUMBERED)
    drawn = Counter(source.group(0, k).prompt_tokens for k in range(22_000))
    assert len(drawn) == 11
    assert chi_square_p(list(drawn.values()), 2000) > 1e-6


@pytest.mark.parametrize("group_size", [1, 8, 11, 12])
def test_every_answer_is_equally_likely_in_every_place(tmp_path, group_size):
    """Chi-square over 11 answers in the first and the last place, 22 000 groups each.

    Fails for 1 seed in 250 000 over all sizes if the code is right. Size 12 is drawn with replacement.
    """
    source = drawn_from(tmp_path, NUMBERED, group_size=group_size)
    answers = all_lengths(source, 22_000) % 100
    for place in (0, group_size - 1):
        assert chi_square_p(np.bincount(answers[:, place], minlength=11), 2000) > 1e-6


def test_every_set_of_answers_is_equally_likely(tmp_path):
    """Chi-square over the 55 pairs of 11 answers, 55 000 groups; fails for 1 seed in 10^6 if the code is right."""
    source = drawn_from(tmp_path, NUMBERED, group_size=2)
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
    text = "prompt_id,response_tokens\na,100\na,200\na,900\n"
    source = drawn_from(tmp_path, text, group_size=3, longest=1000, mean=600.0)
    assert sorted(source.group(0, 0).lengths) == [267, 533, 1000]


def test_without_a_mean_the_lengths_of_the_source_are_kept_and_cut(tmp_path):
    source = drawn_from(tmp_path, "prompt_id,response_tokens\na,100\na,0\na,900\n", group_size=3, longest=500)
    assert sorted(source.group(0, 0).lengths) == [1, 100, 500]


def test_rewards_are_drawn_where_the_source_does_not_give_them(tmp_path):
    """Fails for 1 seed in 10^6 if the code is right: 80 000 rewards, z = 4.9."""
    source = drawn_from(tmp_path, "prompt_id,response_tokens\na,100\n", success_rate=0.2)
    rewards = [reward for k in range(10_000) for reward in source.group(k, k).rewards]
    assert_mean(rewards, 0.2)


def test_prompt_lengths_come_from_the_source_where_it_has_them(tmp_path):
    numbered = drawn_from(tmp_path, NUMBERED, prompt_tokens=7)
    assert numbered.longest_rollout_tokens == 5021
    bare = drawn_from(tmp_path, "prompt_id,response_tokens\na,100\n", prompt_tokens=7)
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
FAULTS = {
    # Other faults are tested with the reader of tables.
    "no lengths": ("prompt_id\n1\n", "line 1: column response_tokens is missing; needed: prompt_id, response_tokens"),
    "verdict": (HEADER + "1,2,3,2\n", "line 2: correct must be a whole number from 0 to 1, got '2'"),
    "two prompt lengths": (
        HEADER + "q,2,3,1\nr,5,3,1\nq,4,3,0\n",
        "line 4: prompt_tokens must be the same in all rows of prompt_id 'q', 2, got 4",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_source_is_one_line_with_file_line_column_rule_and_value(tmp_path, fault):
    text, line = FAULTS[fault]
    path = write(tmp_path, text)
    assert message(read_source, path) == f"{path} {line}"


@pytest.mark.parametrize(
    ("source", "hint"), [("rgym_lama_400", "did you mean rgym_llama_400? "), ("my lengths", ""), ("", "")]
)
def test_an_unknown_set_is_answered_with_the_shipped_ones_and_the_nearest(source, hint):
    assert message(read_source, source) == (
        f"workload.length.source must be a shipped set, a .csv file, a run or another system's trace, got {source!r}; "
        f"{hint}shipped sets: {SHIPPED}"
    )


def test_a_missing_file_is_answered_with_the_shipped_sets(tmp_path):
    path = tmp_path / "skythougt.csv"
    assert message(read_source, str(path)) == (
        f"cannot read workload.length.source {path}: No such file or directory; "
        f"did you mean skythought? shipped sets: {SHIPPED}"
    )
