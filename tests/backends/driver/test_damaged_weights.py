"""Published files whose bytes change: real files of the ``file`` transport, engines and trainer in memory."""

import asyncio
import re
import threading

import pytest
from in_memory import Killer, Letters, Shared, config_of, interrupt, interrupted, parts_of, run, run_checked, turns_of

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

from backends.driver.checkpoint import read_newest  # noqa: E402
from backends.fake import FakeEngine, FakeReference  # noqa: E402
from backends.interface import PUBLICATIONS  # noqa: E402
from backends.transfer.file import FILE  # noqa: E402
from backends.transfer.transport import SenderContext  # noqa: E402
from pipelinerl.errors import ReferenceLostError, TransferError  # noqa: E402


class Source:
    """A ``WeightSource`` whose one parameter is the number of optimizer steps."""

    def __init__(self, steps):
        self.steps = steps

    def buckets(self):
        yield {"steps": torch.tensor(self.steps)}


class Writer(Shared):
    """Publishes real files; ``damage`` gets each with its version and number, the first is 1."""

    def __init__(self, folder, damage, **settings):
        super().__init__(**settings)
        self.sender = FILE.sender(SenderContext(receives=True, folder=folder, group=None))
        self.damage, self.published, self.training = damage, [], False

    async def train(self, samples, *, completes_step):
        self.training = True
        result = await super().train(samples, completes_step=completes_step)
        self.training = False
        return result

    async def publish(self, version):
        assert self.has_memory
        assert not self.training
        weights = self.sender.publish(Source(self.version), version)
        self.published.append(version)
        self.damage(weights, version, self.published.count(version))
        return weights


def flip(weights):
    """Change the last bit of the file."""
    path = weights.location.removeprefix("file:")
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        (last,) = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


class Once:
    """Damages the first file of version 2, or of the next one if engines are late and version 2 is skipped."""

    version = 0

    def __call__(self, weights, version, number):
        if version >= 2 and not self.version:
            self.version = version
            flip(weights)


class Engine(FakeEngine):
    """Shares no memory with a colocated trainer; of several ``workers``, it is lost after a damaged file."""

    trainer, workers, num_lost, version, dies = None, 1, 0, 0, None

    async def start(self):
        assert self.trainer is None or not self.trainer.has_memory
        self.version = 0
        await super().start()

    async def generate(self, request):
        assert self.trainer is None or not self.trainer.has_memory
        if self.dies is not None and self.dies():
            self.dies = None
            self.die()
        return await super().generate(request)

    async def update(self, weights, weight_update):
        assert self.trainer is None or not self.trainer.has_memory
        try:
            times = await super().update(weights, weight_update)
        except TransferError:
            if self.workers > 1:
                self.num_lost += 1
                self.die()
            raise
        self.version = weights.version
        return times

    async def sleep(self):
        assert not self._sequences
        await super().sleep()


def parts_with(config, tmp_path, damage, *, workers=1):
    save_file({"steps": torch.tensor(0)}, tmp_path / "model.safetensors")
    parts = parts_of(config, trainer=Writer(tmp_path / "weights", damage, train_batch_size=8))
    slots = config.scheduler.generation_batch_size
    parts.engines = [Engine(num_slots=slots, receiver=FILE.receiver(str(tmp_path))) for _ in range(2)]
    for engine in parts.engines:
        engine.workers, engine.trainer = workers, parts.trainer if config.colocated else None
    return parts


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_a_version_whose_file_has_a_wrong_bit_is_published_anew_and_costs_no_engine(out, tmp_path, caplog, kind):
    config, damage = config_of(kind=kind, steps=6, longest=40), Once()
    parts = parts_with(config, tmp_path, damage)
    assert run_checked(config, out, parts).engine_restarts == 0
    assert parts.trainer.published == sorted([*set(parts.trainer.published), damage.version])
    assert [engine.num_started for engine in parts.engines] == [1, 1]
    (line,) = [one.message for one in caplog.records if "published anew" in one.message]
    file = f"version-0000000{damage.version}.safetensors"
    assert re.match(rf"weights in .*{file} have a wrong checksum in 1 of 1 parameters: steps", line)


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_engines_that_a_damaged_file_costs_come_back_to_a_right_one(out, tmp_path, kind):
    config, damage = config_of(kind=kind, steps=6, longest=40), Once()
    parts = parts_with(config, tmp_path, damage, workers=2)
    assert run_checked(config, out, parts).engine_restarts == sum(engine.num_lost for engine in parts.engines) > 0
    assert parts.trainer.published == sorted([*set(parts.trainer.published), damage.version])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("settings", [{"publish_every": 4}, {"kind": "conventional", "optimizer_steps_per_rl_step": 4}])
def test_an_engine_that_comes_back_to_a_damaged_file_gets_it_anew(out, tmp_path, settings, workers):
    """The file changes after both have loaded it: only the restarted engine reads it again."""
    newest = []

    def dies():
        loaded = [engine.version for engine in parts.engines] == [4, 4]
        if loaded:
            flip(newest[-1])
        return loaded

    config = config_of(steps=8, longest=40, **settings)
    parts = parts_with(config, tmp_path, lambda weights, version, number: newest.append(weights), workers=workers)
    parts.engines[1].dies = dies
    assert run_checked(config, out, parts).engine_restarts == 1
    assert [engine.num_started for engine in parts.engines] == [1, 1 + workers]
    assert parts.trainer.published == [4, 4]


def test_ctrl_c_ends_a_run_whose_engines_finish_their_rollouts_before_a_file_is_published_anew(out, tmp_path):
    """Engine 0 still decodes when engine 1 comes back to a damaged file; after Ctrl-C no event is delivered."""
    newest = []

    def dies():
        if newest:
            flip(newest[-1])
        return bool(newest)

    class Interrupting(Engine):
        async def update(self, weights, weight_update):
            try:
                return await super().update(weights, weight_update)
            except TransferError:
                asyncio.get_running_loop().call_soon(interrupt)
                raise

    config = config_of(kind="conventional", steps=4, longest=40)
    parts = parts_with(config, tmp_path, lambda weights, version, number: newest.append(weights))
    receivers = [FILE.receiver(str(tmp_path)) for _ in range(2)]
    slow = Engine(num_slots=6, step_s=0.01, endless=True, receiver=receivers[0])
    parts.engines = [slow, Interrupting(num_slots=6, receiver=receivers[1])]
    parts.engines[1].dies = dies
    interrupted(config, out, parts)
    assert parts.trainer.published == [1]
    run_checked(config, out, parts_of(config), resume=True)


def test_engines_sleep_while_a_file_is_published_anew_although_an_evaluation_goes_on(out, tmp_path):
    """Engine 1 is lost in the evaluation after the run; engine 0 has more problems to answer."""
    config = config_of(kind="conventional", steps=2, longest=40, train={"evaluation": {"problems": 40}})
    newest = []

    def dies():
        if after := newest[-1:] and newest[-1].version == 2:
            flip(newest[-1])
        return after

    parts = parts_with(config, tmp_path, lambda weights, version, number: newest.append(weights))
    parts.engines[1].dies = dies
    summary = run_checked(config, out, parts)
    assert parts.trainer.published == [1, 2, 2]
    assert summary.engine_restarts == 1
    assert summary.evaluation.success_after is not None


def test_engines_sleep_while_a_file_is_published_anew_although_an_observation_comes(out, tmp_path):
    """All rollouts wait for their environments when the engines begin to sleep; the second publication lasts longer."""
    newest = []

    def dies():
        if newest:
            flip(newest[-1])
        return bool(newest)

    config = turns_of(kind="conventional", steps=2, settings={"delay_s": 0.05}, slots=4, count=4)
    parts = parts_with(config, tmp_path, lambda weights, version, number: newest.append(weights))
    publish = parts.trainer.publish

    async def slow(version):
        if newest:
            await asyncio.sleep(0.3)
        return await publish(version)

    parts.trainer.publish, parts.engines[1].dies = slow, dies
    assert run_checked(config, out, parts).engine_restarts == 1
    assert parts.trainer.published == [1, 1]


def test_nothing_is_published_anew_once_ctrl_c_ends_the_engines(out, tmp_path):
    """Engine 1 comes back when engine 0 has nothing to do, and finds the file damaged while the engines end."""
    config = config_of(kind="conventional", steps=4, longest=40)
    newest, ending, read = [], asyncio.Event(), asyncio.Event()

    def dies():
        if newest:
            flip(newest[-1])
        return bool(newest)

    class Ends(Engine):
        async def shutdown(self):
            ending.set()
            await super().shutdown()

    class Late(Engine):
        async def update(self, weights, weight_update):
            if self.num_started == 1 or ending.is_set():
                return await super().update(weights, weight_update)
            while parts.engines[0]._sequences:
                await asyncio.sleep(0.001)
            interrupt()
            await ending.wait()
            try:
                return await super().update(weights, weight_update)
            finally:
                read.set()

        async def shutdown(self):
            if ending.is_set() and not self._lost:
                await read.wait()
            await super().shutdown()

    parts = parts_with(config, tmp_path, lambda weights, version, number: newest.append(weights))
    parts.engines = [kind(num_slots=6, receiver=FILE.receiver(str(tmp_path))) for kind in (Ends, Late)]
    parts.engines[1].dies = dies
    interrupted(config, out, parts)
    assert parts.trainer.published == [1]
    run_checked(config, out, parts_of(config), resume=True)


def test_a_checkpoint_waits_for_a_file_that_is_published_anew_when_the_reference_model_is_lost(out, tmp_path):
    config = config_of(kind="conventional", steps=4, longest=40, train={"loss": {"kl_coefficient": 0.1}})
    newest, anew = [], threading.Event()

    class Busy(Writer):
        publishing = False

        async def publish(self, version):
            self.publishing = True
            if newest:
                anew.set()
                await asyncio.sleep(0.2)  # else all is over before the loss is noticed
            self.publishing = False
            return await super().publish(version)

        async def snapshot(self):
            assert not self.publishing
            await super().snapshot()

    class Gone(FakeReference):
        async def logprobs(self, samples):
            if anew.is_set():
                raise ReferenceLostError("reference model lost: it does not run")
            return await super().logprobs(samples)

    def dies():
        if newest:
            flip(newest[-1])
        return bool(newest)

    def reward(problem):
        return float(not newest or anew.wait(20.0))

    parts = parts_with(config, tmp_path, lambda weights, version, number: newest.append(weights))
    settings = {"train_batch_size": 8, "kl_coefficient": 0.1}
    parts.trainer = Busy(tmp_path / "weights", parts.trainer.damage, **settings)
    parts.engines[0].trainer = parts.engines[1].trainer = parts.trainer
    parts.engines[1].dies, parts.reference, parts.task = dies, Gone(), Letters(reward=reward)
    with pytest.raises(ReferenceLostError):
        run(config, out, parts)
    assert anew.is_set()
    run_checked(config, out, parts_of(config), resume=True)


def test_a_resumed_run_trains_its_unfinished_step_and_publishes_a_damaged_file_anew_one_after_the_other(out, tmp_path):
    """Engine 1 is lost while it loads, and comes back to a changed file when the trainer has begun."""
    config = config_of(steps=6, longest=40, micro_batch_size=4, publish_every=2)
    interrupted(config, out, parts_of(config, trainer=Killer(train_batch_size=8, train_s=0.05, at=3, do=interrupt)))
    assert len(read_newest(out, config).state.micro_batches) == 1
    begun, newest = asyncio.Event(), []

    class Slow(Writer):
        async def train(self, samples, *, completes_step):
            self.training = True
            begun.set()
            await asyncio.sleep(0.1)
            return await super().train(samples, completes_step=completes_step)

    class LostOnce(Engine):
        async def start(self):
            if self.num_started:
                await asyncio.wait_for(begun.wait(), 20.0)
                flip(newest[-1])
            await super().start()

        async def update(self, weights, weight_update):
            if self.num_started == 1:
                self.die()
            return await super().update(weights, weight_update)

    parts = parts_with(config, tmp_path, lambda weights, version, number: newest.append(weights))
    parts.trainer = Slow(tmp_path / "weights", parts.trainer.damage, train_batch_size=8)
    parts.engines[1] = LostOnce(num_slots=6, receiver=FILE.receiver(str(tmp_path)))
    assert run_checked(config, out, parts, resume=True).engine_restarts == 1
    assert parts.trainer.published[:2] == [2, 2]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_a_folder_that_damages_every_file_ends_the_run_in_a_line_and_keeps_a_checkpoint(out, tmp_path, kind, workers):
    config = config_of(kind=kind, steps=40, longest=40)
    damage = lambda weights, version, number: version >= 2 and flip(weights)  # noqa: E731
    parts = parts_with(config, tmp_path, damage, workers=workers)
    with pytest.raises(TransferError) as raised:
        run(config, out, parts)
    line, published = str(raised.value), parts.trainer.published
    assert line.startswith(f"{PUBLICATIONS} publications of weights in a row were damaged, the last of version ")
    assert f"{tmp_path / 'weights'}" in line
    assert line.endswith("; another train.weights_folder may help, --resume goes on")
    assert "\n" not in line
    assert published == sorted(published)
    assert len(published) > PUBLICATIONS
    assert published[-1] < 20  # the trainer goes on while lost engines restart, but not to the end
    assert run_checked(config, out, parts_of(config, trainer=Killer(train_batch_size=8)), resume=True).complete
