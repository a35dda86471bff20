"""Parsers of tool calls of vLLM 0.32, for environments; there is no engine in their processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.util.user_code import first_line


def tool_parser(name: str, tokenizer: Any) -> Callable[[str], tuple[str, list[tuple[str, str]]]]:
    """Return a parser: answer -> content and calls (name, JSON of arguments); ``ConfigError`` if vLLM has none."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"train.task.settings.parser='vllm:{name}' needs vLLM ({first_line(error)})") from error
    known = ToolParserManager.list_registered()
    if name not in known:
        raise ConfigError(f"train.task.settings.parser must be vllm: and one of {', '.join(known)}, got {name!r}")
    kind = ToolParserManager.get_tool_parser(name)
    request = ChatCompletionRequest(messages=[], model="")

    def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
        found = kind(tokenizer).extract_tool_calls(text, request)  # a parser has the state of one answer
        return found.content or "", [(one.function.name, one.function.arguments) for one in found.tool_calls]

    return parse
