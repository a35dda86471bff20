"""Settings of a loss and of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import explain
from pipelinerl.util.limits import Count, Tokens, TokensOrZero
from pipelinerl.util.strict_model import StrictModel


class TaskConfig(StrictModel):
    """The problems for the model and the rewards of its answers."""

    name: str
    """``arithmetic``, ``chain``, ``math``, or a user's own ``package.module:attribute`` (docs/training.md says how).
    With a table ``[environment]``: ``calculator``, or a user's own environment."""
    settings: dict[str, Any] = {}
    """Keyword arguments of the task, or of every environment."""
    max_prompt_tokens: Tokens = 1024
    """Longest prompt (tokens); rollouts of longer ones fail."""
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which the rollout whose reward is still missing fails."""
    reward_workers: Count | None = None
    """Processes that compute rewards, each with the task, one reward at a time (count). One that crashes or hangs costs
    its rollout. None: eight threads of the driver."""
    overlong_tokens: TokensOrZero = 0
    """The reward falls linearly, by 1 in all, over the last so many tokens before ``workload.length.max`` (tokens)."""


def task_config(table: Mapping[str, Any], *, key: str) -> TaskConfig:
    """Return the table of a task that is among the settings of another one.

    Raises:
        ConfigError: If it is none; one line per fault.
    """
    try:
        return TaskConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{key}.{line}" for line in explain(error, TaskConfig))) from None


class LossConfig(StrictModel):
    """The policy gradient. ``pipelinerl/rl/losses.py`` has the formulas."""

    kind: Literal["reinforce", "plain", "sequence", "ppo", "cispo", "gspo", "topr"] = "reinforce"
    """``reinforce``: truncated importance weights (eq. 5). ``plain``: none. ``sequence``: of whole sequences."""
    truncation: float = Field(default=5.0, gt=0)
    """Largest importance weight (no unit): reinforce, sequence. Paper symbol c."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """How far below 1 a ratio counts (no unit): ppo, cispo, gspo."""
    clip_high: float = Field(default=0.2, ge=0)
    """How far above 1 a ratio counts (no unit): ppo, cispo, gspo."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference model, the model at the start (no unit). 0: no reference model."""
    value_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the value head's squared error (no unit). 0: no value head; the baseline is leave-one-out."""
