"""The real world: it carries out the scheduler's commands on engines and a trainer and reports what happens.

Theory of operation. One asyncio loop. Each command that takes time becomes a task; each task ends by handing one
event to ``_deliver``, which asks the scheduler and carries out the answer at once. Carrying out only starts tasks,
so events are handled one after the other, as in the simulated world, and no lock is needed; but where weights are sent
through a group, tasks take turns in having the trainer do something (``group.py``).

================  ===============================  ==================================  =========================
task              waits for                        bounded by                          ends with
================  ===============================  ==================================  =========================
``_generate``     room before training, its engine H per engine (scheduler)            finished, aborted, failed
``_score``        a reward thread, the reference   their time-outs                     scored, failed
``_train``        the trainer                      ``step_timeout_s``; one at a time   training finished
``_publish``      the trainer; to send, engines    ``step_timeout_s``; one at a time   weights published
``_update``       its engine (and its restart)     ``update_timeout_s``; one a engine  weights loaded
``_restart``      the engine's start               ``start_timeout_s``; ``restarts``   --
================  ===============================  ==================================  =========================

A lost engine costs what its rollouts had generated since they were submitted: they are reported as aborted, so
the scheduler starts them again, there or elsewhere. It gets the newest published weights before it is used again.

When a run is interrupted, the books are *frozen*: nothing is delivered any more, except that the trainer's last
event is kept as ``pending``. What is then saved can be gone on from: ``_go_on`` reports the rollouts that were in
progress as aborted, the engines that were loading as having loaded, and last the pending event. No engine
generates before it has weights that were published under the version it reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, assert_never

from backends.engines import EngineHandle, EnginePool
from backends.interface import Engine, Reference, Sample, Trainer, Weights
from backends.preprocessing import Preprocessing
from backends.rollouts import Codec, lag_of_tokens, samples_of
from backends.state import DriverState, Keeper, fresh_state
from backends.task_client import TaskClient
from backends.transfer.group import WeightSyncGroup
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, EngineLostError, ReferenceLostError, RunFailedError, TrainerLostError
from pipelinerl.records.recording import Recorder
from pipelinerl.rl.tasks import Task
from pipelinerl.scheduler.events import (
    AbortRollout,
    Command,
    DiscardRollouts,
    Event,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    StartTraining,
    Stop,
    StopReason,
    TrainingFinished,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)

T = TypeVar("T")
LOG = logging.getLogger("pipelinerl")
STOP_TIMEOUT_S = 30.0
"""Seconds that rollouts in progress get to end when the run is over."""
TRAINER_POLL_S = 0.1
"""Seconds between two looks at whether the run has failed while the trainer is waited for."""


class Driver:
    """One real run.

    Args:
        config: What to run; ``config.train`` is there.
        engines: As many as ``config.num_engines``.
        trainer: The trainer.
        reference: The model at the start; there if ``loss.kl_coefficient`` is above 0.
        task: Problems and rewards.
        codec: Text to tokens and back.
        recorder: Told every event and command, in order.
        keeper: Where checkpoints go; None: nowhere.
        state: What to go on from; None: a new run.
        resume_from: The trainer's part of it.
        export_to: Folder for the trained model when the run is done; None: it is not exported.
        group: What weights are sent through; None: they lie where engines find them.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        engines: Sequence[Engine],
        trainer: Trainer,
        reference: Reference | None = None,
        task: Task,
        codec: Codec,
        recorder: Recorder,
        keeper: Keeper | None = None,
        state: DriverState | None = None,
        resume_from: Path | None = None,
        export_to: Path | None = None,
        group: WeightSyncGroup | None = None,
    ) -> None:
        assert config.train is not None  # the caller has seen to it
        assert len(engines) == config.num_engines
        assert (reference is not None) is (config.train.loss.kl_coefficient > 0)
        self._config, self._train_config = config, config.train
        self._trainer, self._recorder = trainer, recorder
        self._answers = TaskClient(config, task, codec)
        self._keeper = keeper
        self._state = state or fresh_state(config)
        self.metrics = self._state.metrics
        self._fleet = EnginePool(
            engines,
            restarts=config.train.engine.restarts,
            spawn=self._spawn,
            on_update=self.metrics.updated,
            on_restart=self.metrics.restarted,
            bring_back=self._bring_back,
        )
        limit = config.scheduler.ready_queue_limit
        self._preprocessing = Preprocessing(reference, limit=limit, spawn=self._spawn)
        self._resumed = state is not None
        self._resume_from, self._export_to, self._group = resume_from, export_to, group
        self._generating = True  # colocated only: the engines have the memory
        self._tasks: set[asyncio.Task[None]] = set()
        self._trainer_task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._stop: StopReason | None = None
        self._failure: BaseException | None = None
        self._interrupted = False
        self._frozen = False
        self._submitted: set[int] = set()  # rollouts that an engine knows
        self._began_s = 0.0

    async def run(self) -> None:
        """Start everything, run until the scheduler stops, and end everything.

        Raises:
            RunFailedError: If the scheduler gave up, or the run was interrupted; a checkpoint has been written.
            BackendError: If the trainer, the reference model, or too many engines, were lost.
        """
        state, limit = self._state, self._config.scheduler.discard_limit
        before = "interrupted before the first optimizer step"
        try:
            await self._unless_ended(self._bring_up(), before)
            if self._train_config.evaluation.problems and not self._resumed:
                state.evaluation["success_before"] = await self._unless_ended(
                    self._answers.success_rate(self._fleet), before
                )
            if state.scheduler.stopped is None:
                await self._until_stopped()
            if state.scheduler.stopped is StopReason.STALLED:
                raise RunFailedError(
                    f"stalled: more than scheduler.discard_limit = {limit} rollouts were given up without an optimizer "
                    "step in between"
                )
            await self._conclude()
        finally:
            await self._shut_down()

    def interrupt(self) -> None:
        """End the run as soon as the trainer is done with what it does; may be called from a signal handler."""
        self._interrupted = True
        self._ended.set()

    def summary(self) -> dict[str, Any]:
        """Return the parts of summary.json that only a real run has, as far as they are known."""
        evaluation = self._state.evaluation
        return self.metrics.summary() | ({"evaluation": evaluation} if evaluation else {})

    # ------------------------------------------------------------------------------- beginning, end

    async def _unless_ended(self, work: Coroutine[Any, Any, T], interrupted: str) -> T:
        """Do what comes before the first command or after the last one, unless the run is interrupted or fails."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise self._failure or RunFailedError(interrupted)

    async def _bring_up(self) -> None:
        """Start trainer, reference model and engines; on going on, with the weights that the engines had."""
        state = self._state
        if self._config.colocated:  # one after the other: each takes the memory that the other has left
            await asyncio.gather(self._start_trainer(), self._preprocessing.start())
            await self._fleet.start()
        else:
            await asyncio.gather(self._start_trainer(), self._preprocessing.start(), self._fleet.start())
        scheduler = self._config.scheduler
        next_publishes = scheduler.publish_every == 1 if scheduler.kind == "pipeline" else self._config.colocated
        if state.version > state.published and next_publishes:
            return  # they wait for the publication that comes first
        if state.published:  # version 0 they have
            await self._load_newest(state.published)
        self._fleet.may_generate()

    async def _start_trainer(self) -> None:
        await self._trainer.start()
        if self._resume_from is not None:
            await self._trainer.load(self._resume_from)
        if self._config.colocated:
            await self._trainer.offload()

    async def _load_newest(self, version: int) -> None:
        """Give all engines the trainer's weights, outside of the schedule, under the name of this version.

        A run that goes on between two publications has no older ones: then the lag that it reports is too large.
        """
        await self._to_training()
        async with self._turn():
            weights = await self._trainer.publish(version)
            self._fleet.published(weights)
        await self._to_generation()
        async with self._turn():
            await self._gather_takers(weights)
            loading = asyncio.ensure_future(self._fleet.load(weights))
            try:
                await self._send(weights)
            except BaseException:
                loading.cancel()
                raise
        await loading

    async def _go_on(self) -> None:
        """Report to the scheduler what has become of everything that was under way."""
        state = self._state
        published = state.published  # the answer to the last report may be a publication
        for engine in state.in_flight.values():
            self._fleet.seats[engine].count(+1)
        for command in state.micro_batches:  # their gradients were not saved
            await self._to_training()
            await self._trainer.train(self._samples(command), completes_step=False)
        in_flight, pending, state.pending = list(state.in_flight.items()), state.pending, None
        for rollout_id in sorted(state.scoring):
            self._spawn(self._score(rollout_id))
        for rollout_id, engine in in_flight:
            self._aborted(rollout_id, engine)
        for engine, version in enumerate(state.scheduler.loaded):
            if version != published:
                self._deliver(WeightsLoaded(engine, published, 0.0))
        if pending is not None:
            self._deliver(pending)

    async def _until_stopped(self) -> None:
        """Let the scheduler run, from the start or from where it stood."""
        self._began_s = time.monotonic() - self._state.time_s
        if self._resumed:
            await self._go_on()
        else:
            self._carry_out_all(self._state.scheduler.start())
        await self._ended.wait()
        await self._wind_up()

    async def _conclude(self) -> None:
        """Export what has been trained, then see what it can do; a run that is complete may do it again."""
        after = "interrupted after the last optimizer step; --resume evaluates again"
        if self._failure is None and not self._interrupted:
            self._ended.clear()
        if self._export_to is not None:
            if self._resumed:  # else the trainer has the memory
                await self._unless_ended(self._to_training(), after)
            partial = self._export_to.with_name(self._export_to.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            await self._trainer.export(partial)
            shutil.rmtree(self._export_to, ignore_errors=True)
            partial.rename(self._export_to)
        if self._train_config.evaluation.problems:
            await self._unless_ended(self._load_newest(self._state.version), after)
            self._state.evaluation["success_after"] = await self._unless_ended(
                self._answers.success_rate(self._fleet), after
            )

    async def _wind_up(self) -> None:
        """End what is in progress, keep a checkpoint, and say how the run ended."""
        self._preprocessing.close()
        if self._failure is not None:
            self._frozen = True
            await self._keep_in_spite_of(self._failure)
            raise self._failure
        if self._stop is None:  # interrupted
            await self._freeze()
            if self._failure is not None:
                raise self._failure
            await self._keep()
            for rollout_id, engine in list(self._state.in_flight.items()):
                spans = self._state.rollouts[rollout_id].spans
                self._recorder.event(self._now(), RolloutAborted(rollout_id, engine, spans))
            raise RunFailedError("interrupted; what was finished is kept, and --resume goes on from there")
        for rollout_id, engine in list(self._state.in_flight.items()):
            if rollout_id in self._submitted:
                self._spawn(self._abort(AbortRollout(rollout_id, engine)))
            else:
                self._aborted(rollout_id, engine)
        over_s = time.monotonic() + STOP_TIMEOUT_S
        while self._state.in_flight and time.monotonic() < over_s and self._failure is None:
            await asyncio.sleep(0.01)
        for rollout_id, engine in list(self._state.in_flight.items()):
            self._aborted(rollout_id, engine)
        await self._freeze()
        await self._keep()

    async def _keep_in_spite_of(self, failure: BaseException) -> None:
        """Keep a checkpoint although reference or engines are lost, if the trainer does not wait for an engine."""
        waits = self._config.colocated
        if not isinstance(failure, ReferenceLostError) and (waits or not isinstance(failure, EngineLostError)):
            return
        if self._trainer_task is not None:
            limit_s = self._train_config.trainer.step_timeout_s if waits else None
            _, unfinished = await asyncio.wait({self._trainer_task}, timeout=limit_s)
            if unfinished:  # an engine was lost, too
                return
        with contextlib.suppress(TrainerLostError):
            await self._to_saving()
            await self._keep()

    async def _freeze(self) -> None:
        """Deliver nothing any more, and wait until the trainer is done; colocated, it gets the memory to save from."""
        self._frozen = True
        if self._trainer_task is not None:
            done: set[asyncio.Task[None]] = set()
            while not done and (self._failure is None or self._stop is not None):  # else it may wait for a lost engine
                done, _ = await asyncio.wait({self._trainer_task}, timeout=TRAINER_POLL_S)
        if self._failure is None:
            await self._to_saving()

    async def _shut_down(self) -> None:
        self._frozen = True
        self._fleet.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        parts = (self._trainer, self._preprocessing, self._fleet)
        for error in await asyncio.gather(*(part.shutdown() for part in parts), return_exceptions=True):
            if error is not None:
                LOG.warning("trainer or reference model could not be shut down: %s", error)

    async def _keep(self) -> None:
        """Write a checkpoint: the trainer's part first, then the rest in one instant."""
        if self._keeper is None:
            return
        state = self._state
        await self._trainer.save(self._keeper.trainer_folder())
        state.time_s = self._now()
        self._keeper.keep(state)

    # ---------------------------------------------------------------------------- events, commands

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _deliver(self, event: Event) -> None:
        """Report an event and carry out the answer."""
        if self._frozen:
            if isinstance(event, TrainingFinished | WeightsPublished):
                self._state.pending = event
            return
        begin_s = time.perf_counter()
        if isinstance(event, RolloutFinished | RolloutAborted | RolloutFailed):
            self._state.aborting.discard(event.rollout_id)
            engine = self._state.in_flight.pop(event.rollout_id, None)
            if engine is not None:
                self._fleet.seats[engine].count(-1)
        self._recorder.event(self._now(), event)
        try:
            self._carry_out_all(self._state.scheduler.handle(event))
        except Exception as error:
            self._fail(error)
        num_rollouts = isinstance(event, RolloutFinished)
        self.metrics.driver_worked(time.perf_counter() - begin_s, num_rollouts=num_rollouts)

    def _carry_out_all(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._recorder.command(self._now(), command)
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        state = self._state
        match command:
            case StartRollout():
                if command.rollout_id not in state.rollouts:  # here: a checkpoint may come before its task begins
                    state.rollouts[command.rollout_id] = self._answers.begin(command.prompt_id)
                state.in_flight[command.rollout_id] = command.engine
                self._fleet.seats[command.engine].count(+1)
                self._spawn(self._generate(command))
            case StartTraining():
                self._trainer_task = self._spawn(self._train(command))
            case PublishWeights():
                state.published = command.version
                self._trainer_task = self._spawn(self._publish(command))
            case DiscardRollouts():
                for rollout_id in command.rollout_ids:
                    del state.rollouts[rollout_id]
            case AbortRollout():
                state.aborting.add(command.rollout_id)
                self._spawn(self._abort(command))
            case Stop():
                self._stop = command.reason
                self._ended.set()
            case _:
                assert_never(command)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._ended.set()

    # ------------------------------------------------------------------------------------ rollouts

    async def _generate(self, command: StartRollout) -> None:
        state, rollout_id, seat = self._state, command.rollout_id, self._fleet.seats[command.engine]
        data = state.rollouts[rollout_id]
        if len(data.prompt_tokens) > self._train_config.task.max_prompt_tokens:
            self._failed(rollout_id, f"its prompt has {len(data.prompt_tokens)} tokens", command.engine)
            return
        await self._preprocessing.room()
        await seat.may_generate.wait()
        await seat.up.wait()
        if self._stop is not None:
            return
        if rollout_id in state.aborting:
            self._aborted(rollout_id, command.engine)
            return
        self._submitted.add(rollout_id)
        try:
            generated = await seat.engine.generate(self._answers.request(rollout_id, data))
        except EngineLostError as error:
            self._fleet.lost(seat, error)
            self._aborted(rollout_id, command.engine)
            return
        except BackendError as error:
            self._failed(rollout_id, str(error), command.engine)
            return
        finally:
            self._submitted.discard(rollout_id)
        if self._frozen:
            return
        data.extend(generated)
        if generated.aborted:
            self._aborted(rollout_id, command.engine)
            return
        state.scoring.add(rollout_id)
        self._deliver(RolloutFinished(rollout_id, command.engine, data.spans))
        self._spawn(self._score(rollout_id))

    def _aborted(self, rollout_id: int, engine: int) -> None:
        """Report a rollout that ended early, with what it has."""
        spans = self._state.rollouts[rollout_id].spans
        if rollout_id in self._state.aborting and not self._frozen:
            del self._state.rollouts[rollout_id]
        self._deliver(RolloutAborted(rollout_id, engine, spans))

    def _failed(self, rollout_id: int, why: str, engine: int | None = None) -> None:
        """Report a rollout that will not be scored, and its engine if it has not finished."""
        if self._frozen:
            return
        self._answers.tell(f"rollout {rollout_id} failed: {why}")
        del self._state.rollouts[rollout_id]
        self._state.scoring.discard(rollout_id)
        self._deliver(RolloutFailed(rollout_id, engine))

    async def _abort(self, command: AbortRollout) -> None:
        seat = self._fleet.seats[command.engine]
        try:
            await seat.engine.abort(command.rollout_id)
        except EngineLostError as error:
            self._fleet.lost(seat, error)

    async def _score(self, rollout_id: int) -> None:
        data = self._state.rollouts[rollout_id]
        try:
            reward = await self._answers.earned(data)
        except (Exception, SystemExit) as error:
            self._failed(rollout_id, f"its reward raised {type(error).__name__}: {error}")
            return
        if self._frozen:  # a cancellation that comes with the reward is lost: nobody would end what comes next
            return
        reference_logprob_T = await self._preprocessing.reference_logprobs(data)
        if self._frozen:
            return
        data.reward, data.reference_logprob_T = reward, reference_logprob_T
        self._state.scoring.discard(rollout_id)
        self._deliver(RolloutScored(rollout_id, reward))

    # ------------------------------------------------------------------------------------- training

    def _samples(self, command: StartTraining) -> list[Sample]:
        return samples_of(self._state.rollouts, command.rollout_ids, self._config.workload.group_size)

    async def _train(self, command: StartTraining) -> None:
        state = self._state
        await self._to_training()
        samples = self._samples(command)
        begin_s = time.monotonic()
        async with self._turn():
            result = await self._trainer.train(samples, completes_step=command.completes_step)
        train_s = time.monotonic() - begin_s
        for sample, logprob_T in zip(samples, result.logprob_T, strict=True):
            lag_T = lag_of_tokens(state.rollouts[sample.rollout_id].spans, command.version)
            self.metrics.trained(logprob_T - sample.behaviour_logprob_T, lag_T)
        self.metrics.trainer_said(result.metrics)
        state.micro_batches.append(command)
        if command.completes_step:
            state.version = command.version + 1
            for done in state.micro_batches:
                for rollout_id in done.rollout_ids:
                    del state.rollouts[rollout_id]
            state.micro_batches.clear()
        event = TrainingFinished(state.version, train_s)
        every = self._train_config.checkpoint.every
        if command.completes_step and every is not None and state.version % every == 0:
            state.pending = event
            await self._keep()
            state.pending = None
        self._deliver(event)

    async def _publish(self, command: PublishWeights) -> None:
        begin_s = time.monotonic()
        async with self._turn():
            weights = await self._trainer.publish(command.version)
            self._fleet.published(weights)
        await self._to_generation()
        waits = self._group is not None and command.weight_update is WeightUpdate.WAIT
        if not waits or await self._drained():  # all engines receive at a time
            async with self._turn():
                await self._gather_takers(weights)
                for seat in self._fleet.seats:
                    self._spawn(self._update(seat, weights, command.weight_update))
                await self._send(weights)
        self._deliver(WeightsPublished(command.version, time.monotonic() - begin_s))

    async def _drained(self) -> bool:
        """Wait until no engine has a rollout in progress; return whether it came to that before the run's end."""
        drained, ended = (asyncio.ensure_future(wait) for wait in (self._fleet.drained(), self._ended.wait()))
        await asyncio.wait({drained, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return not drained.cancel()

    def _turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Keep the trainer from anything else while weights are sent; files are loaded whatever it does."""
        return contextlib.nullcontext() if self._group is None else self._group.turn

    async def _gather_takers(self, weights: Weights) -> None:
        """Have the engines that are to load these weights, and are up, form a group with the trainer."""
        if self._group is not None:
            takers = [seat for seat in self._fleet.seats if seat.up.is_set() and seat.version < weights.version]
            await self._group.of([seat.index for seat in takers])

    async def _send(self, weights: Weights) -> None:
        """Feed the engines that are loading."""
        await (self._trainer if self._group is None else self._group).send(weights)

    async def _bring_back(self, seat: EngineHandle) -> None:
        """Have an engine that has been started again load the newest weights; then it is up."""
        async with self._turn():
            newest = self._fleet.newest
            if newest is not None:
                if self._group is not None:
                    await self._group.of([seat.index])
                loading = seat.engine.update(newest, WeightUpdate.KEEP)
                for end in await asyncio.gather(loading, self._send(newest), return_exceptions=True):
                    if isinstance(end, BaseException):
                        raise end
                seat.version = newest.version
            seat.up.set()

    async def _to_training(self) -> None:
        """Colocated: have the engines give their memory to the trainer."""
        if self._config.colocated and self._generating:
            await self._fleet.sleep()
            await self._trainer.reload()
            self._generating = False

    async def _to_generation(self) -> None:
        """Colocated: have the trainer give its memory to the engines."""
        if self._config.colocated and not self._generating:
            await self._trainer.offload()
            await self._fleet.wake()
            self._generating = True

    async def _to_saving(self) -> None:
        """Colocated: have the trainer take the memory to save from; nothing is generated any more."""
        if self._config.colocated and self._generating:
            await self._fleet.shutdown()
            await self._trainer.reload()
            self._generating = False

    async def _update(self, seat: EngineHandle, weights: Weights, weight_update: WeightUpdate) -> None:
        pause_s = await self._fleet.update(seat, weights, weight_update)
        seat.may_generate.set()
        self._deliver(WeightsLoaded(seat.index, weights.version, pause_s))
