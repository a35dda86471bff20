"""Weights that are sent, to engines in memory: who is in the group, and what the loss of a member costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from in_memory import KINDS, config_of, interrupt, interrupted, parts_of, run, run_checked

from backends.fake import FakeEngine, FakeTrainer
from backends.interface import GroupMembers, Weights
from backends.transfer.group import WeightSyncGroup
from pipelinerl.errors import EngineLostError, TransferError

TIMEOUT_S = 0.5


class Wire:
    """Where the members of a group wait for each other, until all have come, one is lost, or the time is over."""

    def __init__(self):
        self.port = 0
        self.groups = []
        self.pending = {}

    async def wait_for_all(self, what, who, num_members):
        ended, there = self.pending.setdefault((self.port, what), (asyncio.get_running_loop().create_future(), set()))
        there.add(who)
        if len(there) == num_members and not ended.done():
            ended.set_result(True)
            if what == "join":
                self.groups.append(sorted(there, key=str))
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(ended), TIMEOUT_S)
        return False

    def broken(self):
        for ended, _ in self.pending.values():
            if not ended.done():
                ended.set_result(False)


class Sending(FakeTrainer):
    """Does one thing at a time; a hook is called once when it begins something, from a version on."""

    def __init__(self, wire, **options):
        super().__init__(**options)
        self.wire, self.hooks, self.busy, self.num_members = wire, {}, False, 0

    def when(self, what, version, do):
        self.hooks[what] = (version, do)

    @contextlib.contextmanager
    def one_thing(self, what, version=0):
        assert not self.busy, f"{what} while it is busy"
        self.busy = True
        try:
            if what in self.hooks and version >= self.hooks[what][0]:
                self.hooks.pop(what)[1]()
            yield
        finally:
            self.busy = False

    async def train(self, samples, *, completes_step):
        with self.one_thing("train", self.version):
            return await super().train(samples, completes_step=completes_step)

    async def publish(self, version):
        with self.one_thing("publish", version):
            return await super().publish(version)

    async def open_group(self, *, timeout_s):
        with self.one_thing("open"):
            self.wire.port += 1
            return "memory", self.wire.port

    async def join_group(self, names, *, timeout_s):
        with self.one_thing("join"):
            self.num_members = len(names)
            if not await self.wire.wait_for_all("join", "trainer", len(names)):
                raise TransferError("no group")

    async def send(self, weights):
        with self.one_thing("send", weights.version):
            if not await self.wire.wait_for_all(f"send {weights.version}", "trainer", self.num_members):
                raise TransferError("an engine is lost")


class Receiving(FakeEngine):
    """Loads what is sent, if all members get it."""

    def __init__(self, wire, index, **options):
        super().__init__(**options)
        self.wire, self.index, self.num_members = wire, index, 0

    def die(self):
        super().die()
        self.wire.broken()

    async def start(self):
        await super().start()
        self.num_members = 0

    async def together(self, what):
        self._check()
        if not (self.num_members and await self.wire.wait_for_all(what, self.index, self.num_members)):
            self.die()
            raise EngineLostError(f"engine lost: engine={self.index} {what}")

    async def join_group(self, address, port, *, rank_offset, num_members):
        self.num_members = num_members
        await self.together("join")

    async def update(self, weights, weight_update):
        await self.together(f"send {weights.version}")
        return await super().update(weights, weight_update)


def wired(config):
    """Parts of a run whose engines and trainer meet on a wire."""
    wire, parts = Wire(), parts_of(config)
    parts.engines = [Receiving(wire, index, num_slots=config.scheduler.generation_batch_size) for index in range(2)]
    parts.trainer = Sending(wire, train_batch_size=8)
    parts.group = GroupMembers(parts.trainer, dict(enumerate(parts.engines)), timeout_s=TIMEOUT_S)
    return wire, parts


EVERYONE = [0, 1, "trainer"]


@pytest.mark.parametrize("weight_update", KINDS)
def test_one_group_serves_a_run_of_which_nothing_is_lost(out, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16, train={"evaluation": {"problems": 8}})
    wire, parts = wired(config)
    run_checked(config, out, parts)
    assert wire.groups == [EVERYONE]


@pytest.mark.parametrize("weight_update", KINDS)
def test_an_engine_that_was_started_again_is_served_alone_then_with_the_others(out, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16, steps=8)
    wire, parts = wired(config)
    engines = parts.engines
    parts.trainer.when("train", 3, engines[1].die)
    summary = run_checked(config, out, parts)
    assert summary.engine_restarts == 1
    assert [engine.num_started for engine in engines] == [1, 2]
    assert [1, "trainer"] in wire.groups
    assert (wire.groups[0], wire.groups[-1]) == (EVERYONE, EVERYONE)


@pytest.mark.parametrize(("what", "version"), [("send", 1), ("send", 3), ("join", 0), ("publish", 2)])
def test_the_loss_of_an_engine_in_a_transfer_costs_a_start_of_each_at_most(out, what, version):
    config = config_of(longest=40, slots=16, steps=8)
    wire, parts = wired(config)
    engines = parts.engines
    parts.trainer.when(what, version, engines[1].die)
    summary = run_checked(config, out, parts)
    assert 1 <= summary.engine_restarts <= 2
    assert engines[1].num_started == 2
    assert wire.groups[-1] == EVERYONE


def test_when_no_start_is_left_the_run_ends_and_can_be_gone_on_with(out):
    config = config_of(train={"engine": {"restarts": 0}}, steps=20, longest=40)
    _, parts = wired(config)
    parts.trainer.when("send", 3, parts.engines[1].die)
    with pytest.raises(EngineLostError, match="engine lost"):
        run(config, out, parts)
    assert json.loads((out / "summary.json").read_text())["optimizer_steps"] >= 3
    again = config_of(steps=20, longest=40)
    run_checked(again, out, wired(again)[1], resume=True)


def test_ctrl_c_does_not_wait_for_engines_to_drain(out):
    config = config_of(weight_update="wait", longest=40, slots=16, steps=8)
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
        await group.form([0, 1])
        await group.form([0, 1])
        await group.form([0])
        await group.form([])
        await group.send(weights)  # to nobody
        assert wire.groups == [EVERYONE, [0, "trainer"]]
        await group.form([0, 1])
        engines[0].die()
        await group.send(weights)  # fails: nobody loads
        await engines[0].start()
        await group.form([0, 1])
        assert wire.groups == [EVERYONE, [0, "trainer"], EVERYONE, EVERYONE]
        trainer.when("open", 0, raises)  # what is not about the transfer is not kept quiet
        with pytest.raises(RuntimeError, match="no trainer"):
            await group.form([1])
        for engine in engines:
            await engine.shutdown()

    def raises() -> Any:
        raise RuntimeError("no trainer")

    asyncio.run(scenario())
