"""Environments: names in a run file, and the calculator."""

import asyncio
from typing import Any

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.environments import Environment, Observation, Turn
from pipelinerl.rl.tasks import Calculator, load_environment, load_task


def load(name: str, **settings: Any) -> Environment:
    return load_environment(TaskConfig(name=name, settings=settings))


def played(environment: Environment, index: int, *turns: str) -> tuple[Any, list[Observation]]:
    async def play() -> tuple[Any, list[Observation]]:
        prompt = await environment.reset(index, held_out=False)
        return prompt, [await environment.step(Turn((), text)) for text in turns]

    return asyncio.run(play())


def test_a_sum_of_three_numbers_takes_three_turns() -> None:
    environment = Calculator(fewest=3, most=3, largest=9)
    prompt, _ = played(environment, 4)
    first, second, third = (int(one) for one in prompt.removesuffix("=").split("+"))
    total = first + second + third
    _, answers = played(environment, 4, f"{first}+{second}", f"{first + second}+{third}", f"={total}")
    assert answers == [
        Observation(f"{first + second},"),
        Observation(f"{total},"),
        Observation(reward=1.0, done=True),
    ]


def test_a_worked_episode_has_the_answers_of_the_calculator() -> None:
    environment = Calculator()
    for index in range(20):
        (prompt, _), *texts = environment.worked_episode(index)
        asked, answers = played(environment, index, *(text for text, own in texts if own))
        assert asked == prompt
        assert [one.content for one in answers[:-1]] == [text for text, own in texts if not own]
        assert answers[-1] == Observation(reward=1.0, done=True)


@pytest.mark.parametrize("turn", ["", "7", "7+", "7+7+7", "7-7", "1234567+1", "+", "٣+٣", "7 + 7"])
def test_an_invalid_call_is_answered_by_a_question_mark(turn: str) -> None:
    assert played(Calculator(), 0, turn)[1] == [Observation("?")]


@pytest.mark.parametrize("result", ["=", "=-1", "= 1", "=99999999"])
def test_a_wrong_result_ends_the_episode_without_a_reward(result: str) -> None:
    assert played(Calculator(), 0, result)[1] == [Observation(done=True)]


def test_no_held_out_sum_is_trained_on() -> None:
    environment = Calculator(fewest=2, most=2, largest=9)
    training = {environment.terms(index, held_out=False) for index in range(environment.num_training)}
    held_out = {environment.terms(index, held_out=True) for index in range(environment.num_held_out)}
    assert (len(training), len(held_out), training & held_out) == (90, 10, set())


def test_an_environment_is_loaded_by_name_or_path() -> None:
    assert load("calculator", largest=9).num_held_out == 30
    assert load("pipelinerl.rl.tasks:Calculator", largest=9).num_held_out == 30


class NotAsync:
    num_held_out = None

    def reset(self, index: int, *, held_out: bool) -> str:
        return ""

    def step(self, turn: Turn) -> Observation:
        return Observation()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("calculater", {}, "must be calculator or package.module:attribute, got 'calculater'"),
        (
            "pipelinerl.rl.tasks:Arithmetic",
            {},
            r"async reset, step and close where there is a table \[environment\], got",
        ),
        (f"{__name__}:NotAsync", {}, "async reset, step and close"),
        ("calculator", {"most": 9}, "fewest and most must be 2 to 8, in order, got 2, 9"),
        ("calculator", {"largest": 8}, "largest must be 9 to 999, got 8"),
        ("calculator", {"delay_s": -1}, "delay_s must be at least 0, got -1"),
        ("calculator", {"seed": 0.5}, "seed must be a whole number, got 0.5"),
    ],
)
def test_a_wrong_environment_is_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(name, **settings)
    assert "\n" not in str(caught.value)


def test_an_environment_without_its_table_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"one with reset and step needs the table \[environment\]"):
        load_task(TaskConfig(name="pipelinerl.rl.tasks:Calculator"))
