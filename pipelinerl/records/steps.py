"""A row per optimizer step: its columns, and how steps.csv is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AllowInfNan, Field, ValidationError

from pipelinerl.errors import ConfigError
from pipelinerl.util.read import read_rows
from pipelinerl.util.strict_model import MOST, StrictModel

STEPS_FILE = "steps.csv"
BLOCK = 500
"""Rows that are read at a time (count)."""
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class StepRow(StrictModel):
    """One optimizer step: a row of steps.csv, its columns in the order of the fields."""

    step: Whole
    """Optimizer steps done after it (count)."""
    time_s: float
    """Time at which it ended (s)."""
    train_s: float
    """Seconds the trainer worked on it."""
    publish_s: float
    """Seconds of publishing since the step before."""
    wait_s: float
    """Seconds in which the trainer neither trained nor published, since the step before."""
    samples: Whole
    """Rollouts trained on (count)."""
    tokens: Whole
    """Tokens trained on (count), prompts not counted."""
    lag_mean: float
    """Mean lag of its tokens (optimizer steps)."""
    lag_max: Whole
    """Largest lag of its tokens (optimizer steps)."""
    lag_in_flight_mean: float
    """Part of ``lag_mean`` in flight (optimizer steps)."""
    lag_in_queue_mean: float
    """Part of ``lag_mean`` in queue (optimizer steps)."""
    in_progress: Whole
    """Rollouts in progress when it ended (count)."""
    ready: Whole
    """Rollouts finished and waiting when it ended (count)."""
    reward_mean: Annotated[float, AllowInfNan(True)]
    """Mean reward of its rollouts; nan if one is unknown."""
    length_mean: float
    """Mean length of its rollouts (tokens)."""


COLUMNS = tuple(StepRow.model_fields)
_DTYPE = np.dtype([(name, one.annotation) for name, one in StepRow.model_fields.items()])


def read_steps(path: Path) -> np.recarray[Any, Any]:
    """Return the rows of a steps.csv, a field per column; a run that was cut short may have none.

    ConfigError if the file cannot be read, lacks a column, or holds a wrong value; one line that names it.
    """
    lines = read_rows(path)
    _, header = next(lines, (0, list[str]()))
    if missing := [column for column in COLUMNS if column not in header]:
        raise ConfigError(f"{path} lacks the columns {', '.join(missing)}")
    blocks = [np.empty(0, _DTYPE)]
    while block := list(islice(lines, BLOCK)):
        blocks.append(_records(block, header, path))
        if sum(map(len, blocks)) > MOST:
            raise ConfigError(f"{path} must have at most {MOST:,} optimizer steps")
    return np.concatenate(blocks).view(np.recarray)


def _records(lines: list[tuple[int, list[str]]], header: list[str], path: Path) -> np.ndarray[Any, Any]:
    """Return lines as records: by column, or, if a value is not plain, line by line."""
    records = np.empty(len(lines), _DTYPE)
    try:
        columns = dict(zip(header, zip(*(cells for _, cells in lines), strict=True), strict=True))
        for name in COLUMNS:
            number: Any = StepRow.model_fields[name].annotation
            records[name] = np.fromiter(map(number, columns[name]), number)
            if name != "reward_mean" and not np.isfinite(records[name]).all():
                raise ValueError(name)
    except (ValueError, OverflowError):
        records[:] = [_row(cells, header, f"{path}, line {number}") for number, cells in lines]
    return records


def _row(cells: list[str], header: list[str], where: str) -> tuple[float, ...]:
    if len(cells) != len(header):
        raise ConfigError(f"{where}: must have {len(header)} values, got {len(cells)}")
    named = {name: cell or "nan" for name, cell in zip(header, cells, strict=True) if name in COLUMNS}
    try:
        row = StepRow.model_validate_strings(named, strict=False)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        raise ConfigError(f"{where}: {name} must be a number, got {named[name]}") from None
    return tuple(value for _, value in row)


def as_records(rows: Sequence[StepRow]) -> np.recarray[Any, Any]:
    """Return rows as a record array, a field per column: whole numbers as int64, the others as float64."""
    return np.array([tuple(value for _, value in row) for row in rows], dtype=_DTYPE).view(np.recarray)
