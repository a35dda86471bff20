"""Read ``metrics.jsonl``: a line per optimizer step of a run that learns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.errors import ConfigError
from pipelinerl.util.arrays import FloatArray, RealArray
from pipelinerl.util.explain import read_text

REWARD = "reward/mean"
"""Mean reward of the rollouts of a step; in every line."""
ESS_RAW, ESS_TRUNCATED = "ess/token_raw", "ess/token_truncated"
"""ESS of the token weights of a step as they are, and as the loss uses them (share of the tokens)."""

_ESS_AT_LAG = re.compile(r"ess/lag_([0-9]+)")


def read_metrics(path: Path, step: RealArray) -> dict[str, FloatArray]:
    """Read the metrics of a run.

    Args:
        path: The file; a simulated run has none.
        step: The steps that ``steps.csv`` holds, shape [steps]. The log may end before it does, not after.

    Returns:
        A column per metric, of as many rows as the file has lines, nan where a line lacks the metric. Empty if there
        is no file or no line.

    Raises:
        ConfigError: At the first broken line, with its number.
    """
    if not path.exists():
        return {}
    lines = []
    for number, text in enumerate(read_text(path, "metrics").splitlines(), start=1):
        place = f"{path}, line {number}"
        line = _parsed(place, text)
        if number > len(step):
            raise ConfigError(f"{place}: steps.csv has {len(step)} optimizer steps only")
        if line.get("step") != step[number - 1]:
            raise ConfigError(f"{place}: step must be {step[number - 1]:g}, got {json.dumps(line.get('step'))}")
        lines.append(_numbers(place, line))
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: np.array([line.get(name, math.nan) for line in lines], dtype=np.float64) for name in names}


def ess_by_lag(metrics: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the ESS of the tokens of each lag, as a mean over the optimizer steps in which the lag occurred.

    Args:
        metrics: What ``read_metrics`` returned.

    Returns:
        The lags that occurred, rising (optimizer steps), and the ESS of each (share of the tokens), of one shape.
    """
    columns = {int(match[1]): column for name, column in metrics.items() if (match := _ESS_AT_LAG.fullmatch(name))}
    lags = sorted(columns)
    return np.array(lags, dtype=np.float64), np.array([np.nanmean(columns[lag]) for lag in lags])


def _parsed(place: str, text: str) -> dict[str, Any]:
    """Return the table that a line holds."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}, column {error.colno}: not valid JSON: {error.msg}") from None
    if not isinstance(line, dict):
        raise ConfigError(f"{place}: must hold a table, got {type(line).__name__}")
    return line


def _numbers(place: str, line: dict[str, Any]) -> dict[str, float]:
    """Return a line all of whose values are numbers; those that figures show are finite, others may overflow."""
    if REWARD not in line:
        raise ConfigError(f"{place}: {REWARD} is missing")
    for name, value in line.items():
        shown = name == REWARD or name.startswith("ess/")
        if not _is_number(value) or (shown and not math.isfinite(value)):
            raise ConfigError(f"{place}: {name} must be a number, got {json.dumps(value)}")
    return line


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number that a float can hold; not a number and infinity are floats too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True
