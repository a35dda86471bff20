"""FLOP by hand, and the peak of a GPU by the name that its driver gives it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from backends.deepspeed.step_meter import training_flop
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
