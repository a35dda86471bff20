"""Environments of the package verifiers, https://github.com/PrimeIntellect-ai/verifiers.

Theory of operation. Such an environment runs its own loop, the harness, and asks for answers over HTTP, by the protocol
of OpenAI's chat completions. So there is a server here, on this machine only: a request of the harness is the end of
``reset`` or ``step``, and the next turn answers it. Only messages behind the last answer are made into tokens. A
harness that changes the conversation so far, or that has several at a time, fails its rollout: the tokens generated
would not be the tokens trained on. A request waits for the next turn, until ``reset`` or ``close``; ``reset`` and
``step`` wait for a request or the end of the episode, until the caller's time-out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from backends.adapters.chat import ChatTokens, Message, load_tokenizer, missing
from backends.adapters.tools import Answer, load_parser
from pipelinerl.errors import ConfigError
from pipelinerl.rl.environments import Observation, Turn
from pipelinerl.util.user_code import kind_and_line

MAX_REQUEST_BYTES = 2**26
SHUTDOWN_S = 1.0


class Verifiers:
    """An environment of verifiers.

    Args:
        environment: What verifiers calls ``env``: ``taskset.id``, and for each role ``harness`` and ``runtime``.
        tokenizer: Folder of the model's tokenizer, which has a chat template.
        held_out: So many tasks, the first ones, are never trained on (count).
        parser: See ``backends.adapters.tools.load_parser``.

    Raises:
        ConfigError: If one of these cannot be used, or verifiers is not installed.
    """

    def __init__(
        self, *, environment: Mapping[str, Any], tokenizer: str, held_out: int = 0, parser: str = "hermes"
    ) -> None:
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            raise missing("verifiers", extra="verifiers") from error
        try:
            self._environment = load_environment(resolve_env_config(dict(environment)))
        except Exception as error:  # the user's own package may raise anything
            raise ConfigError(
                f"train.task.settings.environment must be one of verifiers: {kind_and_line(error)}"
            ) from error
        if not self._environment.taskset.bounded:
            raise ConfigError("train.task.settings.environment.taskset must have an end")
        if held_out < 0:
            raise ConfigError(f"train.task.settings.held_out must be at least 0, got {held_out}")
        self.num_held_out = held_out
        self._tokenizer = load_tokenizer(tokenizer)
        self._parse = load_parser(parser, self._tokenizer)
        self._tasks: list[Any] = []
        self._resources = AsyncExitStack()
        self._episode: asyncio.Task[Any] | None = None
        self._answered: asyncio.Future[Answer] | None = None

    async def reset(self, index: int, *, held_out: bool) -> tuple[int, ...]:
        """Begin a new episode, and return the first messages of the harness."""
        await self._end_episode()
        if not self._tasks:
            await self._open()
        number = self.num_held_out if held_out else len(self._tasks) - self.num_held_out
        if number <= 0:
            raise ValueError(f"the taskset has {len(self._tasks)} tasks, {self.num_held_out} of them held out")
        task = self._tasks[index % number + (0 if held_out else self.num_held_out)]
        self._requests: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Answer]]] = asyncio.Queue()
        self._episode = asyncio.create_task(self._environment.run_episode(task, self._model))
        if not await self._request():
            raise RuntimeError(f"the episode ended before its first turn{_why(self._episode.result())}")
        messages = [_plain(one) for one in self._body["messages"]]
        self._chat = ChatTokens(self._tokenizer, tools=self._body.get("tools") or ())
        return self._chat.prompt(messages)

    async def step(self, turn: Turn) -> Observation:
        """Answer the harness; return its next request, or the reward."""
        assert self._episode is not None
        assert self._answered is not None
        before: Sequence[Message] = self._body["messages"]
        self._answered.set_result(self._parse(self._chat.text(turn.tokens)))
        if await self._request():
            return Observation(self._chat.after(turn.tokens, _new(self._body["messages"], before)))
        episode = self._episode.result()
        if not episode.ok:
            raise RuntimeError(f"the episode failed{_why(episode)}")
        return Observation(reward=sum(one.reward for one in episode.traces if one.agent.trainable), done=True)

    async def close(self) -> None:
        """End the running episode."""
        await self._end_episode()
        await self._resources.aclose()

    async def _open(self) -> None:
        from aiohttp import web
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        self._resources.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._model = ModelContext("policy", EvalClientConfig(base_url=url, api_key_var="PIPELINERL_NO_KEY"))
        await self._resources.enter_async_context(self._environment.serving())
        self._tasks = list(self._environment.taskset)

    async def _request(self) -> bool:
        """Wait until the harness asks for an answer; return False if the episode has ended instead."""
        assert self._episode is not None
        asks = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({asks, self._episode}, return_when=asyncio.FIRST_COMPLETED)
            if not asks.done():
                return False
            self._body, self._answered = asks.result()
            return True
        finally:
            asks.cancel()

    async def _handle(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((body, answered))
        completion = _completion(await answered, stream=bool(body.get("stream")))
        if not body.get("stream"):
            return web.json_response(completion)
        text = f"data: {json.dumps(completion)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def _end_episode(self) -> None:
        if self._answered is not None:
            self._answered.cancel()  # its request would wait for ever
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.cancel()
            await asyncio.gather(episode, return_exceptions=True)


def _new(messages: Sequence[Message], before: Sequence[Message]) -> list[Message]:
    old, rest = messages[: len(before)], messages[len(before) :]
    if list(old) != list(before) or not rest or rest[0].get("role") != "assistant" or len(rest) == 1:
        raise ValueError("the harness changed its conversation, or has another one: that cannot be trained on")
    return [_plain(one) for one in rest[1:]]


def _plain(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)  # others than texts: no text model reads them
    return {**message, "content": content or ""}


def _completion(answer: Answer, *, stream: bool) -> dict[str, Any]:
    calls = [
        {
            "index": place,
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": one.name, "arguments": one.arguments},
        }
        for place, one in enumerate(answer.calls)
    ]
    message = {"role": "assistant", "content": answer.content, **({"tool_calls": calls} if calls else {})}
    return {
        "id": "turn",
        "object": "chat.completion.chunk" if stream else "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {"index": 0, "delta" if stream else "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        ],
    }


def _why(episode: Any) -> str:
    """Return the first error of an episode that failed, as the end of a sentence."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f": {errors[0].type}: {errors[0].message}".partition("\n")[0] if errors else ""
