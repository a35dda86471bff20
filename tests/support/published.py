"""Rows of published runs, made up."""

from __future__ import annotations

from pipelinerl.records.validation_report import PredictedRow, UnusableRow
from sim.validation.predict import validate
from sim.validation.rows import PublishedRun, Schedule


def row(name, schedule, **values):
    """A run of a system called ours on 8 H100."""
    base = {
        "id": name, "system": "ours", "hw": "H100", "model": "Qwen2.5-7B", "schedule": Schedule(schedule),
        "gpus_total": 8, "prompts_per_step": 16, "n_per_prompt": 8, "max_len": 2048, "avg_len": 600.0,
    }  # fmt: skip
    return PublishedRun(**base | values)


def changed(run, **values):
    """The row with other values."""
    return run.model_copy(update=values)


def predicted(runs, **values) -> list[PredictedRow | UnusableRow]:
    """All rows of a validation in this process, unusable ones last."""
    report = validate(runs, workers=1, **values)
    return [*report.rows, *report.unusable]


def predicted_by_id(runs) -> dict[str, PredictedRow | UnusableRow]:
    """The same by the ids of the rows."""
    return {one.id: one for one in predicted(runs)}
