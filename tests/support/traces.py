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
