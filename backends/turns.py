"""Rollouts with turns: what a rollout and its environment say to each other.

Tokens that were generated stay as they are. What the environment answers is cut at ``observation_max`` tokens and
appended. An episode is over when the environment says so, after ``max`` turns, or when its context is full; what the
environment answered last is then read by nobody.

A rollout that is older than ``lifetime_s`` is given up while its environment acts, or when its turn ends; what an
engine does is not cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

from backends.environments import EnvironmentPool
from backends.interface import Codec
from backends.rollouts import RolloutData
from backends.workers import Launch, LocalWorker, WorkerFailedError
from pipelinerl.config.run import RunConfig
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.environments import Content, Turn
from pipelinerl.rl.problems import Problem
from pipelinerl.scheduler.events import EnvironmentFault


class Turns:
    """The turns of all rollouts of a run, or of its evaluations.

    Args:
        config: What is run; ``config.train`` and ``config.environment`` are there.
        task: Names the environment.
        codec: Text to tokens and back.
        number: Environments (count).
        log: File for what they print. None: it goes where the driver's goes.
        launch: Starts the process of one.
    """

    def __init__(
        self,
        config: RunConfig,
        task: TaskConfig,
        codec: Codec,
        *,
        number: int,
        log: Path | None = None,
        launch: Launch = LocalWorker.launched,
    ) -> None:
        assert config.environment is not None
        self._limits, self._codec, self._longest_prompt = config.environment.turns, codec, task.max_prompt_tokens
        self._lifetime_s = config.environment.lifetime_s
        self.retries = config.environment.retries
        """Times that an environment is opened again (count)."""
        self.environments = EnvironmentPool(task, config.environment, number=number, log=log, launch=launch)

    async def open(self, rollout_id: int, data: RolloutData, index: int, *, held_out: bool = False) -> bool:
        """Give a rollout an environment, and the prompt of its episode; return that a turn follows.

        Raises:
            WorkerFailedError: If that fails, or the prompt is too long; the rollout has no environment then.
        """
        if self._lifetime_s is not None and data.expires_s == math.inf:  # else its reset is made again
            data.expires_s = time.monotonic() + self._lifetime_s
        async with self._lives(rollout_id, data):
            content = (await self.environments.open(rollout_id, index, held_out=held_out)).content
        data.prompt_tokens, data.reward = self._tokens(content), 0.0
        data.problem = Problem(content if isinstance(content, str) else self._codec.decode(list(content)))
        longest = min(self._longest_prompt, self._limits.context_max - 1)
        if not 0 < len(data.prompt_tokens) <= longest:
            self.environments.release(rollout_id)
            raise WorkerFailedError(
                EnvironmentFault.ERROR, f"its prompt has {len(data.prompt_tokens)} tokens, 1 to {longest} are allowed"
            )
        return True

    async def act(self, rollout_id: int, data: RolloutData) -> bool:
        """Have a rollout's environment act on the turn that has ended; return whether another turn follows.

        Raises:
            WorkerFailedError: If it fails; the rollout has none then.
        """
        turn = data.turn_tokens
        async with self._lives(rollout_id, data):
            answer = await self.environments.step(rollout_id, Turn(tuple(turn), self._codec.decode(turn)))
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
        """Give a rollout up that lives too long, and take its environment back."""
        left_s = data.expires_s - time.monotonic()
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
