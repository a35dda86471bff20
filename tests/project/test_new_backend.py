"""A new backend in one file: it passes the contract suite and trains through the driver, and no package changes.

To choose it by ``kind`` in a run file takes two more: a member of a union in ``pipelinerl/config/train.py``, and a
case in ``backends/run.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random

import numpy as np
import pytest
from in_memory import config_of
from ledger_check import check_ledger

from backends.contract import (
    BATCH,
    EngineContract,
    TrainerContract,
    a_published_version_is_what_an_engine_samples_with,
    promises,
)
from backends.interface import Generated, Parts, TrainResult, UpdateTimes, Weights
from backends.run import train
from pipelinerl.errors import BackendError, ConfigError, EngineLostError
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate


def logprob_of(version):
    """Log-probability of any token under a version (nats)."""
    return -2.0 + 0.01 * version


def weights_of(version):
    return Weights(version, f"here:{version}", {"steps": hashlib.sha256(str(version).encode()).hexdigest()})


class Engine:
    """A loop of its own for every request: a token a turn."""

    lost, weights = True, Weights(0, "here:0")

    async def start(self):
        self.lost, self.weights, self.running, self.updating = False, Weights(0, "here:0"), {}, asyncio.Lock()

    async def generate(self, request):
        self.check()
        if request.rollout_id in self.running:
            raise BackendError(f"rollout {request.rollout_id} is in progress")
        aborted = self.running[request.rollout_id] = asyncio.Event()
        rng, tokens, versions = random.Random(request.seed if request.temperature else 0), [], []
        try:
            while len(tokens) < request.max_new_tokens and not aborted.is_set():
                tokens.append(rng.randrange(1, 10))
                versions.append(self.weights.version)
                await asyncio.sleep(0)
                self.check()
        finally:
            del self.running[request.rollout_id]
        ends = {version: end for end, version in enumerate(versions, start=1)}
        return Generated(
            np.array(tokens, np.int64),
            np.array([logprob_of(version) for version in versions], np.float32),
            VersionSpans(tuple(ends), tuple(ends.values())),
            aborted=len(tokens) < request.max_new_tokens,
        )

    async def abort(self, rollout_id):
        self.check()
        if rollout_id in self.running:
            self.running[rollout_id].set()

    async def update(self, weights, weight_update):
        self.check()
        async with self.updating:
            for aborted in self.running.values() if weight_update is WeightUpdate.ABORT else ():
                aborted.set()
            while weight_update is WeightUpdate.ABORT and self.running:
                await asyncio.sleep(0)
            self.weights = weights
        return UpdateTimes(0.0, 0.0, 0.0)

    async def checksums(self):
        return dict(self.weights.checksums)

    async def sleep(self):
        self.check()

    async def wake(self):
        self.check()

    async def shutdown(self):
        self.lost = True

    def check(self):
        if self.lost:
            raise EngineLostError("engine lost: it does not run")


class Trainer:
    """Counts optimizer steps."""

    async def start(self):
        self.steps = 0

    async def train(self, samples, *, completes_step):
        result = [np.full(len(sample.answer_T), logprob_of(self.steps), np.float32) for sample in samples]
        self.steps += completes_step
        ended = {"gradient_norm": 1.0, "learning_rate": 1.0} if completes_step else {}
        return TrainResult(result, {"loss": sum(sample.advantage for sample in samples), **ended})

    async def publish(self, version):
        return Weights(version, f"here:{version}", weights_of(self.steps).checksums)

    async def snapshot(self):
        self.copied = self.steps

    async def save(self, folder):
        folder.mkdir()
        (folder / "steps.json").write_text(json.dumps(self.copied))

    async def load(self, folder):
        self.steps = json.loads((folder / "steps.json").read_text())

    async def export(self, folder):
        folder.mkdir()
        (folder / "steps.json").write_text(json.dumps(self.steps))

    async def nothing(self, *_):
        pass

    send = offload = reload = shutdown = nothing


class Codec:
    def encode(self, prompt):
        return tuple(prompt.encode())

    def decode(self, tokens):
        return "".join(map(str, tokens))


class Backend:
    def check(self, config):
        if config.colocated:
            raise ConfigError("scheduler.kind must not be 'conventional' here")

    @contextlib.contextmanager
    def open(self, config, *, logs=None):
        yield Parts({engine_id: Engine() for engine_id in range(config.num_engines)}, Trainer(), Codec())


def test_it_passes_the_contract_suite(tmp_path):
    async def suite():
        engine, trainer = Engine(), Trainer()
        await asyncio.gather(engine.start(), trainer.start())
        of_engine = EngineContract(engine, weights_of, num_slots=BATCH)
        of_trainer = TrainerContract(trainer, lambda weights: weights.checksums, tmp_path)
        for contract in (of_engine, of_trainer):
            for promise in promises(type(contract)):
                await asyncio.wait_for(getattr(contract, promise)(), 600)
        await a_published_version_is_what_an_engine_samples_with(of_engine, of_trainer)

    asyncio.run(suite())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("weight_update", list(WeightUpdate))
def test_it_trains_through_the_driver(tmp_path, weight_update):
    config = config_of(weight_update=str(weight_update), train={"evaluation": {"problems": 4}})
    summary = train(config, out=tmp_path / "run", backend=Backend())
    check_ledger(tmp_path / "run", config, summary)
    assert json.loads((tmp_path / "run" / "model" / "steps.json").read_text()) == config.optimizer_steps


def test_its_own_check_comes_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="must not be 'conventional' here"):
        train(config_of(kind="conventional"), out=tmp_path / "run", backend=Backend())
    assert not (tmp_path / "run").exists()
