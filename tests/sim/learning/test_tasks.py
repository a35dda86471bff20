"""Tasks of the policy that learns: right answers, by hand, and demonstrations."""

import numpy as np
import pytest

from sim.learning.tasks import BLANK, END, MARK, RESULT, Addition, Calculator, Chain, Reverse


def test_addition_by_hand():
    task = Addition(2)
    assert task.is_right((7, 4, 5, 8, MARK), [2, 3, 1, END])  # 47 + 85 = 132
    assert not task.is_right((7, 4, 5, 8, MARK), [2, 3, 1])
    assert not task.is_right((7, 4, 5, 8, MARK), [2, 4, 1, END])


def test_reverse_by_hand():
    assert Reverse(4).is_right((BLANK, 3, 1, 2, MARK), [2, 1, 3, END])
    assert not Reverse(4).is_right((BLANK, 3, 1, 2, MARK), [3, 1, 2, END])


def test_chain_by_hand():
    task, prompt = Chain(4), (3, 5, 2, BLANK, MARK)  # 10 modulo 6
    assert task.is_right(prompt, [RESULT, 4, END])
    assert task.is_right(prompt, [3, 2, 4, RESULT, 4, END])
    assert not task.is_right(prompt, [3, 2, 4, RESULT, 5, END])
    assert not task.is_right(prompt, [3, 2, 4, RESULT, 4])


def test_a_calculator_answers_calls_by_hand():
    task, prompt = Calculator(4), (3, 5, 8, BLANK, MARK)  # 16 modulo 10
    assert task.observe([3, 5, END]) == [8]
    assert task.observe([8, 8, END]) == [6]
    for last in ([RESULT, 6, END], [3, 5, 8], [3, END], [3, MARK, END], [3, 5, 8, END]):
        assert task.observe(last) is None
    assert task.is_right(prompt, [3, 5, END, 8, 8, 8, END, 6, RESULT, 6, END])
    assert task.is_right(prompt, [RESULT, 6, END])
    assert not task.is_right(prompt, [3, 5, END, 8, RESULT, 8, END])


@pytest.mark.parametrize("make", [Addition, Reverse, Chain, Calculator])
@pytest.mark.parametrize("size", [1, 5])
def test_prompts_have_one_length_and_demonstrations_are_mostly_right(make, size):
    """Without mistakes an answer is right; the chance of none in 300 demonstrations being right is nil."""
    task, stream = make(size), np.random.default_rng(0)
    right = []
    for _ in range(300):
        prompt = task.draw(stream)
        assert len(prompt) == task.prompt_tokens
        answer = task.demonstrate(prompt, stream)
        assert len(answer) <= task.longest_answer
        right.append(task.is_right(prompt, answer))
    assert 0.6 < np.mean(right) < 1
