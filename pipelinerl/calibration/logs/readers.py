"""Read the log of a job: console, JSONL, an export of W&B, a Chrome trace, or a plain CSV file."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelinerl.calibration.logs.formats import FORMATS, PLAIN, Alternatives, Format
from pipelinerl.calibration.logs.record import LoggedStep
from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import did_you_mean, explain, read_text
from pipelinerl.util.table import read_table

Metrics = dict[int, dict[str, float]]
"""Numbers by step and name."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
DURATIONS = re.compile(r"([\d.]+)(ms|[dhms])")
UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
"""Seconds of a unit."""
RUN_PREFIX = " - "
"""What stands between the name of a run and that of a metric where W&B exports a chart."""
EXTREMES = ("__MIN", "__MAX")
"""Columns of such an export that are no values."""
MAY_BE_0 = ("generation_s", "training_s", "sync_s", "wait_s", "clipped_share", "prompt_mean", "lag_mean", "lag_max")
"""Columns in which 0 says something; elsewhere it says that nothing was measured."""


def read_log(paths: Sequence[Path], name: str) -> list[LoggedStep]:
    """Return the steps of a log, in order; several files of one job are put together step by step.

    Args:
        paths: The files.
        name: What wrote them, a name of ``FORMATS`` or ``csv``.

    Raises:
        ConfigError: If the name is unknown, a file cannot be read, or holds no step.
    """
    names = [one.name for one in FORMATS] + [PLAIN]
    if name not in names:
        raise ConfigError(
            f"--from must be one of {', '.join(names)}, got {name!r}; {did_you_mean(name, names)}".rstrip("; ")
        )
    if name == PLAIN:
        return [row for path in paths for _, row in read_table(path, "log").rows(LoggedStep)]
    format_ = FORMATS[names.index(name)]
    metrics: Metrics = defaultdict(dict)
    for path in paths:
        found = 0
        for number, values in _numbers(path, format_):
            metrics[number].update(values)
            found += 1
        if not found:
            raise ConfigError(f"{path} must hold steps as {name} logs them, got none; is it of another system?")
    steps = [step for number in sorted(metrics) if (step := _step(number, metrics[number], format_)) is not None]
    if not steps:
        raise ConfigError(
            f"{', '.join(map(str, paths))} must hold metrics of {name}, such as {_examples(format_)}, got none of them"
        )
    return steps


def _examples(format_: Format) -> str:
    return ", ".join(
        format_.columns[name][0][0] for name in ("step_s", "training_s", "length_mean") if name in format_.columns
    )


def _step(number: int, metrics: Mapping[str, float], format_: Format) -> LoggedStep | None:
    """Return a step by the columns of its format; None if it has nothing of them."""
    columns = dict(format_.columns)
    if any(_metric(name, metrics) for name in format_.asynchronous):
        columns |= format_.asynchronous_columns
    found = {column: _sum(alternatives, metrics) for column, alternatives in columns.items()}
    for column, (above, below) in format_.ratios.items():
        values = [[_metric(name, metrics) for name in names] for names in (above, below)]
        if all(one for names in values for one in names):
            over, under = (math.prod(one for one in names if one) for names in values)
            found[column] = over / under
    if found.get("step_s") is not None:
        found["step_s"] = _without(sum(_metric(name, metrics) or 0.0 for name in format_.besides), found)
    known = {column: value for column, value in found.items() if value or (value is not None and column in MAY_BE_0)}
    if not known:
        return None
    try:
        return LoggedStep(step=number, **known)
    except ValidationError as error:
        raise ConfigError(f"step {number} of the log: {explain(error, LoggedStep)[0]}") from None


def _without(besides_s: float, found: Mapping[str, float | None]) -> float:
    """Return the seconds of a step without its evaluation and checkpoint, if they fit into what its parts leave."""
    waits = "generation_s" if found.get("wait_s") is None else "wait_s"
    step_s, *parts_s = (found.get(name) or 0.0 for name in ("step_s", waits, "training_s", "sync_s"))
    return step_s - besides_s if sum(parts_s) + besides_s <= step_s else step_s


def _sum(alternatives: Alternatives, metrics: Mapping[str, float]) -> float | None:
    for first, *others in alternatives:
        if (value := _metric(first, metrics)) is not None:
            return value + sum(_metric(name, metrics) or 0.0 for name in others)
    return None


def _metric(name: str, metrics: Mapping[str, float]) -> float | None:
    if name in metrics:
        return metrics[name]
    return next((value for key, value in metrics.items() if key.endswith("/" + name)), None)


def _numbers(path: Path, format_: Format) -> Iterator[tuple[int, dict[str, float]]]:
    """Return the numbers of a file, a step at a time; a step may come several times."""
    text = read_text(path, "log")
    if path.suffix in (".json", ".jsonl") or text.startswith("{"):
        return _from_json(path, text, format_)
    if path.suffix == ".csv":
        return _from_csv(path, text, format_)
    return _from_console(text, format_)


def _from_console(text: str, format_: Format) -> Iterator[tuple[int, dict[str, float]]]:
    assert format_.console_step is not None
    step, text = None, COLOURS.sub("", text)
    if format_.console_wraps is not None:
        text = format_.console_wraps.sub("", text)
    for line in text.splitlines():
        if begun := format_.console_step.search(line):
            step = int(begun[1])
        if step is None:
            continue
        found = {
            name.format(*match.groups()): _seconds(match.groups()[-1])
            for pattern, name in format_.console
            for match in pattern.finditer(line)
        }
        if found:
            yield step, found


def _seconds(text: str) -> float:
    """Return a number, or seconds that have units."""
    parts = DURATIONS.findall(text)
    return sum(float(number) * UNITS[unit] for number, unit in parts) if parts else float(text)


def _from_csv(path: Path, text: str, format_: Format) -> Iterator[tuple[int, dict[str, float]]]:
    reader = csv.reader(io.StringIO(text))
    header = [name.rpartition(RUN_PREFIX)[2] for name in next(reader, [])]
    place = next((header.index(name) for name in (*format_.steps, "Step") if name in header), None)
    if place is None:
        raise ConfigError(
            f"{path} must number its steps in a column {', '.join(format_.steps)} or Step, got none of them"
        )
    for cells in reader:
        values = {
            name: value
            for name, cell in zip(header, cells, strict=False)
            if not name.endswith(EXTREMES) and (value := _number(cell)) is not None
        }
        step = _number(cells[place]) if place < len(cells) else None
        if step is not None:
            yield int(step), values


def _from_json(path: Path, text: str, format_: Format) -> Iterator[tuple[int, dict[str, float]]]:
    """Return the numbers of JSON lines, of a trace in lines, or of a trace in one document."""
    try:
        whole = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        try:
            whole = [json.loads(text)]
        except ValueError as error:
            raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from None
    rows: Iterable[Any] = whole
    if len(whole) == 1:
        rows = whole[0] if isinstance(whole[0], list) else whole[0].get("traceEvents", whole)
    spans: Metrics = defaultdict(dict)
    for row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{path} must hold an object per line, got {row!r}"[:200])
        if "ph" in row:
            _take_span(row, spans)
            continue
        data = row.get("data", row)
        step = next((row[name] for name in (*format_.steps, "step") if isinstance(row.get(name), int | float)), None)
        if step is not None and isinstance(data, dict):
            yield int(step), {name: value for name, one in data.items() if (value := _number(one)) is not None}
    yield from spans.items()


def _take_span(event: Mapping[str, Any], spans: Metrics) -> None:
    """Keep a complete event that names its step; of several ranks the longest counts."""
    step = (event.get("args") or {}).get("global_step")
    if event.get("ph") == "X" and isinstance(step, int) and (micros := _number(event.get("dur"))) is not None:
        name = str(event.get("name"))
        spans[step][name] = max(micros / 1e6, spans[step].get(name, 0.0))


def _number(value: Any) -> float | None:
    """Return a finite number, or a cell with one; None where it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
