"""A run as a timeline for ui.perfetto.dev or chrome://tracing: the JSON of the Trace Event Format.

Theory of operation. One pass over a run's trace. An activity becomes a slice when it ends; a track is a thread of the
format. Slices of a thread must not overlap, so an engine has ``LANES`` *lanes*: a rollout takes the first free one, and
is left out if none is free. Environments likewise. A weight update is an arrow from the trainer's slice to the slice of
each engine that loads it. Each rank of a real trainer has a track: the phases of a step, whose seconds are in the
metrics, follow each other from the start of the step. Counters change at every optimizer step, counters of engines at
most every ``COUNTER_STEP`` of the shown time.

Source: Chromium's Catapult project: phases X (a slice), s and f (an arrow), C (a counter), i (an instant), M (a name);
times in microseconds.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from analysis.read import read_metrics
from pipelinerl.errors import ConfigError, TraceError
from pipelinerl.records.run_folder import METRICS_FILE, TRACE_FILE, writing
from pipelinerl.records.steps import STEPS_FILE, read_steps
from pipelinerl.records.trace import Record, Trace
from pipelinerl.scheduler import events

LANES = 8
"""Rollouts of an engine that are shown at a time (count)."""
ENVIRONMENTS = 64
"""Environments that are shown (count)."""
MAX_ENTRIES = 400_000
"""Most entries of a file (count), about 60 MB; the rest is cut."""
COUNTERS = {"lag_mean": "mean lag", "in_progress": "in progress", "ready": "ready"}
"""Columns of optimizer steps that are counters, by name."""
COUNTER_STEP = 1e-3
"""Shortest time between two values of a counter (share of the run)."""
WEIGHTS, FIRST_LANE = 1, 2
"""Threads of an engine; readers treat thread 0 as the main thread of the process."""
FIRST_RANK = 10
RANK_SECONDS = re.compile(r"train/rank([0-9]+)/([a-z]+)_s")
RUN, TRAINER, SANDBOXES, FIRST_ENGINE = 1, 2, 3, 10


@dataclass(slots=True)
class Counts:
    """Events in the shown time, with or without a lane."""

    optimizer_steps: int = 0
    rollouts_finished: int = 0
    weights_loaded: int = 0
    stays_left_out: int = 0
    """Stays on an engine or in an environment that found no free lane."""
    cut_at_s: float | None = None


@dataclass(slots=True)
class _Lanes:
    free: list[int]
    open: dict[int, tuple[int, float]] = field(default_factory=dict)

    def enter(self, rollout_id: int, time_s: float) -> bool:
        if not self.free:
            return False
        self.open[rollout_id] = (heapq.heappop(self.free), time_s)
        return True

    def leave(self, rollout_id: int) -> tuple[int, float] | None:
        stay = self.open.pop(rollout_id, None)
        if stay is not None:
            heapq.heappush(self.free, stay[0])
        return stay


class Timeline:
    """Makes the entries of a file, from ``begin_s`` to ``end_s``."""

    def __init__(
        self, *, num_engines: int, num_environments: int, begin_s: float, end_s: float, duration_s: float
    ) -> None:
        self.counts = Counts()
        self.entries: list[dict[str, Any]] = []
        self._begin_s, self._end_s = begin_s, end_s
        self._counter_s = COUNTER_STEP * (min(end_s, duration_s) - begin_s)
        self._engines: dict[int, _Lanes] = {}
        self._sandboxes = _Lanes(list(range(1, min(ENVIRONMENTS, num_environments) + 1)))
        self._in_flight: dict[int, int] = {}
        self._counted_s: dict[int, float] = {}
        self._on: dict[int, int] = {}
        self._acts_since: dict[int, float] = {}
        self._aborting: set[int] = set()
        self._training: events.StartTraining | None = None
        self._training_s = 0.0
        self._steps: dict[int, tuple[float, float]] = {}  # first and last second of training, by step
        self._ranks: set[int] = set()
        self._loaded_s: dict[int, float] = {}
        self._published: dict[int, float] = {}
        self._num_arrows = 0
        self._name(RUN, "run")
        self._name(TRAINER, "trainer", {1: "training", 2: "publishing"})
        if num_environments:
            self._name(SANDBOXES, "environments", {lane: f"environment {lane}" for lane in self._sandboxes.free})
        for engine in range(num_engines):
            self._join(engine, 0.0)

    def _join(self, engine: int, now_s: float) -> None:
        self._engines[engine] = lanes = _Lanes(list(range(FIRST_LANE, FIRST_LANE + LANES)))
        self._in_flight[engine], self._counted_s[engine], self._loaded_s[engine] = 0, -math.inf, now_s
        names = {WEIGHTS: "weights", **{lane: f"lane {lane - 1}" for lane in lanes.free}}
        self._name(FIRST_ENGINE + engine, f"engine {engine}", names)

    @property
    def full(self) -> bool:
        """Whether no more entries fit."""
        return len(self.entries) >= MAX_ENTRIES

    def steps(self, rows: np.recarray[Any, Any]) -> None:
        """Show the counters of optimizer steps, thinned out if they alone would fill the file."""
        shown = rows[(self._begin_s <= rows.time_s) & (rows.time_s <= self._end_s)]
        shown = shown[:: 1 + len(COUNTERS) * len(shown) // (1 + MAX_ENTRIES)]
        for column, name in COUNTERS.items():
            unit = "optimizer steps" if column == "lag_mean" else "rollouts"
            for time_s, value in zip(shown.time_s.tolist(), shown[column].tolist(), strict=True):
                self._entry("C", RUN, time_s, name=name, args={unit: value})

    def ranks(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the phases of the trainer's ranks in an optimizer step."""
        if step not in self._steps:
            return
        begin_s, end_s = self._steps[step]
        at_s: dict[int, float] = {}
        for name, seconds in metrics.items():
            if not (found := RANK_SECONDS.fullmatch(name)) or not seconds > 0:
                continue
            rank, start_s = int(found[1]), at_s.get(int(found[1]), begin_s)
            at_s[rank] = min(end_s, start_s + seconds)  # a rank has a clock of its own
            if rank not in self._ranks:
                self._ranks.add(rank)
                self._name_thread(TRAINER, FIRST_RANK + rank, f"rank {rank}")
            self._slice((TRAINER, FIRST_RANK + rank), found[2], start_s, at_s[rank], step=step)

    def record(self, record: Record) -> None:
        """Show an event or a command."""
        if record.event is not None:
            self._event(record.event, record.time_s)
        elif record.command is not None:
            self._command(record.command, record.time_s)

    def _command(self, command: events.Command, now_s: float) -> None:
        shown = now_s >= self._begin_s
        match command:
            case events.OpenEnvironment(rollout_id=rollout_id):
                self.counts.stays_left_out += not self._sandboxes.enter(rollout_id, now_s) and shown
                self._acts_since[rollout_id] = now_s
            case events.StartRollout(rollout_id=rollout_id, engine=engine):
                self._on[rollout_id] = engine
                self._moved(engine, 1, now_s)
                self.counts.stays_left_out += not self._engines[engine].enter(rollout_id, now_s) and shown
            case events.AbortRollout(rollout_id=rollout_id):
                self._aborting.add(rollout_id)
            case events.DiscardRollouts(rollout_ids=rollout_ids):
                for rollout_id in rollout_ids:
                    self._left_environment(rollout_id, now_s)
            case events.StartTraining():
                self._training, self._training_s = command, now_s
            case events.PublishWeights(version=version):
                self._published[version] = now_s
            case events.Stop():
                pass
            case _:
                assert_never(command)

    def _event(self, event: events.Event, now_s: float) -> None:
        match event:
            case events.TurnFinished(rollout_id=rollout_id, spans=spans):
                self._left_engine(rollout_id, now_s, spans=spans)
                self._acts_since[rollout_id] = now_s
            case events.ObservationReady(rollout_id=rollout_id):
                self._acted(rollout_id, now_s)
            case events.EnvironmentFailed(rollout_id=rollout_id, fault=fault):
                self._mark(SANDBOXES, self._sandboxes, rollout_id, now_s, fault.value)
            case events.RolloutPreempted(rollout_id=rollout_id, engine=engine):
                self._mark(FIRST_ENGINE + engine, self._engines[engine], rollout_id, now_s, "preempted")
            case events.StepsRaised() | events.KVCacheUsed():
                pass
            case events.RolloutFinished(rollout_id=rollout_id, spans=spans, reward=reward):
                self.counts.rollouts_finished += now_s >= self._begin_s
                self._left_engine(rollout_id, now_s, spans=spans)
                self._acted(rollout_id, now_s)
                if reward is not None:
                    self._left_environment(rollout_id, now_s)
            case events.RolloutScored(rollout_id=rollout_id):
                self._left_environment(rollout_id, now_s)
            case events.RolloutAborted(rollout_id=rollout_id, spans=spans):
                self._left_engine(rollout_id, now_s, spans=spans, end="aborted")
                if rollout_id in self._aborting:  # otherwise it starts again
                    self._left_environment(rollout_id, now_s)
            case events.RolloutFailed(rollout_id=rollout_id):
                self._left_engine(rollout_id, now_s, end="failed")
                self._left_environment(rollout_id, now_s)
            case events.TrainingFinished(train_s=train_s):
                self._trained(now_s, train_s)
            case events.WeightsPublished(version=version):
                start_s = self._published.get(version, now_s)
                self._slice((TRAINER, 2), f"publish {version}", start_s, now_s, version=version)
            case events.WeightsLoaded(engine=engine, version=version, pause_s=pause_s):
                self._loaded(engine, version, now_s, pause_s)
            case events.EngineJoined(engine=engine):
                self._join(engine, now_s)
                self._fleet(engine, now_s, "joined")
            case events.EngineLeaving(engine=engine):
                self._fleet(engine, now_s, "leaving")
            case events.EngineLeft(engine=engine):
                self._fleet(engine, now_s, "left")
            case _:
                assert_never(event)

    def finish(self, now_s: float) -> None:
        """Close open slices."""
        for rollout_id in list(self._on):
            self._left_engine(rollout_id, now_s, end="unfinished")
        for rollout_id in list(self._sandboxes.open):
            self._left_environment(rollout_id, now_s)

    def _trained(self, now_s: float, train_s: float) -> None:
        command, self._training = self._training, None
        if command is None or now_s < self._begin_s:
            return
        self.counts.optimizer_steps += command.completes_step
        args = {"rollouts": len(command.rollout_ids), "completes_step": command.completes_step}
        start_s = max(now_s - train_s, self._training_s)  # a real trainer has a clock of its own
        self._steps[command.version + 1] = (self._steps.get(command.version + 1, (start_s,))[0], now_s)
        self._slice((TRAINER, 1), f"step {command.version + 1}", start_s, now_s, **args)

    def _loaded(self, engine: int, version: int, now_s: float, pause_s: float) -> None:
        process, start_s = FIRST_ENGINE + engine, max(now_s - pause_s, self._loaded_s[engine])
        self._loaded_s[engine] = now_s
        if now_s < self._begin_s:
            return
        self.counts.weights_loaded += 1
        self._slice((process, WEIGHTS), f"load {version}", start_s, now_s, version=version)
        sent_s = self._published.get(version, now_s)
        if sent_s >= self._begin_s:
            self._num_arrows += 1
            arrow = {"cat": "weights", "name": "weights", "id": self._num_arrows}
            self._entry("s", TRAINER, sent_s, tid=2, **arrow)
            self._entry("f", process, max(start_s, sent_s), tid=WEIGHTS, bp="e", **arrow)

    def _left_engine(
        self, rollout_id: int, now_s: float, *, spans: events.VersionSpans | None = None, end: str = "finished"
    ) -> None:
        engine = self._on.pop(rollout_id, None)
        if engine is None:
            return
        self._moved(engine, -1, now_s)
        if (stay := self._engines[engine].leave(rollout_id)) is not None:
            args: dict[str, Any] = {"end": end}
            if spans is not None and spans.ends:
                args |= {"tokens": spans.num_tokens, "versions": f"{spans.versions[0]}-{spans.versions[-1]}"}
            self._slice((FIRST_ENGINE + engine, stay[0]), f"rollout {rollout_id}", stay[1], now_s, **args)

    def _left_environment(self, rollout_id: int, now_s: float) -> None:
        self._acts_since.pop(rollout_id, None)
        if (stay := self._sandboxes.leave(rollout_id)) is not None:
            self._slice((SANDBOXES, stay[0]), f"rollout {rollout_id}", stay[1], now_s)

    def _acted(self, rollout_id: int, now_s: float) -> None:
        since_s = self._acts_since.pop(rollout_id, None)
        lane, open_s = self._sandboxes.open.get(rollout_id, (None, 0.0))
        if since_s is not None and lane is not None:
            name = "reset" if since_s == open_s else "step"
            self._slice((SANDBOXES, lane), name, since_s, now_s, rollout=rollout_id)

    def _moved(self, engine: int, change: int, now_s: float) -> None:
        self._in_flight[engine] += change
        if now_s >= self._begin_s and now_s - self._counted_s[engine] >= self._counter_s:
            self._counted_s[engine] = now_s
            args = {"rollouts": self._in_flight[engine]}
            self._entry("C", FIRST_ENGINE + engine, now_s, name="in flight", args=args)

    def _fleet(self, engine: int, now_s: float, name: str) -> None:
        if now_s >= self._begin_s:
            self._entry("i", FIRST_ENGINE + engine, now_s, tid=WEIGHTS, name=name, s="p")

    def _mark(self, process: int, lanes: _Lanes, rollout_id: int, now_s: float, name: str) -> None:
        if rollout_id in lanes.open and now_s >= self._begin_s:
            self._entry("i", process, now_s, tid=lanes.open[rollout_id][0], name=name, s="t")

    def _slice(self, track: tuple[int, int], name: str, start_s: float, end_s: float, **args: Any) -> None:
        if end_s >= self._begin_s:
            dur = max(0, _microseconds(end_s) - _microseconds(start_s))
            self._entry("X", track[0], start_s, tid=track[1], dur=dur, name=name, args=args)

    def _name(self, process: int, name: str, threads: dict[int, str] | None = None) -> None:
        self._entry("M", process, 0.0, name="process_name", args={"name": name})
        self._entry("M", process, 0.0, name="process_sort_index", args={"sort_index": process})
        for thread, one in (threads or {}).items():
            self._name_thread(process, thread, one)

    def _name_thread(self, process: int, thread: int, name: str) -> None:
        self._entry("M", process, 0.0, tid=thread, name="thread_name", args={"name": name})
        self._entry("M", process, 0.0, tid=thread, name="thread_sort_index", args={"sort_index": thread})

    def _entry(self, phase: str, process: int, time_s: float, *, tid: int = 0, **rest: Any) -> None:
        self.entries.append({"ph": phase, "pid": process, "tid": tid, "ts": _microseconds(time_s), **rest})


def read_timeline(folder: Path, *, begin_s: float = 0.0, end_s: float = math.inf) -> Timeline:
    """Return the timeline of a run with a trace, from ``begin_s`` to ``end_s`` (s).

    Raises:
        TraceError: If there is no trace, or a broken one.
        ConfigError: If rows or metrics of the optimizer steps cannot be read, or the run ends before ``begin_s``.
    """
    trace, rows = Trace(folder / TRACE_FILE), read_steps(folder / STEPS_FILE)
    metrics = read_metrics(folder / METRICS_FILE, rows.step)
    config = trace.config
    timeline = Timeline(
        num_engines=config.num_engines,
        num_environments=config.environment.count if config.environment is not None else 0,
        begin_s=begin_s,
        end_s=end_s,
        duration_s=float(rows.time_s[-1]) if len(rows) else begin_s,
    )
    now_s = begin_s
    for record in trace.records():
        if record.time_s > end_s or timeline.full:
            break
        now_s = record.time_s
        try:
            timeline.record(record)
        except KeyError:
            raise TraceError(f"{trace.path}, line {record.line}: broken record, there is no such engine") from None
    if now_s < begin_s:
        raise ConfigError(f"--begin must be before the end of the run, {now_s:.6g} s, got {begin_s:g}")
    if timeline.full:
        timeline.counts.cut_at_s = now_s
    timeline.finish(now_s)
    shown = rows[rows.time_s <= now_s]
    timeline.steps(shown)
    for number, step in enumerate(shown.step[: max(map(len, metrics.values()), default=0)].tolist()):
        timeline.ranks(step, {name: float(column[number]) for name, column in metrics.items()})
    return timeline


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write the file; RunFailedError if that cannot be done."""
    ordered = sorted(timeline.entries, key=_place)
    with writing(path), path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, entry in enumerate(ordered):
            file.write((",\n" if number else "") + json.dumps(entry, separators=(",", ":")))
        file.write("\n]}\n")


def _place(entry: dict[str, Any]) -> tuple[bool, int, bool, int]:
    """Order: names, then by time; a slice before the slices inside it."""
    return entry["ph"] != "M", entry["ts"], entry["ph"] != "X", -entry.get("dur", 0)


def _microseconds(time_s: float) -> int:
    return round(time_s * 1e6)
