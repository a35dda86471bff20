"""One answer, from problem to reward, whatever the schedule: requests to engines, and rewards."""

from __future__ import annotations

import logging
import math

import numpy as np

from backends.interface import Codec, GenerateRequest
from backends.rewards import RewardProcesses, RewardThreads
from backends.rollouts import RolloutData
from backends.workers import WorkerFailedError
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import RunFailedError
from pipelinerl.rl.problems import Task
from pipelinerl.rl.tasks import overlong_penalty
from pipelinerl.util.user_code import kind_and_line

LOG = logging.getLogger("pipelinerl")
FAILURES_LOGGED = 5
"""Failures that are logged one by one; the run's ledger counts all of them."""


class TaskClient:
    """Asks the problems of a task.

    Args:
        config: The run file; ``config.train`` is there.
        task: Problems and rewards. None: these are an environment's.
        codec: Text to tokens and back.
        processes: Compute rewards. None: threads of this process do.
    """

    def __init__(
        self, config: RunConfig, task: Task | None, codec: Codec, processes: RewardProcesses | None = None
    ) -> None:
        assert config.train is not None
        self._config, self._train = config, config.train
        self._task, self._codec, self._processes = task, codec, processes
        self._rewards = RewardThreads()
        self._num_failed = 0

    def begin(self, index: int, *, held_out: bool = False) -> RolloutData:
        """Return a rollout of a problem, nothing generated yet.

        Raises:
            RunFailedError: If the task gives no problem, or one without a prompt.
        """
        assert self._task is not None
        try:
            problem = self._task.problem(index, held_out=held_out)
            return RolloutData(problem, self._codec.encode(problem.prompt), index=index, held_out=held_out)
        except Exception as error:  # the user's own task may raise anything
            what = f"problem({index}, held_out={held_out})"
            raise RunFailedError(f"train.task: {what} gives no prompt: {kind_and_line(error)}") from error

    def request(
        self, rollout_id: int, data: RolloutData, *, longest: int | None = None, temperature: float | None = None
    ) -> GenerateRequest:
        """Return the request that has an engine continue a rollout.

        Args:
            rollout_id: Which; negative for held-out problems.
            data: What it has.
            longest: Where an answer, or a turn, is cut (tokens). None: where those of training are.
            temperature: Softmax temperature (no unit). None: that of training.
        """
        tokens, sampling = data.tokens, self._train.sampling.model_dump()
        before, environment = (*data.prompt_tokens, *tokens), self._config.environment
        room = (longest or self._config.workload.length.max) - (len(tokens) - data.turn_at)
        if environment is not None:
            room = min(room, environment.turns.context_max - len(before))
        if temperature is not None:
            sampling["temperature"] = temperature
        return GenerateRequest(
            rollout_id=rollout_id,
            prompt_tokens=before,
            max_new_tokens=room,
            seed=request_seed(self._config.seed, rollout_id, len(tokens)),
            **sampling,
        )

    async def compute_reward(self, data: RolloutData) -> float:
        """Return the reward of an answer, less the penalty for coming close to the limit.

        Raises:
            ValueError: If the task's reward is not finite.
            TimeoutError: If it takes too long.
            WorkerFailedError: If a process gives none.
            Exception: Whatever the task raises.
        """
        task, limit = self._train.task, self._config.workload.length.max
        reward = await self.reward(data)
        reward += overlong_penalty(len(data.tokens), max_tokens=limit, overlong_tokens=task.overlong_tokens)
        if not math.isfinite(reward):
            raise ValueError(f"the reward must be finite, got {reward}")
        return reward

    def log_failure(self, failure: str) -> None:
        """Log a failure, unless there have been many."""
        self._num_failed += 1
        if self._num_failed <= FAILURES_LOGGED:
            LOG.warning("%s", failure)

    async def shutdown(self) -> None:
        """End what computes rewards."""
        if self._processes is not None:
            await self._processes.shutdown()

    async def reward(self, data: RolloutData) -> float:
        """Return the reward of an answer as the task gives it; see ``compute_reward``."""
        assert self._task is not None
        answer, timeout_s = self._codec.decode(data.tokens), self._train.task.reward_timeout_s
        if self._processes is not None:
            return await self._processes.reward(data.index, answer, held_out=data.held_out)
        return await self._rewards.call(self._task.reward, data.problem, answer, timeout_s=timeout_s)


def why_no_reward(error: BaseException) -> str:
    """Return what a reward's error says of its rollout."""
    return str(error) if isinstance(error, WorkerFailedError) else f"its reward raised {kind_and_line(error)}"


def request_seed(seed: int, rollout_id: int, num_tokens: int) -> int:
    """Return the seed of one request: a function of the run's seed, the rollout, and the tokens it has."""
    entropy = (seed, rollout_id % 2**63, num_tokens)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) % 2**31
