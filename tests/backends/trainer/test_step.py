"""The learning rate step by step, FLOP and the peak of a GPU, by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from backends.trainer.step import learning_rate_factor, training_flop
from pipelinerl.config.train import OptimizerConfig
from pipelinerl.hardware.catalogue import find_model, gpu_of_device


def test_flop_of_a_7b() -> None:
    """Products: 6 * 7.6156e9 parameters a token; attention: 6 * 28 layers * 3584 numbers a squared token."""
    model = find_model("Qwen2.5-7B")
    flop = training_flop(model, np.array([1000, 3000]))
    products, attention = 6 * 7.6156e9 * 4000, 6 * 28 * 3584 * (1000**2 + 3000**2)
    assert flop == pytest.approx(products + attention, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_gpu(name: str, peak: float | None) -> None:
    gpu = gpu_of_device(name)
    assert (gpu and gpu.bf16_flops) == peak


@pytest.mark.parametrize(
    ("schedule", "warmup", "optimizer_steps", "factors"),
    [
        ("constant", 2, 6, [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", 2, 6, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 2, 6, [0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0]),
        ("linear", 4, 2, [0.25, 0.5]),  # all warm-up
        ("cosine", 0, 4, [1, 0.8535534, 0.5, 0.1464466, 0, 0]),  # beyond the last step
    ],
)
def test_the_rate_rises_in_the_warm_up_and_then_follows_the_schedule(
    schedule: str, warmup: int, optimizer_steps: int, factors: list[float]
) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": warmup, "schedule": schedule})
    factor = learning_rate_factor(config, optimizer_steps=optimizer_steps)
    assert [factor(done) for done in range(len(factors))] == pytest.approx(factors, abs=1e-7)
