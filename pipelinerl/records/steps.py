"""A row per optimizer step: its columns, and how steps.csv is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AllowInfNan, ValidationError

from pipelinerl.errors import ConfigError
from pipelinerl.util.read import read_rows
from pipelinerl.util.strict_model import StrictModel

STEPS_FILE = "steps.csv"


class StepRow(StrictModel):
    """One optimizer step: a row of steps.csv, its columns in the order of the fields."""

    step: int
    """Optimizer steps done after it (count)."""
    time_s: float
    """Time at which it ended (s)."""
    train_s: float
    """Seconds the trainer worked on it."""
    publish_s: float
    """Seconds of publishing since the step before."""
    wait_s: float
    """Seconds in which the trainer neither trained nor published, since the step before."""
    samples: int
    """Rollouts trained on (count)."""
    tokens: int
    """Tokens trained on (count), prompts not counted."""
    lag_mean: float
    """Mean lag of its tokens (optimizer steps)."""
    lag_max: int
    """Largest lag of its tokens (optimizer steps)."""
    lag_in_flight_mean: float
    """Part of ``lag_mean`` in flight (optimizer steps)."""
    lag_in_queue_mean: float
    """Part of ``lag_mean`` in queue (optimizer steps)."""
    in_progress: int
    """Rollouts in progress when it ended (count)."""
    ready: int
    """Rollouts finished and waiting when it ended (count)."""
    reward_mean: Annotated[float, AllowInfNan(True)]
    """Mean reward of its rollouts; nan if one is unknown."""
    length_mean: float
    """Mean length of its rollouts (tokens)."""


COLUMNS = tuple(StepRow.model_fields)
MOST_STEPS = 100_000
"""Rows that are read (count)."""
_INTEGERS = {name for name, field in StepRow.model_fields.items() if field.annotation is int}
_DTYPE = np.dtype([(name, np.int64 if name in _INTEGERS else np.float64) for name in COLUMNS])


def read_steps(path: Path) -> list[StepRow]:
    """Return the rows of a steps.csv; a run that was cut short may have none.

    ConfigError if the file cannot be read, lacks a column, or holds a wrong value; one line that names it.
    """
    lines = read_rows(path)
    _, header = next(lines, (0, list[str]()))
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise ConfigError(f"{path} lacks the columns {', '.join(missing)}")
    rows: list[StepRow] = []
    for number, cells in lines:
        if len(cells) != len(header):
            raise ConfigError(f"{path}, line {number}: must have {len(header)} values, got {len(cells)}")
        if len(rows) == MOST_STEPS:
            raise ConfigError(f"{path} must have at most {MOST_STEPS:,} optimizer steps")
        named = {name: cell or "nan" for name, cell in zip(header, cells, strict=True) if name in COLUMNS}
        try:
            rows.append(StepRow.model_validate_strings(named, strict=False))
        except ValidationError as error:
            fault = error.errors()[0]
            name = str(fault["loc"][0])
            raise ConfigError(f"{path}, line {number}: {name} must be a number, got {named[name]}") from None
    return rows


def as_records(rows: Sequence[StepRow]) -> np.recarray[Any, Any]:
    """Return rows as a record array, a field per column: whole numbers as int64, the others as float64."""
    table = np.array([tuple(value for _, value in row) for row in rows], dtype=_DTYPE)
    return table.view(np.recarray)
