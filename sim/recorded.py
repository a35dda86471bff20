"""Recorded rollouts as a workload: those of a run's trace, of a user's file, of other systems' traces.

Of other systems one table has the formats: a request is a turn; the requests of a session, in order, are a rollout;
rollouts whose first requests have equal prompts are a group. The schedule of a run starts rollouts, so arrivals of
sessions give their order only.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, TraceError
from pipelinerl.records.run_folder import TRACE_FILE, write_whole
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler import events
from pipelinerl.util.arrays import grouped
from pipelinerl.util.explain import explain, shown
from pipelinerl.util.read import parse_json, read_json, read_lines
from pipelinerl.util.strict_model import LONGEST_S, MOST_TOKENS, StrictModel

BLOCK_TOKENS = 512
"""Tokens of a block of the prompt in written traces, as in Mooncake's."""
DYNAMO = "dynamo.request.trace.v1"
"""Schema of Dynamo's lines."""


class RecordedEpisode(StrictModel):
    """A line of a source of turns: one episode."""

    group: int | str
    """Episodes of one task are a group."""
    stream: int | str
    """Number or name of the episode in its group; not read."""
    prompt_len: int = Field(ge=0, le=MOST_TOKENS)
    """Length of the prompt (tokens)."""
    out_lens: list[int] = Field(min_length=1)
    """Tokens generated in each turn, at least 1; 0 counts as 1."""
    obs_lens: list[int]
    """Tokens observed after each turn but the last."""
    tool_times: list[float]
    """Time that the environment acted after each turn but the last (s)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        pauses = len(self.out_lens) - 1
        for name in ("obs_lens", "tool_times"):
            if (found := len(getattr(self, name))) != pauses:
                raise ValueError(f"{name} must have one value less than out_lens, {pauses}, got {found}")
        for name, most in (("out_lens", MOST_TOKENS), ("obs_lens", MOST_TOKENS), ("tool_times", LONGEST_S)):
            for value in getattr(self, name):
                if not 0 <= value <= most:
                    raise ValueError(f"{name} must be from 0 to {most:g}, got {value:g}")
        return self


@dataclass(frozen=True, slots=True)
class TracedRollout:
    """A rollout of a run."""

    episode: RecordedEpisode
    reward: float
    begins_s: tuple[float, ...]
    """When each turn's request was ready for an engine, seconds from the start of the run."""
    ends_s: tuple[float, ...]
    """When each turn ended, likewise."""


@dataclass(slots=True)
class _Recorded:
    """State of a rollout so far in the trace (mutable)."""

    read: int
    """Tokens of its prompt and observations."""
    read_L: list[int] = field(default_factory=list)
    """The same before each turn."""
    out_lens: list[int] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def end_turn(self, now_s: float, spans: events.VersionSpans) -> None:
        self.out_lens.append(spans.num_tokens - sum(self.out_lens))
        self.read_L.append(self.read)
        self.ends_s.append(now_s)

    def rollout(self, rollout_id: int, *, group_size: int, reward: float) -> TracedRollout:
        group, member = divmod(rollout_id, group_size)
        observed = [after - before for before, after in pairwise(self.read_L)]
        acted_s = [begin - end for end, begin in zip(self.ends_s, self.begins_s[1:], strict=False)][: len(observed)]
        content = {"group": group, "stream": member, "prompt_len": self.read_L[0], "out_lens": self.out_lens}
        episode = RecordedEpisode.model_validate({**content, "obs_lens": observed, "tool_times": acted_s})
        return TracedRollout(episode, reward, tuple(self.begins_s), tuple(self.ends_s))


def read_trace(source: str, *, key: str, group_size: int) -> list[list[TracedRollout]]:
    """Return the rollouts of a run, simulated or real, that were scored: whole groups, in the order of their numbers.

    ``source`` is the run's folder or trace, ``key`` the setting in messages. The seconds of an environment hold its
    failed tries. A run without turns does not record the lengths of its prompts: they are its
    ``workload.prompt_tokens``. Raises ConfigError if it cannot be read, or has no group of ``group_size`` rollouts.
    """
    path = Path(source) / TRACE_FILE if Path(source).is_dir() else Path(source)
    try:
        trace = Trace(path)
        size = trace.config.workload.group_size
        scored = _scored(trace, key=key)
    except TraceError as error:
        raise ConfigError(f"{key}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{key}: {path}: {explain(error, RecordedEpisode)[0]}") from None
    groups = grouped((rollout_id // size, scored[rollout_id]) for rollout_id in sorted(scored))
    whole = [group for group in groups.values() if len(group) == size]
    if size < group_size or not whole:
        raise ConfigError(
            f"{key} must be a run with groups of at least workload.group_size={group_size} rollouts that were scored, "
            f"got {source!r} with {len(whole)} of {size}"
        )
    return whole


def _scored(trace: Trace, *, key: str) -> dict[int, TracedRollout]:
    group_size = trace.config.workload.group_size
    recorded: dict[int, _Recorded] = defaultdict(lambda: _Recorded(trace.config.workload.prompt_tokens))
    scored: dict[int, TracedRollout] = {}
    one_turn = trace.config.environment is None
    for record in trace.records():
        if one_turn and isinstance(record.command, events.StartRollout):
            one = recorded[record.command.rollout_id]
            one.begins_s = one.begins_s or [record.time_s]
        event = record.event
        if isinstance(event, events.ObservationReady):
            if event.read_tokens is None:
                raise ConfigError(f"{key}: {trace.path} was recorded before observed tokens were: record it again")
            one = recorded[event.rollout_id]
            one.read = event.read_tokens
            one.begins_s.append(record.time_s)
        if (
            isinstance(event, events.TurnFinished | events.RolloutFinished) and event.engine is not None
        ):  # else it has ended
            recorded[event.rollout_id].end_turn(record.time_s, event.spans)
        if isinstance(event, events.RolloutFinished | events.RolloutScored) and event.reward is not None:
            number = event.rollout_id
            scored[number] = recorded.pop(number).rollout(number, group_size=group_size, reward=event.reward)
    return scored


# ------------------------------------------------------------------------------ traces of other systems


class _Line(NamedTuple):
    """A line of a file, and its place for messages."""

    where: str
    row: Mapping[str, Any]


def _get(line: _Line, kind: type, *names: str, needed: bool = True) -> Any:
    """Return a field by the first name that is there, dots for tables inside, checked; None if it is not needed."""
    for name in names:
        value: Any = line.row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            rule, fits = _KINDS[kind]
            if not fits(value):
                raise ConfigError(f"{line.where}: {name} must be {rule}, got {shown(value)}")
            return value
    if needed:
        raise ConfigError(f"{line.where}: {names[0]} is missing")
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: (f"a whole number from 0 to {MOST_TOKENS:,}", lambda one: type(one) is int and 0 <= one <= MOST_TOKENS),
    float: ("a number", _is_number),
    list: ("a list of numbers", lambda one: isinstance(one, list) and all(map(_is_number, one))),
    str: ("a string", lambda one: isinstance(one, str)),
}
"""Tokens, milliseconds, lists and names: the rule in words, and whether a value fits."""


def _episode(line: _Line, content: Mapping[str, Any]) -> RecordedEpisode:
    try:
        return RecordedEpisode.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{line.where}: {explain(error, RecordedEpisode)[0]}") from None


Read = tuple[list[RecordedEpisode], list[str]]
"""Episodes in their order, and a sentence for each choice that had to be made."""
Groups = Sequence[Sequence[TracedRollout]]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of traces: ``knows`` its files by their first line; without ``write`` it is only read."""

    name: str
    knows: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Iterator[_Line]], Read]
    lacks: str
    write: Callable[[Groups], Iterator[dict[str, Any]]] | None = None


@dataclass(frozen=True, slots=True)
class ForeignTrace:
    """The workload in another system's trace; ``notes``: what it lacks, and the choices that had to be made."""

    source: str
    format: Format
    episodes: list[RecordedEpisode]
    notes: list[str]

    @property
    def has_turns(self) -> bool:
        """Whether a rollout has several turns."""
        return any(len(one.out_lens) > 1 for one in self.episodes)


def format_of(source: str) -> Format | None:
    """Return the format of another system's trace, by its first line. None: it is no such file."""
    path = Path(source)
    if not path.is_file() or path.suffix == ".csv":
        return None
    try:
        first = read_json(path) if path.suffix == ".json" else next(_lines(path)).row
    except (ConfigError, StopIteration):
        return None
    return next((one for one in FORMATS if isinstance(first, dict) and one.knows(first)), None)


def is_run(source: str) -> bool:
    """Return whether a source is the folder of a run, or its trace."""
    if source.endswith(".jsonl.gz"):
        return format_of(source) is None
    return source != "" and Path(source).is_dir()


def read_foreign(source: str, *, key: str) -> ForeignTrace:
    """Return the workload in another system's trace; ``key`` names it in messages.

    Raises ConfigError if no format knows the file, or at the first fault: file, line, allowed values, value.
    """
    path, found = Path(source), format_of(source)
    if found is None:
        names = ", ".join(one.name for one in FORMATS)
        raise ConfigError(f"{key} must be a file of JSON lines as {names} write them, got {source!r}")
    if path.suffix == ".json":  # UniRL's manifest
        path = path.with_name("workload.jsonl")
    episodes, notes = found.read(_lines(path))
    if not episodes:
        raise ConfigError(f"{key} must hold a request at least, got {source!r}")
    return ForeignTrace(source, found, episodes, [*notes, f"{found.name} does not have: {found.lacks}"])


def comes_in_order(source: str) -> bool:
    """Return whether a source is a run or another system's trace: its groups come in their order."""
    return is_run(source) or format_of(source) is not None


def read_groups(source: str, *, key: str, group_size: int) -> list[list[tuple[RecordedEpisode, float | None]]]:
    """Return the groups, of ``group_size`` at least, of a run or another system's trace in their order, with rewards.

    Of a trace, rollouts of equal prompts make groups, the others groups of the nearest prompt lengths; fewer than
    ``group_size`` are left out. Raises ConfigError as ``read_trace`` and ``read_foreign``, or if there is no group.
    """
    if is_run(source):
        recorded = read_trace(source, key=key, group_size=group_size)
        return [[(one.episode, one.reward) for one in group] for group in recorded]
    episodes = read_foreign(source, key=key).episodes
    alike = grouped((one.group, place) for place, one in enumerate(episodes)).values()
    left = [place for places in alike for place in places[len(places) // group_size * group_size :]]
    left.sort(key=lambda place: (episodes[place].prompt_len, place))
    chunks = [
        places[start : start + group_size]
        for places in (*alike, left)
        for start in range(0, len(places) - group_size + 1, group_size)
    ]
    if not chunks:
        raise ConfigError(f"{key} must hold workload.group_size={group_size} rollouts at least, got {len(episodes)}")
    return [
        [(episodes[place].model_copy(update={"group": number}), None) for place in places]
        for number, places in enumerate(sorted(chunks, key=min))
    ]


def _lines(path: Path) -> Iterator[_Line]:
    for number, line in read_lines(path, packed=path.suffix == ".gz"):
        if line.strip():
            where = f"{path} line {number}"
            row = parse_json(line, where)
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: must be a table, got {shown(row)}")
            yield _Line(where, row)


# ----------------------------------------------------------------------------------------- reading


class _Request(NamedTuple):
    """A request that was read; requests with equal ``prompt`` have equal prompts, None: not known."""

    line: _Line
    session: Hashable
    prompt: Hashable
    read: int
    generated: int
    wait_ms: float | None  # from the end of the turn before; None: not known, or there is none


def _episodes(requests: Iterable[_Request]) -> Read:
    """Return the rollouts of requests in the order of their sessions."""
    sessions: dict[Hashable, list[list[_Request]]] = defaultdict(list)
    for one in requests:
        rollouts = sessions[one.session]
        if rollouts and one.read >= rollouts[-1][-1].read + rollouts[-1][-1].generated:
            rollouts[-1].append(one)
        else:
            rollouts.append([one])
    groups: dict[Hashable, int] = {}
    episodes, unknown = [], 0
    for number, turns in enumerate(turns for rollouts in sessions.values() for turns in rollouts):
        first, later = turns[0], turns[1:]
        content = {
            "group": groups.setdefault(("alone", number) if first.prompt is None else first.prompt, len(groups)),
            "stream": number,
            "prompt_len": first.read,
            "out_lens": [one.generated for one in turns],
            "obs_lens": [after.read - before.read - before.generated for before, after in pairwise(turns)],
            "tool_times": [max(0.0, one.wait_ms or 0.0) / 1e3 for one in later],
        }
        episodes.append(_episode(first.line, content))
        unknown += sum(one.wait_ms is None for one in later)
    notes = [f"{unknown} pauses between turns have no seconds: they are 0 s"] * (unknown > 0)
    if cut := len(episodes) - len(sessions):
        notes.append(f"{cut} requests have less context than their session before: each begins a rollout")
    return episodes, notes


def _read_mooncake(lines: Iterator[_Line]) -> Read:
    rows = [line for line in lines if "schema" not in line.row]  # the header of an agentic trace
    sessions: list[Hashable] = [_get(line, str, "session_id", needed=False) for line in rows]
    linked = 0 if any(sessions) else _link(rows, sessions)
    requests, by_timestamp, before_ms = [], 0, dict[Hashable, float | None]()
    for number, line in enumerate(rows):
        session = number if sessions[number] is None else sessions[number]
        waits_ms = [_get(line, float, *names, needed=False) for names in (("delay", "delay_ms"), ("tool_wait_ms",))]
        given_ms = [one for one in waits_ms if one is not None]
        now_ms, last_ms = _get(line, float, "timestamp", "created_time", needed=False), before_ms.get(session)
        before_ms[session] = now_ms
        if not (given_ms or linked or now_ms is None or last_ms is None):
            given_ms, by_timestamp = [now_ms - last_ms], by_timestamp + 1
        wait_ms = sum(given_ms) if given_ms else None
        tokens = _tokens(line)
        requests.append(_Request(line, session, _prompt(line, "hash_ids", tokens[0]), *tokens, wait_ms))
    episodes, notes = _episodes(requests)
    if linked:
        notes.append(
            f"{linked} of {len(rows)} requests begin with all whole blocks of an earlier one and are its next turns: "
            "there is no session_id"
        )
    if by_timestamp:
        notes.append(f"{by_timestamp} turns without delay wait for the difference of timestamps, engine time included")
    return episodes, notes


def _tokens(line: _Line) -> tuple[int, int]:
    read = _get(line, int, "input_length", "input_tokens")
    return read, _get(line, int, "output_length", "output_tokens")


def _prompt(line: _Line, ids: str, read: int) -> Hashable:
    blocks = _get(line, list, ids, needed=False)
    return None if blocks is None else (*blocks, read)


def _link(rows: Sequence[_Line], sessions: list[Hashable]) -> int:
    """Set the session of each request, and return how many requests continue an earlier one.

    An id stands for the prompt up to the end of its block. A request continues another if it has the id of that one's
    last block but one, which is whole, and room for its answer; of several the one with the longest context. An id
    that prompts with other beginnings have, too, is of a common system prompt and links nothing.
    """
    ends: dict[tuple[int, int], list[tuple[int, int, Hashable]]] = defaultdict(list)  # context, number, session
    prompts: dict[int, Hashable] = {}  # the first prompt of the rollouts that have the id; None: of several
    first: dict[Hashable, Hashable] = {}  # of each session
    linked = 0
    for number, line in enumerate(rows):
        ids, (read, generated) = _get(line, list, "hash_ids", needed=False) or [], _tokens(line)
        sessions[number] = number
        for place in range(len(ids) - 1, -1, -1):
            open_ = ends.get((place, ids[place]), []) if prompts.get(ids[place], ()) is not None else []
            if fits := bisect_right(open_, read, key=lambda one: one[0]):
                sessions[number], linked = open_.pop(fits - 1)[2], linked + 1
                break
        prompt = first.setdefault(sessions[number], tuple(ids))
        prompts.update((one, prompt if prompts.get(one, prompt) == prompt else None) for one in ids)
        if len(ids) > 1:
            insort(ends[len(ids) - 2, ids[-2]], (read + generated, number, sessions[number]), key=lambda one: one[:2])
    return linked


def _event(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of a line of Dynamo's, which some sinks put into ``event``."""
    event = row.get("event")
    return event if isinstance(event, dict) else row


def _read_dynamo(lines: Iterator[_Line]) -> Read:
    records = [_Line(line.where, _event(line.row)) for line in lines]
    ends = [line for line in records if line.row.get("event_type") == "request_end"]
    ends.sort(key=lambda line: _get(line, float, "request.request_received_ms"))
    requests, end_ms = [], dict[Hashable, float]()
    for number, line in enumerate(ends):
        session: Hashable = _get(line, str, "agent_context.session_id", needed=False) or number
        begin_ms = line.row["request"]["request_received_ms"]
        total_ms = _get(line, float, "request.total_time_ms", needed=False)
        wait_ms = begin_ms - end_ms[session] if session in end_ms else None
        end_ms[session] = _get(line, float, "event_time_unix_ms") if total_ms is None else begin_ms + total_ms
        tokens = _get(line, int, "request.replay.input_length"), _get(line, int, "request.output_tokens")
        prompt = _prompt(line, "request.replay.input_sequence_hashes", tokens[0])
        requests.append(_Request(line, session, prompt, *tokens, wait_ms))
    return _episodes(requests)


def _read_unirl(lines: Iterator[_Line]) -> Read:
    requests = []
    for line in sorted(lines, key=lambda line: _get(line, int, "turn_index")):  # rollouts stay in the file's order
        group, wait_ms = _get(line, str, "group_id"), _get(line, float, "arrival.external_delay_ms", needed=False)
        requests.append(_Request(line, (group, _get(line, str, "trajectory_id")), group, *_tokens(line), wait_ms))
    return _episodes(requests)


def _read_applied_compute(lines: Iterator[_Line]) -> Read:
    episodes = []
    for number, line in enumerate(lines):
        last = _get(line, int, "final_assistant_response_length")
        content = {
            "group": number, "stream": 0, "prompt_len": _get(line, int, "input_prompt_length"),
            "out_lens": [*_get(line, list, "assistant_response_length"), last],
            "obs_lens": _get(line, list, "tool_call_output_length"),
            "tool_times": _get(line, list, "tool_call_latency"),
        }  # fmt: skip
        episodes.append(_episode(line, content))
    return episodes, []


# ----------------------------------------------------------------------------------------- writing


def _requests(groups: Groups) -> list[tuple[dict[str, Any], float]]:
    """Return Mooncake's line and the end (ms) of each turn of a run, by their begin; a group shares a common prompt."""
    numbers: dict[Hashable, int] = {}
    rollouts = [one for group in groups for one in group]
    has_turns = any(len(one.episode.out_lens) > 1 for one in rollouts)
    rows: list[tuple[dict[str, Any], float]] = []
    for rollout in rollouts:
        one = rollout.episode
        read = prompt = max(1, one.prompt_len)  # an empty prompt is no request
        shared, session = (one.group, prompt), f"{one.group}-{one.stream}"
        for number, generated in enumerate(one.out_lens):
            blocks = [(start, min(read, start + BLOCK_TOKENS)) for start in range(0, read, BLOCK_TOKENS)]
            keys = [(shared if block[1] <= prompt else session, block) for block in blocks]
            ids = [numbers.setdefault(key, len(numbers)) for key in keys]
            begin_ms = rollout.begins_s[number] * 1e3
            row = {"timestamp": begin_ms, "input_length": read, "output_length": generated, "hash_ids": ids}
            if has_turns:
                row["session_id"] = session
            if number:
                row["delay"] = one.tool_times[number - 1] * 1e3
            rows.append((row, rollout.ends_s[number] * 1e3))
            read += generated + (one.obs_lens[number] if number < len(one.obs_lens) else 0)
    return sorted(rows, key=lambda one: one[0]["timestamp"])


def _write_dynamo(groups: Groups) -> Iterator[dict[str, Any]]:
    for number, (row, end_ms) in enumerate(_requests(groups)):
        begin_ms, read, ids = round(row["timestamp"]), row["input_length"], row["hash_ids"]
        request = {
            "request_id": str(number), "input_tokens": read, "output_tokens": row["output_length"],
            "request_received_ms": begin_ms, "total_time_ms": max(0.0, end_ms - begin_ms),
            "replay": {"trace_block_size": BLOCK_TOKENS, "input_length": read, "input_sequence_hashes": ids},
        }  # fmt: skip
        context = {"agent_context": {"session_id": row["session_id"]}} if "session_id" in row else {}
        head = {"schema": DYNAMO, "event_type": "request_end", "event_time_unix_ms": round(end_ms)}
        yield {**head, **context, "request": request}


def write_foreign(run: Path, out: Path, name: str) -> list[str]:
    """Write the requests of a run's scored rollouts as JSON lines, whole or not at all; return what was written.

    Raises ConfigError if the format is not written, the file exists, or as ``read_trace``.
    """
    writers = {one.name: (one.write, one.lacks) for one in FORMATS if one.write is not None}
    if name not in writers:
        raise ConfigError(f"--to must be {' or '.join(sorted(writers))}, got {name!r}")
    if out.exists():
        raise ConfigError(f"--out must be a new file, got {out}, which exists")
    (write, lacks), groups = writers[name], read_trace(str(run), key="RUN", group_size=1)
    rows = [f"{json.dumps(row)}\n" for row in write(groups)]
    write_whole(out, "".join(rows))
    rollouts = f"{len(rows)} requests of {sum(map(len, groups))} rollouts in {len(groups)} groups"
    left_out = "left out: rollouts that were not scored, or not in a whole group"
    return [f"{rollouts}, blocks of {BLOCK_TOKENS} tokens; {left_out}", f"{name} does not have: {lacks}"]


# ----------------------------------------------------------------------------------------- formats

_NEITHER, _LOST = "groups, rewards, arrivals", "groups but by equal prompts, rewards, versions of weights"
FORMATS = (
    Format("dynamo", lambda row: _event(row).get("schema") == DYNAMO, _read_dynamo, _LOST, _write_dynamo),
    Format("unirl", lambda row: row.get("schema_version") == "unirl.rollout.trace.v1", _read_unirl, "rewards"),
    Format("applied-compute", lambda row: "assistant_response_length" in row, _read_applied_compute, _NEITHER),
    Format(
        "mooncake",
        lambda row: row.get("schema") == "dynamo.agentic_mooncake" or not {"hash_ids", "output_length"}.isdisjoint(row),
        _read_mooncake,
        f"ends of answers, {_LOST}",
        lambda groups: (row for row, _ in _requests(groups)),
    ),
)
"""All formats; the first that knows a file reads it."""


# ------------------------------------------------------------------------------------- run files


def run_keys(trace: ForeignTrace, config: RunConfig) -> list[str]:
    """Return the settings, as of ``--set``, that make a trace the workload of a run.

    If it has turns and the run no environments, an environment for each slot of the engines.
    """
    episodes, environment = trace.episodes, config.environment
    longest = max(1, *(tokens for one in episodes for tokens in one.out_lens))
    if environment is None and not trace.has_turns:
        length = {"kind": "empirical", "source": trace.source, "max": longest}
        prompt = max(one.prompt_len for one in episodes)
        return [f"workload.prompt_tokens={prompt}", f"workload.length={_inline(length)}"]
    turns = _inline({"kind": "recorded", "source": trace.source, **_limits(episodes)})
    keys = ["workload.prompt_tokens=0", f"workload.length={_inline({'kind': 'fixed', 'max': longest})}"]
    if environment is None:
        return [*keys, f"environment={{ count = {config.num_slots}, turns = {turns} }}"]
    return [*keys, f"environment.turns={turns}"]


def run_tables(trace: ForeignTrace) -> dict[str, Any]:
    """Return ``[workload]``, and with turns ``[environment]`` without its count: means and spreads of a trace."""
    episodes = trace.episodes
    generated = [max(1, tokens) for one in episodes for tokens in one.out_lens]
    mean, cv = _spread(generated)
    spread = {"kind": "lognormal", "mean": mean, "cv": cv} if cv else {"kind": "fixed"}
    sizes = Counter(Counter(one.group for one in episodes).values())
    workload = {
        "group_size": sizes.most_common(1)[0][0],
        "prompt_tokens": round(float(np.mean([one.prompt_len for one in episodes]))),
        "length": {**spread, "max": max(generated)},
    }
    if not trace.has_turns:
        return {"workload": workload}
    turns, turns_cv = _spread([len(one.out_lens) for one in episodes])
    observed, observed_cv = _spread([tokens for one in episodes for tokens in one.obs_lens])
    step_s, step_cv = _spread([seconds for one in episodes for seconds in one.tool_times])
    means = {"mean": turns, "cv": turns_cv, "observation_tokens": observed, "observation_cv": observed_cv}
    table = {"kind": "lognormal", **means, **_limits(episodes)}
    return {"workload": workload, "environment": {"step_s": step_s, "step_cv": step_cv, "turns": table}}


def _limits(episodes: Sequence[RecordedEpisode]) -> dict[str, int]:
    return {
        "max": max(len(one.out_lens) for one in episodes),
        "observation_max": max((tokens for one in episodes for tokens in one.obs_lens), default=0),
        "context_max": max(1, *(one.prompt_len + sum(one.out_lens) + sum(one.obs_lens) for one in episodes)),
    }


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation over mean, to four digits."""
    mean, deviation = float(np.mean(values)), float(np.std(values))
    return float(f"{mean:.4g}"), float(f"{deviation / mean:.4g}") if deviation > 1e-9 * mean else 0.0


def _inline(table: Mapping[str, Any]) -> str:
    return f"{{ {', '.join(f'{key} = {json.dumps(value, ensure_ascii=False)}' for key, value in table.items())} }}"
