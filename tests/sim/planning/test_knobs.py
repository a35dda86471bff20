"""What is searched: every key that a user may turn is an axis or has the reason why it is none."""

from pydantic import BaseModel

from pipelinerl.config.run import ClusterConfig, RunConfig
from pipelinerl.config.scheduler import SchedulerConfig
from pipelinerl.config.train import DeepSpeedConfig, TrainConfig
from pipelinerl.config.workload import WorkloadConfig
from sim.planning.axes import AXES
from sim.planning.knobs import NOT_SEARCHED

OTHERS = {f"train.trainer.{name}" for name in ("kind", "step_timeout_s", "collective_timeout_s", "restarts")}
"""Keys of these tables that move neither throughput nor lag."""


def keys(table: str, model: type[BaseModel]) -> set[str]:
    return {f"{table}.{name}" for name in model.model_fields}


def test_every_key_of_cluster_schedule_workload_and_trainer_is_searched_or_has_the_reason_why_not() -> None:
    searched = {axis.key for axis in AXES}
    assert not searched & set(NOT_SEARCHED)
    tables = keys("cluster", ClusterConfig) | keys("scheduler", SchedulerConfig) | keys("workload", WorkloadConfig)
    assert (tables | keys("train.trainer", DeepSpeedConfig)) - OTHERS <= searched | set(NOT_SEARCHED)


def test_no_reason_is_of_a_key_that_is_gone() -> None:
    tables = keys("cluster", ClusterConfig) | keys("scheduler", SchedulerConfig) | keys("workload", WorkloadConfig)
    others = {"train.engine.gpu_memory_utilization", "train.transport", *RunConfig.model_fields}
    assert "engine" in TrainConfig.model_fields
    assert set(NOT_SEARCHED) <= tables | keys("train.trainer", DeepSpeedConfig) | others
