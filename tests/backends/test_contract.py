"""The promises of ``backends/contract``, kept by the fakes, and by vLLM and DeepSpeed."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.contract.engine import BATCH, EngineContract, promises
from backends.contract.trainer import (
    ReferenceContract,
    TrainerContract,
    a_published_version_is_what_an_engine_samples_with,
    samples,
)
from backends.fake import DRIFT, FakeEngine, FakeReference, FakeTrainer
from backends.interface import Weights

NUM_SLOTS = 8
TIMEOUT_S = 1800
"""Longest that one promise may take (seconds): it ends one that hangs."""
MISSING = [name for name in ("vllm", "deepspeed", "ray") if importlib.util.find_spec(name) is None]
REAL = (
    pytest.mark.real,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore"),  # Ray, torch, vLLM and DeepSpeed warn of much
)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass
class Contracts:
    engine: EngineContract
    reference: ReferenceContract
    trainer: TrainerContract


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=REAL)])
def contracts(
    request: pytest.FixtureRequest, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Contracts]:
    folder = tmp_path_factory.mktemp("contracts")
    contracts = fake_contracts(folder) if request.param == "fake" else real_contracts(folder)
    try:
        run(start(contracts))
        yield contracts
    finally:
        run(contracts.engine.engine.shutdown())
        run(contracts.reference.reference.shutdown())
        run(contracts.trainer.trainer.shutdown())
        if request.param == "real":
            import ray

            ray.shutdown()


async def start(contracts: Contracts) -> None:
    parts = (contracts.engine.engine, contracts.reference.reference, contracts.trainer.trainer)
    await asyncio.gather(*(part.start() for part in parts))


def fake_contracts(folder: Path) -> Contracts:
    def weights_of(version: int) -> Weights:
        return Weights(version, f"memory:{version}", {"steps": hashlib.sha256(str(version).encode()).hexdigest()})

    engine = FakeEngine(num_slots=NUM_SLOTS, update_s=0.01, endless=True)
    return Contracts(
        EngineContract(engine, weights_of, num_slots=NUM_SLOTS),
        ReferenceContract(FakeReference()),
        TrainerContract(FakeTrainer(train_batch_size=BATCH), lambda weights: weights.checksums, folder),
    )


def real_contracts(folder: Path) -> Contracts:
    import ray
    import torch
    import transformers
    from character_model import make_model
    from safetensors.torch import load_file
    from tiny_trainer import settings

    from backends.ray.actors import RayTrainer
    from backends.trainer.deepspeed.rank import DeepSpeedRank
    from backends.trainer.reference import RayReference, ReferenceSettings
    from backends.transfer.file import write_weights
    from backends.transfer.verify import checksums
    from backends.vllm.engine import VLLMEngine
    from backends.vllm.process import VLLMSettings
    from pipelinerl.config.train import OptimizerConfig

    make_model(folder, seed=0, end_token=None)
    made: dict[int, Weights] = {}

    def weights_of(version: int) -> Weights:
        if version not in made:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            torch.manual_seed(version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            path = folder / f"weights-{version}"
            made[version] = Weights(version, f"file:{path}", write_weights(path, dict(model.named_parameters())))
        return made[version]

    engine = VLLMEngine(
        VLLMSettings(
            engine_id=0,
            model_path=str(folder),
            num_slots=NUM_SLOTS,
            max_tokens=512,
            device="cpu",
            cpu_cores="0",
            request_times=True,
        )
    )
    given = settings(folder, optimizer=OptimizerConfig(learning_rate=1e-3), train_batch_size=BATCH, temperature=1.0)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = RayTrainer(DeepSpeedRank, given, [{"num_cpus": 1}])
    frozen = ReferenceSettings(device="cpu", model_path=str(folder), temperature=1.0, pack_tokens=100, timeout_s=600)
    reference = RayReference(frozen, [{"num_cpus": 0.5}] * 2)
    return Contracts(
        EngineContract(engine, weights_of, num_slots=NUM_SLOTS),
        ReferenceContract(reference),
        TrainerContract(
            trainer,
            lambda weights: checksums(load_file(weights.location.removeprefix("file:")).items()),
            folder / "trainer",
        ),
    )


def test_a_step_of_the_fake_trainer_takes_drift_off_every_log_probability() -> None:
    trainer = FakeTrainer(train_batch_size=BATCH)
    before, after = (asyncio.run(trainer.train(samples(), completes_step=True)).logprob_T for _ in range(2))
    assert np.concatenate(before) - np.concatenate(after) == pytest.approx(DRIFT, abs=1e-6)


@pytest.mark.parametrize("promise", promises(EngineContract))
def test_an_engine_keeps_its_promises(contracts: Contracts, run: Run, promise: str) -> None:
    run(asyncio.wait_for(getattr(contracts.engine, promise)(), TIMEOUT_S))


@pytest.mark.parametrize("promise", promises(ReferenceContract))
def test_a_reference_keeps_its_promises(contracts: Contracts, run: Run, promise: str) -> None:
    run(asyncio.wait_for(getattr(contracts.reference, promise)(), TIMEOUT_S))


@pytest.mark.parametrize("promise", promises(TrainerContract))
def test_a_trainer_keeps_its_promises(contracts: Contracts, run: Run, promise: str) -> None:
    run(asyncio.wait_for(getattr(contracts.trainer, promise)(), TIMEOUT_S))


def test_a_published_version_is_what_an_engine_samples_with(contracts: Contracts, run: Run) -> None:
    run(a_published_version_is_what_an_engine_samples_with(contracts.engine, contracts.trainer))
