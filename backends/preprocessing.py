"""The stage between the reward of a rollout and its training: reference log-probabilities.

Theory of operation. Finished rollouts wait in a list. Whenever the reference model is free it gets all that wait, as
one batch. So it runs beside generation and training, and delays only the moment at which a rollout is ready. With
``kl_coefficient = 0`` there is no reference model and nothing waits.

The scheduler bounds what is in flight and what is ready, not what lies between. So when the reference model falls
behind, no rollout is submitted to an engine until it has taken its next batch.

A reference model that is lost is started again and asked the same batch again, ``RESTARTS`` times in a run; only the
rollouts that wait are delayed. After that the run ends.

===================  =============================================================================
what                 limit
===================  =============================================================================
rollouts that wait   ``limit``, and what is in flight or being rewarded when it is reached
batches at a time    one
seconds of a batch   the reference model's own (``ReferenceSettings.timeout_s``)
restarts             ``RESTARTS``
===================  =============================================================================
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.interface import Reference
from backends.rollouts import RolloutData
from pipelinerl.errors import ReferenceLostError

LOG = logging.getLogger("pipelinerl")
RESTARTS = 1
"""Times that a lost reference model is started again, in all (count)."""


class Preprocessing:
    """The stage before training.

    Args:
        reference: Not yet started; None: nothing to do.
        limit: Rollouts that may wait before generation has to (count).
        spawn: Starts a task; the run ends if it fails.
    """

    def __init__(
        self,
        reference: Reference | None,
        *,
        limit: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._reference, self._limit, self._spawn = reference, limit, spawn
        self._room = asyncio.Event()
        self._room.set()
        self._waiting: list[tuple[RolloutData, asyncio.Future[NDArray[np.float32]]]] = []
        self._busy = False
        self._restarts_left = RESTARTS
        self._closing = False

    async def start(self) -> None:
        """Start the reference model."""
        if self._reference is not None:
            await self._reference.start()

    async def room(self) -> None:
        """Wait until fewer rollouts wait than may."""
        await self._room.wait()

    async def reference_logprobs(self, data: RolloutData) -> NDArray[np.float32] | None:
        """Return the log-probability of each answer token under the reference model, shape [T] (nats).

        None if there is no such model. Waits for ever if it is lost for good: the run ends then.
        """
        if self._reference is None:
            return None
        future: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()
        self._waiting.append((data, future))
        if len(self._waiting) >= self._limit:
            self._room.clear()
        if not self._busy:
            self._busy = True
            self._spawn(self._work(self._reference))
        return await future

    async def _work(self, reference: Reference) -> None:
        """Serve until nothing waits."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            self._room.set()
            try:
                logprobs = await self._asked(reference, [data for data, _ in batch])
            except ReferenceLostError as error:
                if not self._closing:
                    raise
                LOG.warning("%s", error)
                return  # it is not needed any more
            for (_, future), logprob_T in zip(batch, logprobs, strict=True):
                if not future.done():  # cancelled
                    future.set_result(logprob_T)
        self._busy = False

    async def _asked(self, reference: Reference, batch: list[RolloutData]) -> list[NDArray[np.float32]]:
        """Ask the reference model, over as many restarts as there may be."""
        samples = [data.sample(index, advantage=0.0) for index, data in enumerate(batch)]  # advantages come later
        lost = False
        while True:
            try:
                if lost:
                    await reference.shutdown()
                    await reference.start()
                return await reference.logprobs(samples)
            except ReferenceLostError as error:
                if self._closing:
                    raise
                if not self._restarts_left:
                    raise ReferenceLostError(f"{error}; go on from a checkpoint") from error
                self._restarts_left -= 1
                LOG.warning("%s; it is started again", error)
                lost = True

    def close(self) -> None:
        """Let the reference model be lost from now on: its answers are not needed any more."""
        self._closing = True

    async def shutdown(self) -> None:
        """End the reference model."""
        self.close()
        if self._reference is not None:
            await self._reference.shutdown()
