"""Transfer of new weights from the trainer to the engines; colocated, also the turns in using the memory.

Theory of operation. The trainer stands still until it has prepared a version, a *snapshot*; then it is free. While
engines generate and the trainer trains, the snapshot travels to the machines of the engines: files lie there already,
a group of processes sends it. Then every engine loads it, in its own time. The scheduler publishes nothing before all
engines have loaded, and then the newest version: one transfer runs at a time, and none waits.

When a transfer fails, it is tried again without the lost engines. An engine that has no weights when it is to load
them counts as lost. Nothing waits for a lost engine: it gets the newest weights before it joins again. A file that
engines find damaged is published anew from the weights that the trainer has by then: reported lags may be too large.

Colocated, the engines sleep while the trainer works, and the trainer is offloaded while they generate. An engine that
is lost meanwhile starts again when the others wake; they fall asleep only after a start that is under way.

===============  ==========================================  ==================================
coroutine        waits for                                   bounded by
===============  ==========================================  ==================================
``publish``      the trainer; a restarted engine's transfer  ``step_timeout_s``; one at a time
a transfer       its turn, the engines that are up           ``update_timeout_s`` per bucket
an update        its engine                                  ``update_timeout_s``; one a engine
``bring_back``   its turn, the engine that was lost          ``update_timeout_s``
===============  ==========================================  ==================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from backends.driver.engines import EngineHandle, EnginePool, gathered
from backends.driver.metrics import StepMetrics
from backends.driver.tasks import RunTasks, all_of
from backends.interface import PUBLICATIONS, TRANSFER_ATTEMPTS, GroupMembers, Trainer, UpdateTimes, Weights
from backends.transfer.transport import is_mismatch, is_refusal
from pipelinerl.errors import EngineLostError, TransferError, WeightsRefusedError
from pipelinerl.scheduler.events import PublishWeights, WeightsLoaded, WeightUpdate

LOG = logging.getLogger("pipelinerl")


class WeightSyncGroup:
    """The weight sync group: rank 0 of the trainer and the workers of engines.

    A group never changes: if it differs from the engines that are up before a transfer, a new one is formed. A
    restarted engine gets the newest weights alone, in a group of two. When an engine is lost during a transfer the
    sender is aborted at once, since it would wait for the silent engine until the time-out.
    """

    def __init__(self, members: GroupMembers) -> None:
        self._trainer, self._receivers = members.sender, members.receivers
        self._workers_each, self._timeout_s = members.workers_each, members.timeout_s
        self._members: tuple[tuple[int, int], ...] | None = None
        self._rendezvous = ""
        self.refused = False
        """Whether the last transfer failed by its bytes."""

    async def send(self, weights: Weights, engines: Sequence[int]) -> tuple[bool, dict[int, EngineLostError]]:
        """Send to these engines; return whether all have the weights, verified, and the engines that are lost.

        Can raise ``TrainerLostError``; ``WeightsRefusedError`` if an engine's model has other weights.
        """
        self.refused = False
        lost = await self._form(engines)
        if self._members is None:
            return False, lost
        try:
            await self._while_there(self._members, self._trainer.send(weights))
        except TransferError as error:
            self._members, self.refused = None, is_refusal(str(error))
            LOG.warning("version %d did not reach the engines: %s", weights.version, error)
            return False, {}
        return True, {}

    async def _form(self, engines: Sequence[int]) -> dict[int, EngineLostError]:
        """Have the trainer and these engines form a group, unless they are one; return the engines that are lost."""
        members = tuple((engine, self._receivers[engine].num_started) for engine in engines)
        if members == self._members:
            return {}
        self._members = None
        self._rendezvous = await self._trainer.open_group()
        names = ["trainer", *(name for engine in engines for name in self._names(engine))]
        joins = {
            engine: self._receivers[engine].join_group(self._rendezvous, first_worker=1 + place * self._workers_each)
            for place, engine in enumerate(engines)
        }
        _, lost = await gathered(joins)
        if lost:
            return lost
        try:
            await self._while_there(members, self._trainer.join_group(names, timeout_s=self._timeout_s))
        except TransferError as error:
            if is_mismatch(str(error)):
                raise WeightsRefusedError(str(error)) from None
            LOG.warning("no group: %s", error)
        else:
            self._members = members
        return {}

    async def _while_there(self, members: Iterable[tuple[int, int]], work: Coroutine[Any, Any, None]) -> None:
        watching = [asyncio.ensure_future(self._abort_without(engine)) for engine, _ in members]
        try:
            await work
        finally:
            for one in watching:
                one.cancel()
            await asyncio.gather(*watching, return_exceptions=True)  # without the trainer its part has failed, too

    async def _abort_without(self, engine: int) -> None:
        await self._receivers[engine].until_lost()
        await self._trainer.abort_group(self._rendezvous, f"engine {engine} is lost")

    def _names(self, engine: int) -> list[str]:
        if self._workers_each == 1:
            return [f"engine {engine}"]
        return [f"engine {engine} worker {worker}" for worker in range(self._workers_each)]


class WeightSync:
    """Brings weights to the engines (``group`` None: as files); colocated, also hands the memory over."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        pool: EnginePool,
        group: GroupMembers | None,
        colocated: bool,
        tasks: RunTasks,
        metrics: StepMetrics,
    ) -> None:
        self._trainer, self._pool, self._tasks, self._metrics = trainer, pool, tasks, metrics
        self.takes_turns = colocated
        self.sends = group is not None
        """Whether weights are sent, not written to files."""
        self._group = None if group is None else WeightSyncGroup(group)
        # Held while weights are gathered or sent: a snapshot must not change, as files never do.
        self._turn = contextlib.nullcontext() if group is None else asyncio.Lock()
        self._bringing: asyncio.Task[None] | None = None  # the newest publication, until all engines have it
        self._engines_have_memory = True  # colocated only
        self.trainer_turn = asyncio.Lock()
        """Held while the trainer trains, publishes, copies its state or exports, but for the bring-up."""
        self._num_damaged = 0  # publications found damaged since an engine loaded one

    async def publish(self, command: PublishWeights, *, on_loaded: Callable[[WeightsLoaded], None]) -> None:
        """Publish a version; return when the trainer is free. ``on_loaded`` gets the event of each engine later."""
        weights = await self.snapshot(command.version)
        self._metrics.published(weights)
        self._bringing = self._tasks.spawn(self._bring(weights, command.weight_update, on_loaded))

    async def load_trained(self, version: int) -> None:
        """Load the trainer's weights into all engines, labelled ``version``, outside of the schedule.

        A run resumed between two publications has newer weights than that version: its reported lag is too large.
        """
        if self._bringing is not None:  # weights must not change while engines load them
            await asyncio.wait({self._bringing})
        await self.load(await self.snapshot(version))

    async def load(self, weights: Weights) -> None:
        """Load a snapshot into all engines, outside of the schedule."""
        weights = await self._send(weights)
        await all_of(*(self._update(handle, weights, WeightUpdate.KEEP) for handle in self._pool))

    async def bring_back(self, handle: EngineHandle) -> None:
        """Make a restarted engine load the newest weights; then it is up."""
        async with self._turn:
            while (newest := self._pool.newest) is not None and handle.version < newest.version:
                if self._group is not None:
                    sent, lost = await self._group.send(newest, [handle.place])
                    if self._group.refused:
                        async with self.trainer_turn:
                            await self._publish_once_more(newest, "it was refused")
                        continue
                    if not sent:
                        what = f"engine={handle.place}: version {newest.version} has not come in full"
                        why = f"weight update failed: {what}; start the engine again"
                        raise lost.get(handle.place) or EngineLostError(why)
                try:
                    async with handle.changing:
                        if newest is self._pool.newest:  # else another has come while it slept
                            await handle.load(newest, WeightUpdate.KEEP)
                            self._num_damaged = 0
                except TransferError as damage:
                    if handle not in list(self._pool):  # its machine is new to the run, and may not see the file
                        raise EngineLostError(str(damage)) from None
                    await self._publish_anew(newest, damage)
            self._pool.joins(handle)
        if handle.was_lost:
            self._metrics.restarted()

    async def snapshot(self, version: int) -> Weights:
        """Have the trainer make its weights ready, labelled ``version``."""
        async with self._turn, self.trainer_turn:
            return await self._publish(version)

    async def _publish(self, version: int) -> Weights:
        """Have the trainer publish; colocated, engines have the memory then."""
        await self.to_training()
        weights = self._pool.newest = await self._trainer.publish(version)
        await self.to_generation()
        return weights

    async def _update(self, handle: EngineHandle, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes | None:
        """Bring an engine to a version, as ``EnginePool.update``; a damaged file is published anew."""
        while True:
            try:
                if (times := await self._pool.update(handle, weights, weight_update)) is not None:
                    self._num_damaged = 0
                return times
            except TransferError as damage:
                weights = await self._publish_anew(weights, damage)

    async def _publish_anew(self, damaged: Weights, damage: TransferError) -> Weights:
        """Publish a version once more for all engines that find it damaged; return the newest weights."""
        async with self._pool.quiet() if self.takes_turns else contextlib.nullcontext(), self.trainer_turn:
            # Else another engine has found it, a later version has replaced it, or nobody needs it any more.
            if self._pool.newest is damaged and not self._pool.closing:
                await self._publish_once_more(damaged, damage)
        assert self._pool.newest is not None
        return self._pool.newest

    async def _publish_once_more(self, damaged: Weights, damage: object) -> Weights:
        self._num_damaged += 1
        if self._num_damaged >= PUBLICATIONS:
            raise TransferError(
                f"{PUBLICATIONS} publications of weights in a row were damaged, the last of version "
                f"{damaged.version}: {damage}; another train.weights_folder may help, --resume goes on"
            )
        LOG.warning("%s; version %d is published anew", damage, damaged.version)
        return await self._publish(damaged.version)

    async def _bring(
        self, weights: Weights, weight_update: WeightUpdate, on_loaded: Callable[[WeightsLoaded], None]
    ) -> None:
        """Send a version and make every engine load it."""
        weights = await self._send(weights)

        async def update(handle: EngineHandle) -> None:
            engine_id = handle.engine_id
            times = await self._update(handle, weights, weight_update)
            if times is not None:
                self._metrics.updated(times)
            # Else it is lost, or has joined with these weights.
            if engine_id is not None and engine_id == handle.engine_id and handle.reported < weights.version:
                handle.reported = weights.version
                on_loaded(WeightsLoaded(engine_id, weights.version, 0.0 if times is None else times.total_s))

        await all_of(*(update(handle) for handle in self._pool))

    async def _send(self, weights: Weights) -> Weights:
        """Send weights to the machines of the engines; return those sent: refused ones are published anew.

        An engine that has not got them raises when it is to load.
        """
        if self._group is None:
            await self._trainer.send(weights)
            return weights
        sent, num_failed = False, 0
        while not sent and num_failed < TRANSFER_ATTEMPTS:
            async with self._turn:
                takers = [one for one in self._pool if one.lacks(weights)]
                if not takers:
                    break
                sent, lost = await self._group.send(weights, [one.place for one in takers])
                if self._group.refused:
                    async with self.trainer_turn:
                        weights = await self._publish_once_more(weights, "it was refused")
            for handle in takers:
                if handle.place in lost:
                    self._pool.lost(handle, lost[handle.place])
            num_failed += all(one.up.is_set() for one in takers)
        return weights

    # ------------------------------------------------------------------------- memory, where it is shared

    async def to_training(self) -> None:
        """Colocated: have the engines give their memory to the trainer, for ever if the pool is closing."""
        if self.takes_turns and self._engines_have_memory:
            await (self._pool.shutdown() if self._pool.closing else self._pool.sleep())
            await self._trainer.reload()
            self._engines_have_memory = False

    async def to_generation(self) -> None:
        """Colocated: have the trainer give its memory to the engines."""
        if self.takes_turns and not self._engines_have_memory:
            await self._trainer.offload()
            await self._pool.wake()
            self._engines_have_memory = True
