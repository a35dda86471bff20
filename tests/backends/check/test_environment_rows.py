"""The check of an environment: times against the run file, lengths against its limits, rewards, and what fails."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch")  # of ``in_memory``
pytest.importorskip("tensorboard")

from in_memory import turns_of

from backends.check.environment_rows import environment_rows
from backends.fake import FakeCodec
from pipelinerl.config.run import RunConfig
from pipelinerl.records.check_report import CheckRow, Finding


def calculator(**limits: Any) -> RunConfig:
    """Sums of two: a call, its answer of two to three tokens, and the result."""
    keys = {name: limits.pop(name) for name in ("context_max", "observation_max", "settings") if name in limits}
    config = turns_of(**keys, limits={"step_s": 1.0, "reset_s": 1.0, **limits})
    assert config.train is not None
    task = config.train.task.model_copy(
        update={"name": "calculator", "settings": {"most": 2, **(keys.get("settings") or {})}}
    )
    return config.model_copy(update={"train": config.train.model_copy(update={"task": task})})


def rows(config: RunConfig) -> dict[str, CheckRow]:
    return {row.what: row for row in environment_rows(config, FakeCodec())}


def test_an_environment_that_is_right() -> None:
    found = rows(calculator())
    assert {row.finding for row in found.values()} == {Finding.OK}
    assert found["rewards"].measured == "8 of 8 worked episodes earn 1 or more"
    assert found["seconds of a step"].expected == "environment.step_s = 1; slow above 2 s"
    assert found["observation tokens"].expected == "at most environment.turns.observation_max = 10"
    assert not any(row.advice for row in found.values())


def test_slower_than_the_run_file_says_cut_and_beyond_the_context() -> None:
    """A delay of 0.1 s against 0.01 s; contexts of 12 tokens hold no sum with its call, its answer and its result."""
    found = rows(calculator(step_s=0.01, observation_max=1, context_max=12, settings={"delay_s": 0.1}))
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
        (
            {"ways": "hangs"},
            {"step_timeout_s": 0.5},
            "episodes",
            "1 of 1 episodes failed, the first: its step took more",
        ),
    ],
)
def test_what_fails_is_told(settings: dict[str, Any], limits: dict[str, Any], row: str, says: str) -> None:
    found = rows(turns_of(name="Hostile", settings={"turns": 2, **settings}, limits=limits))
    assert found[row].measured.startswith(says)
    assert (found[row].finding is Finding.WRONG) is (says[0] != "1" or says.startswith("1 of 1"))


def test_without_given_answers_turns_count_as_the_longest() -> None:
    """A prompt of 9 tokens, three turns of 12, two observations of at most 10."""
    found = rows(turns_of(settings={"turns": 3}))
    assert found["rewards"].measured == "0 of 8 episodes with empty answers earn 1 or more"
    assert found["episode tokens"].measured.endswith("if all turns are the longest")
    assert 45 < int(found["episode tokens"].measured.split()[3]) < 66


def test_without_a_tokenizer_lengths_are_not_checked() -> None:
    *_, last = environment_rows(turns_of(settings={"turns": 1}), None, "transformers is not installed")
    assert (last.what, last.finding, last.measured) == (
        "lengths in tokens", Finding.UNCHECKED, "transformers is not installed",
    )  # fmt: skip
