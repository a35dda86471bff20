"""Checks before anything starts, for any backend; each fault is one line that names key, value and what is allowed."""

from __future__ import annotations

from backends.driver.metrics import check_logging
from pipelinerl.config.environment import EnvironmentConfig, PrefixCaching
from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.transport import OURS
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.problems import Task
from pipelinerl.rl.tasks import load_environment, load_task


def check_run(config: RunConfig) -> TrainConfig:
    """Return the table ``train`` of a run; ``ConfigError`` if it is missing, or something does not fit the driver."""
    train = config.train
    if train is None:
        raise ConfigError("train is missing; pipelinerl train needs the table [train]: model, task, optimizer")
    if config.environment is not None:
        _check_environment(config.environment, train)
    check_logging(train)
    if not train.chosen_transport(colocated=False).ends:
        ours = ", ".join(one.name for one in OURS)
        raise ConfigError(
            f"train.transport must be {ours} or a WeightTransport with ends, got {train.transport!r}, which can only "
            "be simulated"
        )
    if config.scheduler.schedule.carries_over:
        raise ConfigError(
            f"scheduler.kind={config.scheduler.schedule.name!r} is for the simulator: train's engines lose what is in "
            "progress when they give their memory to the trainer"
        )
    return train


def _check_environment(environment: EnvironmentConfig, train: TrainConfig) -> None:
    if environment.prefix_cache is PrefixCaching.KEPT:
        raise ConfigError(
            "environment.prefix_cache must be 'salted' or 'off' for train, whose engines drop it with the weights, got "
            "'kept'"
        )
    if train.task.overlong_tokens:
        raise ConfigError(
            "train.task.overlong_tokens must be 0 with an [environment], whose reward is taken as it is, got "
            f"{train.task.overlong_tokens}"
        )
    if train.task.reward_workers is not None:
        raise ConfigError(
            "train.task.reward_workers must be left out with an [environment], whose processes give the rewards, got "
            f"{train.task.reward_workers}"
        )


def task_of(config: RunConfig) -> Task | None:
    """Return the task, or None where environments have problems and rewards; ``ConfigError`` if it cannot be made."""
    if config.environment is None:
        return load_task(config.train_table.task)
    load_environment(config.train_table.task)
    return None


def evaluation_task_config(train: TrainConfig) -> TaskConfig:
    """Return the table of the evaluation task: the training task with some settings changed."""
    return train.task.model_copy(update={"settings": train.task.settings | train.evaluation.settings})


def evaluation_task(config: RunConfig, task: Task | None) -> Task | None:
    """Return the training task with the settings of ``train.evaluation``; None for runs with environments.

    Raises ConfigError if it has fewer held-out problems than are asked for, it cannot be made, or evaluation
    allows longer answers than training.
    """
    train = config.train_table
    if train.evaluation.every is not None and not train.evaluation.problems:
        raise ConfigError("train.evaluation.every needs train.evaluation.problems of at least 1, got problems=0")
    longest, most = train.evaluation.max_tokens, config.workload.length.max
    if longest is not None and longest > most:
        raise ConfigError(f"train.evaluation.max_tokens must be at most workload.length.max = {most}, got {longest}")
    try:
        if task is not None and train.evaluation.settings:
            task = load_task(evaluation_task_config(train))
        held_out = task if task is not None else load_environment(evaluation_task_config(train))
    except ConfigError as error:
        key = "train.evaluation.settings" if train.evaluation.settings else "train.task.settings"
        raise ConfigError(*(str(one).replace("train.task.settings", key) for one in error.args)) from None
    wanted, there = train.evaluation.problems, held_out.num_held_out
    if there is not None and wanted > there:
        raise ConfigError(
            f"train.evaluation.problems must be at most the task's {there} held-out problems, got {wanted}"
        )
    return task
