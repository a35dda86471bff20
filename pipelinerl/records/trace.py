"""Traces: every event and command of a run, time-stamped, one JSON object per line, gzip.

The first line holds the format and the resolved configuration. Every further line is an event or a command::

    {"t": 12.5, "event": "RolloutFinished", "rollout_id": 7, "engine": 0, "spans": [[3, 0, 100], [4, 100, 180]],
     "reward": 1.0}
    {"t": 12.5, "command": "StartRollout", "rollout_id": 71, "prompt_id": 8, "engine": 0, "kept_tokens": 0}

``t`` is in seconds since the start. Spans are [version, first token, end token]. Where a simulated rollout has turns,
the end of each has ``"seconds": [prefill, decode]``. Commands follow the event they answer; those of ``start()`` come
first. The same run gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedWriter, RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast, get_args, get_type_hints

from pipelinerl.config.resolve import new_scheduler
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import parse_run
from pipelinerl.errors import ConfigError, SchedulerError, TraceError
from pipelinerl.scheduler.events import (
    Command,
    DiscardReason,
    EngineSeconds,
    EnvironmentFault,
    Event,
    RolloutAborted,
    RolloutFinished,
    StartRollout,
    StopReason,
    VersionSpans,
    WeightUpdate,
)
from pipelinerl.util.explain import cannot_write, writing
from pipelinerl.util.read import parse_json, read_lines

FORMAT = "pipelinerl-trace"
FORMAT_VERSION = 4
"""Raised when a reader of the old format could misread the new one, or the scheduler decides otherwise than before:
an old trace would not replay. 4: rollouts being scored take places in the ready queue."""

ADDED = {"read_tokens", "seconds"}
"""Fields that older traces of this version lack; ``seconds`` is left out where it is not known."""

BUFFER_BYTES = 2**16
"""Lines that are compressed at once (bytes): a call per line takes as long as all the rest."""

T = TypeVar("T")

_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_COMMANDS: dict[str, type[Command]] = {kind.__name__: kind for kind in get_args(Command)}
_FIELDS: dict[type, dict[str, object]] = {kind: get_type_hints(kind) for kind in get_args(Event) + get_args(Command)}


class TraceWriter:
    """Writes a trace, readable so far if the run is cut off; ``go_on_at``: the ``mark`` where an old file is cut."""

    def __init__(self, path: Path, config: RunConfig, *, go_on_at: int | None = None) -> None:
        self._path = path
        self._time_s, self._time_text = math.nan, ""  # of the last line: an event and its commands share them
        if go_on_at is not None:
            self._raw: BinaryIO = path.open("r+b")
            self._raw.truncate(go_on_at)
            self._raw.seek(go_on_at)
            self._file = self._member()
            return
        self._raw = path.open("wb")
        self._file = self._member()
        header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "config": config.model_dump(mode="json", exclude_none=True),
        }
        with writing(path):
            self._file.write(_json_text(header).encode() + b"\n")

    def event(self, time_s: float, event: Event) -> None:
        """Write an event."""
        self._write(time_s, event)

    def command(self, time_s: float, command: Command) -> None:
        """Write a command."""
        self._write(time_s, command)

    def mark(self) -> int:
        """Return the length of the file so far (bytes), all of it on disk."""
        with writing(self._path):
            self._file.close()
            self._raw.flush()
            os.fsync(self._raw.fileno())
        place = self._raw.tell()
        self._file = self._member()
        return place

    def _member(self) -> BufferedWriter:
        # No file name and no time in the gzip header: the same run must give the same bytes.
        compressed = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, compresslevel=3, mtime=0)
        return BufferedWriter(cast("RawIOBase", compressed), BUFFER_BYTES)

    def close(self) -> None:
        """Finish the file."""
        with writing(self._path), self._raw:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, time_s: float, content: Event | Command) -> None:
        """Write a line: a quarter of the time of ``json.dumps``, the same bytes."""
        if time_s != self._time_s:
            self._time_s, self._time_text = time_s, _float_text(time_s)
        try:
            self._file.write(f'{{"t":{self._time_text},{_TEXTS[type(content)](content)}'.encode())
        except OSError as error:
            raise cannot_write(self._path, error) from error


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a trace: an event, or else a command."""

    line: int
    """From 1 (the header)."""
    time_s: float
    event: Event | None
    command: Command | None


class Trace:
    """A recorded trace; TraceError if the file is missing, or its first line is not the header of a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = next(self._lines(), (0, None))[1]
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise TraceError(f"{path} is not a trace: its first line must be a {FORMAT} header")
        if header.get("format_version") != FORMAT_VERSION:
            raise TraceError(
                f"{path} has trace format version {header.get('format_version')}, this program reads {FORMAT_VERSION}; "
                "the version of the program that wrote it reads it"
            )
        try:
            self.config = parse_run(header.get("config", {}), name=f"{path}, line 1")
        except ConfigError as error:  # damaged, or of another version: the first fault will do
            raise TraceError(str(error).splitlines()[0]) from None

    def records(self) -> Iterator[Record]:
        """Yield all events and commands in order; TraceError with its number at the first broken line."""
        lines = self._lines()
        next(lines)
        for number, data in lines:
            try:
                time_s = float(data["t"])
                if "event" in data:
                    yield Record(number, time_s, _decoded(_EVENTS[data["event"]], data), None)
                else:
                    yield Record(number, time_s, None, _decoded(_COMMANDS[data["command"]], data))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise TraceError(f"{self.path}, line {number}: broken record ({error!r})") from None

    def _lines(self) -> Iterator[tuple[int, Any]]:
        try:
            for number, line in read_lines(self.path, "trace", packed=True):
                yield number, parse_json(line, f"{self.path}, line {number}")
        except ConfigError as error:
            raise TraceError(*error.args) from None


# ----------------------------------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay."""

    num_events: int
    num_commands: int
    difference: str | None
    """The first one; None if all commands are identical."""


def replay(trace: Trace) -> ReplayResult:
    """Feed a trace's events to a fresh scheduler and compare its commands with the recorded ones.

    An interrupted run aborts its rollouts in progress at the end, without asking its scheduler. If a trace ends in
    nothing but aborts, the answers to them are therefore not compared. TraceError if the trace is broken.
    """
    config = trace.config
    scheduler = new_scheduler(config)
    expected = list(scheduler.start())
    num_events = num_commands = position = 0
    cause: Event | str = "start()"
    difference = None
    records = trace.records()
    for record in records:
        now = expected[position] if position < len(expected) else None
        if record.event is None:
            if now != record.command:
                answer = "nothing more" if now is None else now
                difference = f"line {record.line}, after {cause}: recorded {record.command}, now {answer}"
                break
            num_commands += 1
            position += 1
        elif now is not None:
            interrupted = isinstance(cause, RolloutAborted) and _is_abort(record) and all(map(_is_abort, records))
            if not interrupted:
                difference = f"line {record.line}, after {cause}: recorded nothing more, now {now}"
            break
        else:
            num_events += 1
            cause = record.event
            try:
                expected, position = list(scheduler.handle(record.event)), 0
            except SchedulerError as error:
                difference = f"line {record.line}: the scheduler {error}"
                break
    else:
        if position < len(expected) and not isinstance(cause, RolloutAborted):
            difference = f"end of trace, after {cause}: recorded nothing more, now {expected[position]}"
    return ReplayResult(num_events, num_commands, difference)


def _is_abort(record: Record) -> bool:
    return isinstance(record.event, RolloutAborted)


# --------------------------------------------------------------------------------------- encoding


_json_text = json.JSONEncoder(separators=(",", ":")).encode


def _float_text(number: float) -> str:
    return float.__repr__(number) if type(number) is float and math.isfinite(number) else _json_text(number)


def _ids_text(ids: Iterable[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


def _spans_text(spans: VersionSpans) -> str:
    start, rows = 0, []
    for version, end in zip(spans.versions, spans.ends, strict=True):
        rows.append(f"[{version},{start},{end}]")
        start = end
    return f"[{','.join(rows)}]"


def _seconds_text(seconds: EngineSeconds | None) -> str:
    return "" if seconds is None else f',"seconds":[{_float_text(seconds.prefill)},{_float_text(seconds.decode)}]'


_ENCODERS: dict[object, Callable[[Any], str]] = {
    int | None: lambda one: "null" if one is None else str(one),
    float: _float_text,
    float | None: lambda one: "null" if one is None else _float_text(one),
    tuple[int, ...]: _ids_text,
    VersionSpans: _spans_text,
    EngineSeconds | None: _seconds_text,
}
"""Writes a field of each type as JSON; others by ``_json_text``."""


def _text_of(kind: type) -> Callable[[Any], str]:
    """Return the function that writes a line, but for its time, of a kind of event or command."""
    label = "event" if kind.__name__ in _EVENTS else "command"
    fields = "".join("%s" if name == "seconds" else f',"{name}":%s' for name in _FIELDS[kind])
    layout = f'"{label}":"{kind.__name__}"{fields}}}\n'
    encoders = [(name, str if hint is int else _ENCODERS.get(hint, _json_text)) for name, hint in _FIELDS[kind].items()]
    return lambda content: layout % tuple([encode(getattr(content, name)) for name, encode in encoders])


def _start_text(one: StartRollout) -> str:
    return (
        f'"command":"StartRollout","rollout_id":{one.rollout_id},"prompt_id":{one.prompt_id},"engine":{one.engine},'
        f'"kept_tokens":{one.kept_tokens}}}\n'
    )


def _finished_text(one: RolloutFinished) -> str:
    engine = "null" if one.engine is None else one.engine
    reward = "null" if one.reward is None else _float_text(one.reward)
    return (
        f'"event":"RolloutFinished","rollout_id":{one.rollout_id},"engine":{engine},'
        f'"spans":{_spans_text(one.spans)},"reward":{reward}{_seconds_text(one.seconds)}}}\n'
    )


_TEXTS = {kind: _text_of(kind) for kind in _FIELDS} | {StartRollout: _start_text, RolloutFinished: _finished_text}
"""Two of them, which come once per rollout, are written out: half the time."""


def _decoded(kind: type[T], data: Mapping[str, Any]) -> T:
    hints = {name: hint for name, hint in _FIELDS[kind].items() if name not in ADDED or name in data}
    return kind(**{name: _DECODERS[hint](data[name]) for name, hint in hints.items()})


def _decoded_seconds(seconds: Any) -> EngineSeconds:
    prefill, decode = seconds
    return EngineSeconds(float(prefill), float(decode))


def _decoded_ids(ids: Any) -> tuple[int, ...]:
    return tuple(operator.index(one) for one in ids)


def _decoded_spans(spans: Any) -> VersionSpans:
    versions = _decoded_ids(version for version, _, _ in spans)
    starts, ends = _decoded_ids(start for _, start, _ in spans), _decoded_ids(end for _, _, end in spans)
    if starts != (0, *ends)[: len(ends)]:
        raise ValueError(f"spans must follow each other from token 0, got {spans}")
    return VersionSpans(versions, ends)


_DECODERS: dict[object, Callable[[Any], object]] = {
    int: operator.index,
    int | None: lambda one: None if one is None else operator.index(one),
    float: float,
    float | None: lambda one: None if one is None else float(one),
    bool: bool,
    tuple[int, ...]: _decoded_ids,
    VersionSpans: _decoded_spans,
    EngineSeconds | None: _decoded_seconds,
    WeightUpdate: WeightUpdate,
    DiscardReason: DiscardReason,
    EnvironmentFault: EnvironmentFault,
    StopReason: StopReason,
}
"""Reads a field of each type from JSON; a value of another type raises an error."""
