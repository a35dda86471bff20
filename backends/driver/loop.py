"""The event loop of a real run: it carries out the scheduler's commands and reports events.

Theory of operation. One asyncio loop. Each command that takes time becomes a task; each task ends with one event to
``_deliver``, which asks the scheduler and starts the tasks of the commands that it returns. So events are handled one
after the other, as in the simulator, without a lock.

================  ===============================  ==================================  =========================
task              waits for                        bounded by                          ends with
================  ===============================  ==================================  =========================
``_generate``     its engine                       H per engine (scheduler)            (turn) finished, aborted, failed
``_act``          its environment                  time-outs; ``environment.count``    observation, finished, failed
``_score``        a reward, the reference model    time-outs; scheduler                scored, failed
``_train``        the trainer                      ``step_timeout_s``; one at a time   training finished
``_publish``      the trainer                      ``step_timeout_s``; one at a time   weights published
a transfer        trainer and engines beside work  ``update_timeout_s``; one at a time an update of each engine
an update         its engine, unless it is lost    ``update_timeout_s``; one a engine  weights loaded
================  ===============================  ==================================  =========================

A lost engine is reported as leaving; its rollouts as aborted, with the tokens that it has reported, and go on from them
elsewhere; then it has left. So is one that is removed, with all tokens, once they have ended or its notice is over.

When a run ends, the loop is *frozen*: it delivers no more events and keeps the trainer's last one as ``pending``. After
a resume it reports rollouts in progress as aborted, loading engines as loaded, and last the pending event. Environments
end with the run: their rollouts fail at their next action or turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import assert_never

from backends.driver.checkpoint import DriverState
from backends.driver.engines import EngineHandle, EnginePool
from backends.driver.evaluation import Evaluation
from backends.driver.metrics import SamplesLog
from backends.driver.preprocessing import Preprocessing
from backends.driver.rollouts import RolloutData, samples_of
from backends.driver.tasks import RunTasks
from backends.driver.weight_sync import WeightSync
from backends.interface import AnswerLostError, Sample, Trainer, busy_s
from backends.workers.environments import Turns
from backends.workers.processes import WorkerFailedError
from backends.workers.rewards import TaskClient, why_no_reward
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, EngineLostError
from pipelinerl.records.trace import Recorder
from pipelinerl.rl.problems import Problem
from pipelinerl.scheduler import events
from pipelinerl.scheduler.kinds import StallWatch

LOG = logging.getLogger("pipelinerl")
ITS_ENVIRONMENT_ENDED = "its environment ended with the run before"
STOP_TIMEOUT_S = 30.0


class EventLoop:
    """Carries out commands and reports events; ``recorder`` gets both in order. Changes ``state``.

    ``after_steps``: called whenever so many optimizer steps are made, before it is reported.
    """

    def __init__(
        self,
        config: RunConfig,
        state: DriverState,
        *,
        tasks: RunTasks,
        trainer: Trainer,
        sync: WeightSync,
        pool: EnginePool,
        client: TaskClient,
        turns: Turns | None,
        preprocessing: Preprocessing,
        evaluation: Evaluation,
        samples: SamplesLog,
        recorder: Recorder,
        after_steps: Sequence[tuple[int | None, Callable[[], Awaitable[None]]]],
    ) -> None:
        self._max_prompt_tokens = config.train_table.task.max_prompt_tokens
        self._group_size, self._optimizer_steps = config.workload.group_size, config.optimizer_steps
        self._state, self._tasks, self._trainer, self._sync, self._pool = state, tasks, trainer, sync, pool
        self._samples, self._after_steps = samples, after_steps
        self._client, self._turns, self._preprocessing = client, turns, preprocessing
        self._evaluation, self._recorder, pool.fleet = evaluation, recorder, self
        self.trainer_task: asyncio.Task[None] | None = None
        self._started = self.frozen = False
        self._stall_watch = StallWatch(LOG.warning)
        self._submitted: set[int] = set()  # rollouts that an engine knows
        self._began_s = time.monotonic() - state.time_s

    @property
    def runs(self) -> bool:
        """Whether events are delivered, and the scheduler has not stopped."""
        return self._started and not self.frozen and self._state.scheduler.stopped is None

    async def start(self, *, resumed: bool) -> None:
        """Begin a new run, or continue a resumed one."""
        self._began_s = time.monotonic() - self._state.time_s
        self._state.metrics.driver_busy(busy_s())
        if resumed:
            await self._resume()
        else:
            self._carry_out_all(self._state.scheduler.start())
        self._started = True
        for engine_id in self._state.scheduler.loaded:  # what has happened meanwhile
            if engine_id not in self._pool:
                self.leaves(engine_id)
                self.left(engine_id)
        for handle in self._pool:
            if handle.engine_id is None and handle.up.is_set():
                self.joins(handle)

    async def _resume(self) -> None:
        state = self._state
        published = state.scheduler.published  # the answer to the last report may be a publication
        async with self._sync.trainer_turn:
            for micro_batch in state.micro_batches:  # of an unfinished step: a checkpoint holds no gradients
                await self._sync.to_training()
                await self._trainer.train(self._samples_of(micro_batch), completes_step=False)
        if self._optimizer_steps > state.scheduler.optimizer_steps:
            self._deliver(events.StepsRaised(self._optimizer_steps))
        in_flight, pending, state.pending = list(state.in_flight.items()), state.pending, None
        for rollout_id in sorted(state.scoring):
            self._tasks.spawn(self._score(rollout_id))
        for rollout_id, engine in in_flight:
            self._aborted(rollout_id, engine)
        for engine in sorted(state.scheduler.leaving):
            self._deliver(events.EngineLeft(engine))
        for rollout_id in sorted(state.acting):
            if rollout_id in state.acting:  # else its group has been given up for one before it
                self._failed(rollout_id, ITS_ENVIRONMENT_ENDED)
        for engine, version in state.scheduler.loaded.items():
            if version != published:
                self._deliver(events.WeightsLoaded(engine, published, 0.0))
        if pending is not None:
            self._deliver(pending)

    def leaves(self, engine_id: int) -> None:
        """Report that an engine is leaving; see ``Fleet``."""
        if self._started:
            self._deliver(events.EngineLeaving(engine_id))

    def left(self, engine_id: int) -> None:
        """Report that an engine has left, and its rollouts that it does not know as aborted."""
        if engine_id in self._state.scheduler.leaving:  # else it is known, or the run has not begun
            for rollout_id, engine in list(self._state.in_flight.items()):
                if engine == engine_id:
                    self._aborted(rollout_id, engine)
            self._deliver(events.EngineLeft(engine_id))

    def joins(self, handle: EngineHandle) -> None:
        """Report that an engine is up."""
        if self._started and not self.frozen:
            self._pool.name(handle, self._state.scheduler.newest_engine + 1)
            assert handle.engine_id is not None
            self._deliver(events.EngineJoined(handle.engine_id, handle.reported))

    def now(self) -> float:
        """Return the seconds that the run has run, before a resume, too."""
        return time.monotonic() - self._began_s

    def _deliver(self, event: events.Event) -> None:
        if self.frozen:
            if isinstance(event, events.TrainingFinished | events.WeightsPublished):
                self._state.pending = event
            return
        begin_s = time.perf_counter()
        if isinstance(
            event, events.RolloutFinished | events.TurnFinished | events.RolloutAborted | events.RolloutFailed
        ):
            self._state.aborting.discard(event.rollout_id)
            self._state.in_flight.pop(event.rollout_id, None)
        self._recorder.event(self.now(), event)
        try:
            self._carry_out_all(self._state.scheduler.handle(event))
        except Exception as error:
            self._tasks.fail(error)
        if self._state.scheduler.given_up:
            self._stall_watch.look(self.now(), self._state.scheduler)
        if isinstance(event, events.WeightsLoaded | events.EngineJoined):
            self._evaluation.begin_if_due()
        num_rollouts = isinstance(event, events.RolloutFinished)
        self._state.metrics.driver_worked(time.perf_counter() - begin_s, num_rollouts=num_rollouts)

    def _carry_out_all(self, commands: Sequence[events.Command]) -> None:
        for command in commands:
            self._recorder.command(self.now(), command)
            self._carry_out(command)

    def _carry_out(self, command: events.Command) -> None:
        state = self._state
        match command:
            case events.StartRollout():
                if command.rollout_id not in state.rollouts:  # here: a checkpoint may come before its task begins
                    state.rollouts[command.rollout_id] = self._client.begin(command.prompt_id)
                state.in_flight[command.rollout_id] = command.engine
                self._tasks.spawn(self._generate(command))
            case events.OpenEnvironment():
                assert self._turns is not None
                data = state.rollouts[command.rollout_id] = RolloutData(Problem(""), ())
                state.acting.add(command.rollout_id)
                opens = partial(self._turns.open, command.rollout_id, data, command.prompt_id)
                self._tasks.spawn(self._act(command.rollout_id, opens, retries=self._turns.retries))
            case events.StartTraining():
                self.trainer_task = self._tasks.spawn(self._train(command))
            case events.PublishWeights():
                self.trainer_task = self._tasks.spawn(self._publish(command))
            case events.DiscardRollouts():
                for rollout_id in command.rollout_ids:
                    self._forget(rollout_id)
            case events.AbortRollout():
                state.aborting.add(command.rollout_id)
                self._tasks.spawn(self._abort(command))
            case events.Stop():
                self._tasks.ended.set()
            case _:
                assert_never(command)

    async def _generate(self, command: events.StartRollout) -> None:
        state, rollout_id = self._state, command.rollout_id
        if state.in_flight.get(rollout_id) != command.engine:  # which has left before this task began
            return
        data = state.rollouts[rollout_id]
        if self._turns is not None and rollout_id not in self._turns.environments:
            self._failed(rollout_id, ITS_ENVIRONMENT_ENDED, command.engine)
            return
        if not 0 < len(data.prompt_tokens) <= self._max_prompt_tokens:
            self._failed(rollout_id, f"its prompt has {len(data.prompt_tokens)} tokens", command.engine)
            return
        handle = await self._pool.generating(command.engine, max(data.spans.versions, default=0))
        if handle is None or state.scheduler.stopped is not None:
            return
        if rollout_id in state.aborting:
            self._aborted(rollout_id, command.engine)
            return
        self._submitted.add(rollout_id)
        request = self._client.request(rollout_id, data)
        try:
            generated = await handle.generate(request)
        except EngineLostError as error:
            self._pool.lost(handle, error)
            if isinstance(error, AnswerLostError) and not self.frozen:
                data.extend(error.known)
            self._aborted(rollout_id, command.engine)
            return
        except BackendError as error:
            self._failed(rollout_id, str(error), command.engine)
            return
        finally:
            self._submitted.discard(rollout_id)
        if self.frozen:
            return
        data.extend(generated)
        state.metrics.answered(handle.place, generated.front_end_s)
        state.metrics.decoded(generated.decode_steps)
        if generated.kv_cache_share is not None:
            self._deliver(events.KVCacheUsed(command.engine, generated.kv_cache_share))
        seconds = None if self._turns is None else generated.seconds
        if generated.aborted:
            self._aborted(rollout_id, command.engine, seconds)
            return
        if self._turns is None:
            self._finished(rollout_id, command.engine)
            return
        if generated.cached_tokens is not None:
            state.metrics.began_turn(len(request.prompt_tokens), generated.cached_tokens)
        self._deliver(events.TurnFinished(rollout_id, command.engine, data.spans, seconds))
        if rollout_id in state.rollouts:
            state.acting.add(rollout_id)
            self._tasks.spawn(self._act(rollout_id, partial(self._turns.act, rollout_id, data)))

    async def _act(self, rollout_id: int, act: Callable[[], Awaitable[bool]], *, retries: int = 0) -> None:
        state, turns = self._state, self._turns
        assert turns is not None
        try:
            goes_on = await act()
        except WorkerFailedError as error:
            if self.frozen or rollout_id not in state.acting:
                return
            again = retries > 0 and error.fault is not events.EnvironmentFault.EXPIRED
            self._deliver(events.EnvironmentFailed(rollout_id, error.fault, again))
            if again:
                await self._act(rollout_id, act, retries=retries - 1)
            else:
                self._failed(rollout_id, str(error))
            return
        if self.frozen:
            return
        if rollout_id not in state.acting:  # its group has been given up meanwhile
            turns.environments.release(rollout_id)
            return
        state.acting.discard(rollout_id)
        if goes_on:
            data = state.rollouts[rollout_id]
            read_tokens = len(data.prompt_tokens) + data.num_tokens - data.spans.num_tokens
            self._deliver(events.ObservationReady(rollout_id, read_tokens))
            return
        turns.environments.release(rollout_id)
        self._finished(rollout_id, engine=None)

    def _finished(self, rollout_id: int, engine: int | None) -> None:
        """Report a rollout with all its tokens, and score it."""
        self._state.scoring.add(rollout_id)
        self._deliver(events.RolloutFinished(rollout_id, engine, self._state.rollouts[rollout_id].spans))
        self._tasks.spawn(self._score(rollout_id))

    def _forget(self, rollout_id: int) -> None:
        """Forget a rollout and release its environment; one that acts is released after its answer."""
        del self._state.rollouts[rollout_id]
        if rollout_id in self._state.acting:
            self._state.acting.discard(rollout_id)
        elif self._turns is not None:
            self._turns.environments.release(rollout_id)

    def _aborted(self, rollout_id: int, engine: int, seconds: events.EngineSeconds | None = None) -> None:
        if self.frozen:  # its end has been recorded, and it may be forgotten
            return
        spans = self._state.rollouts[rollout_id].spans
        if rollout_id in self._state.aborting:
            self._forget(rollout_id)
        self._deliver(events.RolloutAborted(rollout_id, engine, spans, seconds))

    def _failed(self, rollout_id: int, why: str, engine: int | None = None) -> None:
        """Report a rollout that will not be scored; ``engine`` is set if it was generating."""
        if self.frozen:
            return
        self._client.log_failure(f"rollout {rollout_id} failed: {why}")
        self._forget(rollout_id)
        self._state.scoring.discard(rollout_id)
        self._deliver(events.RolloutFailed(rollout_id, engine))

    async def _abort(self, command: events.AbortRollout) -> None:
        if command.engine in self._pool:
            handle = self._pool[command.engine]
            try:
                await handle.engine.abort(command.rollout_id)
            except EngineLostError as error:
                self._pool.lost(handle, error)

    async def _score(self, rollout_id: int) -> None:
        data = self._state.rollouts[rollout_id]
        try:
            reward = await self._client.compute_reward(data) if self._turns is None else data.reward
        except (Exception, SystemExit) as error:
            self._failed(rollout_id, why_no_reward(error))
            return
        if self.frozen:  # a cancellation that arrives with the reward is lost: the next call would not be cancelled
            return
        reference_logprob_T = await self._preprocessing.reference_logprobs(data)
        if self.frozen:
            return
        data.reward, data.reference_logprob_T = reward, reference_logprob_T
        self._state.scoring.discard(rollout_id)
        self._deliver(events.RolloutScored(rollout_id, reward))

    async def abort_all(self) -> None:
        """Abort the rollouts in progress at the end of a run, waiting at most ``STOP_TIMEOUT_S``."""
        for rollout_id, engine in list(self._state.in_flight.items()):
            if rollout_id in self._submitted:
                self._tasks.spawn(self._abort(events.AbortRollout(rollout_id, engine)))
            else:
                self._aborted(rollout_id, engine)
        over_s = time.monotonic() + STOP_TIMEOUT_S
        while self._state.in_flight and time.monotonic() < over_s and self._tasks.failure is None:
            await asyncio.sleep(0.01)
        for rollout_id, engine in list(self._state.in_flight.items()):
            self._aborted(rollout_id, engine)

    def record_interrupted(self) -> None:
        """Freeze, and record the rollouts in progress as aborted; the scheduler handles these events on resume."""
        self.frozen = True
        for rollout_id, engine in list(self._state.in_flight.items()):
            self._recorder.event(
                self.now(), events.RolloutAborted(rollout_id, engine, self._state.rollouts[rollout_id].spans)
            )

    # -------------------------------------------------------------------------------------- the trainer's commands

    async def _train(self, command: events.StartTraining) -> None:
        """Train on a micro-batch; if it completes a step, do what is due after it."""
        state = self._state
        if self._sync.takes_turns:
            self._pool.asleep = True
            await self._evaluation.finished()
        samples = self._samples_of(command)
        async with self._sync.trainer_turn:
            await self._sync.to_training()
            begin_s = time.monotonic()
            result = await self._trainer.train(samples, completes_step=command.completes_step)
            train_s = time.monotonic() - begin_s
        state.count_trained(samples, result, command.version, turns=self._turns is not None)
        state.micro_batches.append(command)
        if command.completes_step:
            state.version = command.version + 1
            self._evaluation.step_done(state.version)
            self._samples.trained(state.version, state.take_trained())
        event = events.TrainingFinished(state.version, train_s)
        for every, act in self._after_steps:
            if command.completes_step and every is not None and state.version % every == 0:
                state.pending = event
                await act()
                state.pending = None
        self._deliver(event)
        state.metrics.driver_busy(busy_s())  # asking the system for it takes 50 us: not per rollout

    def _samples_of(self, command: events.StartTraining) -> list[Sample]:
        return samples_of(self._state.rollouts, command.rollout_ids, self._group_size)

    async def _publish(self, command: events.PublishWeights) -> None:
        begin_s = time.monotonic()
        await self._sync.publish(command, on_loaded=self._deliver)
        self._deliver(events.WeightsPublished(command.version, time.monotonic() - begin_s))
