"""Environments behind a server of OpenEnv, https://github.com/meta-pytorch/OpenEnv.

A session is a connection: a WebSocket at ``/ws``, with JSON in both directions. The server may have any version of
OpenEnv, in an environment or container of its own. (OpenEnv 0.10 cannot be installed beside vLLM 0.32: one wants mcp
below 2, the other from 2 on.)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from backends.adapters.chat import ChatTokens, load_tokenizer, missing
from pipelinerl.errors import ConfigError
from pipelinerl.rl.environments import Content, Observation, Turn

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MAX_MESSAGE_BYTES = 2**24
"""Of a server; a longer one fails the rollout."""


class OpenEnv:
    """One session of a server: ``reset`` gives the first observation, each turn is one action.

    Args:
        url: Of the server: ``ws://host:port`` or ``http://host:port``, or the same with ``s``.
        action: The field of an action that takes the text of a turn.
        observation: The field of an observation that the model reads. None: all of it, as JSON.
        fields: Other fields of every action.
        tokenizer: Folder of a tokenizer with a chat template: observations are messages of the user then. None: they
            are appended as text.
        system: What stands above the first observation.

    Raises:
        ConfigError: If one of these cannot be used, or the package websockets is not installed.
    """

    num_held_out = None

    def __init__(
        self,
        *,
        url: str,
        action: str = "message",
        observation: str | None = None,
        fields: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        system: str = "",
    ) -> None:
        try:
            import websockets  # noqa: F401 - imported where it is used
        except ImportError as error:
            raise missing("websockets", extra="openenv") from error
        scheme, colon, rest = url.partition("://")
        if not colon or scheme not in {"ws", "wss", "http", "https"} or not rest:
            raise ConfigError(f"train.task.settings.url must be ws://HOST:PORT or http://HOST:PORT, got {url!r}")
        self._url = f"{scheme.replace('http', 'ws')}://{rest.rstrip('/')}/ws"
        self._action, self._field, self._fields = action, observation, dict(fields or {})
        self._chat = None if tokenizer is None else ChatTokens(load_tokenizer(tokenizer))
        self._system = system
        self._session: ClientConnection | None = None

    async def reset(self, index: int, *, held_out: bool) -> Content:
        """Return the first observation. Seeds are even in training, odd where held out."""
        await self.close()  # what is left of an episode that was given up
        seen = await self._asked("reset", {"seed": 2 * index + held_out})
        text = self._text(seen)
        if self._chat is None:
            return f"{self._system}{text}"
        above = [{"role": "system", "content": self._system}] if self._system else []
        return self._chat.prompt([*above, {"role": "user", "content": text}])

    async def step(self, turn: Turn) -> Observation:
        """Act with the text of a turn."""
        seen = await self._asked("step", {**self._fields, self._action: turn.text})
        reward, done = float(seen.get("reward") or 0.0), bool(seen.get("done"))
        if done:
            return Observation(reward=reward, done=True)
        text = self._text(seen)
        if self._chat is None:
            return Observation(text, reward)
        return Observation(self._chat.after(turn.tokens, [{"role": "user", "content": text}]), reward)

    async def close(self) -> None:
        """End the session."""
        from websockets.exceptions import ConnectionClosed

        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(ConnectionClosed):
                await session.send(json.dumps({"type": "close"}))
            await session.close()

    def _text(self, seen: Mapping[str, Any]) -> str:
        observed = seen.get("observation", {})
        if self._field is None:
            return json.dumps(observed, ensure_ascii=False)
        if not isinstance(observed, Mapping) or self._field not in observed:
            raise ValueError(f"the observation has no field {self._field!r}: {json.dumps(observed)[:200]}")
        text = observed[self._field]
        return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        from websockets.asyncio.client import connect

        if self._session is None:
            self._session = await connect(self._url, max_size=MAX_MESSAGE_BYTES)
        await self._session.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._session.recv())
        if not isinstance(answer, dict) or answer.get("type") != "observation":
            raise RuntimeError(f"the server answered {kind} with {json.dumps(answer)[:200]}")
        return dict(answer["data"])
