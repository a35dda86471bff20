"""An environment, or a task that gives rewards, in a process of its own: requests on standard input, answers on output.

Both are lines of JSON. The first line is the table ``train.task``, answered when the environment or task is there; then
each request is answered before the next one is read. When standard input closes, an environment is closed, and the
process ends, even if the environment or task hangs.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.environments import Environment, Observation, Turn
from pipelinerl.rl.problems import Task
from pipelinerl.rl.tasks import load_environment, load_task
from pipelinerl.util.user_code import kind_and_line


def log_to(path: str | None) -> None:
    """Append output from now on to a file, if it can be written and is not None."""
    if path is None:
        return
    with suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for printed in (1, 2):
            os.dup2(file, printed)
        os.close(file)


ENVIRONMENT, REWARDS = "environment", "rewards"
CLOSE_LIMIT_S = 5.0
LONGEST_ANSWER = 1 << 20
"""Characters, or tokens."""
TOKENS_END = 2**31
"""No vocabulary has a token from here on."""


def main() -> None:
    """Serve until standard input closes; arguments: ``ENVIRONMENT`` or ``REWARDS``, and perhaps a file for output."""
    kind, *log = sys.argv[1:]
    answers = os.dup(1)
    os.dup2(2, 1)  # so that prints do not mix with answers
    log_to(log[0] if log else None)
    config = TaskConfig.model_validate_json(sys.stdin.buffer.readline())
    if kind == ENVIRONMENT:
        environment = load_environment(config)
        _write(answers, {})
        asyncio.run(_serve(partial(_answer, environment), answers, environment.close))
    else:
        task = load_task(config)
        _write(answers, {})
        asyncio.run(_serve(partial(_reward, task), answers))


async def _serve(
    answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
    answers: int,
    close: Callable[[], Awaitable[None]] | None = None,
) -> None:
    requests: asyncio.Queue[bytes] = asyncio.Queue()
    threading.Thread(target=_read, args=(asyncio.get_running_loop(), requests), daemon=True).start()
    while line := await requests.get():
        _write(answers, await answer(json.loads(line)))
    if close is not None:
        await close()


def _read(loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[bytes]) -> None:
    while line := sys.stdin.buffer.readline():
        loop.call_soon_threadsafe(requests.put_nowait, line)
    loop.call_soon_threadsafe(requests.put_nowait, b"")
    time.sleep(CLOSE_LIMIT_S)
    os._exit(1)  # it hangs


def _write(answers: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


async def _answer(environment: Environment, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "index" in request:
            answer = Observation(await environment.reset(request["index"], held_out=request["held_out"]))
        else:
            answer = await environment.step(Turn(tuple(request["tokens"]), request["text"]))
    except (Exception, SystemExit) as error:
        return {"fault": f"raised {kind_and_line(error)}"}
    if (fault := _fault(answer)) is not None:
        return {"fault": f"gave no observation: {fault}"}
    content = answer.content if isinstance(answer.content, str) else [int(one) for one in answer.content]
    return {"content": content, "reward": float(answer.reward), "done": answer.done}


async def _reward(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    try:
        problem = task.problem(request["index"], held_out=request["held_out"])
        return {"reward": float(task.reward(problem, request["answer"]))}
    except (Exception, SystemExit) as error:
        return {"fault": f"raised {kind_and_line(error)}"}


def _fault(answer: object) -> str | None:
    if not isinstance(answer, Observation):
        return f"step must return an Observation, got {type(answer).__name__}"
    content, reward = answer.content, answer.reward
    tokens = isinstance(content, tuple | list) and all(isinstance(one, Integral) and one >= 0 for one in content)
    if not isinstance(content, str) and not tokens:
        return f"content must be text or a tuple of tokens, got {type(content).__name__}"
    if len(content) > LONGEST_ANSWER:
        return f"content must have at most {LONGEST_ANSWER} characters or tokens, got {len(content)}"
    if isinstance(content, str) and content.encode(errors="ignore").decode() != content:
        return "content must be text that UTF-8 can encode"  # no tokenizer takes it
    if not isinstance(content, str) and max(content, default=0) >= TOKENS_END:
        return f"content must have tokens below {TOKENS_END}, got {max(content)}"
    if not isinstance(reward, Real) or not math.isfinite(reward):
        return f"reward must be a finite number, got {reward!r:.100}"
    return None if isinstance(answer.done, bool) else f"done must be true or false, got {answer.done!r}"


if __name__ == "__main__":
    main()
