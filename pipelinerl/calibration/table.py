"""Tables of step times, which ``measure`` writes and ``calibrate`` reads; docs/calibration.md has the columns by kind.

A row of ``request`` times ``batch`` requests sent together, with ``tokens`` of prompts in all, without their decode
steps: prefill, and the work of engine and front end per request. A row of ``train`` is one whole optimizer step of one
micro-batch on all ``accelerators``, of sequences of equal length.
The columns ``model, system, tp, batch, ctx, tpot_ms`` of NVIDIA AIConfigurator's exports are read, too: ``decode``
rows with ``tp`` accelerators, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.util.arrays import FloatArray, grouped
from pipelinerl.util.strict_model import StrictModel
from pipelinerl.util.table import read_table

KERNELS = "tpot_ms"
"""The column by which an export of AIConfigurator is recognised."""
NEEDED = {
    "decode": ("batch", "ctx", "seconds"),
    "prefill": ("batch", "tokens", "seconds"),
    "request": ("batch", "tokens", "seconds"),
    "train": ("batch", "tokens", "seconds"),
    "matmul": ("batch", "utilisation"),
}
LEAST_ROWS = {"decode": 4, "prefill": 3, "request": 3, "train": 3, "matmul": 2}
"""Rows of a kind that a fit needs (count)."""
PLAUSIBLE_S = {"decode": (1e-5, 2.0), "prefill": (1e-5, 600.0), "request": (1e-6, 600.0), "train": (1e-4, 3600.0)}
"""Range of the median of the seconds of each kind (seconds)."""
TIMES_SLOWER = 300.0
"""A step that is no larger than another takes at most so many times as long (no unit)."""


class StepRow(StrictModel):
    """A row of the table; see the top of this module."""

    kind: Literal["decode", "prefill", "request", "train", "matmul"]
    """The work that was timed."""
    accelerators: int = Field(default=1, ge=1)
    """Accelerators that work together (count)."""
    batch: int | None = Field(default=None, ge=1)
    """Sequences in the step (count)."""
    ctx: float | None = Field(default=None, ge=0)
    """Context of each sequence (tokens)."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens of all sequences together, prompts included."""
    seconds: float | None = Field(default=None, gt=0)
    """Duration (seconds)."""
    utilisation: float | None = Field(default=None, gt=0, le=1)
    """Share of the peak (no unit)."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for name in NEEDED[self.kind]:
            if getattr(self, name) is None:
                raise ValueError(f"a {self.kind} row needs {name}")
        if self.tokens is not None and self.batch is not None and self.tokens < self.batch:
            raise ValueError(
                f"tokens are those of all sequences together, at least batch = {self.batch}, got {self.tokens}"
            )
        return self


COLUMNS = tuple(StepRow.model_fields)


class KernelRow(StrictModel):
    """A row of AIConfigurator's exports: a decode step."""

    model: str
    """Language model."""
    system: str
    """Accelerator."""
    tp: int = Field(ge=1)
    """Accelerators of the engine (count)."""
    batch: int = Field(ge=1)
    """Sequences in the step (count)."""
    ctx: float = Field(ge=0)
    """Context of each sequence (tokens)."""
    tpot_ms: float = Field(gt=0)
    """Duration (milliseconds)."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of one kind; arrays have shape [rows], and 0 where the kind has no such column."""

    accelerators: FloatArray
    batch: FloatArray
    ctx: FloatArray
    tokens: FloatArray
    seconds: FloatArray
    utilisation: FloatArray


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A table."""

    kinds: dict[str, Rows]
    """Only kinds that are there."""
    series: tuple[str, str] | None = None
    """Model and system."""


def read_step_times(path: Path, *, named: tuple[Gpu, LanguageModel] | None = None) -> StepTimes:
    """Read a CSV table of step times; of several series the one of ``named`` is taken.

    Raises ConfigError if it cannot be read, a column or kind is unknown, a cell is missing or impossible, a kind has
    too few rows, or the seconds cannot be seconds.
    """
    table = read_table(path, "the table of step times")
    if "_step" in table.header.cells:
        raise ConfigError(
            f"{path} is an export of W&B: say what logged it, --from verl, nemo-rl, prime-rl, slime or areal"
        )
    found = None
    if KERNELS in table.header.cells:
        kernels = [row for _, row in table.rows(KernelRow)]
        found = _one_series(path, kernels, named)
        steps = [
            StepRow(kind="decode", accelerators=one.tp, batch=one.batch, ctx=one.ctx, seconds=one.tpot_ms / 1000)
            for one in kernels
            if (one.model, one.system) == found
        ]
    else:
        steps = [row for _, row in table.rows(StepRow)]
    kinds = {kind: _as_rows(some) for kind, some in grouped((str(step.kind), step) for step in steps).items()}
    for kind, some in kinds.items():
        _check_kind(path, kind, some)
    return StepTimes(kinds, found)


def _one_series(path: Path, rows: Sequence[KernelRow], named: tuple[Gpu, LanguageModel] | None) -> tuple[str, str]:
    held = sorted({(row.model, row.system) for row in rows})
    if named is not None:
        systems, models = ({_plain(name) for name in (one.name, *one.aliases)} for one in named)
        held = [one for one in held if _plain(one[0]) in models and _plain(one[1]) in systems] or held
    if len(held) > 1:
        names = ", ".join(f"{model} on {system}" for model, system in held)
        raise ConfigError(
            f"{path} holds several series ({names}): name one with --run RUN.toml, by its hardware.gpu and "
            "hardware.model"
        )
    return held[0]


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _as_rows(rows: list[StepRow]) -> Rows:
    def column(name: str) -> FloatArray:
        return np.array([getattr(row, name) or 0.0 for row in rows], dtype=np.float64)

    return Rows(**{one.name: column(one.name) for one in fields(Rows)})


def _check_kind(path: Path, kind: str, rows: Rows) -> None:
    num_rows = len(rows.batch)
    if num_rows < LEAST_ROWS[kind]:
        raise ConfigError(f"{path}: {kind} needs at least {LEAST_ROWS[kind]} rows, got {num_rows}")
    if kind == "matmul":
        return
    median_s, (least_s, most_s) = float(np.median(rows.seconds)), PLAUSIBLE_S[kind]
    if not least_s <= median_s <= most_s:
        unit = "milliseconds" if median_s > most_s else "another unit"
        raise ConfigError(
            f"{path}: seconds of the {kind} rows have a median of {median_s:.3g}, plausible are {least_s:g} to "
            f"{most_s:g} s; are they {unit}?"
        )
    sizes = np.stack([-rows.accelerators, rows.batch, rows.ctx, rows.tokens])
    smaller = (sizes[:, :, None] <= sizes[:, None, :]).all(axis=0)
    ratio = np.where(smaller, rows.seconds[:, None] / rows.seconds[None, :], 0.0)
    one, other = np.unravel_index(int(ratio.argmax()), ratio.shape)
    if ratio[one, other] > TIMES_SLOWER:
        raise ConfigError(
            f"{path}: units differ between rows: a {kind} row takes {rows.seconds[one]:g} s and one that is no smaller "
            f"takes {rows.seconds[other]:g} s"
        )
