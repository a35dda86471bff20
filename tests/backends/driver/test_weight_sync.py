"""Transfers of weights to engines in memory, outside of a run."""

import asyncio

import pytest
import virtual_clock

pytest.importorskip("torch")  # TensorBoard's writer is torch's

from backends.driver.engines import EnginePool
from backends.driver.metrics import StepMetrics
from backends.driver.tasks import RunTasks
from backends.driver.weight_sync import WeightSync
from backends.fake import FakeEngine, FakeTrainer
from backends.interface import Weights
from pipelinerl.rl.config import LossConfig


class Loads(FakeEngine):
    """Keeps the versions that it loads."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    async def update(self, weights, weight_update):
        self.loaded.append(weights.version)
        return await super().update(weights, weight_update)


def test_a_restarted_engine_that_must_wait_loads_the_weights_that_are_the_newest_then():
    """The file of those before may be gone. It waits as for the others to wake, which sleep while the trainer works."""
    engine = Loads()

    async def main():
        pool = EnginePool({0: engine}, engine_ids=[0], restarts_per_hour=0, spawn=None, bring_back=None)
        await pool.start()
        handle, pool.newest = pool[0], Weights(1, "memory:1")
        handle.up.clear()
        sync = WeightSync(
            trainer=FakeTrainer(train_batch_size=8),
            pool=pool,
            group=None,
            colocated=True,
            tasks=RunTasks(),
            metrics=StepMetrics(LossConfig()),
        )
        async with handle.changing:
            back = asyncio.ensure_future(sync.bring_back(handle))
            await asyncio.sleep(1.0)
            pool.newest = Weights(2, "memory:2")
        await back
        assert (handle.version, handle.up.is_set()) == (2, True)

    virtual_clock.run(main())
    assert engine.loaded == [2]
