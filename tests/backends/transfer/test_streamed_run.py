"""A driver whose engines load weights while they are sent, in memory: who stands still, and what a loss costs."""

from __future__ import annotations

import asyncio
import json

import pytest
from in_memory import KINDS, config_of, parts_of, run, run_checked
from ledger_check import records

from backends.fake import FakeEngine, FakeTrainer
from backends.interface import GroupMembers
from pipelinerl.errors import EngineLostError, TransferError
from pipelinerl.scheduler.events import WeightsLoaded

SEND_S = 0.005
SILENCE_S = 30.0  # of an engine that is lost, unless somebody ends the transfer
RESTART_S = 0.05


class Streaming(FakeTrainer):
    """Sends what it has at the time, and trains or sends; hooks are called in the middle of a transfer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.members, self.groups, self.hooks, self.breaks = [], [], {}, 0
        self.engines, self.one_thing = [], asyncio.Lock()

    async def train(self, samples, *, completes_step):
        async with self.one_thing:
            result = await super().train(samples, completes_step=completes_step)
            if completes_step:
                self.published = None
        return result

    async def publish(self, version):
        self.published = version
        return await super().publish(version)

    async def open_group(self):
        for engine in self.members:
            engine.cut("another group")
        self.members = []
        self.aborted = asyncio.get_running_loop().create_future()
        return "memory"

    async def abort_group(self, rendezvous, why):
        self.aborted.set_result(why)

    async def join_group(self, names, *, timeout_s):
        self.members = [engine for engine in self.engines if engine.joined]
        for engine in self.members:
            engine.joined = False
        self.groups.append([engine.index for engine in self.members])

    async def send(self, weights):
        async with self.one_thing:
            try:
                await self._send(weights)
            except TransferError as error:
                for engine in self.members:
                    engine.cut(str(error))
                raise

    async def _send(self, weights):
        await asyncio.sleep(SEND_S)
        if self.breaks:
            self.breaks -= 1
            raise TransferError("no more of it")
        for due in [version for version in self.hooks if version <= weights.version]:
            self.hooks.pop(due)()
        if not all(engine.alive for engine in self.members):
            raise TransferError(await asyncio.wait_for(self.aborted, SILENCE_S))
        for engine in self.members:
            engine.arrived.set_result(None)


class Loading(FakeEngine):
    """Loads what it is sent; if the transfer breaks off it stands still until another one does not."""

    def __init__(self, index, **options):
        super().__init__(**options)
        self.index, self.joined, self.alive, self.arrived = index, False, False, None
        self.gone = asyncio.Event()

    def die(self):
        super().die()
        self.alive = False
        self.gone.set()
        self.cut("dead")

    def cut(self, why):
        if self.arrived is not None and not self.arrived.done():
            self.arrived.set_exception(TransferError(why))

    async def start(self):
        await asyncio.sleep(RESTART_S if self.num_started else 0)
        self._between_steps, self.stands_still = asyncio.Lock(), False
        await super().start()
        self.alive, self.gone = True, asyncio.Event()

    async def until_lost(self):
        await self.gone.wait()

    async def join_group(self, rendezvous, *, first_worker):
        self._check()
        self.joined = True

    async def update(self, weights, weight_update):
        self._check()
        self.arrived = asyncio.get_running_loop().create_future()
        if not self.stands_still:
            await self._between_steps.acquire()
            self.stands_still = True
        try:
            await self.arrived
        except TransferError:
            self._check()
            raise
        self._between_steps.release()
        self.stands_still = False
        return await super().update(weights, weight_update)

    def _check(self):
        if not self.alive:
            raise EngineLostError(f"engine lost: engine={self.index}")
        super()._check()


def streamed(config):
    parts = parts_of(config)
    parts.engines = [Loading(index, num_slots=config.scheduler.generation_batch_size) for index in range(2)]
    parts.trainer = Streaming(train_batch_size=8, train_s=0.02)
    parts.trainer.engines = parts.engines
    parts.group = GroupMembers(parts.trainer, dict(enumerate(parts.engines)), timeout_s=0.2, standing_still=True)
    return parts


@pytest.mark.parametrize("weight_update", KINDS)
def test_one_group_serves_a_run_of_which_nothing_is_lost(out, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16, train={"evaluation": {"problems": 8}})
    parts = streamed(config)
    summary = run_checked(config, out, parts)
    assert parts.trainer.groups == [[0, 1]]
    # What is loaded before the last evaluation, outside of the schedule, counts as little as with other transports.
    assert summary.updates.count == sum(isinstance(one.event, WeightsLoaded) for one in records(out))


@pytest.mark.parametrize("version", [1, 3])
def test_an_engine_lost_in_the_middle_costs_that_engine_only(out, version):
    config = config_of(longest=40, slots=16, steps=30)
    parts = streamed(config)
    parts.trainer.hooks[version] = parts.engines[1].die
    summary = run_checked(config, out, parts)
    assert summary.engine_restarts == 1
    assert [engine.num_started for engine in parts.engines] == [1, 2]
    assert [0] in parts.trainer.groups  # the other one gets everything once more
    assert parts.trainer.groups[-1] == [0, 1]


@pytest.mark.parametrize(("breaks", "restarts"), [(1, 0), (2, 2)])
def test_a_transfer_that_breaks_off_is_made_again_while_engines_stand_still_then_they_are_started_again(
    out, breaks, restarts
):
    config = config_of(longest=40, slots=16, steps=12)
    parts = streamed(config)

    def break_off():
        parts.trainer.breaks = breaks

    parts.trainer.hooks[3] = break_off
    summary = run_checked(config, out, parts)
    assert summary.engine_restarts == restarts


def test_a_run_goes_on_from_a_checkpoint(out):
    config = config_of(train={"engine": {"restarts_per_hour": 0}}, steps=20, longest=40)
    parts = streamed(config)
    parts.trainer.hooks[3] = parts.engines[1].die
    with pytest.raises(EngineLostError, match="engine lost"):
        run(config, out, parts)
    assert json.loads((out / "summary.json").read_text())["optimizer_steps"] >= 3
    again = config_of(steps=20, longest=40)
    run_checked(again, out, streamed(again), resume=True)
