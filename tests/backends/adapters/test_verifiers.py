"""A real environment of verifiers, through the protocol."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from needs import need

need("transformers", "verifiers")

from chat_tokenizers import CHATML, chat_tokenizer  # noqa: E402
from environment_episodes import play, played  # noqa: E402
from refusals import message  # noqa: E402

from backends.adapters.verifiers import Verifiers  # noqa: E402

pytestmark = pytest.mark.slow  # importing verifiers
TOKENIZER = chat_tokenizer(CHATML, "<|im_end|>")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the settings of the environment, given those of its harness."""
    TOKENIZER.save_pretrained(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(**harness: Any) -> dict[str, Any]:
        agent = {"harness": {"id": "verifiers_sums", **harness}, "runtime": {"type": "subprocess"}}
        environment = {"taskset": {"id": "verifiers_sums"}, "agent": agent}
        return {"environment": environment, "tokenizer": str(tmp_path), "held_out": 2}

    return make


@pytest.fixture
def sums(settings: Any) -> Any:
    return lambda **harness: Verifiers(**settings(**harness))


def test_an_episode_is_asked_answered_and_rewarded(sums: Any) -> None:
    """Two tasks are held out, so training problem 1 is task 3, and 9 is task 3 again: 3 + 3."""
    told = played(sums(), "five<|im_end|>", "6<|im_end|>", tokenizer=TOKENIZER, index=9)
    assert told.prompt.endswith("<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "add"' in told.prompt
    assert told.observed == ["\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", ""]
    assert (told.reward, told.done) == (1.0, True)


@pytest.mark.parametrize("turn", ["7<|im_end|>", "6 or so"])
def test_a_wrong_answer_earns_nothing(sums: Any, turn: str) -> None:
    told = played(sums(turns=1), turn, tokenizer=TOKENIZER, index=1)
    assert (told.observed, told.reward, told.done) == ([""], 0.0, True)


def test_a_call_of_a_tool_reaches_the_harness_as_one(sums: Any) -> None:
    told = played(sums(), CALL + "<|im_end|>", "6", tokenizer=TOKENIZER, index=1)
    assert told.observed[0] == '\n<|im_start|>tool\n{"a": 3}<|im_end|>\n<|im_start|>assistant\n'


def test_a_harness_that_streams_is_answered(sums: Any) -> None:
    assert played(sums(turns=1, stream=True), "6", tokenizer=TOKENIZER, index=1).reward == 1.0


def test_a_harness_that_changes_what_was_said_fails_the_rollout(sums: Any) -> None:
    with pytest.raises(ValueError, match="the harness changed its conversation"):
        played(sums(rewrites=True), "5", tokenizer=TOKENIZER)


def test_a_harness_that_fails_says_why(sums: Any) -> None:
    with pytest.raises(RuntimeError, match="the episode ended before its first turn"):
        played(sums(turns=0), tokenizer=TOKENIZER)


def test_an_episode_that_was_given_up_is_gone(sums: Any) -> None:
    async def again() -> Any:
        environment = sums(turns=1)
        await environment.reset(0, held_out=False)
        assert "1+1?" in TOKENIZER.decode(await environment.reset(1, held_out=True))
        return await play(environment, "6", tokenizer=TOKENIZER, index=1)

    assert asyncio.run(again()).reward == 1.0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"environment": {"taskset": {"id": "no-such-taskset"}}}, "must be one of verifiers: .*no-such-taskset"),
        ({"environment": {}}, "must be one of verifiers: .*taskset"),
        ({"held_out": -1}, "held_out must be at least 0, got -1"),
        ({"tokenizer": "no/such"}, "tokenizer must be a folder, got 'no/such'"),
    ],
)
def test_wrong_settings_are_one_line(changed: dict[str, Any], words: str) -> None:
    usual = {"environment": {"taskset": {"id": "verifiers_sums"}}, "tokenizer": "."}
    assert re.search(words, message(Verifiers, **{**usual, **changed}))


def test_the_driver_plays(settings: Any, tmp_path: Path) -> None:
    """Two turns each: the second one is rewarded, so every episode ends by itself."""
    in_memory = pytest.importorskip("in_memory")
    task = {"name": "backends.adapters.verifiers:Verifiers", "settings": settings()}
    config = in_memory.turns_of(steps=1, count=1, most=3, context_max=400, observation_max=60, train={"task": task})
    summary = in_memory.run_checked(config, tmp_path / "run")
    assert (summary.rollouts.failed, summary.samples_trained) == (0, 8)
    assert summary.environments.turns_mean >= 2.0
