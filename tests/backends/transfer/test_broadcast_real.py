"""Two vLLM engines and DeepSpeed on Ray, with weights that are sent: on CPU, through gloo.

Engines and ranks ask Ray for more cores than a small machine has, so the clusters here pretend to have four.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need

need("vllm", "deepspeed", "ray", "tensorboard")
psutil = pytest.importorskip("psutil")

import ray  # noqa: E402
from character_model import make_model  # noqa: E402
from ledger_check import check_ledger, records  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from real_run import EXAMPLE, Process  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_trainer import samples, settings  # noqa: E402

from backends.deepspeed.trainer import DeepSpeedTrainer  # noqa: E402
from backends.interface import GenerateRequest, GroupMembers, UpdateTimes, Weights  # noqa: E402
from backends.ray_cluster import SUBREAPER  # noqa: E402
from backends.tiny_model import make_tiny_model  # noqa: E402
from backends.transfer.group import WeightSyncGroup  # noqa: E402
from backends.transfer.weights_check import checksums  # noqa: E402
from backends.vllm.process import VLLMSettings  # noqa: E402
from backends.vllm.ray_engine import RayEngine  # noqa: E402
from pipelinerl.config.run_file import load_run  # noqa: E402
from pipelinerl.config.train import TrainerConfig  # noqa: E402
from pipelinerl.errors import EngineLostError  # noqa: E402
from pipelinerl.records.reports import RunReport  # noqa: E402
from pipelinerl.scheduler.events import WeightsLoaded, WeightUpdate  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
NUM_CORES = 4
TIMEOUT_S = 60.0


def kill(name: str) -> None:
    """Kill a process that this one has started, Ray's included."""
    for one in psutil.Process().children(recursive=True):
        try:
            if name in " ".join((one.name(), *one.cmdline())):
                one.kill()
                return
        except psutil.Error:
            continue
    raise AssertionError(f"there is no {name}")


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(SUBREAPER, "true")
    ray.init(num_cpus=NUM_CORES, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("own_ray")
def test_engines_hold_what_the_trainer_has_after_every_step_and_after_a_loss(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0, end_token=None)
    engines = [engine(tmp_path / "model", index) for index in range(2)]
    given = settings(
        tmp_path / "model",
        trainer=TrainerConfig(zero_stage=3, pack_tokens=100, step_timeout_s=120),
        transport="broadcast",
    )
    trainer = DeepSpeedTrainer(given, num_cpus=1, num_gpus=0)
    group = WeightSyncGroup(GroupMembers(trainer, dict(enumerate(engines)), timeout_s=TIMEOUT_S))

    async def bring(weights: Weights, members: list[int]) -> list[Any]:
        await group.form(members)
        updates = (engines[index].update(weights, WeightUpdate.KEEP) for index in members)
        _, *ends = await asyncio.gather(group.send(weights), *updates, return_exceptions=True)
        return ends

    async def hold_the_same(weights: Weights, number: int, members: list[int]) -> None:
        assert all(isinstance(end, UpdateTimes) for end in await bring(weights, members))
        folder = tmp_path / f"export-{number}"
        await trainer.export(folder)
        trained = checksums(load_file(folder / "model.safetensors").items())
        answers = []
        for index in members:
            assert await engines[index].checksums() == trained == weights.checksums
            answers.append(await engines[index].generate(GenerateRequest(0, (3, 13), 100, seed=0, temperature=1.0)))
            assert answers[-1].spans.versions == (weights.version,)
        assert len({answer.logprob_T.tobytes() for answer in answers}) == 1

    async def scenario() -> None:
        await asyncio.gather(trainer.start(), *(one.start() for one in engines))
        seen = set()
        for version in (1, 2, 3):
            await trainer.train(samples(version), completes_step=True)
            weights = await trainer.publish(version)
            assert weights.location == "broadcast:"
            await hold_the_same(weights, version, [0, 1])
            seen.add(json.dumps(weights.checksums))
        assert len(seen) == 3  # something was learnt in every step
        kill("VLLM::Worker")
        lost = await bring(weights, [0, 1])  # at hand is the group of which one has died
        assert all(isinstance(end, EngineLostError) for end in lost)
        assert all(
            "weight update failed: phase=" in str(end) or "a process of vLLM has ended" in str(end) for end in lost
        )
        await asyncio.gather(*(one.shutdown() for one in engines))
        await asyncio.gather(*(one.start() for one in engines))
        await hold_the_same(weights, 4, [1])
        await hold_the_same(weights, 5, [0, 1])

    async def live() -> None:
        try:
            await scenario()
        finally:
            await asyncio.gather(trainer.shutdown(), *(one.shutdown() for one in engines))

    asyncio.run(live())


def engine(model_path: Path, index: int) -> RayEngine:
    given = VLLMSettings(
        engine_id=index,
        model_path=str(model_path),
        num_slots=16,
        max_tokens=256,
        device="cpu",
        transport="broadcast",
        cpu_cores=str(index % (os.cpu_count() or 1)),
        start_timeout_s=300,
        update_timeout_s=TIMEOUT_S,
    )
    return RayEngine(given, {"num_cpus": 1, "max_concurrency": 100})


def test_a_run_with_two_engines_by_broadcast_survives_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "model", fit_steps=0)
    monkeypatch.setenv(SUBREAPER, "true")
    sets = (
        "optimizer_steps=20",
        "cluster.accelerators=3",
        "cluster.generation_accelerators=2",
        "train.transport=broadcast",
        "train.evaluation.problems=20",  # the last one needs all engines, the restarted one too
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": NUM_CORES, "include_dashboard": False})
    try:
        run = Process(tmp_path / "model", tmp_path / "run", *sets, f"train.ray_address={cluster.address}")
        run.wait_for_step(5)
        kill("VLLM::EngineCore")
        status, stdout, stderr = run.end()
    finally:
        cluster.shutdown()
    assert status == 0, stderr
    summary = RunReport.from_dict(json.loads(stdout), name="stdout")
    check_ledger(tmp_path / "run", load_run(EXAMPLE, list(sets)), summary)
    assert 1 <= summary.engine_restarts <= 2  # one, unless it died in the middle of a transfer
    assert "lost" in stderr
    assert summary.evaluation.success_after is not None
    assert summary.mismatch.log_ratio_abs_max_at_lag_0 < 1e-3
    loaded = {row.event.engine for row in records(tmp_path / "run") if isinstance(row.event, WeightsLoaded)}
    assert loaded == {0, 1}
