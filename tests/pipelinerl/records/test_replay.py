"""Replay: the same commands again, and the first difference of a changed trace."""

import json
import signal
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import CASES, lines_of, recorded, rewritten, run

from pipelinerl.errors import RunFailedError, TraceError
from pipelinerl.records.trace import ReplayResult, Trace, TraceWriter, replay
from pipelinerl.scheduler.events import (
    RolloutAborted,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    StartTraining,
    Stop,
    StopReason,
    TrainingFinished,
    VersionSpans,
)


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_a_run_replays_to_the_same_commands(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    trace = Trace(recorded(tmp_path, *overrides))
    records = list(trace.records())
    num_commands = sum(one.command is not None for one in records)
    assert num_commands > 20
    assert replay(trace) == ReplayResult(len(records) - num_commands, num_commands, None)


@pytest.mark.parametrize("overrides", [case for case in CASES if "scheduler.max_lag=1" not in case], ids=" ".join)
@pytest.mark.parametrize("step", [1, 4])
def test_an_interrupted_run_replays_up_to_where_it_was_interrupted(
    tmp_path: Path, overrides: tuple[str, ...], step: int
) -> None:
    def interrupt(row: Any) -> None:
        if row.step == step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunFailedError, match="interrupted; what was finished is kept"):
        recorded(tmp_path, *overrides, on_step=interrupt)
    trace = Trace(tmp_path / "trace.jsonl.gz")
    records = list(trace.records())
    assert not any(isinstance(one.command, Stop) for one in records)
    idle = "scheduler.max_lag=0" in overrides or "scheduler.kind=conventional" in overrides
    assert isinstance(records[-1].event, RolloutAborted) is not idle  # what was in progress, if anything was
    result = replay(trace)
    assert result.difference is None
    assert result.num_commands == sum(one.command is not None for one in records)


def test_a_run_interrupted_with_one_rollout_in_progress_replays(tmp_path: Path) -> None:
    """The abort of that one is the last line; what the scheduler answers to it was never asked."""
    path = one_rollout(tmp_path)[0]
    lines = lines_of(path)
    aborted = '{"t":0.5,"event":"RolloutAborted","rollout_id":0,"engine":0,"spans":[]}'
    assert replay(Trace(rewritten(path, [*lines[:2], aborted]))) == ReplayResult(1, 1, None)


def one_rollout(folder: Path) -> tuple[Path, list[str]]:
    """Write the trace of one optimizer step with one rollout, and return it with its lines."""
    config = run(
        "optimizer_steps=1",
        "workload.group_size=1",
        "scheduler={train_batch_size=1, generation_batch_size=1, kind='conventional'}",
        "cluster={accelerators=1}",
    )
    path = folder / "one.gz"
    spans = VersionSpans((0,), (9,))
    with closing(TraceWriter(path, config)) as trace:
        trace.command(0.0, StartRollout(0, 0, 0, 0))
        trace.event(1.0, RolloutFinished(0, 0, spans))
        trace.event(1.0, RolloutScored(0, 1.0))
        trace.command(1.0, StartTraining((0,), 0, True))
        trace.event(2.0, TrainingFinished(1, 1.0))
        trace.command(2.0, Stop(StopReason.DONE))
    return path, lines_of(path)


FINISHED = "RolloutFinished(rollout_id=0, engine=0, spans=VersionSpans(versions=(0,), ends=(9,)), reward=None)"
SCORED = "RolloutScored(rollout_id=0, reward=1.0)"
TRAINED = "TrainingFinished(version=1, train_s=1.0)"
START = "StartRollout(rollout_id=0, prompt_id=0, engine=0, kept_tokens=0)"
TRAIN = "StartTraining(rollout_ids=(0,), version=0, completes_step=True)"
STOP = "Stop(reason=<StopReason.DONE: 'done'>)"


TAMPERINGS: list[tuple[str, Callable[[list[str]], list[str]], ReplayResult]] = [
    ("another first command", lambda lines: [lines[0], lines[1].replace('"prompt_id":0', '"prompt_id":5'), *lines[2:]],
        ReplayResult(0, 0,
        f"line 2, after start(): recorded {START.replace('prompt_id=0', 'prompt_id=5')}, now {START}")),
    ("another command", lambda lines: [*lines[:4], lines[4].replace("true", "false"), *lines[5:]],
        ReplayResult(2, 1, f"line 5, after {SCORED}: recorded {TRAIN.replace('True', 'False')}, now {TRAIN}")),
    ("another reason", lambda lines: [*lines[:6], lines[6].replace("done", "stalled")],
        ReplayResult(3, 2,
        f"line 7, after {TRAINED}: recorded Stop(reason=<StopReason.STALLED: 'stalled'>), now {STOP}")),
    ("a command too many", lambda lines: [*lines[:2], lines[1], *lines[2:]],
        ReplayResult(0, 1, f"line 3, after start(): recorded {START}, now nothing more")),
    ("a command missing", lambda lines: [*lines[:4], *lines[5:]],
        ReplayResult(2, 1, f"line 5, after {SCORED}: recorded nothing more, now {TRAIN}")),
    ("the first command missing", lambda lines: [lines[0], *lines[2:]],
        ReplayResult(0, 0, f"line 2, after start(): recorded nothing more, now {START}")),
    ("the last command missing", lambda lines: lines[:6],
        ReplayResult(3, 2, f"end of trace, after {TRAINED}: recorded nothing more, now {STOP}")),
    ("nothing but the header", lambda lines: lines[:1],
        ReplayResult(0, 0, f"end of trace, after start(): recorded nothing more, now {START}")),
    ("an event missing", lambda lines: [*lines[:3], *lines[4:]],
        ReplayResult(1, 1, f"line 4, after {FINISHED}: recorded {TRAIN}, now nothing more")),
    ("an impossible event", lambda lines: [*lines[:2], lines[2].replace('"engine":0', '"engine":1'), *lines[3:]],
        ReplayResult(1, 1, "line 3: the scheduler cannot handle the end of rollout 0 on engine 1: it is not there")),
    ("a made-up abort in place of an answer", lambda lines: [*lines[:4], lines[2].replace("Finished", "Aborted")],
        ReplayResult(2, 1, f"line 5, after {SCORED}: recorded nothing more, now {TRAIN}")),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "result"), [case[1:] for case in TAMPERINGS], ids=[case[0] for case in TAMPERINGS])
def test_replay_names_the_first_difference_and_its_line(
    tmp_path: Path, tamper: Callable[[list[str]], list[str]], result: ReplayResult
) -> None:
    path, lines = one_rollout(tmp_path)
    changed = tamper(lines)
    assert changed != lines
    assert replay(Trace(rewritten(path, changed))) == result


def test_events_after_the_stop_must_be_possible_too(tmp_path: Path) -> None:
    path, lines = one_rollout(tmp_path)
    rewritten(path, [*lines, '{"t":2.0,"event":"RolloutFailed","rollout_id":5,"engine":0}'])
    assert replay(Trace(path)).difference == (
        "line 8: the scheduler cannot handle the end of rollout 5 on engine 0: it is not there"
    )


@cache
def simulated_lines(folder: Path) -> tuple[str, ...]:
    overrides = ("scheduler.max_lag=1", "scheduler.on_stale=requeue", "scheduler.weight_update=abort")
    overrides += ("optimizer_steps=3",)
    return tuple(lines_of(recorded(folder / "to_tamper_with", *overrides)))


@settings(deadline=None)
@given(st.data())
def test_a_command_that_is_missing_or_changed_anywhere_is_noticed_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = list(simulated_lines(folder))
    commands = [number for number, line in enumerate(lines) if '"command"' in line]
    number = data.draw(st.sampled_from(commands))
    if data.draw(st.booleans()):
        del lines[number]
    else:
        one = json.loads(lines[number])
        changes = {"rollout_id": 10**6, "rollout_ids": [], "version": 99, "reason": "stalled"}
        key = next(key for key in changes if key in one)
        lines[number] = json.dumps(one | {key: changes[key] if one["command"] != "DiscardRollouts" else [0, 0]})
    result = replay(Trace(rewritten(folder / "tampered.gz", lines)))
    assert result.difference is not None
    assert result.num_commands == commands.index(number)
    assert result.difference.startswith(f"line {number + 1}, after " if number < len(lines) else "end of trace, after ")


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**30), st.floats(), st.text(max_size=3), st.lists(st.integers())
)


@settings(deadline=None)
@given(st.data())
def test_no_line_however_wrong_makes_replay_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = list(simulated_lines(folder))
    number = data.draw(st.integers(1, len(lines) - 1))
    one = json.loads(lines[number])
    one[data.draw(st.sampled_from(sorted(one)))] = data.draw(JUNK)
    lines[number] = json.dumps(one)
    if data.draw(st.booleans()):
        other = data.draw(st.integers(1, len(lines) - 1))
        lines[number], lines[other] = lines[other], lines[number]
    rewritten(folder / "tampered.gz", lines)
    found = outcome(folder / "tampered.gz")
    assert found is None or "line " in found or found.startswith("end of trace")


def outcome(path: Path) -> str | None:
    """Return what is wrong with a trace: broken or different."""
    try:
        return replay(Trace(path)).difference
    except TraceError as error:
        return str(error)
