"""The weight sync group: rank 0 of the trainer and the workers of engines, as weights are sent to them.

Theory of operation. A group never changes; when its members do, a new one is made. That is found out before weights
are sent: every transfer is to the engines that are up at that time, and if these are not the members of the group at
hand, trainer and engines join a new one first. An engine that has been started again gets the newest weights alone,
in a group of two; the next publication finds it up, and makes a group of all.

Engines generate and the trainer trains while weights are sent. Where an engine is lost in the middle of a transfer, the
sender ends it at once, as it would wait for an engine that is silent; the others go on with the weights that they have,
and get the new ones in a group without it.

=============  =============================================  ===================================================
call           waits for                                      bounded by
=============  =============================================  ===================================================
``turn``       the transfer before                            its own time-outs
``form``       engines, to begin to join; then the trainer    ``update_timeout_s``
``send``       engines, to receive and verify                 ``update_timeout_s`` per bucket; the loss of one
=============  =============================================  ===================================================
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from backends.interface import GroupMembers, Weights
from backends.transfer.misfit import is_misfit
from pipelinerl.errors import EngineLostError, TransferError, WeightsRefusedError

LOG = logging.getLogger("pipelinerl")


class WeightSyncGroup:
    """The weight sync group at hand, and how a new one is made.

    Args:
        members: Who can be in it.
    """

    def __init__(self, members: GroupMembers) -> None:
        self._trainer, self._receivers = members.sender, members.receivers
        self._workers_each, self._timeout_s = members.workers_each, members.timeout_s
        self._members: tuple[tuple[int, int], ...] | None = None
        self._meeting = ""
        self.turn = asyncio.Lock()
        """Held while weights are put together or sent: what is sent must not change."""

    @property
    def formed(self) -> bool:
        """Whether there is a group to send to."""
        return self._members is not None

    async def form(self, engines: Sequence[int]) -> dict[int, EngineLostError]:
        """Have the trainer and these engines form a group, unless they are one; return the engines that are lost.

        Raises:
            TrainerLostError: If the trainer is lost.
            WeightsRefusedError: If an engine's model has other weights.
        """
        members = tuple((engine, self._receivers[engine].num_started) for engine in engines)
        if members == self._members:
            return {}
        self._members = None
        if not members:
            return {}
        self._meeting = await self._trainer.open_group()
        names = ["trainer", *(name for engine in engines for name in self._names(engine))]
        joins = [
            self._receivers[engine].join_group(self._meeting, first_worker=1 + place * self._workers_each)
            for place, engine in enumerate(engines)
        ]
        ends = await asyncio.gather(*joins, return_exceptions=True)
        lost = {engine: end for engine, end in zip(engines, ends, strict=True) if isinstance(end, EngineLostError)}
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, EngineLostError):
                raise end
        if lost:
            return lost
        try:
            await self._while_there(members, self._trainer.join_group(names, timeout_s=self._timeout_s))
        except TransferError as error:
            if is_misfit(str(error)):
                raise WeightsRefusedError(str(error)) from None
            LOG.warning("no group: %s", error)
        else:
            self._members = members
        return {}

    async def send(self, weights: Weights) -> bool:
        """Send to the group that ``form`` has formed; return whether all of it have the weights, verified.

        Raises:
            TrainerLostError: If the trainer is lost.
        """
        if self._members is None:
            return False
        try:
            await self._while_there(self._members, self._trainer.send(weights))
        except TransferError as error:
            self._members = None
            LOG.warning("version %d did not reach the engines: %s", weights.version, error)
            return False
        return True

    async def _while_there(self, members: Iterable[tuple[int, int]], work: Coroutine[Any, Any, None]) -> None:
        """Have the sender do its part; it ends at once when a member is lost."""
        watching = [asyncio.ensure_future(self._abort_without(engine)) for engine, _ in members]
        try:
            await work
        finally:
            for one in watching:
                one.cancel()
            await asyncio.gather(*watching, return_exceptions=True)  # without the trainer its part has failed, too

    async def _abort_without(self, engine: int) -> None:
        await self._receivers[engine].until_lost()
        await self._trainer.abort_group(self._meeting, f"engine {engine} is lost")

    def _names(self, engine: int) -> list[str]:
        if self._workers_each == 1:
            return [f"engine {engine}"]
        return [f"engine {engine} worker {worker}" for worker in range(self._workers_each)]
