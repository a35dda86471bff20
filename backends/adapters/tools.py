"""A task whose model may call tools: Python functions, by the chat template and the tool calls of the model.

An episode opens with the problem of a task and the tools. A turn that calls tools is answered by what they return; a
turn that calls none is the answer, which the task rewards.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.adapters.chat import ChatTokens, load_tokenizer
from backends.vllm.tool_calls import tool_parser
from pipelinerl.errors import ConfigError
from pipelinerl.rl.config import task_config
from pipelinerl.rl.environments import Observation, Turn
from pipelinerl.rl.tasks import load_task
from pipelinerl.util.user_code import first_line, kind_and_line, named_attribute

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that a model has written."""

    name: str
    arguments: str
    """JSON of an object, as the model wrote it: it may be wrong."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Content and calls of a model's turn."""

    content: str
    calls: tuple[ToolCall, ...]
    """In order."""


Parser = Callable[[str], Answer]
"""From the text of a turn, special tokens included."""


def load_parser(name: str, tokenizer: Any) -> Parser:
    """Return a parser of tool calls; ``ConfigError`` if there is none of this name.

    ``hermes``: JSON in ``<tool_call>``, as Qwen and Hermes write it. ``vllm:NAME``: one of vLLM's, which makes every
    environment's process import vLLM.
    """
    if name == "hermes":
        return hermes
    source, colon, known = name.partition(":")
    if source != "vllm" or not colon:
        raise ConfigError(f"train.task.settings.parser must be hermes or vllm:NAME, got {name!r}")
    read = tool_parser(known, tokenizer)

    def parse(text: str) -> Answer:
        content, calls = read(text)
        return Answer(content, tuple(ToolCall(*one) for one in calls))

    return parse


def hermes(text: str) -> Answer:
    """Parse ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``; any other text is content."""
    calls = []
    for one in HERMES.findall(text):
        try:
            found = json.loads(one)
            calls.append(ToolCall(str(found["name"]), json.dumps(found.get("arguments", {}))))
        except (ValueError, TypeError, KeyError, AttributeError):
            return Answer(text, ())
    return Answer(HERMES.sub("", text).strip() if calls else text, tuple(calls))


class ToolEnvironment:
    """A task with tools.

    Args:
        tokenizer: Folder of the model's tokenizer, which has a chat template.
        task: The table of the task as in ``train.task``: ``name``, ``settings``.
        tools: Functions, ``module:attribute``. Type hints and a Google docstring describe each to the model; it may be
            a coroutine. Its result is written as text, its exception as "error: ...".
        parser: See ``load_parser``.
        system: What stands above the problem.

    Raises:
        ConfigError: If one of these cannot be used.
    """

    def __init__(
        self,
        *,
        tokenizer: str,
        task: Mapping[str, Any],
        tools: Sequence[str],
        parser: str = "hermes",
        system: str | None = None,
    ) -> None:
        self._task = load_task(task_config(task, key="train.task.settings.task"))
        functions = [
            named_attribute(name, key="train.task.settings.tools", allowed="module:attribute") for name in tools
        ]
        self._tools = {function.__name__: function for function in functions}
        own = load_tokenizer(tokenizer)
        self._chat = ChatTokens(own, tools=[_schema(function) for function in functions])
        self._parse = load_parser(parser, own)
        self._above = [] if system is None else [{"role": "system", "content": system}]

    @property
    def num_held_out(self) -> int | None:
        """Distinct ones of the task."""
        return self._task.num_held_out

    async def reset(self, index: int, *, held_out: bool) -> tuple[int, ...]:
        """Return the tokens of the problem and of the tools."""
        self._problem = self._task.problem(index, held_out=held_out)
        return self._chat.prompt([*self._above, {"role": "user", "content": self._problem.prompt}])

    async def step(self, turn: Turn) -> Observation:
        """Call tools, or reward the answer."""
        answer = self._parse(self._chat.text(turn.tokens))
        if not answer.calls:
            return Observation(reward=float(self._task.reward(self._problem, answer.content)), done=True)
        returned = [{"role": "tool", "name": one.name, "content": await self._called(one)} for one in answer.calls]
        return Observation(self._chat.after(turn.tokens, returned))

    async def close(self) -> None:
        """Nothing is held."""

    async def _called(self, call: ToolCall) -> str:
        function = self._tools.get(call.name)
        if function is None:
            return f"error: no tool {call.name!r}; there are {', '.join(self._tools)}"
        try:
            returned = function(**json.loads(call.arguments))
            return str(await returned if inspect.isawaitable(returned) else returned)
        except Exception as error:  # a tool may raise anything, and the model may call it with anything
            return f"error: {kind_and_line(error)}"


def _schema(function: Any) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # its errors have no common root
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"train.task.settings.tools: {name} cannot be described: {first_line(error)}") from error
