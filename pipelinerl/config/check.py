"""A short run that measures: what ``train --check`` makes of a run file."""

from __future__ import annotations

from pipelinerl.config.run import RunConfig

CHECK_STEPS = 4
"""Optimizer steps of a check (count): each of them trains, publishes, and, colocated, switches."""


def check_config(config: RunConfig) -> RunConfig:
    """Return a run file's first steps, with every step an RL step of its own and its weights published.

    Batches, engines and split stay, so what is timed is what the run would do. Nothing is evaluated.
    """
    scheduler = config.scheduler.model_copy(update={"optimizer_steps_per_rl_step": 1, "publish_every": 1})
    train = config.train
    if train is not None:
        train = train.model_copy(update={"evaluation": type(train.evaluation)()})
    steps = min(CHECK_STEPS, config.optimizer_steps)
    return config.model_copy(
        update={"optimizer_steps": steps, "scheduler": scheduler, "train": train, "plan": None, "compare": None}
    )
