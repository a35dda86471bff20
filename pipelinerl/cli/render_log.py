"""A calibration from a log on a terminal: the job beside its simulation, and what could not be known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.calibration.logs.fit import CalibratedLog
from pipelinerl.calibration.logs.lengths import quantile

ROWS = {
    "step_s": "seconds per step",
    "generation_s": "  generation",
    "training_s": "  training",
    "sync_s": "  weight sync",
    "wait_s": "  trainer waits",
    "tokens_per_s": "tokens/s",
    "samples": "answers per step",
    "length_mean": "answer: mean",
    "length_p90": "  90 % up to",
    "length_p95": "  95 % up to",
    "length_max": "  longest",
    "lag_mean": "staleness: mean",
    "lag_max": "  largest",
}
"""Columns of a logged step, and what the table calls them."""


def print_log(result: CalibratedLog, name: str) -> None:
    """Print the job beside its simulation, before and after the calibration, the factors, and what was assumed."""
    table = Table(title=escape(f"{name}: your run beside its simulation"), title_justify="left")
    for head in ("", "log", "simulated", "difference", "before"):
        table.add_column(head, justify="left" if not head else "right")
    for cells in _cells(result):
        table.add_row(*cells)
    console = Console()
    console.print(table)
    log = result.log
    left_out = f", {log.num_left_out} left out (start, evaluations, checkpoints)" if log.num_left_out else ""
    kind = "asynchronous" if log.asynchronous else "synchronous"
    console.print(f"{log.num_steps} steps of a {kind} job{left_out}", highlight=False)
    for what, factor in result.fit.factors.items():
        console.print(f"{what}: {factor:.3g} times as long as the hardware model says", highlight=False)
    for line in (*result.assumed, *result.fit.notes):
        console.print(escape(f"- {line}"), highlight=False, soft_wrap=True)


def log_as_json(result: CalibratedLog) -> dict[str, Any]:
    """Return the same as plain values."""
    columns = {"log": result.log.mean, "simulated": result.simulated, "before": result.predicted}
    return {
        "steps": result.log.num_steps,
        "asynchronous": result.log.asynchronous,
        "beside": {name: step.model_dump(exclude_none=True, exclude={"step"}) for name, step in columns.items()},
        "factors": result.fit.factors,
        "assumed": list(result.assumed),
        "run": result.run.model_dump(mode="json", exclude_none=True, exclude_unset=True),
    }


def _cells(result: CalibratedLog) -> Iterator[tuple[str, ...]]:
    length = result.run.workload.length
    drawn = {"length_max": float(length.max)}
    if length.kind == "lognormal":
        drawn |= {"length_p90": quantile(length, 0.9), "length_p95": quantile(length, 0.95)}
    for column, label in ROWS.items():
        logged, before = getattr(result.log.mean, column), getattr(result.predicted, column)
        simulated = drawn.get(column, getattr(result.simulated, column))
        if column == "length_max":
            logged = result.log.longest
        unasked = column.startswith("length_p") or (column.startswith("lag_") and not result.log.asynchronous)
        if logged is None and (simulated is None or unasked):
            continue
        off = "" if not logged or simulated is None else f"{simulated / logged - 1:+.1%}"
        yield (label, *(_shown(value) for value in (logged, simulated)), off, "" if before is None else _shown(before))


def _shown(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
