"""Traces: what is written is read back, and the line for a broken one."""

import gzip
import json
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import lines_of, recorded, rewritten, run

from pipelinerl.errors import RunFailedError, TraceError
from pipelinerl.records.trace import Record, Trace, TraceWriter
from pipelinerl.scheduler import events as ev
from pipelinerl.scheduler.events import Command, Event, VersionSpans

EXAMPLES: list[tuple[Event | Command, str]] = [
    (ev.StartRollout(71, 8, 0, 20),
        '"command":"StartRollout","rollout_id":71,"prompt_id":8,"engine":0,"kept_tokens":20'),
    (ev.OpenEnvironment(71, 8), '"command":"OpenEnvironment","rollout_id":71,"prompt_id":8'),
    (ev.AbortRollout(71, 0), '"command":"AbortRollout","rollout_id":71,"engine":0'),
    (ev.DiscardRollouts((4, 5), ev.DiscardReason.NO_SIGNAL),
        '"command":"DiscardRollouts","rollout_ids":[4,5],"reason":"no_signal"'),
    (ev.StartTraining((6, 7), 3, True),
        '"command":"StartTraining","rollout_ids":[6,7],"version":3,"completes_step":true'),
    (ev.PublishWeights(4, ev.WeightUpdate.WAIT), '"command":"PublishWeights","version":4,"weight_update":"wait"'),
    (ev.Stop(ev.StopReason.STALLED), '"command":"Stop","reason":"stalled"'),
    (ev.RolloutFinished(7, 1, VersionSpans((3, 4), (100, 180))),
        '"event":"RolloutFinished","rollout_id":7,"engine":1,"spans":[[3,0,100],[4,100,180]],"reward":null'),
    (ev.RolloutFinished(7, 1, VersionSpans((3,), (100,)), 0.5),
        '"event":"RolloutFinished","rollout_id":7,"engine":1,"spans":[[3,0,100]],"reward":0.5'),
    (ev.TurnFinished(7, 1, VersionSpans((3,), (100,))),
        '"event":"TurnFinished","rollout_id":7,"engine":1,"spans":[[3,0,100]]'),
    (ev.ObservationReady(7, 30), '"event":"ObservationReady","rollout_id":7,"read_tokens":30'),
    (
        ev.EnvironmentFailed(7, ev.EnvironmentFault.TIMEOUT, again=True),
        '"event":"EnvironmentFailed","rollout_id":7,"fault":"timeout","again":true',
    ),
    (ev.RolloutScored(7, 0.5), '"event":"RolloutScored","rollout_id":7,"reward":0.5'),
    (ev.RolloutAborted(8, 1, ev.NO_TOKENS), '"event":"RolloutAborted","rollout_id":8,"engine":1,"spans":[]'),
    (ev.RolloutPreempted(8, 1, 5), '"event":"RolloutPreempted","rollout_id":8,"engine":1,"num_tokens":5'),
    (ev.KVCacheUsed(1, 0.75), '"event":"KVCacheUsed","engine":1,"share":0.75'),
    (ev.RolloutFailed(9), '"event":"RolloutFailed","rollout_id":9,"engine":null'),
    (ev.RolloutFailed(9, 1), '"event":"RolloutFailed","rollout_id":9,"engine":1'),
    (ev.StepsRaised(9), '"event":"StepsRaised","optimizer_steps":9'),
    (ev.TrainingFinished(4, 2.25), '"event":"TrainingFinished","version":4,"train_s":2.25'),
    (ev.WeightsPublished(4, 0.5), '"event":"WeightsPublished","version":4,"publish_s":0.5'),
    (ev.WeightsLoaded(1, 4, 0.0), '"event":"WeightsLoaded","engine":1,"version":4,"pause_s":0.0'),
    (ev.EngineJoined(4, 3), '"event":"EngineJoined","engine":4,"version":3'),
    (ev.EngineLeaving(4), '"event":"EngineLeaving","engine":4'),
    (ev.EngineLeft(4), '"event":"EngineLeft","engine":4,"lost_tokens":null'),
    (ev.EngineLeft(4, 12), '"event":"EngineLeft","engine":4,"lost_tokens":12'),
]  # fmt: skip
"""Every event and command, and how a trace writes it."""


def write(path: Path, *contents: Event | Command) -> Path:
    """Write a trace of these, one second apart."""
    with closing(TraceWriter(path, run())) as trace:
        for time_s, one in enumerate(contents):
            (trace.event if isinstance(one, get_args(Event)) else trace.command)(float(time_s), one)
    return path


def record(line: int, one: Event | Command) -> Record:
    if isinstance(one, get_args(Event)):
        return Record(line, line - 2.0, one, None)
    return Record(line, line - 2.0, None, one)


def fault(path: Path) -> str:
    """Return the line that reading the whole trace ends with."""
    with pytest.raises(TraceError) as caught:
        list(Trace(path).records())
    return str(caught.value)


def test_a_trace_is_the_configuration_then_a_line_per_event_and_command(tmp_path: Path) -> None:
    header, *lines = lines_of(write(tmp_path / "trace", *(one for one, _ in EXAMPLES)))
    assert json.loads(header) == {
        "format": "pipelinerl-trace",
        "format_version": 4,
        "config": run().model_dump(mode="json", exclude_none=True),
    }
    assert lines == [f'{{"t":{float(time_s)},{text}}}' for time_s, (_, text) in enumerate(EXAMPLES)]


def test_every_event_and_command_is_in_this_test() -> None:
    assert {type(one) for one, _ in EXAMPLES} == {*get_args(Event), *get_args(Command)}


def test_records_are_read_back_with_their_types_lines_and_times(tmp_path: Path) -> None:
    contents = [one for one, _ in EXAMPLES]
    trace = Trace(write(tmp_path / "trace", *contents))
    assert trace.config == run()
    records = list(trace.records())
    assert records == [record(line, one) for line, one in enumerate(contents, start=2)]
    assert records == list(trace.records())  # it can be read again
    for written, read in zip(contents, records, strict=True):
        again = read.event if read.event is not None else read.command
        for field in fields(written):
            assert type(getattr(again, field.name)) is type(getattr(written, field.name)), field


whole = st.integers(0, 2**60)
versions = st.lists(whole, unique=True, max_size=5).map(sorted)
spans = versions.flatmap(
    lambda some: st.lists(whole.map(lambda one: one + 1), unique=True, min_size=len(some), max_size=len(some)).map(
        lambda ends: VersionSpans(tuple(some), tuple(sorted(ends)))
    )
)
VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: whole,
    float: st.floats(-1e12, 1e12),
    bool: st.booleans(),
    VersionSpans: spans,
    tuple: st.lists(whole, max_size=9).map(tuple),
}


def with_other_values(one: Event | Command) -> st.SearchStrategy[Event | Command]:
    kinds = {field.name: type(getattr(one, field.name)) for field in fields(one)}
    return st.builds(partial(replace, one), **{name: VALUES[kind] for name, kind in kinds.items() if kind in VALUES})


contents = st.sampled_from([one for one, _ in EXAMPLES]).flatmap(with_other_values)


@settings(deadline=None)
@given(st.lists(contents, max_size=20))
def test_any_events_and_commands_come_back_equal(
    tmp_path_factory: pytest.TempPathFactory, some: list[Event | Command]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.gz", *some)
    assert list(Trace(path).records()) == [record(line, one) for line, one in enumerate(some, start=2)]


def test_the_compressed_file_has_neither_its_name_nor_its_time(tmp_path: Path) -> None:
    """The header of gzip (RFC 1952): no file name flag, no modification time."""
    assert recorded(tmp_path).read_bytes()[3:8] == bytes(5)


def header(version: str, config: str = "{}") -> str:
    return f'{{"format": "pipelinerl-trace", "format_version": {version}, "config": {config}}}'


NO_HEADER = "{path} is not a trace: its first line must be a pipelinerl-trace header"
OLDER = "the version of the program that wrote it reads it"
NO_TRACES: list[tuple[bytes | list[str], str]] = [
    (b"optimizer_steps = 5", "cannot read trace {path}: Not a gzipped file (b'op')"),
    (b"", NO_HEADER),
    *((lines, NO_HEADER) for lines in ([], ["{}"], ["[1]"], ["null"], ['{"format": "other"}'])),
    ([header("1")], f"{{path}} has trace format version 1, this program reads 4; {OLDER}"),
    ([header("null")], f"{{path}} has trace format version None, this program reads 4; {OLDER}"),
    ([header("3")], f"{{path}} has trace format version 3, this program reads 4; {OLDER}"),
    ([header('"2"')], f"{{path}} has trace format version 2, this program reads 4; {OLDER}"),
    ([header("4", "[]")], "{path}, line 1: the root must be a table, got []"),
    ([header("4", "{}")], "{path}, line 1: optimizer_steps is missing"),  # the first fault
]
"""What is in a file, or in its compressed lines."""


@pytest.mark.parametrize(("content", "line"), NO_TRACES)
def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, content: bytes | list[str], line: str) -> None:
    path = tmp_path / "trace"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        rewritten(path, content)
    assert fault(path) == line.format(path=path)


def test_a_missing_trace_is_one_line(tmp_path: Path) -> None:
    assert fault(tmp_path / "no.gz") == f"cannot read trace {tmp_path}/no.gz: No such file or directory"
    assert fault(tmp_path) == f"cannot read trace {tmp_path}: Is a directory"


BROKEN = [
    ("garbage", "line 3 is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    ("", "line 3 is not valid JSON: Expecting value: line 2 column 1 (char 1)"),
    ("[" * 100_000, "line 3 is not valid JSON: maximum recursion depth exceeded while decoding a JSON array"),
    ("5", "line 3: broken record (TypeError(\"'int' object is not subscriptable\"))"),
    ("[]", "line 3: broken record (TypeError('list indices must be integers or slices, not str'))"),
    ("{}", "line 3: broken record (KeyError('t'))"),
    ('{"t": 0}', "line 3: broken record (KeyError('command'))"),
    ('{"t": null, "event": "RolloutFailed"}', "line 3: broken record (TypeError("),
    ('{"t": 0, "event": "RolloutFailed"}', "line 3: broken record (KeyError('rollout_id'))"),
    ('{"t": 0, "event": "StartRollout"}', "line 3: broken record (KeyError('StartRollout'))"),
    ('{"t": 0, "command": "RolloutFailed"}', "line 3: broken record (KeyError('RolloutFailed'))"),
    ('{"t": 0, "command": []}', "line 3: broken record (TypeError(\"unhashable type: 'list'\"))"),
    ('{"t": 0, "command": "Stop", "reason": "bored"}', "line 3: broken record (ValueError("),
    ('{"t": 0, "command": "Stop", "reason": "stale"}', "line 3: broken record (ValueError("),  # a reason to discard
    ('{"t": 0, "command": "AbortRollout", "rollout_id": "7", "engine": 0}', "line 3: broken record (TypeError("),
    ('{"t": 0, "command": "AbortRollout", "rollout_id": 7.0, "engine": 0}', "line 3: broken record (TypeError("),
    ('{"t": 0, "command": "AbortRollout", "rollout_id": [], "engine": 0}', "line 3: broken record (TypeError("),
    ('{"t": 0, "event": "RolloutScored", "rollout_id": 7, "reward": []}', "line 3: broken record (TypeError("),
    (f'{{"t": 0, "event": "RolloutScored", "rollout_id": 7, "reward": 1{"0" * 400}}}',
        "line 3: broken record (OverflowError("),
    ('{"t": 0, "event": "RolloutFinished", "rollout_id": 7, "engine": 0, "spans": [[0, 0, 5], [1, 6, 9]]}',
        "line 3: broken record (ValueError('spans must follow each other from token 0, got [[0, 0, 5], [1, 6, 9]]'))"),
    ('{"t": 0, "event": "RolloutFinished", "rollout_id": 7, "engine": 0, "spans": [[0, 1, 5]]}',
        "line 3: broken record (ValueError('spans must follow each other from token 0, got [[0, 1, 5]]'))"),
    ('{"t": 0, "event": "RolloutFinished", "rollout_id": 7, "engine": 0, "spans": [[0, 5]]}',
        "line 3: broken record (ValueError('not enough values to unpack (expected 3, got 2)'))"),
]  # fmt: skip


def test_a_trace_from_before_observations_were_counted_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", ev.ObservationReady(7, 30))
    rewritten(path, [line.replace(',"read_tokens":30', "") for line in lines_of(path)])
    assert [one.event for one in Trace(path).records()] == [ev.ObservationReady(7, None)]


@pytest.mark.parametrize(("text", "reason"), BROKEN, ids=[reason[8:40] for _, reason in BROKEN])
def test_a_broken_line_is_reported_with_its_number_after_the_lines_before_it(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = write(tmp_path / "trace", ev.RolloutFailed(1), ev.RolloutFailed(2), ev.RolloutFailed(3))
    lines = lines_of(path)
    rewritten(path, [*lines[:2], text, *lines[3:]])
    line = fault(path)
    assert line.startswith(f"{path}, {reason}")
    assert "\n" not in line
    assert next(Trace(path).records()) == record(2, ev.RolloutFailed(1))


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    header = lines_of(write(path))[0].encode()
    path.write_bytes(gzip.compress(header + b"\n\xff\n"))
    assert fault(path) == f"cannot read trace {path}: it is not UTF-8 text"


def test_a_trace_that_is_cut_off_gives_what_it_has_and_then_one_line(tmp_path: Path) -> None:
    events = [ev.RolloutFailed(number * 7919) for number in range(20_000)]
    path = write(tmp_path / "trace", *events)
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[: len(whole_file) // 2])
    seen = []
    with pytest.raises(TraceError) as caught:
        seen.extend(Trace(path).records())
    assert str(caught.value) == f"{path} is cut off after line {len(seen) + 1}"
    assert seen == [record(line, one) for line, one in enumerate(events[: len(seen)], start=2)]
    assert 8_000 < len(seen) < 12_000  # half the bytes hold about half the lines


def test_a_flipped_byte_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", *(ev.RolloutFailed(number) for number in range(1000)))
    data = bytearray(path.read_bytes())
    for place in range(20, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        line = fault(path)
        assert str(path) in line
        assert "\n" not in line


def test_a_reward_that_is_no_number_is_written_as_json_has_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with closing(TraceWriter(path, run())) as trace:
        trace.event(float("inf"), ev.RolloutFinished(0, None, VersionSpans((0,), (1,)), float("nan")))
    line = lines_of(path)[-1]
    assert json.loads(line)["reward"] != json.loads(line)["reward"]
    assert '"t":Infinity' in line
    assert '"engine":null' in line


def test_after_a_mark_on_a_full_disk_an_event_does_not_hide_it() -> None:
    trace = TraceWriter(Path("/dev/full"), run())
    for write in (trace.mark, trace.close):
        with pytest.raises(RunFailedError, match=r"^cannot write /dev/full: No space left on device$"):
            write()
        if write == trace.mark:
            trace.event(1.0, ev.RolloutFailed(9))
