"""The learning rate, step by step, by hand."""

from __future__ import annotations

import pytest

from backends.deepspeed.lr_schedule import learning_rate_factor
from pipelinerl.config.train import OptimizerConfig


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0]),
    ],
)
def test_the_rate_rises_in_two_steps_and_then_follows_the_schedule(schedule: str, factors: list[float]) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": 2, "schedule": schedule})
    factor = learning_rate_factor(config, optimizer_steps=6)
    assert [factor(done) for done in range(7)] == pytest.approx(factors, abs=1e-7)


def test_a_run_that_is_all_warm_up_never_falls() -> None:
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=4, schedule="linear")
    factor = learning_rate_factor(config, optimizer_steps=2)
    assert [factor(done) for done in range(2)] == [0.25, 0.5]


def test_steps_beyond_the_last_have_no_rate() -> None:
    factor = learning_rate_factor(OptimizerConfig(learning_rate=1e-3, schedule="cosine"), optimizer_steps=4)
    assert factor(5) == 0
