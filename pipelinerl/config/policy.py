"""The table ``policy`` of a run file: a small policy that learns inside the simulation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from pipelinerl.config.train import Temperature
from pipelinerl.rl.config import LossConfig
from pipelinerl.util.limits import Count, CountOrZero
from pipelinerl.util.strict_model import StrictModel


class WarmStartConfig(StrictModel):
    """The base model: supervised training on demonstrations before the run begins, in no simulated time."""

    steps: CountOrZero = 400
    """Supervised optimizer steps (count)."""
    batch_size: Count = 64
    """Demonstrations per step (sequences)."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Adam's largest rate, from which it falls linearly to a tenth (no unit)."""
    seed: int = Field(default=0, ge=0)
    """Seed of weights and demonstrations: not that of the run, so that all runs start from one base model."""


class PolicyConfig(StrictModel):
    """A small transformer, trained by the simulated schedule on a task that checks its answers."""

    task: Literal["addition", "reverse", "chain", "calculator"]
    """``addition``: of two numbers. ``reverse``: a word, backwards. ``chain``: a long sum, step by step or at once.
    ``calculator``: the same in turns, by an ``[environment]`` that adds two digits, or at once."""
    size: int = Field(ge=1, le=1000)
    """Longest problem: digits of a number, letters of a word, or terms of a sum (count)."""
    layers: int = Field(default=2, ge=1, le=32)
    """Transformer blocks (count)."""
    width: int = Field(default=64, ge=1, le=4096)
    """Width of the residual stream (count)."""
    heads: Count = 4
    """Attention heads (count); divides ``width``."""
    temperature: Temperature = 1.0
    """Softmax temperature of sampling, training and importance weights (no unit)."""
    learning_rate: float = Field(gt=0)
    """Adam's rate in the reinforcement learning (no unit)."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient of a batch (no unit)."""
    loss: LossConfig = LossConfig()
    """The policy gradient."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """The base model."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got heads={self.heads}, width={self.width}")
        for name in ("kl_coefficient", "value_coefficient"):
            if getattr(self.loss, name):
                raise ValueError(f"loss.{name} must be 0: the policy has no reference model and no value head")
        return self
