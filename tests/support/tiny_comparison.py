"""A run of six optimizer steps, and comparisons of such runs."""

from __future__ import annotations

from typing import Any

from pipelinerl.config.run import RunConfig, parse_run, with_overrides

BASE: dict[str, Any] = {
    "seed": 3,
    "optimizer_steps": 6,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 4, "generation_batch_size": 6},
    "workload": {"group_size": 2, "length": {"kind": "uniform", "max": 50}},
    "hardware": {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-3}},
}
PIPELINE, CONVENTIONAL = {"name": "pipeline"}, {"name": "conventional", "set": ["scheduler.kind=conventional"]}
STALLS = {
    "name": "stalls",
    "set": ["workload.success_rate=1.0", "scheduler.filter_no_signal=true", "scheduler.discard_limit=20"],
}
SLOW, FAST = (
    {"name": "slow trainer", "set": ["hardware.training.token_s=1e-2"]},
    {"name": "fast trainer", "set": ["hardware.training.token_s=1e-4"]},
)


def run(*overrides: str, **compare_table: Any) -> RunConfig:
    data = with_overrides(BASE, overrides)
    return parse_run(data | {"compare": compare_table} if compare_table else data)


def two_by_two() -> RunConfig:
    return run(arms=[PIPELINE, CONVENTIONAL], scenarios=[SLOW, FAST], baseline="conventional")
