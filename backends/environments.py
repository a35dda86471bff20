"""The environments of a run, each in a process of its own; see ``workers.py``.

An environment that raises, or answers with what is no observation, costs the rollout only, as one that hangs or dies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.worker_main import ENVIRONMENT
from backends.workers import Launch, LocalWorker, Worker, WorkerPool, ask
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.environments import Observation, Turn


class EnvironmentPool:
    """So many environments.

    Args:
        task: Names the environment.
        config: Its time-outs.
        number: Environments (count).
        log: File for what they print. None: it goes where the driver's goes.
        launch: Starts a process.
    """

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
        """Return whether a rollout has an environment."""
        return rollout_id in self._of

    async def open(self, rollout_id: int, index: int, *, held_out: bool = False) -> Observation:
        """Give a rollout an environment, when there is a free one; return its prompt.

        Raises:
            WorkerFailedError: If that fails; the rollout has none then.
        """
        self._of[rollout_id] = await self._workers.take()
        request = {"index": index, "held_out": held_out}
        return await self._asked(rollout_id, request, "reset", timeout_s=self._config.reset_timeout_s)

    async def step(self, rollout_id: int, turn: Turn) -> Observation:
        """Return what a rollout's environment answers.

        Raises:
            WorkerFailedError: If it fails; the rollout has none then.
        """
        request = {"tokens": turn.tokens, "text": turn.text}
        return await self._asked(rollout_id, request, "step", timeout_s=self._config.step_timeout_s)

    def release(self, rollout_id: int) -> None:
        """Take a rollout's environment back, if it has one; it is not asked anything just now."""
        one = self._of.pop(rollout_id, None)
        if one is not None:
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
