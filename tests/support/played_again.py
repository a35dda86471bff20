"""A small run, with turns and without, whose rollouts are played again."""

from __future__ import annotations

from typing import Any

RUN: dict[str, Any] = {
    "optimizer_steps": 6,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 16, "generation_batch_size": 12},
    "workload": {
        "group_size": 4,
        "prompt_tokens": 30,
        "length": {"kind": "lognormal", "mean": 40, "cv": 0.8, "max": 200},
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 0.1},
        "training": {"token_s": 3e-4, "step_s": 0.3},
        "latency": {"reward_s": 0.2, "report_s": 0.05},
    },
}
TURNS = {
    "kind": "lognormal", "mean": 3, "cv": 0.6, "max": 9, "observation_tokens": 20, "observation_cv": 1.0,
    "observation_max": 200, "context_max": 4000,
}  # fmt: skip
IN_TURNS = {**RUN, "environment": {"count": 40, "reset_s": 1.0, "step_s": 2.0, "step_cv": 1.0, "turns": TURNS}}
