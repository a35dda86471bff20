"""Lengths of answers: counts, mean and spread."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.theory.lengths import lengths_from, uniform_lengths


def test_uniform_lengths_have_the_case_studys_survivor_and_mean():
    lengths = uniform_lengths(4)
    assert (lengths.unfinished / lengths.num_sequences).tolist() == [1, 0.75, 0.5, 0.25]
    assert (lengths.max_tokens, lengths.mean_tokens) == (4, 2.5)
    assert uniform_lengths(2048).mean_tokens == 1024.5


@given(tokens=st.lists(st.integers(1, 500), min_size=1, max_size=50))
def test_lengths_from_keeps_count_maximum_mean_and_spread(tokens):
    lengths = lengths_from(tokens)
    assert lengths.num_sequences == len(tokens)
    assert lengths.max_tokens == max(tokens)
    assert lengths.num_tokens == sum(tokens)
    assert lengths.unfinished.tolist() == [sum(one >= step for one in tokens) for step in range(1, max(tokens) + 1)]
    assert lengths.cv == pytest.approx(np.std(tokens) / np.mean(tokens), abs=1e-7)


@given(longest=st.integers(1, 200))
def test_uniform_lengths_are_those_of_one_answer_of_each_length(longest):
    expected = lengths_from(np.arange(1, longest + 1))
    assert uniform_lengths(longest).unfinished.tolist() == expected.unfinished.tolist()


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [1.5], [3, 0], [-1]])
def test_lengths_from_refuses_anything_but_a_list_of_lengths(tokens):
    with pytest.raises(ValueError, match="tokens must be a list of whole numbers, each at least 1, got"):
        lengths_from(tokens)
