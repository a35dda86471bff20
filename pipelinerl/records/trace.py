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

import errno
import gzip
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from io import BufferedWriter, RawIOBase
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar, cast, get_args, get_type_hints

from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.resolve import new_scheduler
from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.errors import ConfigError, SchedulerError, TraceError
from pipelinerl.records.run_folder import cannot_write, writing
from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.events import (
    NO_TOKENS,
    AbortRollout,
    Command,
    DiscardReason,
    DiscardRollouts,
    EngineSeconds,
    EnvironmentFault,
    Event,
    ObservationReady,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutPreempted,
    StartRollout,
    StopReason,
    TrainingFinished,
    TurnFinished,
    VersionSpans,
    WeightUpdate,
    value,
)
from pipelinerl.util.read import parse_json, read_lines

FORMAT = "pipelinerl-trace"
FORMAT_VERSION = 4
"""Raised when a reader of the old format could misread the new one, or the scheduler decides otherwise than before:
an old trace would not replay. 4: rollouts being scored take places in the ready queue."""

ADDED = {"read_tokens", "seconds"}
"""Fields that older traces of this version lack; ``seconds`` is left out where it is not known."""

BUFFER_BYTES = 2**16
"""Lines that are compressed at once (bytes): a call per line takes as long as all the rest."""

LONGEST_TEXT = 200
"""Characters of an event or a command in a message."""

T = TypeVar("T")

_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_COMMANDS: dict[str, type[Command]] = {kind.__name__: kind for kind in get_args(Command)}
_FIELDS: dict[type, dict[str, object]] = {kind: get_type_hints(kind) for kind in get_args(Event) + get_args(Command)}


class Recorder(Protocol):
    """Observes every event and command of a run."""

    def event(self, time_s: float, event: Event, /) -> None:
        """Record an event that was reported to the scheduler."""

    def command(self, time_s: float, command: Command, /) -> None:
        """Record a command of the scheduler."""


class FanOut:
    """Passes events and commands on to several recorders, in their order."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def event(self, time_s: float, event: Event) -> None:
        """Record an event."""
        for one in self._recorders:
            one.event(time_s, event)

    def command(self, time_s: float, command: Command) -> None:
        """Record a command."""
        for one in self._recorders:
            one.command(time_s, command)


class FaultWatch:
    """A recorder that has faults come after their steps, for simulated and real runs (mutable).

    It comes before other recorders. ``come`` is called before the scheduler answers the step: a task or an event that
    it begins follows the answer. ``path``: what a full disk refuses.
    """

    def __init__(self, faults: Iterable[FaultConfig], come: Callable[[FaultConfig], None], *, path: Path) -> None:
        self._left, self._come, self._path = list(faults), come, path
        self._full = False

    def comes(self, fault: FaultConfig) -> None:
        """Have a fault come."""
        self._left.remove(fault)
        self._come(fault)
        self._full |= fault.kind == "disk_full"

    def event(self, time_s: float, event: Event) -> None:  # noqa: ARG002
        """Have the faults of a step come; RunFailedError if the disk is full."""
        self._refuse_if_full()
        if isinstance(event, TrainingFinished):
            for fault in [one for one in self._left if one.step == event.version]:
                self.comes(fault)

    def command(self, time_s: float, command: Command) -> None:  # noqa: ARG002
        """Raise RunFailedError if the disk is full."""
        self._refuse_if_full()

    def _refuse_if_full(self) -> None:
        if self._full:
            raise cannot_write(self._path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


class TraceWriter:
    """Writes a trace, readable so far if the run is cut off, to its end if ``file`` is open there."""

    def __init__(self, path: Path, config: RunConfig, file: TextIO | None = None) -> None:
        self._path = path
        self._time_s, self._time_text = math.nan, ""  # of the last line: an event and its commands share them
        self._all = path.open("w") if file is None else file
        self._raw = self._all.buffer
        goes_on = self._raw.tell() > 0
        self._file = self._member()
        if goes_on:
            return
        dumped = config.model_dump(mode="json", exclude_none=True)
        header = {"format": FORMAT, "format_version": FORMAT_VERSION, "config": dumped}
        with writing(path):
            self._file.write(_json_text(header).encode() + b"\n")

    def event(self, time_s: float, content: Event | Command) -> None:
        """Write a line: a quarter of the time of ``json.dumps``, the same bytes."""
        if time_s != self._time_s:
            self._time_s, self._time_text = time_s, _float_text(time_s)
        try:
            self._file.write(f'{{"t":{self._time_text},{_TEXTS[type(content)](content)}'.encode())
        except OSError as error:
            raise cannot_write(self._path, error) from error

    command = event

    def mark(self) -> None:
        """Have all so far on disk, readable without the rest."""
        with writing(self._path):
            try:
                self._file.close()
                self._raw.flush()
                os.fsync(self._raw.fileno())
            finally:  # an event after an error must not hide it
                self._file = self._member()

    def _member(self) -> BufferedWriter:
        # No file name and no time in the gzip header: the same run must give the same bytes.
        compressed = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, compresslevel=3, mtime=0)
        return BufferedWriter(cast("RawIOBase", compressed), BUFFER_BYTES)

    def close(self) -> None:
        """Finish the file."""
        with writing(self._path), closing(self._all):
            self._file.close()


@value
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
    """The first one; None if all is identical."""
    compared: tuple[str, ...] = ()
    """Files beside the trace whose numbers were compared; none is once something differs."""


def replay(trace: Trace, recorder: Recorder | None = None) -> ReplayResult:
    """Feed a trace's events to a fresh scheduler and compare its commands with the recorded ones.

    Time never goes backwards, and the tokens of rollouts must be possible. ``recorder`` gets all that is identical. An
    interrupted run aborts its rollouts in progress at the end, without asking its scheduler. If a trace ends in
    nothing but aborts, it is therefore not asked about them. TraceError if the trace is broken.
    """
    scheduler = new_scheduler(trace.config)
    observer = FanOut(_TokenCheck(trace.config, scheduler), *([recorder] if recorder else []))
    expected = iter(scheduler.start())
    num_events = num_commands = line = 0
    cause: Event | str = "start()"
    last_s = 0.0
    difference = None
    try:
        for record in _last_aborts_marked(trace.records()):
            if record is None:
                scheduler.stopped = scheduler.stopped or StopReason.STALLED  # so that it decides nothing
                continue
            line, now = record.line, next(expected, None)
            if not last_s <= record.time_s < math.inf:
                raise _ImpossibleError(f"t must be at least {last_s}, that of the line before, got {record.time_s}")
            last_s = record.time_s
            if record.command != now:
                raise _OtherError(record.command, now)
            if now is not None:
                num_commands += 1
                observer.command(last_s, now)
            elif record.event is not None:
                num_events += 1
                cause = record.event
                expected = iter(scheduler.handle(cause))
                observer.event(last_s, cause)
        line = 0
        if (now := next(expected, None)) is not None:
            raise _OtherError(None, now)
        if scheduler.stopped is not None and scheduler.num_in_flight:
            raise _ImpossibleError(f"no end of {scheduler.num_in_flight} rollouts in progress")
    except SchedulerError as error:
        difference = f": the scheduler {error}"
    except _ImpossibleError as error:
        difference = f": {error}"
    except _OtherError as error:
        difference = f", after {_cut(cause)}: {error}"
    place = f"line {line}" if line else "end of trace"
    return ReplayResult(num_events, num_commands, None if difference is None else place + difference)


def _last_aborts_marked(records: Iterable[Record]) -> Iterator[Record | None]:
    """Yield all records, and None before the aborts with which they end."""
    aborts: list[Record] = []
    for record in records:
        if isinstance(record.event, RolloutAborted):
            aborts.append(record)
        else:
            yield from aborts
            aborts.clear()
            yield record
    if aborts:
        yield None
    yield from aborts


def _cut(content: object) -> str:
    text = str(content)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."


class _ImpossibleError(ValueError):
    """No engine or environment can have reported this event."""


class _OtherError(ValueError):
    """The scheduler gives another command."""

    def __init__(self, *recorded_and_now: Command | None) -> None:
        was, now = ("nothing more" if one is None else _cut(one) for one in recorded_and_now)
        super().__init__(f"recorded {was}, now {now}")


class _TokenCheck:
    """Checks the tokens of rollouts, at which the scheduler does not look, after it has accepted an event (mutable)."""

    def __init__(self, config: RunConfig, scheduler: Scheduler) -> None:
        self._scheduler, self._longest = scheduler, config.longest_answer_tokens
        self._longest_context = config.longest_rollout_tokens
        self._published = {0}
        self._running: dict[int, tuple[int, int]] = {}  # rollout -> oldest version of any engine, tokens at least
        self._kept: dict[int, VersionSpans] = {}  # of a rollout that goes on
        self._read: dict[int, int] = {}  # prompt and observations of a rollout
        self._aborting: set[int] = set()

    def command(self, _: float, command: Command) -> None:
        if isinstance(command, StartRollout):
            self._running[command.rollout_id] = self._scheduler.oldest_loaded, command.kept_tokens
        elif isinstance(command, PublishWeights):
            self._published.add(command.version)
        elif isinstance(command, AbortRollout):
            self._aborting.add(command.rollout_id)
        elif isinstance(command, DiscardRollouts):
            for rollout_id in command.rollout_ids:
                self._forget(rollout_id)

    def event(self, _: float, event: Event) -> None:
        if isinstance(event, RolloutFinished | TurnFinished | RolloutAborted):
            if event.engine is None and event.spans != self._kept[event.rollout_id]:
                raise _ImpossibleError(f"rollout {event.rollout_id} must end with the tokens of its last turn")
            if event.engine is not None:
                self._check_spans(event, *self._running.pop(event.rollout_id))
            if isinstance(event, RolloutFinished) or event.rollout_id in self._aborting:
                self._forget(event.rollout_id)
            else:
                self._kept[event.rollout_id] = event.spans
        elif isinstance(event, ObservationReady) and event.read_tokens is not None:
            rollout_id, kept = event.rollout_id, self._kept.get(event.rollout_id, NO_TOKENS).num_tokens
            _check("read_tokens", event.read_tokens, self._read.get(rollout_id, 0), self._longest_context - kept)
            self._read[rollout_id] = event.read_tokens
        elif isinstance(event, RolloutPreempted):
            oldest, least = self._running[event.rollout_id]
            _check("num_tokens", event.num_tokens, least, self._longest)
            self._running[event.rollout_id] = oldest, event.num_tokens
        elif isinstance(event, RolloutFailed):
            self._forget(event.rollout_id)

    def _check_spans(self, event: RolloutFinished | TurnFinished | RolloutAborted, oldest: int, least: int) -> None:
        spans, before, first = event.spans, self._kept.get(event.rollout_id, NO_TOKENS), 0
        if before.ends:
            last = len(before.ends) - 1
            same = spans.versions[: last + 1] == before.versions and spans.ends[:last] == before.ends[:last]
            if not same or spans.ends[last] < before.ends[last]:
                raise _ImpossibleError(f"rollout {event.rollout_id} must keep {_cut(before)}, got {_cut(spans)}")
            first = last + (spans.ends[last] == before.ends[last])
        _check("tokens", spans.num_tokens, least if isinstance(event, RolloutAborted) else max(1, least), self._longest)
        for version in spans.versions[first:]:
            if version < oldest or version not in self._published:
                raise _ImpossibleError(
                    f"new tokens must be of rising published versions from {oldest} on, got {_cut(spans)}"
                )
            oldest = version + 1

    def _forget(self, rollout_id: int) -> None:
        for table in (self._running, self._kept, self._read):
            table.pop(rollout_id, None)
        self._aborting.discard(rollout_id)


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise _ImpossibleError(f"{name} must be from {least} to {most}, got {_cut(value)}")


# --------------------------------------------------------------------------------------- encoding


_json_text = json.JSONEncoder(separators=(",", ":")).encode


def _float_text(number: float) -> str:
    return float.__repr__(number) if type(number) is float and math.isfinite(number) else _json_text(number)


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
    tuple[int, ...]: lambda ids: f"[{','.join(map(str, ids))}]",
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
    return kind(*[decode(data[name]) for name, decode in _DECODED[kind] if name in data or name not in ADDED])


def _decoded_float(number: Any) -> float:
    if not math.isfinite(decoded := float(number)):
        raise ValueError(f"must be a finite number, got {number}")
    return decoded


def _decoded_seconds(seconds: Any) -> EngineSeconds:
    prefill, decode = seconds
    return EngineSeconds(_decoded_float(prefill), _decoded_float(decode))


def _decoded_spans(spans: Any) -> VersionSpans:
    versions, ends, last = [], [], 0
    for version, start, end in spans:
        if operator.index(start) != last or operator.index(end) <= last:
            raise ValueError(f"spans must follow each other from token 0, got {spans}")
        versions.append(operator.index(version))
        ends.append(last := end)
    return VersionSpans(tuple(versions), tuple(ends))


_DECODERS: dict[object, Callable[[Any], object]] = {
    int: operator.index,
    int | None: lambda one: None if one is None else operator.index(one),
    float: _decoded_float,
    float | None: lambda one: None if one is None else _decoded_float(one),
    bool: bool,
    tuple[int, ...]: lambda ids: tuple(map(operator.index, ids)),
    VersionSpans: _decoded_spans,
    EngineSeconds | None: _decoded_seconds,
    WeightUpdate: WeightUpdate,
    DiscardReason: DiscardReason,
    EnvironmentFault: EnvironmentFault,
    StopReason: StopReason,
}
"""Reads a field of each type from JSON; a value of another type raises an error."""
_DECODED = {kind: [(name, _DECODERS[hint]) for name, hint in _FIELDS[kind].items()] for kind in _FIELDS}
"""Names of fields, those in ``ADDED`` last, and how each is read."""
