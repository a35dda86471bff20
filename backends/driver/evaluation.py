"""Evaluations on held-out problems by the engines of the run: before it, beside it every few optimizer steps, after it.

Theory of operation. An evaluation is *due* when its optimizer step is done, and begins when all engines have loaded
the weights of that step or newer ones. Its requests run beside the rollouts in slots of their own
(``evaluation_slots``): no scheduler and no ledger counts them, nothing is trained on them, only a drain waits for one.
Engines load new weights meanwhile, as always: an evaluation reports the versions that sampled its answers. Where
engines and trainer take turns, the next training waits for the evaluation, and none begins then: the last engine may
load while others sleep. Ctrl-C drops one in progress.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from backends.driver.checkpoint import DriverState
from backends.driver.engines import EnginePool
from backends.driver.metrics import SamplesLog
from backends.driver.rollouts import RolloutData
from backends.driver.tasks import RunTasks
from backends.workers.environments import Turns
from backends.workers.rewards import TaskClient
from pipelinerl.config.run import RunConfig
from pipelinerl.records.reports import EvaluationPoint
from pipelinerl.rl.problems import Problem
from pipelinerl.util.user_code import kind_and_line

SHARE_OF_SLOTS = 8
"""One more slot per so many rollout slots of an engine, for evaluations; environments likewise."""


def evaluation_slots(config: RunConfig) -> int:
    """Return an engine's extra slots for evaluations (count)."""
    beside = config.train is not None and config.train.evaluation.every is not None
    return math.ceil(config.scheduler.generation_batch_size / SHARE_OF_SLOTS) if beside else 0


class Evaluation:
    """The evaluations of a run; ``turns`` are environments for evaluations only (None: rollouts have no turns)."""

    def __init__(
        self,
        config: RunConfig,
        state: DriverState,
        *,
        client: TaskClient,
        turns: Turns | None,
        pool: EnginePool,
        tasks: RunTasks,
        samples: SamplesLog,
    ) -> None:
        self._run, self._config, self._state = config, config.train_table.evaluation, state
        self._client, self._turns, self._pool, self._tasks, self._samples = client, turns, pool, tasks, samples
        self._due: int | None = None
        self._running: asyncio.Task[None] | None = None

    def step_done(self, version: int) -> None:
        """Note that an optimizer step is done."""
        if self._config.every is not None and version % self._config.every == 0:
            self._due = version

    def begin_if_due(self) -> None:
        """Start an evaluation if one is due, none is running, and all engines are awake with its weights."""
        due = self._due
        if due is None or self._running is not None or self._pool.asleep:
            return
        if any(one.version < due for one in self._pool):
            return
        self._due = None
        self._running = self._tasks.spawn(self._beside(due))

    async def finished(self) -> None:
        """Wait for the running evaluation."""
        while self._running is not None:
            await asyncio.wait({self._running})

    def drop(self) -> None:
        """End the running evaluation."""
        if self._running is not None:
            self._running.cancel()

    async def _beside(self, step: int) -> None:
        try:
            point = await self._answers(step, slots=evaluation_slots(self._run))
        finally:
            self._running = None
        self._state.evaluation.setdefault("during", []).append(point)
        self._state.metrics.evaluated(point)
        self.begin_if_due()

    async def success_rate(self) -> float:
        """Return the share of problems that are solved while nothing else is generated."""
        slots = self._run.scheduler.generation_batch_size + evaluation_slots(self._run)
        return (await self._answers(self._state.version, slots=slots)).success

    async def _answers(self, step: int, *, slots: int) -> EvaluationPoint:
        """Answer all problems, ``slots`` at a time per engine; a failed generation or reward counts as wrong."""
        begin_s = time.monotonic()
        handles = list(self._pool)
        room = {handle.place: asyncio.Semaphore(slots) for handle in handles}

        async def generate(index: int, data: RolloutData) -> None:
            handle, aborted = handles[index % len(handles)], True
            async with room[handle.place]:
                while aborted:  # by an update of that kind
                    request = self._client.request(
                        _rollout_id(index), data, longest=self._config.max_tokens, temperature=self._config.temperature
                    )
                    generated = await self._pool.generate(handle, request)
                    data.extend(generated)
                    self._state.metrics.decoded(generated.decode_steps)
                    aborted = generated.aborted

        async def answer(index: int) -> tuple[RolloutData, float] | None:
            data = RolloutData(Problem(""), ()) if self._turns else self._client.begin(index, held_out=True)
            try:
                if self._turns is not None:
                    await self._play(self._turns, index, data, generate)
                    return data, data.reward
                await generate(index, data)
                return data, await self._client.reward(data)
            except (Exception, SystemExit) as error:
                self._client.log_failure(f"held-out problem {index} counts as not solved: {kind_and_line(error)}")
                return None

        answers = await asyncio.gather(*(answer(index) for index in range(self._config.problems)))
        given = [one for one in answers if one is not None]
        self._samples.evaluated(step, given)
        versions = [version for data, _ in given for version in data.spans.versions] or [step]
        return EvaluationPoint(
            step=step,
            success=sum(reward >= 1.0 for _, reward in given) / self._config.problems,
            version_min=min(versions),
            version_max=max(versions),
            seconds=time.monotonic() - begin_s,
        )

    async def _play(
        self, turns: Turns, index: int, data: RolloutData, generate: Callable[[int, RolloutData], Awaitable[None]]
    ) -> None:
        rollout_id = _rollout_id(index)
        await turns.open(rollout_id, data, index, held_out=True)
        try:
            await generate(index, data)
            while await turns.act(rollout_id, data):
                await generate(index, data)
        finally:
            turns.environments.release(rollout_id)


def _rollout_id(index: int) -> int:
    return -1 - index
