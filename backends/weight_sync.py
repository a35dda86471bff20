"""Transfer of new weights from the trainer to the engines; colocated, also the turns in using the memory.

Theory of operation. Publications come one at a time. The trainer makes a version ready, then every engine gets a task
that loads it. Files are loaded while the trainer goes on. Where weights are sent through a group of processes, all
engines receive at a time and the trainer may do nothing else: every task that uses the trainer then holds ``turn``.

Colocated engines and trainer share their accelerators: the engines sleep while the trainer works, and the trainer is
offloaded while they generate.

===============  ==========================================  ==================================
coroutine        waits for                                   bounded by
===============  ==========================================  ==================================
``publish``      its turn, the trainer; to send, engines     ``step_timeout_s``; one at a time
an update        its engine, and that one's restart          ``update_timeout_s``; one a engine
``bring_back``   its turn, the engine that was lost          ``update_timeout_s``
===============  ==========================================  ==================================
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from backends.engines import EngineHandle, EnginePool
from backends.interface import GroupMembers, Trainer, Weights
from backends.run_tasks import RunTasks
from backends.transfer.group import WeightSyncGroup
from pipelinerl.scheduler.events import PublishWeights, WeightsLoaded, WeightUpdate


class WeightSync:
    """Brings weights to the engines of one run; colocated, also switches the memory.

    Args:
        trainer: The trainer.
        pool: The engines.
        group: Who sends and receives; None: weights lie where engines find them.
        colocated: Whether engines and trainer share their accelerators.
        tasks: Runs one update for each engine.
    """

    def __init__(
        self, *, trainer: Trainer, pool: EnginePool, group: GroupMembers | None, colocated: bool, tasks: RunTasks
    ) -> None:
        self._trainer, self._pool, self._colocated, self._tasks = trainer, pool, colocated, tasks
        self._group = None if group is None else WeightSyncGroup(group)
        self._engines_have_memory = True  # colocated only

    def turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Keep the trainer from anything else while weights are sent; files are loaded whatever it does."""
        return contextlib.nullcontext() if self._group is None else self._group.turn

    async def publish(self, command: PublishWeights, *, on_loaded: Callable[[WeightsLoaded], None]) -> None:
        """Publish a version and have every engine begin to load it; return when the trainer is free again.

        Args:
            command: Which version, and what happens to sequences in progress.
            on_loaded: Called with the event to report for each engine, in its own time.
        """
        async with self.turn():
            weights = await self._trainer.publish(command.version)
            self._pool.newest = weights
        await self.to_generation()
        waits = self._group is not None and command.weight_update is WeightUpdate.WAIT
        if waits and not await self._drained():  # all engines receive at a time
            return
        async with self.turn():
            await self._form_group(weights)
            for handle in self._pool:
                self._tasks.spawn(self._update(handle, weights, command.weight_update, on_loaded))
            await self._send(weights)

    async def load_trained(self, version: int) -> None:
        """Give all engines the trainer's weights, outside of the schedule, under the name of this version.

        A run that is resumed between two publications has no older ones: then the lag that it reports is too large.
        """
        await self.to_training()
        async with self.turn():
            weights = await self._trainer.publish(version)
            self._pool.newest = weights
        await self.to_generation()
        async with self.turn():
            await self._form_group(weights)
            loading = asyncio.ensure_future(self._pool.load(weights))
            try:
                await self._send(weights)
            except BaseException:
                loading.cancel()
                raise
        await loading

    async def bring_back(self, handle: EngineHandle) -> None:
        """Have an engine that has been started again load the newest weights; then it is up."""
        async with self.turn():
            newest = self._pool.newest
            if newest is not None:
                if self._group is not None:
                    await self._group.form([handle.engine_id])
                loading = handle.engine.update(newest, WeightUpdate.KEEP)
                for end in await asyncio.gather(loading, self._send(newest), return_exceptions=True):
                    if isinstance(end, BaseException):
                        raise end
                handle.version = newest.version
            handle.up.set()

    async def _update(
        self,
        handle: EngineHandle,
        weights: Weights,
        weight_update: WeightUpdate,
        on_loaded: Callable[[WeightsLoaded], None],
    ) -> None:
        pause_s = await self._pool.update(handle, weights, weight_update)
        handle.may_generate.set()
        on_loaded(WeightsLoaded(handle.engine_id, weights.version, pause_s))

    async def _drained(self) -> bool:
        """Wait until no engine has a rollout in progress; return whether it came to that before the run's end."""
        drained, ended = (asyncio.ensure_future(wait) for wait in (self._pool.drained(), self._tasks.ended.wait()))
        await asyncio.wait({drained, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return not drained.cancel()

    async def _form_group(self, weights: Weights) -> None:
        """Have the engines that are up, and are to load these weights, form a group with the trainer."""
        if self._group is not None:
            takers = [one.engine_id for one in self._pool if one.up.is_set() and one.version < weights.version]
            await self._group.form(takers)

    async def _send(self, weights: Weights) -> None:
        """Feed the engines that are loading."""
        await (self._trainer if self._group is None else self._group).send(weights)

    # ------------------------------------------------------------------------- memory, where it is shared

    async def to_training(self) -> None:
        """Colocated: have the engines give their memory to the trainer."""
        if self._colocated and self._engines_have_memory:
            await self._pool.sleep()
            await self._trainer.reload()
            self._engines_have_memory = False

    async def to_generation(self) -> None:
        """Colocated: have the trainer give its memory to the engines."""
        if self._colocated and not self._engines_have_memory:
            await self._trainer.offload()
            await self._pool.wake()
            self._engines_have_memory = True

    async def to_saving(self) -> None:
        """Colocated: have the trainer take the memory to save from; nothing is generated any more."""
        if self._colocated and self._engines_have_memory:
            await self._pool.shutdown()
            await self._trainer.reload()
            self._engines_have_memory = False
