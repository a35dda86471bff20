"""The check of a task and its data: what is right, what is wrong, and what a run would leave out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from in_memory import config_of, turns_of

from backends.check.run_check import SAMPLE, environment_rows, task_rows
from backends.fake import FakeCodec
from pipelinerl.config.run import RunConfig
from pipelinerl.records.reports import CheckRow, Finding
from pipelinerl.rl.problems import Problem
from pipelinerl.rl.tasks import Arithmetic


def config(max_prompt_tokens: int = 8) -> RunConfig:
    task = {"name": "arithmetic", "max_prompt_tokens": max_prompt_tokens, "reward_timeout_s": 600.0}
    return config_of(longest=50, train={"task": task})


class Own:
    """A task made of two functions."""

    num_held_out = None

    def __init__(self, problem: Any = None, reward: Any = None) -> None:
        self.made = problem or (lambda index: Problem(f"{index}?", str(index)))
        self.given = reward or (lambda problem, answer: float(answer == problem.expected))

    def problem(self, index: int, *, held_out: bool) -> Problem:
        assert not held_out
        return self.made(index)

    def reward(self, problem: Problem, answer: str) -> float:
        return self.given(problem, answer)


def rows(task: Any, **changed: Any) -> dict[str, CheckRow]:
    return {row.what: row for row in task_rows(config(**changed), task, FakeCodec())}


def test_a_task_that_is_right() -> None:
    """Sums below 50 + 50 have 4 to 6 letters with the = sign, and answers of 1 or 2."""
    found = rows(Arithmetic())
    assert {row.finding for row in found.values()} == {Finding.OK}
    assert found["rewards"].measured.startswith(f"{SAMPLE} of {SAMPLE} expected answers earn more than an empty one")
    assert found["prompt tokens"].measured.endswith("largest 6")
    assert found["expected answer tokens"].measured.endswith("largest 2")
    assert not any(row.advice for row in found.values())


def test_a_reward_that_wants_more_than_the_answer_is_not_judged() -> None:
    found = rows(Own(reward=lambda problem, answer: answer == f"so it is {problem.expected}"))["rewards"]
    assert found.finding is Finding.UNCHECKED
    assert found.measured.startswith(f"0 of {SAMPLE} expected answers earn more")


def test_an_answer_that_must_be_boxed_counts_as_right_when_it_is() -> None:
    boxed = Own(reward=lambda problem, answer: answer == f"\\boxed{{{problem.expected}}}")
    assert rows(boxed)["rewards"].finding is Finding.OK


def raises(*_: Any) -> float:
    raise RuntimeError("no sandbox")


@pytest.mark.parametrize(
    ("task", "row", "words"),
    [
        (Own(problem=raises), "prompts", "a problem raised RuntimeError: no sandbox"),
        (Own(problem=lambda index: Problem("", "1")), "prompts", f"{SAMPLE} of {SAMPLE} are empty"),
        (Own(reward=raises), "rewards", f"all of {SAMPLE} raised: RuntimeError: no sandbox"),
        (Own(reward=lambda *_: 1.0), "rewards", f"0 of {SAMPLE} expected answers earn more than an empty one"),
        (Own(problem=lambda index: Problem("9 letters", "1")), "prompt tokens", f"{SAMPLE} of {SAMPLE} would fail"),
        (Own(problem=lambda index: Problem("?", "1" * 50)), "expected answer tokens", "64 of 64 would be cut"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_task(task: Any, row: str, words: str) -> None:
    found = rows(task)[row]
    assert found.finding is Finding.WRONG
    assert words in found.measured
    assert found.advice


def test_what_a_run_leaves_out_is_counted_and_is_no_fault() -> None:
    """Index 10 and above have two digits: 54 of 64 prompts are too long for two tokens."""
    found = rows(Own(), max_prompt_tokens=2)["prompt tokens"]
    assert (found.finding, found.measured) == (Finding.OK, f"mean 3, largest 3; {SAMPLE - 10} of {SAMPLE} would fail")
    some = Own(reward=lambda problem, answer: raises() if problem.expected == "3" else answer == problem.expected)
    found = rows(some)["rewards"]
    assert found.finding is Finding.OK
    assert found.measured.endswith("1 raised, the first: RuntimeError: no sandbox")


def test_without_a_tokenizer_lengths_are_not_checked() -> None:
    for *_, last in (
        task_rows(config(), Arithmetic(), None, "no transformers"),
        environment_rows(turns_of(settings={"turns": 1}), None, "no transformers"),
    ):
        assert (last.what, last.finding, last.measured) == ("lengths in tokens", Finding.UNCHECKED, "no transformers")


# The check of an environment: times against the run file, lengths against its limits, rewards, and what fails.


def calculator(*, delay_s: float = 0.0, step_s: float = 1.0, **keys: Any) -> RunConfig:
    """Sums of two: a call, its answer of two to three tokens, and the result."""
    task = {"name": "calculator", "settings": {"most": 2, "delay_s": delay_s}}
    return turns_of(**keys, limits={"step_s": step_s, "reset_s": 1.0}, train={"task": task})


def episode_rows(config: RunConfig) -> dict[str, CheckRow]:
    return {row.what: row for row in environment_rows(config, FakeCodec())}


def test_an_environment_that_is_right() -> None:
    found = episode_rows(calculator())
    assert {row.finding for row in found.values()} == {Finding.OK}
    assert found["rewards"].measured == "8 of 8 worked episodes earn 1 or more"
    assert found["seconds of a step"].expected == "environment.step_s = 1; slow above 2 s"
    assert found["observation tokens"].expected == "at most environment.turns.observation_max = 10"
    assert not any(row.advice for row in found.values())


def test_slower_than_the_run_file_says_cut_and_beyond_the_context() -> None:
    """A delay of 0.1 s against 0.01 s; contexts of 12 tokens hold no sum with its call, its answer and its result."""
    found = episode_rows(calculator(step_s=0.01, observation_max=1, context_max=12, delay_s=0.1))
    assert found["seconds of a step"].finding is Finding.SLOW
    seconds = re.match(r"environment\.step_s = (\S+) has", found["seconds of a step"].advice)
    assert seconds is not None
    assert float(seconds[1]) >= 0.1
    assert found["observation tokens"].finding is Finding.WRONG
    assert "8 of 8 would be cut" in found["observation tokens"].measured
    assert "environment.turns.observation_max must be larger" in found["observation tokens"].advice
    assert "would end early" in found["episode tokens"].measured


@pytest.mark.parametrize(
    ("settings", "limits", "row", "says"),
    [
        ({"rate": 1.0, "ways": "raises"}, {}, "environment", "it never opened: its reset raised RuntimeError: no game"),
        ({"ways": "raises"}, {}, "episodes", "1 of 8 episodes failed, the first: its step raised RuntimeError"),
        ({"ways": "hangs"}, {"step_timeout_s": 0.5}, "episodes", "1 of 1 episodes failed, the first: its step took"),
    ],
)
def test_what_fails_is_told(settings: dict[str, Any], limits: dict[str, Any], row: str, says: str) -> None:
    found = episode_rows(turns_of(name="Hostile", settings={"turns": 2, **settings}, limits=limits))
    assert found[row].measured.startswith(says)
    assert (found[row].finding is Finding.WRONG) is (says[0] != "1" or says.startswith("1 of 1"))


def test_without_given_answers_turns_count_as_the_longest() -> None:
    """A prompt of 9 tokens, three turns of 12, two observations of at most 10."""
    found = episode_rows(turns_of(settings={"turns": 3}))
    assert found["rewards"].measured == "0 of 8 episodes with empty answers earn 1 or more"
    assert found["episode tokens"].measured.endswith("if all turns are the longest")
    assert 45 < int(found["episode tokens"].measured.split()[3]) < 66
