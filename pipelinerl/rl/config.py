"""Settings of a loss and of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import explain
from pipelinerl.util.strict_model import Count, Settings, StrictModel, Tokens, TokensOrZero


class TaskConfig(StrictModel):
    """The problems for the model and the rewards of its answers."""

    name: str
    """``arithmetic``, ``chain``, ``math``; with ``[environment]`` ``calculator``; or your own
    ``package.module:attribute`` (docs/training_task.md)."""
    settings: Settings = {}
    """Keyword arguments of the task or environment."""
    max_prompt_tokens: Tokens = 1024
    """Longest prompt (tokens); longer ones fail."""
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds until a rollout without a reward fails."""
    reward_workers: Count | None = None
    """Processes that compute rewards (count). None: eight threads of the driver."""
    overlong_tokens: TokensOrZero = 0
    """Tokens before ``workload.length.max`` over which the reward falls linearly by 1."""


def task_config(table: Mapping[str, Any], *, key: str) -> TaskConfig:
    """Return a task's table that is a setting of another task; ConfigError, one line per fault, if invalid."""
    try:
        return TaskConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(*(f"{key}.{line}" for line in explain(error, TaskConfig))) from None


class LossConfig(StrictModel):
    """The policy gradient. ``pipelinerl/rl/losses.py`` has the formulas."""

    kind: Literal["reinforce", "plain", "sequence", "ppo", "cispo", "gspo", "topr"] = "reinforce"
    """Policy gradient loss."""
    truncation: float = Field(default=5.0, gt=0)
    """Largest importance weight, the paper's c: reinforce, sequence."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios are clipped below 1 less this: ppo, cispo, gspo."""
    clip_high: float = Field(default=0.2, ge=0)
    """... above 1 plus this."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the initial model. 0: no reference model."""
    value_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the value head's squared error. 0: no value head, leave-one-out baseline."""
