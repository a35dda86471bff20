"""Advantages of the rollouts of one group."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipelinerl.rl.ess import finite

# Legend of shapes: G rollouts of one group.


def leave_one_out(reward_G: ArrayLike) -> NDArray[np.float64]:
    """Return each rollout's reward minus the mean reward of the others of its group, shape [G].

    A_i = r_i - b_i with b_i = sum_{j != i} r_j / (n - 1), the same as n / (n - 1) * (r_i - mean r). The baseline
    does not depend on the rollout it is subtracted from, so it adds no bias. The advantages of a group sum to 0,
    and are exactly 0 when all rewards are equal. They are not divided by the standard deviation. In a group of 1 it is
    the reward itself (ServiceNow/PipelineRL gives 0, so that such groups do not train).
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free".
    Raises ValueError if the array is empty, not one-dimensional, or has a non-finite entry.
    """
    reward = finite("reward_G", reward_G)
    num = reward.size
    if num == 1:
        return reward.copy()
    difference = reward - reward[0]  # makes equal rewards exact zeros before anything is rounded
    advantage: NDArray[np.float64] = num / (num - 1) * (difference - difference.mean())
    return advantage
