"""Read a user's CSV file: named columns, and a strict model for the cells of a row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import did_you_mean
from pipelinerl.util.read import read_rows
from pipelinerl.util.strict_model import StrictModel

Row = TypeVar("Row", bound=StrictModel)

MOST_ROWS = 200_000
"""Most lines of a table (count)."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""A number in a cell: neither thousands separators nor other digits."""
LIMITS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
"""Bounds of a field, as pydantic calls them, in words."""


class Line(NamedTuple):
    """A line of a table that is not blank."""

    where: str
    """File and line, the beginning of every message about it."""
    cells: list[str]
    """Without space around them."""


@dataclass(frozen=True, slots=True)
class Table:
    """A CSV file, split into cells."""

    path: Path
    header: Line
    lines: list[Line]

    def rows(self, kind: type[Row], *, filled: bool = False) -> list[tuple[str, Row]]:
        """Return the rows as models of ``kind``, each with its file and line for further messages.

        A column is a field of the model. An empty cell has the field's default; a number's, if ``filled``, is a fault.
        Raises ConfigError at the first fault: file, line, column, rule, value.
        """
        self._check_columns(kind)
        columns = self.header.cells
        numbers = [name for name in columns if _is_number(kind.model_fields[name])]
        rows = []
        for where, cells in self.lines:
            if len(cells) != len(columns):
                raise ConfigError(
                    f"{where}: there must be {len(columns)} cells ({', '.join(columns)}), got {len(cells)}"
                )
            row = dict(zip(columns, cells, strict=True))
            for name in numbers:
                if (row[name] or filled) and not NUMBER.fullmatch(row[name]):
                    raise _fault(kind.model_fields[name], name, row[name], where)
            rows.append((where, _row(kind, row, where)))
        return rows

    def _check_columns(self, kind: type[StrictModel]) -> None:
        where, columns = self.header
        allowed = kind.model_fields
        for column in columns:
            if column not in allowed:
                raise ConfigError(
                    f"{where}: {_shown(column)} is an unknown column; {did_you_mean(column, allowed)}"
                    f"allowed, with commas in between: {', '.join(allowed)}"
                )
            if columns.count(column) > 1:
                raise ConfigError(f"{where}: column {column} must stand there once, got {columns.count(column)}")
        needed = [name for name, field in allowed.items() if field.is_required()]
        for name in needed:
            if name not in columns:
                raise ConfigError(f"{where}: column {name} is missing; needed: {', '.join(needed)}")
        if not self.lines:
            raise ConfigError(f"{where}: there must be a row below the header, got none")


def read_table(path: Path, what: str) -> Table:
    """Return the header and the lines of a comma-separated UTF-8 file, blank lines left out.

    Raises ConfigError if it cannot be read, is no UTF-8 text, or its quotes do not match; ``what`` names it.
    """
    rows = ((number, [cell.strip() for cell in cells]) for number, cells in read_rows(path, what))
    lines = [Line(f"{path} line {number}", cells) for number, cells in islice(rows, MOST_ROWS) if any(cells)]
    if next(rows, None) is not None:
        raise ConfigError(f"{path} must have at most {MOST_ROWS:,} lines")
    header, *rest = lines or [Line(f"{path} line 1", [])]
    return Table(path, header, rest)


def _row(kind: type[Row], cells: dict[str, str], where: str) -> Row:
    try:
        return kind.model_validate_strings({name: cell for name, cell in cells.items() if cell})
    except ValidationError as error:
        fault = error.errors()[0]
        if not fault["loc"]:  # a rule across columns
            raise ConfigError(f"{where}: {fault['ctx']['error']}") from None
        name = str(fault["loc"][0])
        raise _fault(kind.model_fields[name], name, cells[name], where) from None


def _fault(field: FieldInfo, name: str, cell: str, where: str) -> ConfigError:
    rule = f"must be {_rule(field)}" if _is_number(field) or _choices(field) else "must not be empty"
    return ConfigError(f"{where}: {name} {rule}, got {_shown(cell)}")


def _kinds(field: FieldInfo) -> list[Any]:
    parts = get_args(field.annotation) if get_origin(field.annotation) is not Literal else ()
    return [one for one in parts or (field.annotation,) if one is not type(None)]


def _is_number(field: FieldInfo) -> bool:
    return _kinds(field)[0] in (int, float)


def _choices(field: FieldInfo) -> Sequence[str]:
    kind = _kinds(field)[0]
    if get_origin(kind) is Literal:
        return get_args(kind)
    return [str(one.value) for one in kind] if isinstance(kind, type) and issubclass(kind, Enum) else ()


def _rule(field: FieldInfo) -> str:
    if choices := _choices(field):
        return f"one of {', '.join(choices)}"
    limits = {name: getattr(one, name) for one in field.metadata for name in LIMITS if hasattr(one, name)}
    number = f"a {'whole ' if int in _kinds(field) else ''}number"
    if {"ge", "le"} <= limits.keys():
        return f"{number} from {limits['ge']} to {limits['le']}"
    bounds = [f"{words} {limits[name]}" for name, words in LIMITS.items() if name in limits]
    return f"{number} {' and '.join(bounds)}".strip()


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:37] + "...")
