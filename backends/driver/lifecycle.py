"""The life of a real run: start, run, stop, interruption, evaluation, checkpoints, resume.

Theory of operation. ``Driver`` owns the parts of a run and their order; between start and end ``loop.py`` carries out
the scheduler's commands, and ``weight_sync.py`` brings weights to the engines.

Invariant: no engine generates before it has weights that were published under the version that it reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from backends.driver.checkpoint import Checkpoint, CheckpointKeeper, fresh_state
from backends.driver.engines import EnginePool
from backends.driver.evaluation import SHARE_OF_SLOTS, Evaluation
from backends.driver.faults import FaultInjector
from backends.driver.fleet import FleetRequests
from backends.driver.loop import EventLoop
from backends.driver.metrics import SamplesLog
from backends.driver.preprocessing import Preprocessing
from backends.driver.tasks import RunTasks, all_of
from backends.driver.weight_sync import WeightSync
from backends.interface import Parts, Weights
from backends.owner import DriverLock
from backends.preflight import evaluation_task_config
from backends.workers.environments import Turns
from backends.workers.rewards import RewardProcesses, TaskClient
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, EngineLostError, ReferenceLostError, RunInterruptedError, TransferError
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import EvaluationReport, RunMeasurements
from pipelinerl.records.run_folder import LOGS_FOLDER, writing
from pipelinerl.records.trace import FanOut
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.problems import Task
from pipelinerl.scheduler.events import StopReason
from pipelinerl.scheduler.kinds import stalled

LOG = logging.getLogger("pipelinerl")
LOST_POLL_S = 1.0
"""Between two calls of ``Parts.lost``; twice gone in a row is lost."""
TRAINER_POLL_S = 0.1
"""Between two looks at a failure while the run waits for the trainer."""
MODEL_FOLDER = "model"
ENVIRONMENTS_LOG, REWARDS_LOG = "environments.log", "rewards.log"


def _reward_processes(task: TaskConfig, parts: Parts, logs: Path) -> RewardProcesses | None:
    if task.reward_workers is None:
        return None
    return RewardProcesses(task, number=task.reward_workers, log=logs / REWARDS_LOG, launch=parts.launch)


class Driver:
    """One real run, with ``[train]``.

    ``task`` None: the environments have problems and rewards. ``evaluation_task`` None: the held-out problems of
    ``task``. ``checkpoint`` None: a new run. ``trial`` is awaited once before the first rollout, when all parts are up
    and the trainer has its memory; such a run keeps no checkpoint and no model.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        parts: Parts,
        task: Task | None,
        evaluation_task: Task | None,
        recording: Recording,
        lock: DriverLock,
        checkpoint: Checkpoint | None,
        trial: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        assert set(parts.engines).issuperset(range(config.num_engines))
        self._config, self._train = config, config.train_table
        assert (parts.reference is not None) is self._train.loss.needs_reference
        self._trainer, self._lost, self._lock = parts.trainer, parts.lost, lock
        self._checkpoint, self._trial, logs = checkpoint, trial, lock.folder / LOGS_FOLDER
        self._keeper = None if trial else CheckpointKeeper(lock, config, recording)
        samples = SamplesLog(parts.codec, recording)
        self._state = fresh_state(config) if checkpoint is None else checkpoint.state
        self.metrics = self._state.metrics
        self._interrupted = False
        self._writing: asyncio.Task[None] | None = None  # the newest checkpoint
        self._longer: bytes | None = None
        self._tasks = RunTasks()
        self._client = TaskClient(config, task, parts.codec, _reward_processes(self._train.task, parts, logs))
        evaluation_client = self._client
        if evaluation_task not in (None, task):
            processes = _reward_processes(evaluation_task_config(self._train), parts, logs)
            evaluation_client = TaskClient(config, evaluation_task, parts.codec, processes)
        self._clients = {self._client, evaluation_client}
        self._pool = EnginePool(
            parts.engines,
            engine_ids=sorted(self._state.scheduler.loaded),
            restarts_per_hour=self._train.engine.restarts_per_hour,
            spawn=self._tasks.spawn,
            bring_back=lambda handle: self._sync.bring_back(handle),  # noqa: PLW0108 - it is made next
            more=parts.more,
        )
        self._requests = FleetRequests(lock, self._pool)
        self._sync = WeightSync(
            trainer=parts.trainer,
            pool=self._pool,
            group=parts.group,
            colocated=config.colocated,
            tasks=self._tasks,
            metrics=self.metrics,
        )
        self._preprocessing = Preprocessing(parts.reference, spawn=self._tasks.spawn)
        self._turns = self._evaluation_turns = None
        if config.environment is not None:
            count = config.environment.count
            turns = partial(Turns, config, codec=parts.codec, log=logs / ENVIRONMENTS_LOG, launch=parts.launch)
            self._turns = turns(self._train.task, number=count)
            self._evaluation_turns = turns(evaluation_task_config(self._train), number=-(-count // SHARE_OF_SLOTS))
        recorder, self._injector = recording.recorder, None
        if config.faults:
            self._injector = FaultInjector(
                config, folder=lock.folder, pool=self._pool, trainer=parts.trainer, tasks=self._tasks
            )
            recorder = FanOut(self._injector.watch, recorder)
        self._evaluation = Evaluation(
            config,
            self._state,
            client=evaluation_client,
            turns=self._evaluation_turns,
            pool=self._pool,
            tasks=self._tasks,
            samples=samples,
        )
        self._loop = EventLoop(
            config,
            self._state,
            tasks=self._tasks,
            trainer=parts.trainer,
            sync=self._sync,
            pool=self._pool,
            client=self._client,
            turns=self._turns,
            preprocessing=self._preprocessing,
            evaluation=self._evaluation,
            samples=samples,
            recorder=recorder,
            after_steps=(
                (self._train.checkpoint.every, self._keep),
                (self._train.checkpoint.export_every, self._export),
                (config.optimizer_steps, self._before_end),
            ),
        )

    async def run(self) -> None:
        """Start everything, run until the scheduler stops, and end everything.

        Raises:
            RunFailedError: If the scheduler gave up, or the run was interrupted; a checkpoint has been written.
            BackendError: If the trainer, the reference model, or too many engines, were lost.
        """
        state = self._state
        before = "interrupted before the first optimizer step"
        if self._checkpoint is not None:
            before = (
                f"interrupted before anything new, after {state.version} optimizer steps; --resume goes on from there"
            )
        try:
            self._tasks.spawn(self._watch())
            await self._tasks.unless_ended(self._bring_up(), before)
            if self._trial is not None:
                await self._tasks.unless_ended(self._measured(self._trial), before)
            if self._train.evaluation.problems and self._checkpoint is None:
                state.evaluation["success_before"] = await self._tasks.unless_ended(
                    self._evaluation.success_rate(), before
                )
            if state.scheduler.stopped is None:
                await self._until_stopped()
            if state.scheduler.stopped is StopReason.STALLED:
                raise stalled(state.scheduler)
            await self._conclude()
        finally:
            self._loop.frozen = True
            try:
                self._loop.record_interrupted()  # it raises if the trace cannot be written
            finally:
                await self._shut_down()

    def interrupt(self) -> None:
        """End the run after the trainer's current call; may be called from a signal handler."""
        self._interrupted = True
        self._tasks.ended.set()

    def summary(self) -> RunMeasurements:
        """Return the parts of summary.json that only real runs have."""
        rates = self._state.evaluation
        evaluation = EvaluationReport(**rates) if rates else None
        return self.metrics.summary().model_copy(update={"evaluation": evaluation})

    async def _watch(self) -> None:
        before = None
        while True:
            await asyncio.sleep(LOST_POLL_S)
            self._lock.check()
            if self._loop.runs:
                self._requests.look()
            why = None if self._lost is None else await asyncio.to_thread(self._lost)
            if why is not None and before is not None:
                raise BackendError(f"{why}; --resume goes on from the last checkpoint, if there is one")
            before = why

    # ------------------------------------------------------------------------------------- start

    async def _bring_up(self) -> None:
        version, published = self._state.version, self._state.scheduler.published
        # Engines have version 0. If weights are sent, a new trainer sends it anyway: the first transfer allocates
        # memory and proves direct copies, on the trainer's side while engines start.
        weights_first = published > 0 or (self._sync.sends and version == 0)

        async def trainer() -> Weights | None:
            await self._start_trainer()
            return await self._sync.snapshot(published) if weights_first else None

        if self._config.colocated:  # one after the other: each takes the memory that the other has left
            await all_of(self._start_trainer(), self._preprocessing.start())
            await self._pool.start()
            if weights_first:
                await self._sync.load_trained(published)
        else:
            weights, *_ = await all_of(trainer(), self._preprocessing.start(), self._pool.start())
            if weights is not None:
                await self._sync.load(weights)

    async def _start_trainer(self) -> None:
        await self._trainer.start()
        if self._checkpoint is not None:
            await self._trainer.load(self._checkpoint.trainer_folder)
        if self._keeper is not None:
            await self._trainer.snapshot()  # allocates the memory of its copies while engines start
        if self._config.colocated:
            await self._trainer.offload()

    async def _measured(self, trial: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._sync.to_training()
        await trial()
        for handle in self._pool:
            handle.version = -1  # the trainer has changed version 0: engines must load it again
        # Not measured: the first update of files allocates memory and proves direct copies.
        await self._sync.load_trained(self._state.version)

    # --------------------------------------------------------------------------------------- end

    async def _until_stopped(self) -> None:
        if self._state.version == self._config.optimizer_steps:  # it was interrupted before its last event
            await self._before_end()
        if self._injector is not None:
            self._injector.start(self._state.time_s)
        await self._loop.start(resumed=self._checkpoint is not None)
        await self._tasks.ended.wait()
        await self._wind_up()

    async def _conclude(self) -> None:
        """Export the model, then evaluate it; a resumed complete run does it again."""
        after = "interrupted after the last optimizer step; --resume evaluates again"
        if self._tasks.failure is None and not self._interrupted:
            self._tasks.ended.clear()
        await self._tasks.unless_ended(self._evaluation.finished(), after)
        if self._trial is None:
            async with self._sync.trainer_turn:
                await self._tasks.unless_ended(self._sync.to_training(), after)
            await self._export()
        if self._train.evaluation.problems:
            await self._tasks.unless_ended(self._sync.load_trained(self._state.version), after)
            self._state.evaluation["success_after"] = await self._tasks.unless_ended(
                self._evaluation.success_rate(), after
            )

    async def _export(self) -> None:
        model = self._lock.folder / MODEL_FOLDER
        new, before = (self._lock.unfinished / name for name in ("model", "model.before"))
        for left in (new, before):
            shutil.rmtree(left, ignore_errors=True)
        async with self._sync.trainer_turn:
            await self._sync.to_training()
            await self._trainer.export(new)
        self._lock.check()
        with writing(model):
            if model.exists():
                model.rename(before)
            new.rename(model)

    async def _wind_up(self) -> None:
        self._preprocessing.close()
        if self._tasks.failure is not None:
            self._loop.frozen = True
            await self._keep_in_spite_of(self._tasks.failure)
            raise self._tasks.failure
        interrupted = self._state.scheduler.stopped is None
        if not interrupted:
            await self._loop.abort_all()
        await self._freeze()
        if interrupted and self._tasks.failure is not None:
            raise self._tasks.failure
        await self._keep()
        await self._kept()
        if interrupted:
            raise RunInterruptedError("interrupted; what was finished is kept, and --resume goes on from there")

    async def _keep_in_spite_of(self, failure: BaseException) -> None:
        """Keep a checkpoint although reference, engines or files are lost, if the trainer waits for no engine."""
        waits, well = self._config.colocated, isinstance(failure, ReferenceLostError | TransferError)
        if not well and (waits or not isinstance(failure, EngineLostError)):
            return
        await self._end_generation()
        if self._loop.trainer_task is not None:
            limit_s = self._train.trainer.step_timeout_s if waits else None
            _, unfinished = await asyncio.wait({self._loop.trainer_task}, timeout=limit_s)
            if unfinished:  # an engine was lost, too
                return
        with contextlib.suppress(BackendError):
            await self._keep()
            await self._kept()

    async def _end_generation(self) -> None:
        """Colocated: end all that the trainer may wait for."""
        if self._config.colocated:
            self._evaluation.drop()
            await self._pool.shutdown()

    async def _freeze(self) -> None:
        """Deliver no more events, and wait until the trainer is done."""
        self._loop.frozen = True
        if self._state.scheduler.stopped is None:
            await self._end_generation()
        if self._loop.trainer_task is not None:
            done: set[asyncio.Task[None]] = set()
            # After a failure the trainer may wait for an engine that is lost.
            while not done and (self._tasks.failure is None or self._state.scheduler.stopped is not None):
                done, _ = await asyncio.wait({self._loop.trainer_task}, timeout=TRAINER_POLL_S)

    async def _shut_down(self) -> None:
        self._pool.close()
        await self._tasks.cancel_all()
        environments = [one.environments for one in (self._turns, self._evaluation_turns) if one is not None]
        parts: list[Any] = [self._trainer, self._preprocessing, self._pool, *environments, *self._clients]
        for error in await asyncio.gather(*(part.shutdown() for part in parts), return_exceptions=True):
            if error is not None:
                LOG.warning(
                    "trainer, reference model, an environment or a reward's process could not be shut down: %s", error
                )

    async def _keep(self) -> None:
        """Copy the trainer's part, then the rest in one instant; write it during training. One is written at a time."""
        if self._keeper is None:
            return
        await self._kept()
        async with self._sync.trainer_turn:
            await self._sync.to_training()
            await self._trainer.snapshot()
        self._state.time_s = self._loop.now()
        writing = self._write(self._keeper, self._state.version, self._keeper.copy(self._state))
        self._writing = self._tasks.spawn(writing)

    async def _write(self, keeper: CheckpointKeeper, version: int, content: bytes) -> None:
        digests = await self._trainer.save(await asyncio.to_thread(keeper.trainer_folder))
        await asyncio.to_thread(keeper.keep, version, content, digests or {}, self._longer)

    async def _before_end(self) -> None:
        """Copy the state before the last event: the run goes on from it if its ``optimizer_steps`` are raised."""
        if self._keeper is not None:
            self._state.time_s = self._loop.now()
            self._longer = self._keeper.copy(self._state)

    async def _kept(self) -> None:
        if self._writing is not None:
            await self._writing
