"""Checks before anything starts, for any backend; each fault is one line that names key, value and what is allowed."""

from __future__ import annotations

from backends.metrics_log import check_logging
from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.errors import ConfigError
from pipelinerl.rl.problems import Task


def check_run(config: RunConfig) -> TrainConfig:
    """Check that this run file is one for the driver.

    Args:
        config: What is to be run.

    Returns:
        Its table ``train``.

    Raises:
        ConfigError: If the table is missing, or something does not fit.
    """
    train = config.train
    if train is None:
        raise ConfigError("train is missing; pipelinerl train needs the table [train]: model, task, optimizer")
    check_logging(train)
    if config.scheduler.schedule.carries_over:
        raise ConfigError(
            f"scheduler.kind={config.scheduler.schedule.name!r} is for the simulator: train's engines lose what is in "
            "progress when they give their memory to the trainer"
        )
    return train


def trainer_ranks(config: RunConfig) -> int:
    """Return the ranks of the trainer (count): one for every accelerator that trains, or that takes turns."""
    return config.training_accelerators // (config.cluster.tensor_parallel if config.colocated else 1)


def check_evaluation(train: TrainConfig, task: Task) -> None:
    """Check that a task has as many held-out problems as the evaluation asks for.

    Raises:
        ConfigError: If it has fewer.
    """
    wanted, there = train.evaluation.problems, task.num_held_out
    if there is not None and wanted > there:
        raise ConfigError(
            f"train.evaluation.problems must be at most the task's {there} held-out problems, got {wanted}"
        )
