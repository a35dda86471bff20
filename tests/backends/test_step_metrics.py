"""Measurements of an optimizer step, from those of its micro-batches and ranks."""

from __future__ import annotations

import pytest

from backends.step_metrics import StepMetrics
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.steps import StepRow


def taken(metrics: StepMetrics) -> dict[str, float]:
    """End a step; return what the trainer reports of it."""
    row = StepRow(**dict.fromkeys(StepRow.model_fields, 0))
    logged = metrics.take(row, RunLedger(num_engines=1, colocated=False, longest=100))
    return {name.removeprefix("train/"): value for name, value in logged.items() if name.startswith("train/")}


def test_micro_batches_and_ranks_make_one_step() -> None:
    """Losses, seconds and tokens add up; memory is the largest; entropy is per token, FLOP/s per rank."""
    metrics = StepMetrics(truncation=5.0)
    micro_batch = {"loss": 0.25, "entropy_sum": 6.0, "answer_tokens_sum": 3.0, "flop_sum": 8e12, "peak_flops": 1e13}
    micro_batch |= {
        "rank0/forward_s": 0.5,
        "rank1/forward_s": 1.0,
        "rank1/backward_s": 0.5,
        "rank1/peak_memory_gb": 7.0,
    }
    metrics.add_trainer_metrics(micro_batch)
    metrics.add_trainer_metrics(micro_batch | {"entropy_sum": 0.0, "rank1/peak_memory_gb": 6.0, "skipped": 1.0})
    assert taken(metrics) == pytest.approx(
        {
            "loss": 0.5,
            "entropy": 1.0,
            "flop_per_s": 4e12,
            "mfu": 0.4,
            "rank0/forward_s": 1.0,
            "rank1/forward_s": 2.0,
            "rank1/backward_s": 1.0,
            "rank1/peak_memory_gb": 7.0,
            "skipped": 1.0,
        }
    )
    assert metrics.summary().skipped_steps == 1
    assert taken(metrics) == {}
