"""Transfer of new weights from the trainer to the engines; colocated, also the turns in using the memory.

Theory of operation. The trainer stands still until it has made a version ready, a *snapshot*; then it is free. The
snapshot is brought to where engines load it from while they generate and the trainer trains: files lie there already,
through a group of processes it is sent. Then every engine loads it, in its own time. The scheduler publishes nothing
before all engines have loaded, and then what is newest: there is one transfer at a time, and none that waits.

*Streamed* weights are not kept: engines load what the trainer sends while it sends it, and all stand still until then.

Where a transfer fails, lost engines are left out and it is tried again. An engine that has not got the weights in the
end counts as lost when it is to load them. Nobody waits for a lost engine: it gets the newest weights before it
generates again. So when the others have loaded a version, its seat is reported to have it, too; whichever engine serves
that seat then generates with nothing older.

Colocated engines and trainer share their accelerators: the engines sleep while the trainer works, and the trainer is
offloaded while they generate.

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
from collections.abc import Callable
from typing import Any

from backends.engines import EngineHandle, EnginePool
from backends.interface import TRANSFER_ATTEMPTS, GroupMembers, Trainer, UpdateTimes, Weights
from backends.run_tasks import RunTasks
from backends.transfer.group import WeightSyncGroup
from pipelinerl.errors import EngineLostError, TransferError
from pipelinerl.scheduler.events import PublishWeights, WeightsLoaded, WeightUpdate


class WeightSync:
    """Brings weights to the engines of one run; colocated, also switches the memory.

    Args:
        trainer: The trainer.
        pool: The engines.
        group: Who sends and receives; None: weights lie where engines find them.
        colocated: Whether engines and trainer share their accelerators.
        tasks: Runs transfers and updates.
    """

    def __init__(
        self, *, trainer: Trainer, pool: EnginePool, group: GroupMembers | None, colocated: bool, tasks: RunTasks
    ) -> None:
        self._trainer, self._pool, self._tasks = trainer, pool, tasks
        self.takes_turns = colocated
        """Whether engines and trainer have the same memory, in turn."""
        self._group = None if group is None else WeightSyncGroup(group)
        self._standing_still = group is not None and group.standing_still
        self._bringing: asyncio.Task[None] | None = None  # the newest publication, until all engines have it
        self._engines_have_memory = True  # colocated only

    async def publish(self, command: PublishWeights, *, on_loaded: Callable[[WeightsLoaded], None]) -> None:
        """Publish a version and have every engine begin to load it; return when the trainer is free again.

        Args:
            command: Which version, and what happens to sequences in progress.
            on_loaded: Called with the event to report for each engine, in its own time.
        """
        weights = await self._snapshot(command.version)
        await self.to_generation()
        pauses = None
        if self._standing_still:
            times = await self._stream(weights, command.weight_update)
            pauses = {engine: one.total_s for engine, one in times.items()}
            for one in times.values():
                self._pool.count_update(one)
        self._bringing = self._tasks.spawn(self._bring(weights, command.weight_update, on_loaded, pauses))

    async def load_trained(self, version: int) -> None:
        """Give all engines the trainer's weights, outside of the schedule, under the name of this version.

        A run that is resumed between two publications has no older ones: then the lag that it reports is too large.
        """
        await self.to_training()
        if self._bringing is not None:  # what is being loaded must stay as it is
            await asyncio.wait({self._bringing})
        weights = await self._snapshot(version)
        await self.to_generation()
        if self._standing_still:
            await self._stream(weights, WeightUpdate.KEEP)
        else:
            await self._transfer(weights)
        await self._pool.load(weights)

    async def bring_back(self, handle: EngineHandle) -> None:
        """Have an engine that has been started again load the newest weights; then it is up.

        Weights that are not kept may have been trained since: then it gets those, under the name of the newest, and the
        lag that is reported of it is too large.
        """
        async with self._turn():
            loaded: Weights | None = None
            while (newest := self._pool.newest) is not None and newest is not loaded:
                if self._standing_still:
                    times, lost = await self._stream_once([handle], newest, WeightUpdate.KEEP)
                    if not times:
                        raise lost.get(handle.engine_id) or _incomplete(handle, newest)
                else:
                    if self._group is not None:
                        for error in (await self._group.form([handle.engine_id])).values():
                            raise error
                        await self._group.send(newest)
                    await handle.engine.update(newest, WeightUpdate.KEEP)
                handle.version, loaded = newest.version, newest
            handle.up.set()

    async def _snapshot(self, version: int) -> Weights:
        async with self._turn():
            weights = await self._trainer.publish(version)
            self._pool.newest = weights
        return weights

    async def _bring(
        self,
        weights: Weights,
        weight_update: WeightUpdate,
        on_loaded: Callable[[WeightsLoaded], None],
        pauses: dict[int, float] | None,
    ) -> None:
        """Have every engine load; ``pauses``: seconds that those have stood still that already have, None: none has."""
        if pauses is None:
            await self._transfer(weights)
        lost: list[int] = []

        async def update(seat: int) -> None:
            pause_s = await self._pool.update(seat, weights, weight_update)
            if self._pool.has(seat, weights.version):
                report(seat, (pauses or {}).get(seat, pause_s))
            else:
                lost.append(seat)

        def report(seat: int, pause_s: float) -> None:
            self._pool.known(seat)
            on_loaded(WeightsLoaded(seat, weights.version, pause_s))

        await asyncio.gather(*(update(seat) for seat in self._pool.seats))
        for seat in lost:
            report(seat, 0.0)

    async def _transfer(self, weights: Weights) -> None:
        """Bring the weights to where the engines that are up load them from.

        Raises nothing where they do not get there: an engine that has not got them says so when it is to load.
        """
        if self._group is None:
            await self._trainer.send(weights)
            return
        num_failed = 0
        while num_failed < TRANSFER_ATTEMPTS:
            async with self._turn():
                takers = [one.engine_id for one in self._pool if one.up.is_set() and one.version < weights.version]
                lost = await self._group.form(takers)
                if not takers or (not lost and await self._group.send(weights)):
                    return
            for engine, error in lost.items():
                self._pool.lost(self._pool[engine], error)
            num_failed += all(self._pool[engine].up.is_set() for engine in takers)

    # ----------------------------------------------------------------- loaded while they are sent, all standing still

    async def _stream(self, weights: Weights, weight_update: WeightUpdate) -> dict[int, UpdateTimes]:
        """Have all engines load what the trainer sends; return the times of each that has it."""
        if weight_update is WeightUpdate.WAIT:
            await self._pool.drained()
        times: dict[int, UpdateTimes] = {}
        num_failed = 0
        async with self._turn():
            while num_failed < TRANSFER_ATTEMPTS:
                takers = [one for one in self._pool if one.up.is_set() and one.version < weights.version]
                if not takers:
                    break
                loaded, lost = await self._stream_once(takers, weights, weight_update)
                times |= loaded
                for engine, error in lost.items():
                    self._pool.lost(self._pool[engine], error)
                num_failed += not lost
        for handle in self._pool:
            if handle.up.is_set() and handle.version < weights.version:  # it stands still, with a mixture
                self._pool.lost(handle, _incomplete(handle, weights))
        return times

    async def _stream_once(
        self, handles: list[EngineHandle], weights: Weights, weight_update: WeightUpdate
    ) -> tuple[dict[int, UpdateTimes], dict[int, EngineLostError]]:
        """Send to engines that load; return the times of those that have all, and the engines that are lost."""
        assert self._group is not None
        lost = await self._group.form([one.engine_id for one in handles])
        times: dict[int, UpdateTimes] = {}
        if lost or not self._group.formed:
            return times, lost

        async def load(handle: EngineHandle) -> UpdateTimes:
            async with handle.updating:
                return await handle.engine.update(weights, weight_update)

        updates = [asyncio.ensure_future(load(one)) for one in handles]
        try:
            await self._group.send(weights)
            ends = await asyncio.gather(*updates, return_exceptions=True)
        finally:
            for update in updates:
                update.cancel()
        for handle, end in zip(handles, ends, strict=True):
            if isinstance(end, EngineLostError):
                lost[handle.engine_id] = end
            elif isinstance(end, UpdateTimes):
                times[handle.engine_id] = end
                handle.version = weights.version
            elif not isinstance(end, TransferError):
                raise end
        return times, lost

    def _turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Keep a snapshot as it is while it is sent; files stay as they are anyway."""
        return contextlib.nullcontext() if self._group is None else self._group.turn

    # ------------------------------------------------------------------------- memory, where it is shared

    async def to_training(self) -> None:
        """Colocated: have the engines give their memory to the trainer."""
        if self.takes_turns and self._engines_have_memory:
            await self._pool.sleep()
            await self._trainer.reload()
            self._engines_have_memory = False

    async def to_generation(self) -> None:
        """Colocated: have the trainer give its memory to the engines."""
        if self.takes_turns and not self._engines_have_memory:
            await self._trainer.offload()
            await self._pool.wake()
            self._engines_have_memory = True

    async def to_saving(self) -> None:
        """Colocated: have the trainer take the memory to save from; nothing is generated any more."""
        if self.takes_turns and self._engines_have_memory:
            await self._pool.shutdown()
            await self._trainer.reload()
            self._engines_have_memory = False


def _incomplete(handle: EngineHandle, weights: Weights) -> EngineLostError:
    what = f"engine={handle.engine_id}: version {weights.version} has not come in full"
    return EngineLostError(f"weight update failed: {what}; start the engine again")
