"""Weights that are sent, to engines in memory: who is in the group, and what the loss of a member costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from in_memory import KINDS, config_of, interrupt, interrupted, parts_of, run, run_checked

from backends.driver.weight_sync import WeightSyncGroup
from backends.fake import FakeEngine, FakeTrainer
from backends.interface import GroupMembers, Weights
from pipelinerl.errors import EngineLostError, TransferError, WeightsRefusedError

TIMEOUT_S = 0.2
SILENCE_S = 30.0  # nothing that is right waits for it
SEND_S = 0.005
TRAIN_S = 0.02  # longer than a transfer, so that a run does not end before the restart of an engine


class Wire:
    """Where the members of a group meet, and what they have been sent."""

    def __init__(self):
        self.groups, self.rendezvous = [], []
        self.joining = {}


class Sending(FakeTrainer):
    """Trains while it sends; a hook is called once when it begins something, from a version on.

    A transfer lasts until so many steps, ``awaited``, have begun in one.
    """

    def __init__(self, wire, **options):
        super().__init__(**options)
        self.wire, self.hooks, self.busy, self.members = wire, {}, set(), {}
        self.trained_while_sending, self.awaited = 0, 0

    def when(self, what, version, do):
        self.hooks[what] = (version, do)

    @contextlib.contextmanager
    def one_thing(self, what, version=0, *, but_not):
        assert not self.busy & {what, *but_not}, f"{what} while {self.busy}"
        self.busy.add(what)
        try:
            if what in self.hooks and version >= self.hooks[what][0]:
                self.hooks.pop(what)[1]()
            yield
        finally:
            self.busy.discard(what)

    async def train(self, samples, *, completes_step):
        self.trained_while_sending += "send" in self.busy
        with self.one_thing("train", self.version, but_not=["publish"]):
            return await super().train(samples, completes_step=completes_step)

    async def publish(self, version):
        with self.one_thing("publish", version, but_not=["train", "send", "join", "open"]):
            return await super().publish(version)

    async def open_group(self):
        with self.one_thing("open", but_not=["send"]):
            self.wire.joining, self.members = {}, {}
            self.aborted = asyncio.get_running_loop().create_future()
            self.wire.rendezvous.append(f"rendezvous {len(self.wire.rendezvous)}")
            return self.wire.rendezvous[-1]

    async def abort_group(self, rendezvous, why):
        if rendezvous == self.wire.rendezvous[-1] and not self.aborted.done():
            self.aborted.set_result(why)

    async def join_group(self, names, *, timeout_s):
        with self.one_thing("join", but_not=["send"]):
            if len(self.wire.joining) < len(names) - 1 or not all(one.runs for one in self.wire.joining.values()):
                await self.silence()
            self.members = dict(self.wire.joining)
            self.wire.groups.append([*sorted(self.members), "trainer"])

    async def silence(self):
        """Wait for an engine that says nothing, until somebody ends it."""
        raise TransferError(await asyncio.wait_for(self.aborted, SILENCE_S))

    async def send(self, weights):
        with self.one_thing("send", weights.version, but_not=["publish"]):
            await asyncio.sleep(SEND_S)
            async with asyncio.timeout(60):
                while self.trained_while_sending < self.awaited:
                    await asyncio.sleep(0.001)
            started = {index: engine.num_started for index, engine in self.members.items()}
            if any(not engine.runs or started[index] != engine.joined_at for index, engine in self.members.items()):
                await self.silence()
            for engine in self.members.values():
                engine.staged = weights.version


class Receiving(FakeEngine):
    """Loads what it has been sent, nothing else."""

    def __init__(self, wire, index, **options):
        super().__init__(**options)
        self.wire, self.index, self.staged, self.joined_at, self.runs = wire, index, None, 0, False
        self.gone = asyncio.Event()

    def die(self):
        super().die()
        self.runs = False
        self.gone.set()

    async def start(self):
        await super().start()
        self.runs, self.staged, self.gone = True, None, asyncio.Event()

    async def until_lost(self):
        await self.gone.wait()

    async def join_group(self, rendezvous, *, first_worker):
        self._check()
        self.joined_at = self.num_started
        self.wire.joining[self.index] = self

    async def update(self, weights, weight_update):
        self._check()
        if self.staged != weights.version:
            self.die()
            raise EngineLostError(f"engine lost: engine={self.index} has version {self.staged}, not {weights.version}")
        return await super().update(weights, weight_update)


def wired(config):
    """Parts of a run whose engines and trainer meet on a wire."""
    wire, parts = Wire(), parts_of(config)
    parts.engines = [Receiving(wire, index, num_slots=config.scheduler.generation_batch_size) for index in range(2)]
    parts.trainer = Sending(wire, train_batch_size=8, train_s=TRAIN_S)
    parts.group = GroupMembers(parts.trainer, dict(enumerate(parts.engines)), timeout_s=TIMEOUT_S)
    return wire, parts


EVERYONE = [0, 1, "trainer"]


def test_an_engine_of_another_model_ends_the_run_at_once(out, caplog):
    config = config_of(steps=50)
    _, parts = wired(config)
    refusal = "engine 0: weights to be received have unknown 1 of 3 parameters: x"
    joined = []

    async def join_group(names, *, timeout_s):
        joined.append(names)
        raise TransferError(refusal)

    parts.trainer.join_group = join_group
    with pytest.raises(WeightsRefusedError, match=f"^{refusal}$"):
        run(config, out, parts)
    assert len(joined) == 1
    assert [engine.num_started for engine in parts.engines] == [1, 1]


@pytest.mark.parametrize("weight_update", KINDS)
def test_one_group_serves_a_run_of_which_nothing_is_lost(out, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16, train={"evaluation": {"problems": 8}})
    wire, parts = wired(config)
    run_checked(config, out, parts)
    assert wire.groups == [EVERYONE]


@pytest.mark.parametrize("weight_update", KINDS)
def test_an_engine_that_was_started_again_is_served_alone_then_with_the_others(out, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16, steps=30)
    wire, parts = wired(config)
    engines = parts.engines
    parts.trainer.when("train", 3, engines[1].die)
    summary = run_checked(config, out, parts)
    assert summary.engine_restarts == 1
    assert [engine.num_started for engine in engines] == [1, 2]
    assert [1, "trainer"] in wire.groups
    assert (wire.groups[0], wire.groups[-1]) == (EVERYONE, EVERYONE)


@pytest.mark.parametrize(("what", "version"), [("send", 1), ("send", 3), ("join", 0), ("publish", 2)])
def test_the_loss_of_an_engine_in_a_transfer_costs_that_engine_only(out, what, version):
    config = config_of(longest=40, slots=16, steps=30)
    wire, parts = wired(config)
    engines = parts.engines
    parts.trainer.when(what, version, engines[1].die)
    summary = run_checked(config, out, parts)
    assert summary.engine_restarts == 1
    assert [engine.num_started for engine in engines] == [1, 2]
    assert wire.groups[-1] == EVERYONE


def test_the_trainer_trains_while_it_sends(out):
    config = config_of(longest=40, slots=16, steps=20)
    _, parts = wired(config)
    parts.trainer.awaited = 5
    run_checked(config, out, parts)
    assert parts.trainer.trained_while_sending >= 5


def test_when_no_start_is_left_the_run_ends_and_can_be_gone_on_with(out):
    config = config_of(train={"engine": {"restarts_per_hour": 0}}, steps=20, longest=40)
    _, parts = wired(config)
    parts.trainer.when("send", 3, parts.engines[1].die)
    with pytest.raises(EngineLostError, match="engine lost"):
        run(config, out, parts)
    assert json.loads((out / "summary.json").read_text())["optimizer_steps"] >= 3
    again = config_of(steps=20, longest=40)
    run_checked(again, out, wired(again)[1], resume=True)


def test_ctrl_c_does_not_wait_for_engines_to_drain(out):
    # Without a limit of the lag the run may end before engines that are slow to drain have loaded a first version.
    config = config_of(weight_update="wait", longest=40, slots=16, steps=8, max_lag=2)
    _, parts = wired(config)
    parts.trainer.when("publish", 2, interrupt)
    interrupted(config, out, parts)
    run_checked(config, out, wired(config)[1], resume=True)


def test_a_group_is_made_anew_when_its_members_change_and_when_a_transfer_failed():
    async def scenario() -> None:
        wire, parts = wired(config_of())
        engines, trainer, group = parts.engines, parts.trainer, WeightSyncGroup(parts.group)
        weights = Weights(1, "memory:1")
        for engine in engines:
            await engine.start()
        assert await group.form([0, 1]) == {}
        await group.form([0, 1])
        await group.form([0])
        await group.form([])
        assert not await group.send(weights)  # to nobody
        assert wire.groups == [EVERYONE, [0, "trainer"]]
        await group.form([0, 1])
        engines[0].die()
        assert not await group.send(weights)
        assert list(await group.form([0, 1])) == [0]
        await engines[0].start()
        await group.form([0, 1])
        assert wire.groups == [EVERYONE, [0, "trainer"], EVERYONE, EVERYONE]
        assert await group.send(weights)
        assert [engine.staged for engine in engines] == [1, 1]
        trainer.when("open", 0, raises)  # what is not about the transfer is not kept quiet
        with pytest.raises(RuntimeError, match="no trainer"):
            await group.form([1])
        for engine in engines:
            await engine.shutdown()

    def raises() -> Any:
        raise RuntimeError("no trainer")

    asyncio.run(scenario())
