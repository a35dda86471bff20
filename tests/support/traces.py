"""Traces of small simulated runs, their lines, and changed ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_comparison

from pipelinerl.config.run import RunConfig
from sim.run import simulate

MORE = (
    "optimizer_steps=5",
    "workload.prompt_tokens=10",
    "hardware.weights={publish_s=0.01, transfer_s=0.02, pause_s=0.01}",
    "hardware.latency={dispatch_jitter_s=0.01, reward_s=0.05}",
)

CASES = [
    (),
    ("seed=8", "optimizer_steps=12"),
    ("scheduler.max_lag=1",),
    ("scheduler.max_lag=0", "scheduler.micro_batch_size=2"),
    ("scheduler.max_lag=1", "scheduler.on_stale=drop"),
    ("scheduler.max_lag=1", "scheduler.on_stale=requeue", "scheduler.weight_update=abort"),
    ("scheduler.weight_update=abort",),
    ("scheduler.weight_update=recompute", "hardware.kv_cache_tokens=100"),
    ("scheduler.weight_update=wait",),
    ("scheduler.on_full=drop_oldest", "scheduler.ready_queue_size=4"),
    ("scheduler.filter_no_signal=true",),
    ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=3"),
    ("scheduler.kind=conventional", "scheduler.filter_no_signal=true", "scheduler.micro_batch_size=2"),
]


def run(*overrides: str) -> RunConfig:
    return tiny_comparison.run(*MORE, *overrides)


def lines_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def rewritten(path: Path, lines: list[str]) -> Path:
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), compresslevel=1))
    return path


def recorded(path: Path, *overrides: str, on_step: Callable[[Any], None] | None = None) -> Path:
    """Simulate with a trace and return its path."""
    simulate(run(*overrides), out=path, trace=True, on_step=on_step)
    return path / "trace.jsonl.gz"
