"""The driver's time per rollout, with engines and a trainer that take no time."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tensorboard")

from backends.fake import FakeBackend
from backends.owner import driving
from backends.run import drive
from pipelinerl.config.run import RunConfig
from pipelinerl.rl.tasks import Arithmetic

STEPS, BATCH = 20, 256


def config() -> RunConfig:
    data = {
        "optimizer_steps": STEPS,
        "cluster": {"accelerators": 3, "generation_accelerators": 2},
        "scheduler": {"train_batch_size": BATCH, "generation_batch_size": 128},
        "workload": {"group_size": 8, "length": {"kind": "uniform", "max": 16}},
        "hardware": {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}},
        "train": {
            "device": "cpu",
            "model": {"path": "none"},
            "task": {"name": "arithmetic"},
            "optimizer": {"learning_rate": 1e-3},
        },
    }
    return RunConfig.model_validate_json(json.dumps(data))


def test_the_driver_costs_less_than_a_millisecond_per_rollout(benchmark, tmp_path):
    runs = iter(range(1000))

    def run() -> dict:
        with FakeBackend().open(config()) as parts, driving(tmp_path / str(next(runs))) as lock:
            return drive(
                config(),
                parts=parts,
                task=Arithmetic(),
                lock=lock,
            )

    summary = benchmark.pedantic(run, rounds=3)
    per_rollout_s = benchmark.stats.stats.min / (STEPS * BATCH)  # engines, trainer and files included
    in_driver_s = summary.driver_s_per_rollout
    print(f"\n{1e3 * per_rollout_s:.3f} ms per rollout in all, {1e3 * in_driver_s:.3f} ms in the driver")
