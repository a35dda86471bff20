"""The timeline of a run: it keeps the rules of the format, and its counts are those of summary.json."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_folders import simulated_steps
from trace_event_format import checked
from traces import lines_of, rewritten

import analysis.timeline
from analysis.timeline import FIRST_ENGINE, RUN, SANDBOXES, TRAINER, read_timeline, write_timeline
from pipelinerl.errors import TraceError
from pipelinerl.records.steps import STEPS_FILE, read_steps
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import ObservationReady, TurnFinished


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with environments."""
    turns = (
        'turns = { kind = "lognormal", mean = 3, cv = 0.5, max = 6, observation_tokens = 50, observation_max = 90, '
        "context_max = 20000 }"
    )
    sandboxes = f"environment={{ count = 40, reset_s = 2.0, step_s = 1.0, failure_rate = 0.01, {turns} }}"
    return simulated_steps(tmp_path_factory.mktemp("agents"), [sandboxes])


def drawn(folder: Path, **window: float) -> tuple[Any, list[dict[str, Any]]]:
    timeline = read_timeline(folder, **window)
    write_timeline(timeline, folder / "timeline.json")
    return timeline.counts, checked(folder / "timeline.json")


def only(entries: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [one for one in entries if all(one.get(key) == value for key, value in fields.items())]


def slices(entries: list[dict[str, Any]], name: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the slices whose name begins with ``name``."""
    return [one for one in only(entries, ph="X", **fields) if one["name"].startswith(name)]


@pytest.mark.parametrize("name", ["folder", "agents"])
def test_tracks_are_named_and_counts_are_those_of_the_summary(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    summary = json.loads((run / "summary.json").read_text())
    counts, entries = drawn(run)
    assert counts.optimizer_steps == summary["optimizer_steps"] == 6
    assert counts.rollouts_finished == summary["rollouts"]["finished"]
    training = only(entries, ph="X", pid=TRAINER, tid=1)
    assert sum(one["args"]["rollouts"] for one in training) == summary["samples_trained"]
    assert sum(one["dur"] for one in training) / 1e6 == pytest.approx(summary["seconds"]["training"], abs=1e-4)
    arrows = Counter(one["pid"] for one in only(entries, ph="f"))
    assert arrows == Counter(one["pid"] for one in slices(entries, "load "))
    assert counts.weights_loaded == arrows.total() > 0
    names = {one["pid"]: one["args"]["name"] for one in only(entries, ph="M", name="process_name")}
    engines = {FIRST_ENGINE + number: f"engine {number}" for number in range(4)}
    assert names == {RUN: "run", TRAINER: "trainer", **engines} | (
        {SANDBOXES: "environments"} if name == "agents" else {}
    )
    for counter, column in (("mean lag", "lag_mean"), ("in progress", "in_progress"), ("ready", "ready")):
        shown = [sum(one["args"].values()) for one in only(entries, ph="C", pid=RUN, name=counter)]
        assert shown == read_steps(run / STEPS_FILE)[column].tolist()


def test_with_a_lane_for_each_all_rollouts_are_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis.timeline, "LANES", 32)  # the slots of an engine
    counts, entries = drawn(folder)
    summary = json.loads((folder / "summary.json").read_text())
    args = [one["args"] for one in slices(entries, "rollout ")]
    assert sum(one["end"] == "finished" for one in args) == summary["rollouts"]["finished"]
    assert len(args) == summary["rollouts"]["started"]
    assert counts.stays_left_out == 0
    assert sum(one.get("tokens", 0) for one in args) == summary["tokens"]["generated"]


def test_environments_reset_and_act_within_their_rollout(agents: Path) -> None:
    """There is a track for each, so their slices are all that is in use."""
    _, entries = drawn(agents)
    summary = json.loads((agents / "summary.json").read_text())
    in_use_us = sum(one["dur"] for one in slices(entries, "rollout ", pid=SANDBOXES))
    assert in_use_us / 1e6 == pytest.approx(summary["environments"]["in_use_mean"] * summary["duration_s"], rel=1e-6)
    acts = Counter(one["name"] for one in only(entries, ph="X", pid=SANDBOXES))
    events = Counter(type(one.event) for one in Trace(agents / "trace.jsonl.gz").records())
    assert acts["reset"] + acts["step"] == events[ObservationReady] > 100
    assert acts["step"] <= events[TurnFinished]


def test_a_window_shows_only_its_own_time(folder: Path) -> None:
    whole = read_steps(folder / STEPS_FILE)
    begin_s, end_s = whole[1].time_s + 1e-6, whole[3].time_s
    counts, entries = drawn(folder, begin_s=begin_s, end_s=end_s)
    assert counts.optimizer_steps == 2
    timed = [one for one in entries if one["ph"] != "M"]
    assert all(one["ts"] + one.get("dur", 0) >= math.floor(begin_s * 1e6) for one in timed)
    assert all(one["ts"] <= math.ceil(end_s * 1e6) for one in timed)


def test_an_engine_that_is_not_there_is_one_line(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder, tmp_path / "run"))
    lines = lines_of(run / "trace.jsonl.gz")
    rewritten(run / "trace.jsonl.gz", [line.replace('"engine":0', '"engine":999') for line in lines])
    with pytest.raises(TraceError, match="broken record, there is no such engine"):
        read_timeline(run)


def test_a_full_file_is_cut_at_a_known_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis.timeline, "MAX_ENTRIES", 300)
    counts, entries = drawn(folder)
    last = max(one["ts"] + one.get("dur", 0) for one in entries) / 1e6
    assert len(entries) <= 300 + 4 * analysis.timeline.LANES + 18  # what was open, and counters of six steps
    assert counts.cut_at_s == pytest.approx(last, abs=1e-6)


def test_a_real_trainers_ranks_have_a_track_each(tmp_path: Path, folder: Path) -> None:
    """From where the step began, one phase after the other, not beyond its end; a step without metrics has none."""
    shutil.copytree(folder, tmp_path / "run")
    _, before = drawn(tmp_path / "run")
    steps = {int(one["name"].removeprefix("step ")): one for one in slices(before, "step ", pid=TRAINER)}
    shares = {"rank0/forward": 0.5, "rank0/backward": 0.25, "rank1/forward": 9.0, "rank1/optimizer": 1.0}
    lines = [
        {"step": step, "reward/mean": 0.5}
        | {f"train/{phase}_s": share * steps[step]["dur"] / 1e6 for phase, share in shares.items()}
        for step in (1, 2)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, entries = drawn(tmp_path / "run")
    tracks = {one["args"]["name"]: one["tid"] for one in only(entries, name="thread_name", pid=TRAINER)}
    assert {name for name in tracks if name.startswith("rank")} == {"rank 0", "rank 1"}
    for rank, shown in ((0, {"forward": 0.5, "backward": 0.25}), (1, {"forward": 1.0, "optimizer": 0.0})):
        own = only(entries, ph="X", pid=TRAINER, tid=tracks[f"rank {rank}"])
        assert [(one["args"]["step"], one["name"]) for one in own] == [
            (step, name) for step in (1, 2) for name in shown
        ]
        for one in own:
            step = steps[one["args"]["step"]]
            assert one["dur"] == pytest.approx(shown[one["name"]] * step["dur"], abs=2)
            assert step["ts"] <= one["ts"] <= one["ts"] + one["dur"] <= step["ts"] + step["dur"]


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
@pytest.mark.parametrize("update", ["keep", "abort"])
def test_a_run_of_the_real_driver_is_drawn_too(tmp_path: Path, kind: str, update: str) -> None:
    in_memory = pytest.importorskip("in_memory")
    settings = {"kind": kind} if kind == "conventional" else {"kind": kind, "weight_update": update}
    config = in_memory.config_of(**settings)
    summary = in_memory.run(config, tmp_path / "run", in_memory.parts_of(config))
    counts, entries = drawn(tmp_path / "run")
    assert counts.optimizer_steps == 6
    assert counts.rollouts_finished == summary.rollouts.finished
    assert len(only(entries, ph="f")) == counts.weights_loaded > 0
