"""The trainer's part of a real run: micro-batches, a checkpoint where one is due, publications."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from backends.driver.evaluation import Evaluation
from backends.driver.metrics import SamplesLog
from backends.driver.rollouts import samples_of
from backends.driver.state import DriverState
from backends.driver.weight_sync import WeightSync
from backends.interface import Trainer
from pipelinerl.config.run import RunConfig
from pipelinerl.scheduler.events import (
    PublishWeights,
    StartTraining,
    TrainingFinished,
    WeightsLoaded,
    WeightsPublished,
)


class Training:
    """Carries out the trainer's commands, one at a time; taking turns, training waits for an evaluation in progress."""

    def __init__(
        self,
        config: RunConfig,
        state: DriverState,
        *,
        trainer: Trainer,
        sync: WeightSync,
        evaluation: Evaluation,
        samples: SamplesLog,
        keep_checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        self._checkpoint_every, self._group_size = config.train_table.checkpoint.every, config.workload.group_size
        self._has_turns = config.environment is not None
        self._state, self._trainer, self._sync = state, trainer, sync
        self._evaluation, self._samples_log, self._keep_checkpoint = evaluation, samples, keep_checkpoint

    async def train(self, command: StartTraining) -> TrainingFinished:
        """Train on a micro-batch; keep a checkpoint if it completes a step after which one is due."""
        state = self._state
        if self._sync.takes_turns:
            await self._evaluation.finished()
        await self._sync.to_training()
        samples = samples_of(state.rollouts, command.rollout_ids, self._group_size)
        begin_s = time.monotonic()
        result = await self._trainer.train(samples, completes_step=command.completes_step)
        train_s = time.monotonic() - begin_s
        state.count_trained(samples, result, command.version, turns=self._has_turns)
        state.micro_batches.append(command)
        if command.completes_step:
            state.version = command.version + 1
            self._evaluation.step_done(state.version)
            self._samples_log.trained(state.version, state.take_trained())
        event = TrainingFinished(state.version, train_s)
        every = self._checkpoint_every
        if command.completes_step and every is not None and state.version % every == 0:
            state.pending = event
            await self._keep_checkpoint()
            state.pending = None
        return event

    async def repeat_micro_batches(self) -> None:
        """Repeat the micro-batches of an unfinished step after a resume: a checkpoint holds no gradients."""
        for command in self._state.micro_batches:
            await self._sync.to_training()
            samples = samples_of(self._state.rollouts, command.rollout_ids, self._group_size)
            await self._trainer.train(samples, completes_step=False)

    async def publish(self, command: PublishWeights, *, on_loaded: Callable[[WeightsLoaded], None]) -> WeightsPublished:
        """Publish a version; ``on_loaded`` is called for each engine that has it, also afterwards."""
        begin_s = time.monotonic()
        await self._sync.publish(command, on_loaded=on_loaded)
        return WeightsPublished(command.version, time.monotonic() - begin_s)
