"""Take numbers out of a JSON file; every complaint is one line that names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import ConfigError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class JsonTable:
    """A table of a JSON file. Keys are dotted; a method raises ``ConfigError`` if what it finds is not what it says."""

    path: Path
    """The file, for messages."""
    data: Mapping[str, Any]
    """The table."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the table that the file holds."""
        try:
            data = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path} must hold a table, got {type(data).__name__}")
        return cls(path, data)

    def value(self, key: str) -> Any:
        """Return whatever is at the key."""
        try:
            return lookup(self.data, key)
        except (KeyError, TypeError):
            raise ConfigError(f"{self.path}: {key} is missing") from None

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ConfigError(f"{self.path}: {key} must be a number, got {json.dumps(value)}")
        return float(value)

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.value(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: {key} must be a string, got {json.dumps(value)}")
        return value

    def tables(self, key: str) -> list[JsonTable]:
        """Return a list of tables."""
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise ConfigError(f"{self.path}: {key} must be a list of tables")
        return [JsonTable(self.path, one) for one in value]

    def array(self, key: str, *, nulls: bool = False) -> FloatArray:
        """Return a list of numbers; ``nulls`` allows null, read as nan."""
        return self._numbers(key, self.value(key), ndim=1, nulls=nulls)

    def spans(self, key: str, kind: str | None = None) -> FloatArray:
        """Return a list of [start, end], or of the [start, end, kind] of this kind, as an array of shape [spans, 2]."""
        value = self.value(key)
        if kind is not None and isinstance(value, list):
            value = [span[:2] for span in value if isinstance(span, list) and span[2:] == [kind]]
        if value == []:
            return np.empty((0, 2))
        spans = self._numbers(key, value, ndim=2, nulls=False)
        if spans.shape[1] != 2:
            raise ConfigError(f"{self.path}: {key} must be a list of [start, end]")
        return spans

    def _numbers(self, key: str, value: Any, *, ndim: int, nulls: bool) -> FloatArray:
        try:
            array = np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            array = np.empty(())
        if array.ndim != ndim or not (nulls or np.isfinite(array).all()):
            raise ConfigError(f"{self.path}: {key} must be a list of {'numbers' if ndim == 1 else '[start, end]'}")
        return array


def lookup(data: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key.

    Args:
        data: Nested tables.
        key: Names of the nested tables and of the value, joined by dots.

    Returns:
        The value.

    Raises:
        KeyError: If a table lacks the key.
        TypeError: If the key leads through something that is no table.
    """
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return value


def read_text(path: Path) -> str:
    """Return the text of a file.

    Args:
        path: The file.

    Returns:
        Its text.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from None
