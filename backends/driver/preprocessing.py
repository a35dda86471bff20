"""The stage between the reward of a rollout and its training: log-probabilities of the reference model or the teacher.

Theory of operation. A free reference model gets all waiting rollouts as one batch, while engines generate and the
trainer trains; one batch at a time, with the time-out of ``ReferenceSettings``. Without ``loss.needs_reference`` there
is none and nothing waits. The scheduler bounds the rollouts that wait, which are being scored. A lost reference model
is restarted and gets the same batch, ``RESTARTS`` times in a run; then the run ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.driver.rollouts import RolloutData
from backends.interface import Reference
from pipelinerl.errors import ReferenceLostError

LOG = logging.getLogger("pipelinerl")
RESTARTS = 1


class Preprocessing:
    """The stage before training. ``reference`` None: none waits."""

    def __init__(
        self, reference: Reference | None, *, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        self._reference, self._spawn = reference, spawn
        self._waiting: list[tuple[RolloutData, asyncio.Future[NDArray[np.float32]]]] = []
        self._busy = False
        self._restarts_left = RESTARTS
        self._closing = False

    async def start(self) -> None:
        """Start the reference model."""
        if self._reference is not None:
            await self._reference.start()

    async def reference_logprobs(self, data: RolloutData) -> NDArray[np.float32] | None:
        """Return reference log-probabilities (nats), shape [T], or None; never returns if that model is lost."""
        if self._reference is None:
            return None
        future: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()
        self._waiting.append((data, future))
        if not self._busy:
            self._busy = True
            self._spawn(self._work(self._reference))
        return await future

    async def _work(self, reference: Reference) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
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
        """Ignore a loss of the reference model from now on."""
        self._closing = True

    async def shutdown(self) -> None:
        """End the reference model."""
        self.close()
        if self._reference is not None:
            await self._reference.shutdown()
