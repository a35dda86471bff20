"""Published files whose bytes change: real files of the ``file`` transport, engines and trainer in memory."""

import asyncio
import re

import pytest
from in_memory import Killer, Shared, config_of, interrupt, interrupted, parts_of, run, run_checked

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

from backends.fake import FakeEngine  # noqa: E402
from backends.interface import PUBLICATIONS  # noqa: E402
from backends.transfer.file import FILE  # noqa: E402
from backends.transfer.transport import SenderContext  # noqa: E402
from pipelinerl.errors import TransferError  # noqa: E402


class Source:
    """A ``WeightSource`` whose one parameter is the number of optimizer steps."""

    def __init__(self, steps):
        self.steps = steps

    def buckets(self, bucket_bytes=None):
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


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_a_folder_that_damages_every_file_ends_the_run_in_a_line_and_keeps_a_checkpoint(out, tmp_path, kind, workers):
    config = config_of(kind=kind, steps=40, longest=40)
    damage = lambda weights, version, number: version >= 2 and flip(weights)  # noqa: E731
    parts = parts_with(config, tmp_path, damage, workers=workers)
    with pytest.raises(TransferError) as raised:
        run(config, out, parts)
    line, published = str(raised.value), parts.trainer.published
    assert line.startswith(f"{PUBLICATIONS} files of weights in a row were damaged, the last of version ")
    assert f"{tmp_path / 'weights'}" in line
    assert line.endswith("; another train.weights_folder may help, --resume goes on")
    assert "\n" not in line
    assert published == sorted(published)
    assert len(published) > PUBLICATIONS
    assert published[-1] < 20  # the trainer goes on while lost engines restart, but not to the end
    assert run_checked(config, out, parts_of(config, trainer=Killer(train_batch_size=8)), resume=True).complete
