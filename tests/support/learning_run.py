"""A small run with a policy that learns, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelinerl.config.run import RunConfig, parse_run, with_overrides

MAX = 12
BASE: dict[str, Any] = {
    "optimizer_steps": 6,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 16, "generation_batch_size": 12},
    "workload": {"group_size": 4, "length": {"kind": "fixed", "max": MAX}},
    "policy": {
        "task": "chain",
        "size": 6,
        "layers": 2,
        "width": 16,
        "heads": 2,
        "learning_rate": 3e-3,
        "warm_start": {"steps": 40, "batch_size": 32},
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 0.1, "sequence_s": 0.003, "context_token_s": 1e-5},
        "prefill": {"token_s": 1e-4},
        "training": {"token_s": 3e-4, "step_s": 0.3},
        "weights": {"publish_s": 0.05, "pause_s": 0.02},
        "latency": {"dispatch_jitter_s": 0.01, "reward_s": 0.03},
    },
}

TURNS: dict[str, Any] = {
    **BASE,
    "workload": {"group_size": 4, "length": {"kind": "fixed", "max": 4}},
    "environment": {
        "count": 32,
        "step_s": 1.5,
        "step_cv": 0.5,
        "turns": {"kind": "lognormal", "mean": 2, "max": 6, "observation_max": 1, "context_max": 32},
    },
    "policy": {
        **BASE["policy"],
        "task": "calculator",
        "warm_start": {"steps": 80, "batch_size": 32, "learning_rate": 1e-2},
    },
}
"""The same in turns."""


def config_with(*overrides: str, base: Mapping[str, Any] = BASE) -> RunConfig:
    return parse_run(with_overrides(base, overrides))
