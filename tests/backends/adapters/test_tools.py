"""Tool calls of a chat model: parsers, and an episode of turns."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, chat_tokenizer
from environment_episodes import played
from refusals import message

from backends.adapters.tools import Answer, ToolCall, ToolEnvironment, hermes, load_parser
from pipelinerl.errors import ConfigError
from pipelinerl.rl.problems import Problem

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


async def wait() -> str:
    """Wait a moment."""
    await asyncio.sleep(0)
    return "waited"


def undescribed(a):
    return a


class Five:
    num_held_out = None

    def problem(self, index: int, *, held_out: bool) -> Problem:
        return Problem(f"What is 2+3? ({index})")

    def reward(self, problem: Problem, answer: str) -> float:
        return float(answer == "5")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    chat_tokenizer(CHATML, "<|im_end|>").save_pretrained(tmp_path)
    return str(tmp_path)


def environment(folder: str, **settings: Any) -> ToolEnvironment:
    tools = [f"{__name__}:add", f"{__name__}:wait"]
    return ToolEnvironment(**{"tokenizer": folder, "task": {"name": f"{__name__}:Five"}, "tools": tools, **settings})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5", Answer("5", ())),
        (f"Let me see. {ADD}", Answer("Let me see.", (ToolCall("add", '{"a": 2, "b": 3}'),))),
        (ADD + ADD, Answer("", (ToolCall("add", '{"a": 2, "b": 3}'),) * 2)),
        (ADD.removesuffix("</tool_call>"), Answer("", (ToolCall("add", '{"a": 2, "b": 3}'),))),
        ('<tool_call>{"name": "wait"}</tool_call>', Answer("", (ToolCall("wait", "{}"),))),
        ("<tool_call>add 2 3</tool_call>", Answer("<tool_call>add 2 3</tool_call>", ())),
        ("<tool_call>[1]</tool_call>", Answer("<tool_call>[1]</tool_call>", ())),
        ("<tool_call>{}</tool_call>", Answer("<tool_call>{}</tool_call>", ())),
    ],
)
def test_calls_in_json_are_read_and_anything_else_is_text(text: str, answer: Answer) -> None:
    assert hermes(text) == answer


@pytest.mark.slow  # imports vLLM
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_vllm_reads_the_same_and_its_parsers_are_named() -> None:
    pytest.importorskip("vllm")
    tokenizer = chat_tokenizer(CHATML, "<|im_end|>")
    parse = load_parser("vllm:hermes", tokenizer)
    for text in ("5", f"Let me see. {ADD}", ADD + ADD, "<tool_call>add 2 3</tool_call>"):
        theirs, ours = parse(text), hermes(text)
        assert (theirs.calls, theirs.content.strip()) == (ours.calls, ours.content)
    assert re.search(
        "must be vllm: and one of .*hermes.*, got 'harmes'", message(load_parser, "vllm:harmes", tokenizer)
    )


def test_an_episode_calls_a_tool_and_answers(folder: str) -> None:
    tokenizer = chat_tokenizer(CHATML, "<|im_end|>")
    told = played(environment(folder), ADD + "<|im_end|>", "5<|im_end|>", tokenizer=tokenizer, index=7)
    assert told.prompt.endswith("<|im_start|>user\nWhat is 2+3? (7)<|im_end|>\n<|im_start|>assistant\n")
    assert '"Add two numbers."' in told.prompt
    assert told.observed == ["\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n", ""]
    assert (told.reward, told.done) == (1.0, True)


@pytest.mark.parametrize(
    ("call", "returned"),
    [
        ('{"name": "wait"}', "waited"),
        ('{"name": "sub"}', "error: no tool 'sub'; there are add, wait"),
        ('{"name": "add", "arguments": {"a": 1}}', "error: TypeError: add() missing 1 required positional argument: "),
        ('{"name": "add", "arguments": [1, 2]}', "error: TypeError:"),
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}}', "error: TypeError: unsupported operand"),
    ],
)
def test_what_a_tool_returns_or_raises_is_read_by_the_model(folder: str, call: str, returned: str) -> None:
    tokenizer = chat_tokenizer(CHATML, "<|im_end|>")
    told = played(environment(folder), f"<tool_call>{call}</tool_call><|im_end|>", tokenizer=tokenizer)
    assert f"<|im_start|>tool\n{returned}" in told.observed[0]
    assert not told.done


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer": "no/such"}, "train.task.settings.tokenizer must be a folder, got 'no/such'"),
        ({"task": {"nam": "math"}}, "^train.task.settings.task.name is missing\ntrain.task.settings.task.nam is an un"),
        ({"tools": ["add"]}, "train.task.settings.tools must be module:attribute, got 'add'"),
        ({"tools": [f"{__name__}:undescribed"]}, "train.task.settings.tools: undescribed cannot be described: "),
        ({"parser": "harmes"}, "train.task.settings.parser must be hermes or vllm:NAME, got 'harmes'"),
    ],
)
def test_wrong_settings_are_one_line(folder: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        environment(folder, **settings)
    assert all(line.startswith("train.task.settings.") for line in str(caught.value).splitlines())
