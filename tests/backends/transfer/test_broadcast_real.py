"""Two vLLM engines and DeepSpeed on Ray, with weights that are sent, on CPU.

Engines and ranks ask Ray for more cores than a small machine has, so the clusters here pretend to have five, one of
them three machines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from needs import need

need("vllm", "deepspeed", "ray", "tensorboard")
psutil = pytest.importorskip("psutil")

import ray  # noqa: E402
from character_model import make_model  # noqa: E402
from ledger_check import check_ledger, metrics_of, records  # noqa: E402
from probes import check_probes, probed, started_with, told  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from real_run import EXAMPLE, Process, python_path  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402
from tiny_trainer import OPTIMIZER, samples, settings  # noqa: E402
from transfer_group import digest_of  # noqa: E402
from vllm_engine import settings as engine_settings  # noqa: E402

import backends.transfer.group  # noqa: E402
from backends.driver.weight_sync import WeightSyncGroup  # noqa: E402
from backends.interface import GenerateRequest, GroupMembers, UpdateTimes, Weights  # noqa: E402
from backends.ray.actors import RayEngine, RayTrainer  # noqa: E402
from backends.trainer.deepspeed.rank import DeepSpeedRank  # noqa: E402
from pipelinerl.config.run import load_run  # noqa: E402
from pipelinerl.config.train import TrainerConfig  # noqa: E402
from pipelinerl.errors import EngineLostError  # noqa: E402
from pipelinerl.hardware.transport import DELTA  # noqa: E402
from pipelinerl.records.reports import RunReport  # noqa: E402
from pipelinerl.scheduler.events import (  # noqa: E402
    AbortRollout,
    RolloutAborted,
    StartRollout,
    StartTraining,
    Stop,
    WeightsLoaded,
    WeightUpdate,
)

pytestmark = [pytest.mark.real(seconds=60), pytest.mark.filterwarnings("ignore")]
NUM_CORES = 5
LEARNING_RATE = 3e-10
"""Of deltas: a step of Adam is so small that few of the float32 numbers change, as at 1e-6 of those in bf16."""
NUM_DELTAS = 40
"""Versions, all but the first of which come as deltas."""
TIMEOUT_S = 600.0
"""Nothing here waits for it."""
SILENCE_S = 5.0
"""An engine is given up after so long, once it has been stopped. Before, after ``TIMEOUT_S``: Ray starts engines at
niceness 15, and beside other test files one made no decode step for ten seconds."""


@pytest.fixture
def own_ray(subreaper: None) -> Iterator[None]:
    ray.init("local", num_cpus=NUM_CORES, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("own_ray")
def test_engines_hold_what_the_trainer_has_after_every_step_and_a_loss_costs_one_engine_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path / "model", seed=0, end_token=None)
    engines = [engine(tmp_path / "model", index) for index in range(2)]
    given = settings(
        tmp_path / "model",
        trainer=TrainerConfig(zero_stage=3, pack_tokens=100, step_timeout_s=600),
        transport=DELTA,
        optimizer=OPTIMIZER.model_copy(update={"learning_rate": LEARNING_RATE, "schedule": "constant"}),
    )
    trainer = RayTrainer(DeepSpeedRank, given, [{"num_cpus": 1}])
    published: list[Weights] = []
    group = WeightSyncGroup(GroupMembers(trainer, dict(enumerate(engines)), timeout_s=TIMEOUT_S))

    async def send(members: list[int]) -> bool:
        return (await group.send(published[-1], members))[0]

    async def train_and_publish() -> int:
        version = 1 + len(published)
        await trainer.train(samples(version), completes_step=True)
        published.append(await trainer.publish(version))
        return version

    async def hold_the_same(members: list[int]) -> set[bytes]:
        folder = tmp_path / f"export-{len(list(tmp_path.iterdir()))}"
        await trainer.export(folder)
        return await load_the_same(published[-1], [engines[index] for index in members], folder)

    async def scenario() -> None:
        await asyncio.gather(trainer.start(), *(one.start() for one in engines))
        # The trainer takes the engines' machine for another one: nothing is sent to its own.
        await trainer._call("move", "__ray_call__", lambda _: vars(backends.transfer.group).update({"machine": str}))
        for _ in range(NUM_DELTAS):
            version = await train_and_publish()
            assert await send([0, 1])
            if version <= 2 or version == NUM_DELTAS:
                patched = await hold_the_same([0, 1])
            else:
                await asyncio.gather(*(one.update(published[-1], WeightUpdate.KEEP) for one in engines))
        assert [weights.delta_bytes > 0 for weights in published] == [False, *([True] * (NUM_DELTAS - 1))]
        assert len({json.dumps(weights.checksums) for weights in published}) == NUM_DELTAS  # every step changed some
        group._members = None  # a new group gets all weights
        assert await send([0, 1])
        assert await hold_the_same([0, 1]) == patched
        version = await train_and_publish()
        core = await engines[0]._call("__ray_call__", lambda one: one._processes[0].pid)
        silent = psutil.Process(core)  # its worker receives for both engines
        silent.suspend()
        await silent_while_weights_arrive(engines, trainer, asyncio.create_task(send([0, 1])))
        assert f"version {version} did not reach the engines: " in caplog.text
        assert "engine 0 is lost" in caplog.text
        assert list((await group.send(published[-1], [0, 1]))[1]) == [0]
        assert await send([1])
        assert silent.status() == psutil.STATUS_STOPPED  # its end has helped nobody
        await hold_the_same([1])
        await engines[0].shutdown()
        await engines[0].start()
        for members in ([0], [0, 1]):
            assert await send(members)
            await hold_the_same(members)

    async def live() -> None:
        try:
            await scenario()
        finally:
            await asyncio.gather(trainer.shutdown(), *(one.shutdown() for one in engines))

    asyncio.run(live())


async def load_the_same(weights: Weights, engines: list[RayEngine], exported: Path) -> set[bytes]:
    """Load weights that are those exported; return the log-probabilities of an answer, of all engines the same."""
    trained = digest_of(load_file(exported / "model.safetensors"))
    answers = []
    for one in engines:
        assert isinstance(await one.update(weights, WeightUpdate.KEEP), UpdateTimes)
        assert await one.checksums() == {"all parameters": trained} == weights.checksums
        answers.append(await one.generate(GenerateRequest(0, (3, 13), 100, seed=0, temperature=1.0)))
        assert answers[-1].spans.versions == (weights.version,)
    logprobs = {answer.logprob_T.tobytes() for answer in answers}
    assert len(logprobs) == 1
    return logprobs


async def silent_while_weights_arrive(
    engines: list[RayEngine], trainer: RayTrainer, sending: asyncio.Task[bool]
) -> None:
    """While a worker is silent, the other engine generates with the old weights, and the trainer trains.

    The transfer ends when the loss is known, not before and not after its time-out.
    """
    request = GenerateRequest(1, (3, 13), 20, seed=0, temperature=1.0)
    meanwhile = await engines[1].generate(request)
    assert meanwhile.spans.versions == (NUM_DELTAS,)
    await trainer.train(samples(NUM_DELTAS + 2)[:1], completes_step=False)
    assert not sending.done()
    impatient = {"generate_timeout_s": SILENCE_S}  # Ray sends a lambda by value, with its names
    await engines[0]._call("__ray_call__", lambda one: setattr(one, "_settings", replace(one._settings, **impatient)))
    with pytest.raises(EngineLostError, match=f"no decode step for {SILENCE_S:g} s"):
        await engines[0].generate(request)
    assert not await sending


def engine(model_path: Path, index: int) -> RayEngine:
    given = engine_settings(
        model_path,
        engine_id=index,
        num_slots=16,
        max_tokens=256,
        transport=DELTA,
        cpu_in_place=False,
        update_timeout_s=TIMEOUT_S,
        generate_timeout_s=TIMEOUT_S,
    )
    return RayEngine(given, {"num_cpus": 1, "max_concurrency": 100})


LEAVING = """
import asyncio
import contextlib
import os

import psutil
from backends.vllm.process import remove_shared_memory, shared_memory_of
from backends.ray.actors import RayEngine
from probing import Probed

generate, update, loaded = RayEngine.generate, RayEngine.update, set()


async def update_and_note(self, weights, kind):
    times = await update(self, weights, kind)
    if weights.version >= 2:
        loaded.add(self)
    return times


async def generate_and_vanish(self, request):
    answer = asyncio.ensure_future(generate(self, request))
    if self in loaded and self._node == os.environ["MACHINE"]:
        await asyncio.sleep(0)  # it is under way
        raylet = psutil.Process(int(os.environ["RAYLET"]))
        processes = [raylet, *raylet.children(recursive=True)]
        its_memory = shared_memory_of(processes[1:]) - shared_memory_of([])
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        remove_shared_memory(its_memory)  # goes with a machine, but this is none
        os.environ["MACHINE"] = "gone"
    return await answer


RayEngine.generate, RayEngine.update = generate_and_vanish, update_and_note
"""
"""A task in whose run a machine vanishes with its processes, after it has loaded weights, while it generates."""


def check_started_again(out: Path, *, engine: int) -> None:
    """Check that rollouts in progress on the engine of the lost machine were started again, and trained on.

    ``check_ledger`` shows that each rollout ends once, and none is trained on twice.
    """
    rows = list(itertools.takewhile(lambda row: not isinstance(row.command, Stop), records(out)))
    broken_off = {
        row.event.rollout_id: at
        for at, row in enumerate(rows)
        if isinstance(row.event, RolloutAborted) and row.event.engine == engine
    }
    given_up = {row.command.rollout_id for row in rows if isinstance(row.command, AbortRollout)}
    again = {
        row.command.rollout_id
        for at, row in enumerate(rows)
        if isinstance(row.command, StartRollout) and at > broken_off.get(row.command.rollout_id, len(rows))
    }
    assert broken_off.keys() - given_up == again
    trained = {one for row in rows if isinstance(row.command, StartTraining) for one in row.command.rollout_ids}
    assert trained & again


@pytest.mark.usefixtures("subreaper")
def test_a_run_goes_on_when_one_of_three_machines_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is on the first; the others have an engine of two workers each.

    What is left answers bit for bit as an engine of two workers that was started with the trained weights.
    """
    make_tiny_model(tmp_path / "model", fit_steps=0)
    monkeypatch.setenv("RAY_health_check_failure_threshold", "2")  # seconds until Ray says that it is gone
    sets = (
        "optimizer_steps=8",
        "scheduler.train_batch_size=64",
        "scheduler.generation_batch_size=32",
        "scheduler.max_lag=3",  # so that training waits until the engine is given up
        "cluster.accelerators=5",
        "cluster.generation_accelerators=4",
        "cluster.tensor_parallel=2",
        f"train.transport={DELTA.name}",
        "train.evaluation.problems=4",
        f"train.optimizer.learning_rate={LEARNING_RATE}",
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        others = [cluster.add_node(num_cpus=2) for _ in range(2)]
        goes_away, _ = others
        (raylet,) = goes_away.all_processes["raylet"]
        env = {"MACHINE": goes_away.node_id, "RAYLET": str(raylet.process.pid), "PYTHONPATH": python_path(tmp_path)}
        probed(tmp_path)
        (tmp_path / "leaving.py").write_text(LEAVING)
        task = "train.task.name=leaving:Probed"
        run = Process(
            tmp_path / "model", tmp_path / "run", *sets, task, f"train.ray_address={cluster.address}", env=env
        )
        status, stdout, stderr = run.end()
        cluster.remove_node(goes_away)
    finally:
        cluster.shutdown()
    assert status == 0, stderr
    (gone,) = set(re.findall(r"engine (\d) lost: ", stderr))
    left = {"0": "1", "1": "0"}[gone]
    summary = RunReport.from_dict(json.loads(stdout), name="stdout")
    check_ledger(tmp_path / "run", load_run(EXAMPLE, list(sets)), summary)
    assert summary.engine_restarts == 0
    assert summary.evaluation.success_after is not None
    assert summary.mismatch.log_ratio_abs_max_at_lag_0 < 1e-3
    check_started_again(tmp_path / "run", engine=int(gone))
    assert any("weights/delta_bytes" in row for row in metrics_of(tmp_path / "run"))
    loaded = {row.event.engine for row in records(tmp_path / "run") if isinstance(row.event, WeightsLoaded)}
    assert loaded == {0, 1}
    check_probes(told(tmp_path, "last", int(left)), started_with(tmp_path / "run" / "model", workers=2))
