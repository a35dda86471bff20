"""Leave-one-out advantages: hand-made groups, and identities of every group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipelinerl.rl.segments import leave_one_out

GROUPS = arrays(np.float64, st.integers(2, 16), elements=st.floats(-100, 100))


def test_each_baseline_is_the_mean_reward_of_the_others() -> None:
    # Baselines 2/3, 1, 1, 1/3 of the rewards 1, 0, 0, 2.
    assert leave_one_out([1, 0, 0, 2]) == pytest.approx([1 - 2 / 3, -1, -1, 2 - 1 / 3])


def test_a_group_of_one_keeps_its_reward() -> None:
    assert leave_one_out([0.75]).tolist() == [0.75]


def test_the_rewards_are_left_as_they_are() -> None:
    reward = np.array([0.75])
    leave_one_out(reward)[0] = 5.0
    assert reward.tolist() == [0.75]


@given(GROUPS)
def test_the_definition_and_the_identity_agree(reward: np.ndarray) -> None:
    num = reward.size
    definition = [reward[i] - np.delete(reward, i).mean() for i in range(num)]
    identity = num / (num - 1) * (reward - reward.mean())
    assert leave_one_out(reward) == pytest.approx(definition, abs=1e-10)
    assert leave_one_out(reward) == pytest.approx(identity, abs=1e-10)


@given(st.floats(-1e6, 1e6), st.integers(2, 64))
def test_equal_rewards_give_exact_zeros(reward: float, num: int) -> None:
    assert leave_one_out([reward] * num).tolist() == [0.0] * num


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([], r"reward_G must be one-dimensional and not empty, got shape \(0,\)"),
        ([[1.0, 2.0]], r"reward_G must be one-dimensional and not empty, got shape \(1, 2\)"),
        ([1.0, float("nan")], "reward_G must be finite, got nan"),
        ([float("inf"), 1.0], "reward_G must be finite, got inf"),
    ],
)
def test_a_wrong_group_is_refused(reward, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        leave_one_out(reward)
