"""Weights that are sent, to engines in memory: who is in the group, what a lost member costs."""

import asyncio
import contextlib
import json
from functools import partial

import pytest
from in_memory import KINDS, config_of, interrupt, interrupted, parts_of, run, run_checked

from backends.fake import FakeEngine, FakeTrainer
from backends.interface import PUBLICATIONS, GroupMembers
from backends.transfer.transport import REFUSED
from pipelinerl.errors import EngineLostError, TransferError, WeightsRefusedError

TIMEOUT_S = 0.2
SILENCE_S = 30.0  # nothing that is right waits for it
SEND_S = 0.005
TRAIN_S = 0.02  # longer than a transfer, so that a run does not end before the restart of an engine


class Sending(FakeTrainer):
    """Trains while it sends; does something once, when a call of a name begins, from a version on.

    A transfer lasts until so many steps, ``awaited``, have begun in one; before the first step none waits.
    """

    def __init__(self, engines):
        super().__init__(train_batch_size=8, train_s=TRAIN_S)
        self.engines, self.members, self.groups, self.num_opened = engines, [], [], 0
        self.when, self.busy = (None, 0, None), set()
        self.trained_while_sending, self.awaited = 0, 0

    @contextlib.contextmanager
    def one_thing(self, name, version=0, *, but_not):
        assert not self.busy & {name, *but_not}, f"{name} while {self.busy}"
        self.busy.add(name)
        try:
            at, least, do = self.when
            if name == at and version >= least:
                self.when = (None, 0, None)
                do()
            yield
        finally:
            self.busy.discard(name)

    async def train(self, samples, *, completes_step):
        self.trained_while_sending += "send" in self.busy
        with self.one_thing("train", self.version, but_not=["publish"]):
            return await super().train(samples, completes_step=completes_step)

    async def publish(self, version):
        with self.one_thing("publish", version, but_not=["train", "send", "join", "open"]):
            return await super().publish(version)

    async def open_group(self):
        with self.one_thing("open", but_not=["send"]):
            for engine in self.engines:
                engine.joined_at = None
            self.members, self.num_opened = [], self.num_opened + 1
            self.aborted = asyncio.get_running_loop().create_future()
            return f"rendezvous {self.num_opened}"

    async def abort_group(self, rendezvous, why):
        if rendezvous == f"rendezvous {self.num_opened}" and not self.aborted.done():
            self.aborted.set_result(why)

    async def join_group(self, names, *, timeout_s):
        with self.one_thing("join", but_not=["send"]):
            joined = [engine for engine in self.engines if engine.joined_at is not None]
            if len(joined) < len(names) - 1 or any(engine.gone.is_set() for engine in joined):
                await self.silence()
            self.members = joined
            self.groups.append([engine.index for engine in joined])

    async def silence(self):
        """Wait for an engine that does not answer, until the group is aborted."""
        raise TransferError(await asyncio.wait_for(self.aborted, SILENCE_S))

    async def send(self, weights):
        with self.one_thing("send", weights.version, but_not=["publish"]):
            await asyncio.sleep(SEND_S)
            async with asyncio.timeout(60):
                while weights.version and self.trained_while_sending < self.awaited:
                    await asyncio.sleep(0.001)
            if any(engine.gone.is_set() or engine.joined_at != engine.num_started for engine in self.members):
                await self.silence()
            for engine in self.members:
                engine.arrives(weights.version)


class Receiving(FakeEngine):
    """Loads the version that it was sent last, no other."""

    def __init__(self, index, **options):
        super().__init__(**options)
        self.index, self.staged, self.joined_at, self.gone = index, None, None, asyncio.Event()

    def die(self):
        super().die()
        self.gone.set()

    async def start(self):
        await super().start()
        self.staged, self.gone = None, asyncio.Event()

    async def until_lost(self):
        await self.gone.wait()

    async def join_group(self, rendezvous, *, first_worker):
        self._check()
        self.joined_at = self.num_started

    def arrives(self, version):
        self.staged = version

    async def update(self, weights, weight_update):
        self._check()
        if self.staged != weights.version:
            self.die()
            raise EngineLostError(f"engine lost: engine={self.index} has version {self.staged}, not {weights.version}")
        return await super().update(weights, weight_update)


def wired(config, trainer=Sending, engine=Receiving):
    """Parts of a run whose engines and trainer are in a group."""
    parts = parts_of(config)
    slots = config.scheduler.generation_batch_size
    parts.engines = [engine(index, num_slots=slots) for index in range(config.num_engines)]
    parts.trainer = trainer(parts.engines)
    parts.group = GroupMembers(parts.trainer, dict(enumerate(parts.engines)), timeout_s=TIMEOUT_S)
    return parts


EVERYONE = [0, 1]


def test_an_engine_of_another_model_ends_the_run_at_once(out):
    config = config_of(steps=50)
    parts = wired(config)
    refusal = "engine 0: weights to be received have unknown 1 of 3 parameters: x"

    async def join_group(names, *, timeout_s):
        raise TransferError(refusal)

    parts.trainer.join_group = join_group
    with pytest.raises(WeightsRefusedError, match=f"^{refusal}$"):
        run(config, out, parts)
    assert parts.trainer.num_opened == 1
    assert [engine.num_started for engine in parts.engines] == [1, 1]


@pytest.mark.parametrize("weight_update", KINDS)
def test_one_group_serves_a_run_of_which_nothing_is_lost(out, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16, train={"evaluation": {"problems": 8}})
    parts = wired(config)
    run_checked(config, out, parts)
    assert parts.trainer.groups == [EVERYONE]


@pytest.mark.parametrize("weight_update", KINDS)
def test_an_engine_that_was_started_again_is_served_alone_then_with_the_others(out, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16, steps=30)
    parts = wired(config)
    parts.trainer.when = ("train", 3, parts.engines[1].die)
    assert run_checked(config, out, parts).engine_restarts == 1
    first, *groups, last = parts.trainer.groups
    assert [1] in groups
    assert first == last == EVERYONE


def test_the_only_engine_gets_another_group_after_its_restart(out):
    config = config_of(engines=1, steps=12, longest=40, slots=16, publish_every=2)  # none is under way at step 3
    parts = wired(config)
    parts.trainer.when = ("train", 3, parts.engines[0].die)
    assert run_checked(config, out, parts).engine_restarts == 1


@pytest.mark.parametrize(("what", "version"), [("send", 1), ("send", 3), ("join", 0), ("publish", 2)])
def test_the_loss_of_an_engine_in_a_transfer_costs_that_engine_only(out, what, version):
    config = config_of(longest=40, slots=16, steps=30)
    parts = wired(config)
    parts.trainer.when = (what, version, parts.engines[1].die)
    assert run_checked(config, out, parts).engine_restarts == 1
    assert [engine.num_started for engine in parts.engines] == [1, 2]
    assert parts.trainer.groups[-1] == EVERYONE
    assert what != "send" or [0] in parts.trainer.groups  # the other one gets everything once more


def test_engines_have_got_weights_before_the_first_rollout(out):
    """So the first update does not pay for the group, the memory and the proof of direct copies."""

    class First(Receiving):
        first = None

        async def generate(self, request):
            self.first = self.first or (self.joined_at, self.staged)
            return await super().generate(request)

    config = config_of(steps=3, longest=40)
    parts = wired(config, engine=First)
    run_checked(config, out, parts)
    assert [one.first for one in parts.engines] == [(1, 0), (1, 0)]


def test_the_trainer_trains_while_it_sends(out):
    config = config_of(longest=40, slots=16, steps=20)
    parts = wired(config)
    parts.trainer.awaited = 5
    run_checked(config, out, parts)
    assert parts.trainer.trained_while_sending >= 5


def test_when_no_start_is_left_the_run_ends_and_can_be_gone_on_with(out):
    config = config_of(train={"engine": {"restarts_per_hour": 0}}, steps=20, longest=40)
    parts = wired(config)
    parts.trainer.when = ("send", 3, parts.engines[1].die)
    with pytest.raises(EngineLostError, match="engine lost"):
        run(config, out, parts)
    assert json.loads((out / "summary.json").read_text())["optimizer_steps"] >= 3
    again = config_of(steps=20, longest=40)
    run_checked(again, out, wired(again), resume=True)


def test_ctrl_c_does_not_wait_for_engines_to_drain(out):
    # Without a limit of the lag the run may end before engines that are slow to drain have loaded a first version.
    config = config_of(weight_update="wait", longest=40, slots=16, steps=8, max_lag=2)
    parts = wired(config)
    parts.trainer.when = ("publish", 2, interrupt)
    interrupted(config, out, parts)
    run_checked(config, out, wired(config), resume=True)


class Refused(Sending):
    """Some transfers are refused by their bytes; weights published since then are sent."""

    def __init__(self, engines, at, times):
        super().__init__(engines)
        self.at, self.times, self.published = at, times, []

    async def publish(self, version):
        weights = await super().publish(version)
        self.published.append(version)
        return weights

    async def send(self, weights):
        if weights.version >= self.at and self.times:
            self.times -= 1
            raise TransferError(f"version {weights.version} {REFUSED} 2 times (machines: 1)")
        await super().send(weights)


def test_weights_that_are_refused_are_published_anew_and_no_engine_is_lost(out):
    config = config_of(longest=40, slots=16, steps=12)
    parts = wired(config, trainer=partial(Refused, at=3, times=1))
    assert run_checked(config, out, parts).engine_restarts == 0
    published = parts.trainer.published
    twice = [version for version in set(published) if published.count(version) == 2]
    assert twice == [next(version for version in published if version >= 3)]
    assert len(published) == len(set(published)) + 1


def test_weights_that_are_refused_again_and_again_end_the_run_in_a_line(out):
    config = config_of(longest=40, slots=16, steps=12)
    parts = wired(config, trainer=partial(Refused, at=3, times=100))
    with pytest.raises(TransferError, match=f"{PUBLICATIONS} publications of weights in a row were damaged"):
        run(config, out, parts)
