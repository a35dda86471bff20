"""Settings of a loss and of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pipelinerl.util.explain import explaining
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
    with explaining(TaskConfig, f"{key}."):
        return TaskConfig.model_validate(table)


class LossConfig(StrictModel):
    """The policy gradient. ``pipelinerl/rl/losses.py`` has the formulas."""

    kind: Literal["reinforce", "plain", "sequence", "ppo", "cispo", "gspo", "topr"] = "reinforce"
    """Policy gradient loss."""
    truncation: float = Field(default=5.0, gt=0)
    """Largest importance weight, the paper's c: reinforce, sequence."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Clips ratios below 1 less this: ppo, cispo, gspo."""
    clip_high: float = Field(default=0.2, ge=0)
    """... above 1 plus this."""
    mask: Literal["token", "sequence", "geometric"] | None = None
    """Ratio that masks a token: its own, the product over its answer, its geometric mean. None: no mask."""
    mask_low: float = Field(default=0.5, ge=0, le=1)
    """Least unmasked ratio."""
    mask_high: float = Field(default=5.0, ge=1)
    """Largest unmasked ratio."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the initial model. 0: no reference model."""
    teacher: str | None = None
    """Model (folder or id), with the same tokens, whose log-probabilities replace the reward. None: the reward."""
    value_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the value head's squared error. 0: no value head, leave-one-out baseline."""

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen model gives log-probabilities of each answer: the teacher, or the model at the start."""
        return self.kl_coefficient > 0 or self.teacher is not None

    def masked(self, log_ratio: Any, answer_sum: Any, answer_tokens: Any) -> Any:
        """Return where the ratio that ``mask`` names is out of its bounds; NaN is not. There must be a mask.

        ``log_ratio``: of each token (nats), an array or tensor. ``answer_sum``, ``answer_tokens``: the sum of them over
        its answer, and their number, of each token or of all.
        """
        assert self.mask is not None
        ratio = {"token": log_ratio, "sequence": answer_sum, "geometric": answer_sum / answer_tokens}[self.mask]
        least = math.log(self.mask_low) if self.mask_low else -math.inf
        return (ratio < least) | (ratio > math.log(self.mask_high))

    @model_validator(mode="after")
    def _advantage_is_of_tokens(self) -> Self:
        if self.kind == "gspo" and (self.value_coefficient or self.teacher):
            key, value = ("teacher", "left out") if self.teacher else ("value_coefficient", "0")
            raise ValueError(f"{key} must be {value} with kind='gspo': its advantage is per sequence")
        for name in ("kl_coefficient", "value_coefficient") if self.teacher else ():
            if getattr(self, name):
                raise ValueError(f"{name} must be 0 with a teacher, got {getattr(self, name):g}")
        return self

    @model_validator(mode="after")
    def _bounds_have_a_mask(self) -> Self:
        for name in ("mask_low", "mask_high"):
            value = getattr(self, name)
            if self.mask is None and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs mask='token', 'sequence' or 'geometric', got no mask, {name}={value:g}")
            if self.mask == "geometric" and name not in self.model_fields_set:
                raise ValueError(
                    f"mask='geometric' needs mask_low and mask_high (verl: 0.999 and 1.001), got no {name}"
                )
        return self
