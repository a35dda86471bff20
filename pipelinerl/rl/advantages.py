"""Advantages of the rollouts of one group."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    reward = np.asarray(reward_G, dtype=np.float64)
    if reward.ndim != 1 or reward.size == 0:
        raise ValueError(f"reward_G must be one-dimensional and not empty, got shape {reward.shape}")
    if not np.isfinite(reward).all():
        raise ValueError(f"reward_G must be finite, got {reward[~np.isfinite(reward)][0]}")
    num = reward.size
    if num == 1:
        return reward.copy()
    difference = reward - reward[0]  # makes equal rewards exact zeros before anything is rounded
    advantage: NDArray[np.float64] = num / (num - 1) * (difference - difference.mean())
    return advantage
