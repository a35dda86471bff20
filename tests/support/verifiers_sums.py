"""A taskset of verifiers with its own harness: sums, which the model may revise once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["Loop", "Sums"]


class Numbers(vf.TaskData):
    total: int


class Sum(vf.Task[Numbers]):
    @vf.reward
    async def right(self, task: Numbers, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(task.total))


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterable[Sum]:
        for number in range(10):
            yield Sum(Numbers(prompt=f"{number}+{number}?", total=2 * number))


class LoopConfig(vf.HarnessConfig):
    turns: int = 2
    stream: bool = False
    rewrites: bool = False


class Loop(vf.Harness[LoopConfig]):
    """A chat of some turns in this process: a real harness is a program, which it installs from the network."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *_: Any, **__: Any) -> Any:
        messages = [{"role": "user", "content": trace.task.data.prompt}]
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        async with httpx.AsyncClient() as client:
            for turn in range(self.config.turns):
                body = {"model": ctx.model, "messages": messages, "tools": tools, "stream": self.config.stream}
                headers = {"Authorization": f"Bearer {secret}"}
                answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers, timeout=600)
                answer.raise_for_status()
                said = "?" if self.config.stream else answer.json()["choices"][0]["message"]
                messages.append(said if isinstance(said, dict) else {"role": "assistant", "content": said})
                calls = messages[-1].get("tool_calls")
                new = {"role": "user", "content": "Sure?"}
                if calls:
                    new = {"role": "tool", "tool_call_id": calls[0]["id"], "content": calls[0]["function"]["arguments"]}
                messages.append(new)
                if self.config.rewrites:
                    messages[0] = {"role": "user", "content": f"Turn {turn}"}
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
