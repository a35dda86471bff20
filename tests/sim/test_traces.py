"""Traces of other systems: how each format is read, a run written and read back, wrong lines.

The files in ``tests/data/traces`` are made by hand after the formats' public descriptions (README beside them).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import played_again
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import message

from pipelinerl.config.run import parse_run, with_overrides
from sim.recorded import (
    FORMATS,
    RecordedEpisode,
    TracedRollout,
    format_of,
    read_foreign,
    read_groups,
    read_trace,
    run_keys,
    run_tables,
    write_foreign,
)
from sim.run import simulate
from sim.workload import read_source

FILES = Path(__file__).parents[1] / "data" / "traces"
OTHER: dict[str, Any] = {
    "optimizer_steps": 4,
    "scheduler": played_again.RUN["scheduler"] | {"kind": "conventional"},
    "workload": played_again.RUN["workload"] | {"prompt_tokens": 700},
}
RUN, IN_TURNS = played_again.RUN | OTHER, played_again.IN_TURNS | OTHER


def content(one: RecordedEpisode) -> tuple[Any, ...]:
    """Prompt, generated, observed, seconds to a nanosecond."""
    return one.prompt_len, one.out_lens, one.obs_lens, [round(seconds, 9) for seconds in one.tool_times]


def groups_of(episodes: list[RecordedEpisode]) -> list[int]:
    """A number per episode, equal within a group, in the order of first appearance."""
    numbers: dict[int | str, int] = {}
    return [numbers.setdefault(one.group, len(numbers)) for one in episodes]


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("name", "known_as", "episodes", "groups", "notes"),
    [
        # The last request begins with 60 and 61, whole blocks of the third and the fourth, and has room for 1500 + 400
        # tokens: it continues the third. Block 46 is of several prompts: nothing continues them.
        (
            "mooncake.jsonl",
            "mooncake",
            [
                (655, [52], [], []),
                (700, [30], [], []),
                (1500, [400, 10], [100], [0.0]),
                (1500, [20], [], []),
                (900, [9], [], []),
            ],
            [0, 1, 2, 2, 3],
            ["1 pauses between turns have no seconds", "1 of 6 requests begin with all whole blocks"],
        ),
        # b: 3010 - 1010 ms; then its context shrinks. The equal first prompts are a group.
        (
            "mooncake_sessions.jsonl",
            "mooncake",
            [
                (2048, [128, 64], [384], [0.05]),
                (2048, [100, 7], [52], [2.0]),
                (500, [8], [], []),
                (10, [5], [], []),
            ],
            [0, 0, 1, 2],
            ["1 requests have less context", "2 turns without delay wait for the difference of timestamps"],
        ),
        ("agentic_mooncake.jsonl", "mooncake", [(6, [2, 3], [3], [1.5])], [0], []),
        # c begins 2250 ms after the end of a, 1000 ms after its arrival.
        (
            "dynamo.jsonl",
            "dynamo",
            [(128, [16, 5], [56], [2.25]), (128, [20], [], [])],
            [0, 0],
            [],
        ),
        (
            "applied_compute.jsonl",
            "applied-compute",
            [(100, [10, 20, 50], [30, 40], [0.5, 1.25]), (70, [8], [], [])],
            [0, 1],
            [],
        ),
        ("unirl/manifest.json", "unirl", [(40, [12, 3], [8], [0.75]), (40, [9], [], [])], [0, 0], []),
        ("unirl/workload.jsonl", "unirl", [(40, [12, 3], [8], [0.75]), (40, [9], [], [])], [0, 0], []),
    ],
)
def test_a_format_is_known_by_its_content_and_read_as_episodes(
    name: str, known_as: str, episodes: list[Any], groups: list[int], notes: list[str]
) -> None:
    trace = read_foreign(str(FILES / name), key="--workload")
    assert trace.format.name == known_as
    assert list(map(content, trace.episodes)) == episodes
    assert groups_of(trace.episodes) == groups
    for note, begin in zip(trace.notes, [*notes, f"{known_as} does not have: "], strict=True):
        assert note.startswith(begin)


def test_a_trace_packed_by_gzip_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "dynamo.000000.jsonl.gz"
    path.write_bytes(gzip.compress((FILES / "dynamo.jsonl").read_bytes()))
    assert content(read_groups(str(path), key="source", group_size=1)[0][0][0]) == (128, [16, 5], [56], [2.25])


def test_rollouts_of_equal_prompts_are_a_group_and_the_others_go_with_the_nearest_lengths(tmp_path: Path) -> None:
    """Prompts of 9, 7, 5, 8, 5, 5 tokens, the last three 5s equal: 5 and 5; then 5 and 7, 8 and 9; by first rollout."""
    lengths = [(9, 1), (7, 2), (5, 3), (8, 4), (5, 3), (5, 3)]
    rows = [
        {"timestamp": number, "input_length": read, "output_length": number + 1, "hash_ids": [name]}
        for number, (read, name) in enumerate(lengths)
    ]
    source = written(tmp_path / "t.jsonl", *rows)
    groups = read_groups(source, key="source", group_size=2)
    assert [[one.out_lens[0] for one, _ in group] for group in groups] == [[4, 1], [6, 2], [3, 5]]


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("mooncake.jsonl", {"input_length": -1}, "input_length must be a whole number from 0 to 1,000,000,000, got -1"),
        ("mooncake.jsonl", {"output_length": None}, "output_length is missing"),
        ("mooncake.jsonl", {"hash_ids": ["x"]}, 'hash_ids must be a list of numbers, got ["x"]'),
        ("mooncake_sessions.jsonl", {"session_id": 3}, "session_id must be a string, got 3"),
        ("mooncake.jsonl", {"timestamp": "noon"}, 'timestamp must be a number, got "noon"'),
        ("dynamo.jsonl", {"request": {}}, "request.request_received_ms is missing"),
        ("applied_compute.jsonl", {"tool_call_latency": [-1.0, 0.0]}, "tool_times must be from 0 to 100000, got -1"),
        (
            "applied_compute.jsonl",
            {"tool_call_latency": [1.0]},
            "tool_times must have one value less than out_lens, 2, got 1",
        ),
        (
            "unirl/workload.jsonl",
            {"arrival": {"external_delay_ms": True}},
            "arrival.external_delay_ms must be a number",
        ),
    ],
)
def test_a_wrong_line_is_named_with_rule_and_value(tmp_path: Path, name: str, change: Any, fault: str) -> None:
    rows = [json.loads(line) for line in (FILES / name).read_text().splitlines()]
    source = written(tmp_path / "t.jsonl", rows[0] | change, *rows[1:])
    assert f"{source} line 1: {fault}" in message(read_foreign, source, key="--workload")


@pytest.mark.parametrize("text", ["", "[]\n", '{"a": 1}\n', "{\n", '{"hash_ids": [1], "output_length": 1}\nx\n'])
def test_a_file_of_no_format_or_no_json_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    line = message(read_foreign, str(path), key="--workload")
    assert str(path) in line
    if format_of(str(path)) is None:
        assert all(one.name in line for one in FORMATS)


def test_too_few_rollouts_for_a_group_are_refused_and_turns_are_no_lengths() -> None:
    assert message(read_groups, str(FILES / "dynamo.jsonl"), key="source", group_size=3) == (
        "source must hold workload.group_size=3 rollouts at least, got 2"
    )
    source = str(FILES / "dynamo.jsonl")
    assert message(read_source, source, group_size=2) == (
        f"workload.length.source must be a run without turns, got '{source}': environment.turns.source reads it"
    )


# ---------------------------------------------------------------------------------- written and read


@st.composite
def runs(draw: st.DrawFn) -> list[list[TracedRollout]]:
    """Groups of a prompt each; turns with random lengths and seconds."""
    tokens, seconds = st.integers(0, 2000), st.floats(0, 100)
    groups = []
    for group in range(draw(st.integers(1, 4))):
        prompt, rollouts = draw(st.integers(1, 2000)), []
        for stream in range(draw(st.integers(1, 3))):
            out_lens = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=4))
            obs_lens, tool_times, lasts = (
                draw(st.lists(one, min_size=size, max_size=size))
                for one, size in ((tokens, len(out_lens) - 1), (seconds, len(out_lens) - 1), (seconds, len(out_lens)))
            )
            episode = RecordedEpisode(
                group=group, stream=stream, prompt_len=prompt, out_lens=out_lens, obs_lens=obs_lens,
                tool_times=tool_times,
            )  # fmt: skip
            begins, ends = [draw(seconds)], []
            for last, tool in zip(lasts, [*tool_times, 0.0], strict=True):
                ends.append(begins[-1] + last)
                begins.append(ends[-1] + tool)
            rollouts.append(TracedRollout(episode, 1.0, tuple(begins[:-1]), tuple(ends)))
        groups.append(rollouts)
    return groups


@settings(max_examples=100)
@given(groups=runs(), name=st.sampled_from(["mooncake", "dynamo"]))
def test_written_rollouts_are_read_back_but_for_rewards(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[TracedRollout]], name: str
) -> None:
    """In the order of their first requests. Lost: rewards, names of groups; of Dynamo's requests the microseconds."""
    path = tmp_path_factory.getbasetemp() / f"{name}.jsonl"
    write = next(one.write for one in FORMATS if one.name == name)
    assert write is not None
    source = written(path, *write(groups))
    trace = read_foreign(source, key="source")
    assert (trace.format.name, len(trace.notes)) == (name, 1)
    was = sorted((one for group in groups for one in group), key=lambda one: one.begins_s[0])
    assert [lengths(one) for one in trace.episodes] == [lengths(one.episode) for one in was]
    assert groups_of(trace.episodes) == groups_of([one.episode for one in was])
    for after, before in zip(trace.episodes, was, strict=True):
        assert after.tool_times == pytest.approx(before.episode.tool_times, abs=1e-3 if name == "dynamo" else 1e-9)


def lengths(one: RecordedEpisode) -> tuple[Any, ...]:
    return one.prompt_len, one.out_lens, one.obs_lens


def test_blocks_of_a_prompt_are_shared_by_its_group_and_those_of_answers_by_their_rollout() -> None:
    """A prompt of 1000 tokens, an answer of 100, 500 observed: blocks end at 512, 1000; then 512, 1024, 1536, 1600."""
    episode = {"group": 0, "prompt_len": 1000, "out_lens": [100, 7], "obs_lens": [500], "tool_times": [1.0]}
    group = [
        TracedRollout(RecordedEpisode(stream=number, **episode), 0.0, (0.0, 4.0 + number), (3.0 + number, 9.0))
        for number in (0, 1)
    ]
    write = next(one.write for one in FORMATS if one.name == "mooncake")
    assert write is not None
    assert [(row["session_id"], row["hash_ids"]) for row in write([group])] == [
        ("0-0", [0, 1]),
        ("0-1", [0, 1]),
        ("0-0", [0, 2, 3, 4]),
        ("0-1", [0, 5, 6, 7]),
    ]


@pytest.mark.parametrize("name", ["mooncake", "dynamo"])
@pytest.mark.parametrize("data", [RUN, IN_TURNS], ids=["one turn", "turns"])
def test_a_run_simulated_with_its_own_exported_requests_has_the_same_rollouts(
    tmp_path: Path, data: dict[str, Any], name: str
) -> None:
    config = parse_run(data)
    simulate(config, out=tmp_path / "before", trace=True)
    lines = write_foreign(tmp_path / "before", tmp_path / "t.jsonl", name)
    assert "of 64 rollouts in 16 groups, blocks of 512 tokens; left out: " in lines[0]
    keys = run_keys(read_foreign(str(tmp_path / "t.jsonl"), key="--workload"), config)
    simulate(parse_run(with_overrides(data, ["seed=7", *keys])), out=tmp_path / "after", trace=True)
    before, after = (
        [lengths(one.episode) for group in groups for one in group]
        for groups in (read_trace(str(tmp_path / run), key="run", group_size=4) for run in ("before", "after"))
    )
    assert after == before
    assert len(set(map(str, before))) > 30


def test_a_run_of_one_turn_is_written_with_the_four_published_fields_of_mooncake(tmp_path: Path) -> None:
    simulate(parse_run(RUN), out=tmp_path / "run", trace=True)
    write_foreign(tmp_path / "run", tmp_path / "t.jsonl", "mooncake")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {tuple(row) for row in rows} == {("timestamp", "input_length", "output_length", "hash_ids")}
    assert [row["timestamp"] for row in rows] == sorted(row["timestamp"] for row in rows)
    assert {row["input_length"] for row in rows} == {700}


# ----------------------------------------------------------------------------------- a run's settings


def test_a_trace_without_turns_sets_lengths_and_one_with_turns_gets_an_environment_per_slot() -> None:
    config = parse_run(RUN)  # conventional: all four accelerators generate, 12 slots each
    turns = read_foreign(str(FILES / "dynamo.jsonl"), key="--workload")
    changed = parse_run(with_overrides(RUN, ["workload.group_size=2", *run_keys(turns, config)]))
    assert changed.environment is not None
    assert changed.environment.count == 48
    limits = changed.environment.turns.model_dump(include={"max", "observation_max", "context_max"})
    assert limits == {"max": 2, "observation_max": 56, "context_max": 205}
    assert changed.workload.length.max == 20
    kept = parse_run(with_overrides(IN_TURNS, run_keys(turns, parse_run(IN_TURNS))))
    assert kept.environment is not None
    assert (kept.environment.count, kept.environment.reset_s, kept.environment.turns.max) == (40, 1.0, 2)


def test_a_trace_gives_means_and_spreads() -> None:
    """Answers of 16, 5 and 20 tokens: mean 41 / 3, standard deviation sqrt(681 / 3 - (41 / 3)^2)."""
    tables = run_tables(read_foreign(str(FILES / "dynamo.jsonl"), key="SOURCE"))
    assert tables["workload"] == {
        "group_size": 2,
        "prompt_tokens": 128,
        "length": {"kind": "lognormal", "mean": 13.67, "cv": 0.4641, "max": 20},
    }
    assert tables["environment"] == {
        "step_s": 2.25,
        "step_cv": 0.0,
        "turns": {
            "kind": "lognormal", "mean": 1.5, "cv": 0.3333, "observation_tokens": 56.0, "observation_cv": 0.0,
            "max": 2, "observation_max": 56, "context_max": 205,
        },
    }  # fmt: skip
