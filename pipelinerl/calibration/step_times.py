"""Tables of step times: what ``measure`` writes and ``calibrate`` reads.

=================  =========================================================================  ==================
column             meaning                                                                    kinds
=================  =========================================================================  ==================
``kind``           ``decode``, ``prefill``, ``train`` or ``matmul``                           all
``accelerators``   accelerators that work together (count); 1 if left out                     decode, prefill, train
``batch``          sequences in the step (count)                                              all
``ctx``            tokens of context of each sequence                                         decode
``tokens``         tokens of all sequences together, prompts included                         prefill, train
``seconds``        how long it took (seconds)                                                 decode, prefill, train
``utilisation``    share of the peak, in (0, 1] (no unit)                                     matmul
=================  =========================================================================  ==================

A row of ``train`` is one whole optimizer step of one micro-batch on all ``accelerators``, of sequences of equal length.
The columns ``model, system, tp, batch, ctx, tpot_ms`` of NVIDIA AIConfigurator's exports are read, too: ``decode``
rows with ``tp`` accelerators, in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import ConfigError
from pipelinerl.util.csv_file import read_csv

FloatArray = NDArray[np.float64]

COLUMNS = ("kind", "accelerators", "batch", "ctx", "tokens", "seconds", "utilisation")
"""Columns that ``measure`` writes."""
KERNEL_COLUMNS = ("model", "system", "tp", "batch", "ctx", "tpot_ms")
"""Columns of AIConfigurator's exports."""
NEEDED = {
    "decode": ("batch", "ctx", "seconds"),
    "prefill": ("batch", "tokens", "seconds"),
    "train": ("batch", "tokens", "seconds"),
    "matmul": ("batch", "utilisation"),
}
"""Cells that a row of each kind must have."""
LEAST_ROWS = {"decode": 4, "prefill": 3, "train": 3, "matmul": 2}
"""Rows of a kind that a fit needs (count)."""
PLAUSIBLE_S = {"decode": (1e-5, 2.0), "prefill": (1e-5, 600.0), "train": (1e-4, 3600.0)}
"""Where the median of the seconds of each kind must lie (seconds)."""
TIMES_SLOWER = 300.0
"""A step that is no larger than another takes at most so many times as long (no unit)."""


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

    path: Path
    kinds: dict[str, Rows]
    """Rows by kind, only kinds that are there."""
    series: tuple[str, str] | None = None
    """Model and system that the table names."""


def read_step_times(path: Path, *, series: tuple[list[str], list[str]] | None = None) -> StepTimes:
    """Read a table of step times.

    Args:
        path: A CSV file; see the top of this module.
        series: Names of the model and of the accelerator whose rows are wanted, where a table has several.

    Raises:
        ConfigError: If it cannot be read, a column or kind is unknown, a cell is missing or impossible, a kind has too
            few rows, or the seconds cannot be seconds.
    """
    header, lines = _cells(path)
    kernels = set(header) == set(KERNEL_COLUMNS)
    if not kernels:
        for name in header:
            if name not in COLUMNS:
                raise ConfigError(f"{path} line 1: unknown column {name}; allowed: {', '.join(COLUMNS)}")
        if "kind" not in header:
            raise ConfigError(f"{path} line 1: column kind is missing; allowed: {', '.join(COLUMNS)}")
    found = None
    if kernels:
        lines, found = _one_series(path, lines, series)
    rows: dict[str, list[dict[str, float]]] = {}
    for number, cells in lines:
        where = f"{path} line {number}"
        if kernels:
            kind = "decode"
            row = {name: _number(cells[name], name, where) for name in ("tp", "batch", "ctx", "tpot_ms")}
            row |= {"accelerators": row.pop("tp"), "seconds": row.pop("tpot_ms") / 1000}
        else:
            kind = cells["kind"]
            if kind not in NEEDED:
                raise ConfigError(f"{where}: kind must be one of {', '.join(NEEDED)}, got {kind!r}")
            row = {name: _number(text, name, where) for name, text in cells.items() if name != "kind" and text}
            for name in NEEDED[kind]:
                if name not in row:
                    raise ConfigError(f"{where}: a {kind} row needs {name}")
        _check_row(row, where)
        rows.setdefault(kind, []).append(row)
    if not rows:
        raise ConfigError(f"{path} has no rows")
    kinds = {kind: _as_rows(some) for kind, some in rows.items()}
    for kind, some in kinds.items():
        _check_kind(path, kind, some)
    return StepTimes(path, kinds, found)


def _cells(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Return the columns, and each line with its number."""
    (_, header), *rows = read_csv(path, "the table of step times") or [(1, [])]
    if len(set(header)) < len(header):
        raise ConfigError(f"{path} line 1: a column is there twice: {', '.join(header)}")
    for number, cells in rows:
        if len(cells) != len(header):
            raise ConfigError(f"{path} line {number}: {len(header)} cells expected, got {len(cells)}")
    return header, [(number, dict(zip(header, cells, strict=True))) for number, cells in rows]


def _one_series(
    path: Path, lines: list[tuple[int, dict[str, str]]], series: tuple[list[str], list[str]] | None
) -> tuple[list[tuple[int, dict[str, str]]], tuple[str, str] | None]:
    """Return the lines of one model on one system."""
    held = sorted({(cells["model"], cells["system"]) for _, cells in lines})
    if series is not None:
        models, systems = ({_plain(name) for name in names} for names in series)
        held = [one for one in held if _plain(one[0]) in models and _plain(one[1]) in systems] or held
    if len(held) > 1:
        names = ", ".join(f"{model} on {system}" for model, system in held)
        raise ConfigError(
            f"{path} holds several series ({names}): name one with --run RUN.toml, by its hardware.gpu and "
            "hardware.model"
        )
    return [line for line in lines if (line[1]["model"], line[1]["system"]) in held], (held[0] if held else None)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _number(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: {name} must be a number, got {text!r}")
    return value


def _check_row(row: dict[str, float], where: str) -> None:
    for name in ("accelerators", "batch", "tokens"):
        if name in row and (row[name] < 1 or row[name] % 1):
            raise ConfigError(f"{where}: {name} must be a whole number of at least 1, got {row[name]:g}")
    if row.get("tokens", row["batch"]) < row["batch"]:
        raise ConfigError(
            f"{where}: tokens are those of all sequences together, at least batch = {row['batch']:g}, got "
            f"{row['tokens']:g}"
        )
    if row.get("ctx", 0) < 0:
        raise ConfigError(f"{where}: ctx must be at least 0, got {row['ctx']:g}")
    if "seconds" in row and row["seconds"] <= 0:
        raise ConfigError(f"{where}: seconds must be above 0, got {row['seconds']:g}")
    if "utilisation" in row and not 0 < row["utilisation"] <= 1:
        raise ConfigError(f"{where}: utilisation must be above 0 and at most 1, got {row['utilisation']:g}")


def _as_rows(rows: list[dict[str, float]]) -> Rows:
    def column(name: str, missing: float = 0.0) -> FloatArray:
        return np.array([row.get(name, missing) for row in rows], dtype=np.float64)

    return Rows(
        accelerators=column("accelerators", 1.0),
        batch=column("batch"),
        ctx=column("ctx"),
        tokens=column("tokens"),
        seconds=column("seconds"),
        utilisation=column("utilisation"),
    )


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
