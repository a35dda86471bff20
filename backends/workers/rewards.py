"""A user's task: problems, requests to engines, and rewards in threads or processes, each with a time-out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from backends.driver.rollouts import RolloutData
from backends.interface import Codec, GenerateRequest
from backends.workers.main import REWARDS
from backends.workers.processes import Launch, LocalWorker, WorkerFailedError, WorkerPool, ask
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import RunFailedError
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.problems import Problem, Task
from pipelinerl.util.user_code import kind_and_line

REWARD_THREADS = 8
PROBLEMS_KEPT = 1024
"""Newest problems that are kept: the rollouts of a group have one."""


class RewardThreads:
    """Daemon threads, a call each. One that hangs is replaced, and does not keep the process, as a pool would."""

    def __init__(self, number: int = REWARD_THREADS) -> None:
        self._room = asyncio.Semaphore(number)
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []  # of calls, one per thread

    async def call(self, function: Callable[..., float], *arguments: Any, timeout_s: float) -> float:
        """Call a function in a thread; ``TimeoutError`` after ``timeout_s``, once a place was free."""
        async with self._room:
            loop = asyncio.get_running_loop()
            outcome: asyncio.Future[float] = loop.create_future()

            def run() -> None:
                try:
                    result, error = float(function(*arguments)), None
                except BaseException as raised:
                    result, error = 0.0, raised
                with contextlib.suppress(RuntimeError):  # the loop has been closed: no task waits any more
                    loop.call_soon_threadsafe(settle, result, error)

            def settle(result: float, error: BaseException | None) -> None:
                if outcome.done():  # given up
                    return
                if error is None:
                    outcome.set_result(result)
                else:
                    outcome.set_exception(error)

            calls = self._idle.pop() if self._idle else _reward_thread()
            calls.put(run)
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    return await outcome
            except TimeoutError:
                if not limit.expired():  # the function's own
                    raise
                raise TimeoutError(f"no reward after {timeout_s:g} s (train.task.reward_timeout_s)") from None
            finally:
                if outcome.cancelled():
                    calls.put(None)
                else:
                    self._idle.append(calls)

    def close(self) -> None:
        """End the threads that are idle."""
        while self._idle:
            self._idle.pop().put(None)


def _reward_thread() -> SimpleQueue[Callable[[], None] | None]:
    calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def work() -> None:
        for call in iter(calls.get, None):
            call()

    threading.Thread(target=work, name="reward", daemon=True).start()
    return calls


class RewardProcesses:
    """Processes with the task and a call each; they know problems by index. One that dies or hangs is replaced."""

    def __init__(
        self, task: TaskConfig, *, number: int, log: Path | None = None, launch: Launch = LocalWorker.launched
    ) -> None:
        self._timeout_s = task.reward_timeout_s
        self._workers = WorkerPool(REWARDS, task, number=number, log=log, launch=launch)

    async def reward(self, index: int, answer: str, *, held_out: bool) -> float:
        """Return the reward of an answer to a problem; ``WorkerFailedError`` if there is none."""
        worker = await self._workers.take()
        try:
            request = {"index": index, "held_out": held_out, "answer": answer}
            return float((await ask(worker, request, "reward", timeout_s=self._timeout_s))["reward"])
        finally:
            self._workers.give_back(worker)

    async def shutdown(self) -> None:
        """End all processes."""
        await self._workers.shutdown()


LOG = logging.getLogger("pipelinerl")
FAILURES_LOGGED = 5
"""One by one; the run's ledger counts all."""


class TaskClient:
    """Asks the problems of a task (None: an environment's) and its rewards (``processes`` None: in threads)."""

    def __init__(self, config: RunConfig, task: Task | None, codec: Codec, processes: RewardProcesses | None) -> None:
        self._config, self._train = config, config.train_table
        self._task, self._codec, self._processes = task, codec, processes
        self._problem = lru_cache(PROBLEMS_KEPT)(self._new_problem)
        self._sampling = config.train_table.sampling.model_dump()
        self._rewards = RewardThreads()
        self._num_failed = 0

    def begin(self, index: int, *, held_out: bool = False) -> RolloutData:
        """Return a fresh rollout of a problem; ``RunFailedError`` if the task gives none, or one without a prompt."""
        problem, prompt_tokens = self._problem(index, held_out=held_out)
        return RolloutData(problem, prompt_tokens, index=index, held_out=held_out)

    def _new_problem(self, index: int, *, held_out: bool) -> tuple[Problem, tuple[int, ...]]:
        assert self._task is not None
        try:
            problem = self._task.problem(index, held_out=held_out)
            return problem, self._codec.encode(problem.prompt)
        except Exception as error:  # the user's own task may raise anything
            what = f"problem({index}, held_out={held_out})"
            raise RunFailedError(f"train.task: {what} gives no prompt: {kind_and_line(error)}") from error

    def request(
        self, rollout_id: int, data: RolloutData, *, longest: int | None = None, temperature: float | None = None
    ) -> GenerateRequest:
        """Return the request that continues a rollout; ``longest`` answer or turn (tokens). None: as in training."""
        before, environment = (*data.prompt_tokens, *data.tokens.tolist()), self._config.environment
        room = (longest or self._config.workload.length.max) - (data.num_tokens - data.turn_at)
        if environment is not None:
            room = min(room, environment.turns.context_max - len(before))
        sampling = self._sampling if temperature is None else self._sampling | {"temperature": temperature}
        return GenerateRequest(
            rollout_id=rollout_id,
            prompt_tokens=before,
            max_new_tokens=room,
            seed=request_seed(self._config.seed, rollout_id, data.num_tokens),
            **sampling,
        )

    async def compute_reward(self, data: RolloutData) -> float:
        """Return an answer's reward, less the penalty near the limit; ``ValueError`` or an error of the task."""
        task, limit = self._train.task, self._config.workload.length.max
        reward = await self.reward(data)
        reward += overlong_penalty(data.num_tokens, max_tokens=limit, overlong_tokens=task.overlong_tokens)
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
        self._rewards.close()
        if self._processes is not None:
            await self._processes.shutdown()

    async def reward(self, data: RolloutData) -> float:
        """Return the reward of an answer as the task gives it; see ``compute_reward``."""
        assert self._task is not None
        answer, timeout_s = self._codec.decode(data.tokens), self._train.task.reward_timeout_s
        if self._processes is not None:
            return await self._processes.reward(data.index, answer, held_out=data.held_out)
        return await self._rewards.call(self._task.reward, data.problem, answer, timeout_s=timeout_s)


def overlong_penalty(num_tokens: int, *, max_tokens: int, overlong_tokens: int) -> float:
    """Return the penalty in [-1, 0] that is added to the reward of an answer near the length limit.

    p(L) = ((L_max - b) - L) / b for L > L_max - b, and -1 from L_max on; 0 before, and always if b = 0. L, L_max
    and b are ``num_tokens``, ``max_tokens`` and ``overlong_tokens``. Source: Yu et al. 2025 (DAPO,
    arXiv:2503.14476), eq. 13, used by Piche et al. 2025 (arXiv:2509.19128).
    """
    excess = num_tokens - (max_tokens - overlong_tokens)
    return -min(max(excess / overlong_tokens, 0.0), 1.0) if overlong_tokens else 0.0


def why_no_reward(error: BaseException) -> str:
    """Word the failure of a rollout by the error of its reward."""
    return str(error) if isinstance(error, WorkerFailedError) else f"its reward raised {kind_and_line(error)}"


def request_seed(seed: int, rollout_id: int, num_tokens: int) -> int:
    """Return the seed of one request: a function of the run's seed, the rollout, and the tokens it has."""
    entropy = (seed, rollout_id % 2**63, num_tokens)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) % 2**31
