"""The environments of a run, each in a process of its own (``processes.py``), and the turns of its rollouts.

An environment that raises, or answers with no valid observation, costs the rollout only, as one that hangs or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from backends.driver.rollouts import RolloutData
from backends.interface import Codec
from backends.workers.main import ENVIRONMENT
from backends.workers.processes import Launch, LocalWorker, Worker, WorkerFailedError, WorkerPool, ask
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.environments import Content, Observation, Turn
from pipelinerl.rl.problems import Problem
from pipelinerl.scheduler.events import EnvironmentFault


class EnvironmentPool:
    """So many environments of a task, started by ``launch``; their output goes to ``log`` (None: the driver's)."""

    def __init__(
        self,
        task: TaskConfig,
        config: EnvironmentConfig,
        *,
        number: int,
        log: Path | None = None,
        launch: Launch = LocalWorker.launched,
    ) -> None:
        self._config = config
        self._workers = WorkerPool(ENVIRONMENT, task, number=number, log=log, launch=launch)
        self._of: dict[int, Worker] = {}

    def __contains__(self, rollout_id: int) -> bool:
        return rollout_id in self._of

    async def open(self, rollout_id: int, index: int, *, held_out: bool = False) -> Observation:
        """Give a rollout a free environment; return its prompt. After a ``WorkerFailedError`` it has none."""
        self._of[rollout_id] = await self._workers.take()
        request = {"index": index, "held_out": held_out}
        return await self._asked(rollout_id, request, "reset", timeout_s=self._config.reset_timeout_s)

    async def step(self, rollout_id: int, turn: Turn) -> Observation:
        """Return an environment's observation after a turn; ``WorkerFailedError`` if it fails, and it is gone."""
        request = {"tokens": turn.tokens, "text": turn.text}
        return await self._asked(rollout_id, request, "step", timeout_s=self._config.step_timeout_s)

    def release(self, rollout_id: int) -> None:
        """Take a rollout's environment back, if it has one; it is not asked anything just now."""
        if (one := self._of.pop(rollout_id, None)) is not None:
            self._workers.give_back(one)

    async def shutdown(self) -> None:
        """End all processes."""
        await self._workers.shutdown()

    async def _asked(self, rollout_id: int, request: dict[str, Any], what: str, *, timeout_s: float) -> Observation:
        try:
            answer = await ask(self._of[rollout_id], request, what, timeout_s=timeout_s)
        except BaseException:
            self.release(rollout_id)
            raise
        content = answer["content"]
        return Observation(content if isinstance(content, str) else tuple(content), answer["reward"], answer["done"])


class Turns:
    """The turns of all rollouts of a run, or of its evaluations.

    Generated tokens stay as they are; observations are cut at ``observation_max`` tokens and appended. An episode ends
    when its environment ends it, after ``max`` turns, or when its context is full; its last observation is not read.
    A rollout older than ``lifetime_s`` is given up while its environment acts, or when its turn ends.

    Arguments are as of ``EnvironmentPool``; ``config`` has ``[train]`` and ``[environment]``.
    """

    def __init__(
        self, config: RunConfig, task: TaskConfig, codec: Codec, *, number: int, log: Path, launch: Launch
    ) -> None:
        assert config.environment is not None
        self._limits, self._codec, self._longest_prompt = config.environment.turns, codec, task.max_prompt_tokens
        self._lifetime_s = config.environment.lifetime_s
        self.retries = config.environment.retries
        self.environments = EnvironmentPool(task, config.environment, number=number, log=log, launch=launch)

    async def open(self, rollout_id: int, data: RolloutData, index: int, *, held_out: bool = False) -> bool:
        """Open an episode; return that a turn follows. After ``WorkerFailedError`` (or a long prompt) there is none."""
        if self._lifetime_s is not None and data.expires_s == math.inf:  # else its reset is made again
            data.expires_s = asyncio.get_running_loop().time() + self._lifetime_s
        async with self._lives(rollout_id, data):
            content = (await self.environments.open(rollout_id, index, held_out=held_out)).content
        data.prompt_tokens, data.reward = self._tokens(content), 0.0
        data.problem = Problem(content if isinstance(content, str) else self._codec.decode(np.array(content, np.int64)))
        longest = min(self._longest_prompt, self._limits.context_max - 1)
        if not 0 < len(data.prompt_tokens) <= longest:
            self.environments.release(rollout_id)
            raise WorkerFailedError(
                EnvironmentFault.ERROR, f"its prompt has {len(data.prompt_tokens)} tokens, 1 to {longest} are allowed"
            )
        return True

    async def act(self, rollout_id: int, data: RolloutData) -> bool:
        """Have the environment act on a turn; return whether another follows. ``WorkerFailedError`` ends it."""
        turn = data.turn_tokens
        async with self._lives(rollout_id, data):
            answer = await self.environments.step(rollout_id, Turn(tuple(turn.tolist()), self._codec.decode(turn)))
        data.reward += answer.reward
        data.num_turns += 1
        if answer.done or data.num_turns == self._limits.max:
            return False
        observed = self._tokens(answer.content)[: self._limits.observation_max]
        if len(data.prompt_tokens) + data.num_tokens + len(observed) >= self._limits.context_max:
            return False
        data.observe(observed)
        return True

    @contextlib.asynccontextmanager
    async def _lives(self, rollout_id: int, data: RolloutData) -> AsyncIterator[None]:
        left_s = data.expires_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None if left_s == math.inf else max(0.0, left_s)):
                await asyncio.sleep(0)  # one that has lived too long is not acted on
                yield
        except TimeoutError:
            self.environments.release(rollout_id)
            what = f"it has lived for more than {self._lifetime_s:g} s (environment.lifetime_s)"
            raise WorkerFailedError(EnvironmentFault.EXPIRED, what) from None

    def _tokens(self, content: Content) -> tuple[int, ...]:
        return self._codec.encode(content) if isinstance(content, str) else content
