"""Measuring at sizes of a few tokens, on the CPU at hand."""

from __future__ import annotations

import math

import pytest

from backends.measure import bench
from backends.measure.bench import PlainShape, Sizes
from pipelinerl.calibration import table as step_times

SHAPE = PlainShape(layers=2, width=32, heads=4, kv_heads=2, head_size=8, inner=64, vocabulary=50)
TINY = Sizes(
    products=(1, 4, 16),
    decode=((1, 8), (1, 64), (4, 8), (4, 64)),
    prefill=((1, 8), (1, 32), (2, 32)),
    train=((1, 8), (1, 32), (4, 32)),
    warm_up=1,
    repeats=3,
    least_s=0.0,
)


def measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a tiny model; steps of microseconds are noisy, which would pass for another unit."""
    monkeypatch.setitem(bench.SHAPES, "cpu", SHAPE)
    monkeypatch.setattr(step_times, "TIMES_SLOWER", math.inf)
    monkeypatch.setattr(step_times, "PLAUSIBLE_S", dict.fromkeys(step_times.PLAUSIBLE_S, (0.0, math.inf)))
