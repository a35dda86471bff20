"""Episodes: drawn by means, recorded, cut at the context; and faults of a source."""

from __future__ import annotations

import json

import numpy as np
import pytest
from drawn_episodes import episodes
from refusals import message

from sim.clock import TICKS_PER_S
from sim.episodes import read_turns

LINE = {"group": 1, "stream": 0, "prompt_len": 10, "out_lens": [4, 6, 2], "obs_lens": [3, 5], "tool_times": [1.5, 2.0]}


def written(folder, *lines):
    path = folder / "turns.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {"kind": "recorded", "source": str(path), "max": 10}


# ----------------------------------------------------------------------------------------- recorded


def test_a_recorded_episode_is_played_as_it_was(tmp_path):
    one = episodes(written(tmp_path, LINE), reset_s=7.0).episode(0, 0)
    assert (one.prompt_tokens, one.ends, one.observed) == (10, (4, 10, 12), (0, 3, 5))
    assert [ticks / TICKS_PER_S for ticks in one.acting_ticks] == [7.0, 1.5, 2.0]
    assert one.faults == {}


@pytest.mark.parametrize(
    ("context_max", "ends", "observed"),
    [
        (30, (4, 10, 12), (0, 3, 5)),
        (29, (4, 10, 11), (0, 3, 5)),
        (28, (4, 10), (0, 3)),  # the third turn would begin at 10 + 4 + 3 + 6 + 5 = 28
        (20, (4, 7), (0, 3)),
        (17, (4,), (0,)),
        (13, (3,), (0,)),
        (11, (1,), (0,)),
    ],
)
def test_an_episode_is_cut_where_its_context_is_full(tmp_path, context_max, ends, observed):
    turns = {**written(tmp_path, LINE), "context_max": context_max, "max": min(3, context_max - 10)}
    one = episodes(turns).episode(0, 0)
    assert (one.ends, one.observed) == (ends, observed)


def test_turns_observations_and_times_are_cut_each(tmp_path):
    turns = {**written(tmp_path, LINE), "max": 2, "observation_max": 2}
    one = episodes(turns, length_max=5, step_max_s=1.0).episode(0, 0)
    assert (one.ends, one.observed, one.acting_ticks) == ((4, 9), (0, 2), (0, TICKS_PER_S))


def test_an_episode_that_begins_beyond_the_context_is_left_out(tmp_path):
    lines = [{**LINE, "group": prompt, "prompt_len": prompt} for prompt in (10, 20, 30)]
    source = episodes({**written(tmp_path, *lines), "context_max": 30})
    assert {source.episode(rollout_id, rollout_id).prompt_tokens for rollout_id in range(50)} == {10, 20}
    line = message(episodes, {**written(tmp_path, lines[2]), "context_max": 30})
    assert line.endswith("above the shortest prompt of environment.turns.source, 30 tokens, got 30")


def test_siblings_play_different_episodes_of_one_task(tmp_path):
    lines = [{**LINE, "group": task, "stream": k, "prompt_len": 100 * task + k} for task in (1, 2) for k in range(4)]
    source = episodes(written(tmp_path, *lines), group_size=4)
    prompts = [{source.episode(rollout_id, 5).prompt_tokens for rollout_id in range(4)} for _ in range(2)]
    assert prompts[0] == prompts[1]
    assert prompts[0] in ({100, 101, 102, 103}, {200, 201, 202, 203})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"obs_lens": [3]}, "line 2: obs_lens must have one value less than out_lens, 2, got 1"),
        ({"tool_times": [1.0, -1.0]}, "line 2: tool_times must be from 0 to 100000, got -1"),
        ({"out_lens": [], "obs_lens": [], "tool_times": []}, "line 2: out_lens must not be empty, got []"),
        ({"prompt_len": None}, "line 2: prompt_len must be a whole number, got null"),
        ({"toolTimes": []}, "line 2: toolTimes is an unknown key; did you mean tool_times? allowed: "),
    ],
)
def test_a_wrong_line_of_a_source_is_named(tmp_path, change, rule):
    assert rule in message(episodes, written(tmp_path, LINE, {**LINE, **change}))


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (
            "agent_turn",
            "must be a shipped set, a .jsonl file, a run or another system's trace, got 'agent_turn'; "
            "did you mean agent_turns? ",
        ),
        ("missing.jsonl", "missing.jsonl: No such file or directory"),
    ],
)
def test_a_source_that_is_not_there_is_named(source, rule):
    assert "environment.turns.source " + rule in message(read_turns, source)


def test_the_shipped_sessions_have_their_published_means():
    """683 sessions, 44,295 turns: 64.9 turns a session, of 436 tokens, 43 in the median (shipped README)."""
    sessions = read_turns("agent_turns")
    turns = [len(one.out_lens) for one in sessions]
    assert (len(sessions), sum(turns), np.median(turns)) == (683, 44_295, 43)
    assert np.concatenate([one.out_lens for one in sessions]).mean() == pytest.approx(436, abs=1)


# ------------------------------------------------------------------------------------------- drawn


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_the_problem_decides_its_share_of_the_turns(share):
    """500 groups of 4: mean, and intraclass correlation of the logarithms, within 5 standard errors (Fisher 1925)."""
    turns = {"kind": "lognormal", "mean": 20.0, "cv": 0.5, "max": 1000, "group_share": share, "observation_max": 0,
             "context_max": 10**6}  # fmt: skip
    source = episodes(turns, group_size=4)
    drawn = np.array([[len(source.episode(4 * group + k, group).ends) for k in range(4)] for group in range(500)])
    logs = np.log(drawn)
    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var(ddof=1) - within / 4
    error = (1 - share) * (1 + 3 * share) * (2 / (4 * 3 * 500)) ** 0.5
    assert between / (between + within) == pytest.approx(share, abs=5 * error + 0.001)
    assert drawn.mean() == pytest.approx(20, abs=5 * 10 * ((1 + 3 * share) / 2000) ** 0.5)


@pytest.mark.slow
def test_draws_have_the_means_and_are_a_function_of_the_rollout():
    """4000 rollouts; each mean within 5 of its standard errors, one false alarm in two million seeds."""
    turns = {"kind": "lognormal", "mean": 20.0, "cv": 0.5, "max": 200, "observation_tokens": 30.0,
             "observation_cv": 1.0, "observation_max": 10**6, "context_max": 10**8}  # fmt: skip
    source = episodes(turns, step_s=2.0, step_cv=1.5, reset_s=9.0, reset_cv=0.5)
    drawn = [source.episode(rollout_id, rollout_id) for rollout_id in range(4000)]
    assert source.episode(17, 17) == drawn[17]
    for values, mean in (
        ([len(one.ends) for one in drawn], 20.0),
        (np.concatenate([one.observed[1:] for one in drawn]), 30.0),
        (np.concatenate([one.acting_ticks[1:] for one in drawn]) / TICKS_PER_S, 2.0),
        (np.array([one.acting_ticks[0] for one in drawn]) / TICKS_PER_S, 9.0),
    ):
        assert abs(np.mean(values) - mean) <= 5 * np.std(values) / len(values) ** 0.5
    assert {end for one in drawn for end in np.diff(one.ends, prepend=0)} == {8}


@pytest.mark.slow
def test_the_most_turns_there_can_be_change_no_turn_and_cost_no_draws():
    """Turns beyond eight times their mean have lengths of their own, too; others are drawn side by side."""
    turns = {"kind": "lognormal", "mean": 4.0, "cv": 2.0, "observation_max": 0, "context_max": 10**8}
    lengths = {"kind": "uniform", "max": 10**6}
    few, many = (episodes({**turns, "max": most}, length=lengths) for most in (40, 10**6))
    pairs = [(few.episode(k, k).ends, many.episode(k, k).ends) for k in range(2000)]
    assert all(one[:32] == other[: len(one)][:32] for one, other in pairs)
    generated = np.concatenate([np.diff(other, prepend=0) for _, other in pairs])
    assert max(len(other) for _, other in pairs) > 40
    assert many._workload._made.cache_info().misses < 100  # blocks of 8192 lengths; a group had one of its own before
    assert len(set(generated.tolist())) > 0.98 * len(generated)  # n^2 / 2 / 10^6 pairs fall together by chance
