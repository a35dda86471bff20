"""The weight sync group: rank 0 of the trainer and the workers of engines, as weights are sent to them.

Theory of operation. A group never changes; when its members do, a new one is made. That is found out before weights
are sent: every transfer is to the engines that are up at that time, and if these are not the members of the group at
hand, trainer and engines join a new one first. An engine that has been started again gets the newest weights alone,
in a group of two; the next publication finds it up, and makes a group of all.

Where an engine is lost in the middle of a transfer, the others cannot finish it either: they are lost with it, and
all are started again. The trainer is well then.

=============  =============================================  ===================================================
call           waits for                                      bounded by
=============  =============================================  ===================================================
``turn``       the trainer: it trains, publishes, or sends    what it does, which has its own time-outs
``form``       trainer and engines, to join                   ``update_timeout_s``
``send``       engines, to receive and verify                 ``update_timeout_s`` per bucket
=============  =============================================  ===================================================
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from backends.interface import GroupMembers, Weights
from pipelinerl.errors import EngineLostError, TransferError

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
        self.turn = asyncio.Lock()
        """Held while a task uses the trainer: neither side may wait for the other's work."""

    async def form(self, engines: Sequence[int]) -> None:
        """Have the trainer and these engines form a group, unless they are one.

        Raises nothing where an engine does not join: it is lost, and says so when it is called next.

        Raises:
            TrainerLostError: If the trainer is lost.
        """
        members = tuple((engine, self._receivers[engine].num_started) for engine in engines)
        if members == self._members:
            return
        self._members = None
        if not members:
            return
        address, port = await self._trainer.open_group(timeout_s=self._timeout_s)
        names = ["trainer", *(name for engine in engines for name in self._names(engine))]
        joins = [
            self._receivers[engine].join_group(
                address, port, rank_offset=1 + place * self._workers_each, num_members=len(names)
            )
            for place, engine in enumerate(engines)
        ]
        ends = await asyncio.gather(
            self._trainer.join_group(names, timeout_s=self._timeout_s), *joins, return_exceptions=True
        )
        faults = [end for end in ends if end is not None]
        for fault in faults:
            if not isinstance(fault, TransferError | EngineLostError):
                raise fault
            LOG.warning("no group: %s", fault)
        if not faults:
            self._members = members

    async def send(self, weights: Weights) -> None:
        """Send to the group that ``form`` has formed.

        Raises nothing where the weights do not arrive: engines are lost then, and say so themselves.

        Raises:
            TrainerLostError: If the trainer is lost.
        """
        if self._members is None:
            return
        try:
            await self._trainer.send(weights)
        except TransferError as error:
            self._members = None
            LOG.warning("version %d did not reach the engines: %s", weights.version, error)

    def _names(self, engine: int) -> list[str]:
        if self._workers_each == 1:
            return [f"engine {engine}"]
        return [f"engine {engine} worker {worker}" for worker in range(self._workers_each)]
