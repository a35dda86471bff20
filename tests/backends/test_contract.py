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

from backends.contract import (
    BATCH,
    EngineContract,
    ReferenceContract,
    TrainerContract,
    a_published_version_is_what_an_engine_samples_with,
    promises,
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
    parts = (contracts.engine.engine, contracts.reference.reference, contracts.trainer.trainer)

    async def on_each(call: str) -> None:
        await asyncio.gather(*(getattr(part, call)() for part in parts))

    try:
        run(on_each("start"))
        yield contracts
    finally:
        run(on_each("shutdown"))
        if request.param == "real":
            import ray

            ray.shutdown()


def fake_contracts(folder: Path) -> Contracts:
    def weights_of(version: int) -> Weights:
        return Weights(version, f"memory:{version}", {"steps": hashlib.sha256(str(version).encode()).hexdigest()})

    engine = FakeEngine(num_slots=NUM_SLOTS, update_s=0.01, endless=True, stream_tokens=8)
    return Contracts(
        EngineContract(engine, weights_of, num_slots=NUM_SLOTS),
        ReferenceContract(FakeReference()),
        TrainerContract(FakeTrainer(train_batch_size=BATCH), lambda weights: weights.checksums, folder),
    )


def real_contracts(folder: Path) -> Contracts:
    import ray
    import transformers
    import vllm_engine
    from character_model import make_model
    from tiny_trainer import trainer_contract

    from backends.trainer.deepspeed.rank import DeepSpeedRank
    from backends.trainer.reference import RayReference, ReferenceSettings
    from backends.vllm.engine import VLLMEngine

    make_model(folder, seed=0, end_token=None)
    engine = VLLMEngine(vllm_engine.settings(folder, num_slots=NUM_SLOTS, request_times=True, cpu_in_place=False))
    subject = vllm_engine.Subject(engine, folder, [transformers.AutoModelForCausalLM.from_pretrained(folder)])
    made: list[Weights] = []

    def weights_of(version: int) -> Weights:
        while len(made) < version:
            made.append(subject.next_weights())
        return made[version - 1]

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    frozen = ReferenceSettings(device="cpu", model_path=str(folder), temperature=1.0, pack_tokens=100, timeout_s=600)
    reference = RayReference(frozen, [{"num_cpus": 0.5}] * 2)
    return Contracts(
        EngineContract(engine, weights_of, num_slots=NUM_SLOTS),
        ReferenceContract(reference),
        trainer_contract(DeepSpeedRank, folder, num_ranks=1),
    )


def test_a_step_of_the_fake_trainer_takes_drift_off_every_log_probability() -> None:
    trainer = FakeTrainer(train_batch_size=BATCH)
    before, after = (asyncio.run(trainer.train(samples(), completes_step=True)).logprob_T for _ in range(2))
    assert np.concatenate(before) - np.concatenate(after) == pytest.approx(DRIFT, abs=1e-6)


KINDS = {"engine": EngineContract, "reference": ReferenceContract, "trainer": TrainerContract}


@pytest.mark.parametrize(("part", "promise"), [(part, one) for part, kind in KINDS.items() for one in promises(kind)])
def test_every_part_keeps_its_promises(contracts: Contracts, run: Run, part: str, promise: str) -> None:
    run(asyncio.wait_for(getattr(getattr(contracts, part), promise)(), TIMEOUT_S))


def test_a_published_version_is_what_an_engine_samples_with(contracts: Contracts, run: Run) -> None:
    run(a_published_version_is_what_an_engine_samples_with(contracts.engine, contracts.trainer))
