"""Rollouts of one prompt, and where each of them is."""

from __future__ import annotations

from pipelinerl.scheduler.events import DiscardReason

NEVER_REPORTED = 2**62
"""Oldest version of a group no token of which has been reported: later than any."""

NOWHERE = -1
"""Engine of a rollout that is not in flight."""
SCORING = -2
"""Engine of a rollout that is being scored."""
ENVIRONMENT = -3
"""Engine of a rollout whose environment acts."""


class RolloutGroup:
    """Rollouts of one prompt (mutable; owned by the pool)."""

    __slots__ = (
        "cancelled",
        "engines",
        "group_id",
        "num_scoring",
        "num_started",
        "oldest_bound",
        "oldest_reported",
        "prompt_id",
        "ready",
        "rewards_differ",
        "scored",
        "scored_reward",
    )

    def __init__(self, group_id: int, prompt_id: int, oldest_bound: int, group_size: int) -> None:
        self.group_id = group_id
        self.prompt_id = prompt_id
        self.oldest_bound = oldest_bound  # no token of the group is older than this version
        self.oldest_reported = NEVER_REPORTED  # oldest version among the tokens reported so far
        self.num_started = 0
        self.engines = [NOWHERE] * group_size  # where each of its rollouts is in flight, or SCORING, or ENVIRONMENT
        self.num_scoring = 0
        self.scored: list[int] = []
        self.scored_reward = 0.0
        self.rewards_differ = False
        self.ready = False
        self.cancelled: DiscardReason | None = None
