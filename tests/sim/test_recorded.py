"""A run as the workload of another: its episodes come again, whole and in their order."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from played_again import IN_TURNS, RUN
from refusals import message

from pipelinerl.config.run import load_run, parse_run, with_overrides
from pipelinerl.records.trace import Trace, TraceWriter
from pipelinerl.scheduler.events import ObservationReady, StartRollout
from sim.recorded import read_trace
from sim.run import simulate

CONVENTIONAL = "scheduler.kind=conventional"


def played(data: dict[str, Any], folder: Path, *overrides: str) -> Path:
    simulate(parse_run(with_overrides(data, overrides)), out=folder, trace=True)
    return folder


def again(data: dict[str, Any], before: Path, folder: Path, *overrides: str) -> Path:
    """Play a run with another as its workload."""
    if "environment" in data:
        source = [f"environment.turns.source={before}", "environment.turns.kind=recorded"]
    else:
        source = [f"workload.length={{ kind = 'empirical', source = '{before}', max = 200 }}"]
    return played(data, folder, *overrides, *source)


def rollouts(folder: Path, *, rewards: bool) -> list[tuple[Any, ...]]:
    """What was generated, observed and waited for, in each rollout of whole groups; times to the microsecond."""
    groups = read_trace(str(folder), key="source", group_size=4)
    return [
        (
            one.episode.prompt_len,
            tuple(one.episode.out_lens),
            tuple(one.episode.obs_lens),
            tuple(round(time_s, 6) for time_s in one.episode.tool_times),
            one.reward if rewards else None,  # a source of turns has none
        )
        for group in groups
        for one in group
    ]


@pytest.mark.parametrize("data", [RUN, IN_TURNS], ids=["one turn", "turns"])
def test_a_run_of_whole_batches_comes_again_rollout_by_rollout(tmp_path: Path, data: dict[str, Any]) -> None:
    before = played(data, tmp_path / "before", CONVENTIONAL)
    after = again(data, before, tmp_path / "after", CONVENTIONAL, "seed=5")
    first = rollouts(before, rewards=data is RUN)
    assert rollouts(after, rewards=data is RUN) == first
    assert len(first) == 6 * 16
    assert len(set(first)) > 48
    observed = sum(sum(lengths) for _, _, lengths, *_ in first)
    assert observed > 1000 if data is IN_TURNS else observed == 0


@pytest.mark.parametrize("data", [RUN, IN_TURNS], ids=["one turn", "turns"])
def test_another_schedule_plays_episodes_of_the_run_and_none_twice_before_all_were(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    before = played(data, tmp_path / "before", CONVENTIONAL)
    after = again(data, before, tmp_path / "after")  # the pipeline, which starts others first
    there, seen = (Counter(rollouts(folder, rewards=False)) for folder in (before, after))
    assert sum(seen.values()) > 60
    assert seen <= there + there


def test_the_trace_is_as_good_as_its_folder_and_relative_to_the_run_file(tmp_path: Path) -> None:
    before = played(IN_TURNS, tmp_path / "runs" / "before")
    text = (before / "run.toml").read_text().replace('kind = "lognormal"\nmean = 3.0', 'kind = "recorded"\nmean = 3.0')
    for name in ("runs/before/trace.jsonl.gz", "runs/before"):
        (tmp_path / "run.toml").write_text(text)
        config = load_run(tmp_path / "run.toml", [f"environment.turns.source={name}"])
        assert config.environment is not None
        assert config.environment.turns.source == str((tmp_path / name).resolve())
    (tmp_path / "turns.jsonl").touch()
    config = load_run(tmp_path / "run.toml", ["environment.turns.source=turns.jsonl"])
    assert config.environment is not None
    assert config.environment.turns.source == str((tmp_path / "turns.jsonl").resolve())


def test_a_run_that_cannot_be_a_workload_is_one_line(tmp_path: Path) -> None:
    turns, one_turn = played(IN_TURNS, tmp_path / "turns"), played(RUN, tmp_path / "one_turn")
    assert message(again, RUN, turns, tmp_path / "after") == (
        f"workload.length.source must be a run without turns, got '{turns}': environment.turns.source reads it"
    )
    assert message(again, RUN, one_turn, tmp_path / "after", "workload.group_size=8").startswith(
        "workload.length.source must be a run with groups of at least workload.group_size=8 rollouts that were scored, "
    )
    shutil.rmtree(one_turn)
    one_turn.mkdir()
    assert message(again, RUN, one_turn, tmp_path / "after") == (
        f"workload.length.source: cannot read trace {one_turn}/trace.jsonl.gz: No such file or directory"
    )
    with closing(TraceWriter(one_turn / "trace.jsonl.gz", Trace(turns / "trace.jsonl.gz").config)) as trace:
        trace.command(0.0, StartRollout(0, 0, 0))
        trace.event(0.0, ObservationReady(0))
    line = message(again, IN_TURNS, one_turn, tmp_path / "after")
    assert "was recorded before observed tokens were: record it again" in line
