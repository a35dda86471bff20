"""Engines in Ray actors, and processes of environments, on two machines: hangs, losses, and places that are taken."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from needs import need

need("ray", "vllm", "deepspeed", "tensorboard")

import ray  # noqa: E402
from in_memory import config_of  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from refusals import message  # noqa: E402
from vllm_engine import settings  # noqa: E402

import backends.ray.actors  # noqa: E402
from backends.interface import AnswerLostError, Generated, GenerateRequest  # noqa: E402
from backends.ray.actors import RayEngine  # noqa: E402
from backends.ray.placement import accelerators, shares  # noqa: E402
from backends.workers.hosts import Hosts  # noqa: E402
from backends.workers.main import ENVIRONMENT  # noqa: E402
from backends.workers.processes import LocalWorker, Worker, WorkerFailedError, WorkerPool, ask  # noqa: E402
from pipelinerl.errors import EngineLostError  # noqa: E402
from pipelinerl.rl.config import TaskConfig  # noqa: E402
from pipelinerl.scheduler.events import VersionSpans  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
REQUEST = GenerateRequest(0, prompt_tokens=(1,), max_new_tokens=1, seed=0, temperature=1.0)


def stand_in() -> type[Any]:
    """Return the class; Ray sends a class made in a function as it is, and need not import it."""

    class StandIn:
        """In the place of ``VLLMEngine``: hangs in ``generate``, dies in ``shutdown``, and leaves a file.

        The file names the machine. All machines are this one.
        """

        def __init__(self, settings: Any) -> None:
            self._left = Path(settings.model_path)

        async def start(self) -> None:
            self._left.write_text(ray.get_runtime_context().get_node_id())

        async def shared_memory(self) -> set[str]:
            return {str(self._left)}

        async def report(self, within_s: float) -> dict[tuple[int, int], bytes]:
            await asyncio.sleep(within_s)
            return {}

        async def checksums(self) -> dict[str, str]:
            return {}

        async def generate(self, request: Any) -> None:
            self._left.with_name("hangs").touch()
            time.sleep(1000)

        async def shutdown(self) -> None:
            os._exit(1)

    return StandIn


def telltale() -> type[Any]:
    """Return a stand-in that dies in ``generate``, once it has reported two tokens of it and some of a shorter one."""

    class Telltale(stand_in()):  # type: ignore[misc]  # it is made when it is asked for
        num_told = -1

        async def generate(self, request: Any) -> None:
            self.num_told = 0
            await asyncio.sleep(1000)

        async def report(self, within_s: float) -> dict[tuple[int, int], bytes]:
            if self.num_told < 0:
                await asyncio.sleep(0.01)
                return {}
            self.num_told += 1
            if self.num_told > 2:
                os._exit(1)
            tokens_T = np.array([self.num_told])
            new = Generated(tokens_T, np.float32(-tokens_T), VersionSpans((self.num_told,), (1,)), aborted=True)
            return dict.fromkeys([(0, 1), (0, 0)], pickle.dumps(new))

    return Telltale


@pytest.fixture(scope="module")
def two_machines() -> Iterator[tuple[Cluster, Any]]:
    """A cluster, and the machine of it which the driver is not on."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1, resources={"elsewhere": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, other
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def elsewhere(two_machines: tuple[Cluster, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The other machine, on which engines are stand-ins."""
    monkeypatch.setattr(backends.ray.actors, "VLLMEngine", stand_in())
    return two_machines[1].node_id


def engine_elsewhere(left: Path, **changed: Any) -> RayEngine:
    return RayEngine(settings(left, **changed), {"num_cpus": 0, "resources": {"elsewhere": 1}})


def test_what_a_killed_engine_leaves_is_removed_on_its_machine(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removed, left = tmp_path / "removed", tmp_path / "left"

    def remove(paths: set[str]) -> None:
        removed.write_text(f"{ray.get_runtime_context().get_node_id()} {paths}")

    monkeypatch.setattr(backends.ray.actors, "remove_shared_memory", remove)
    engine = engine_elsewhere(left)

    async def live_and_die() -> None:
        await engine.start()
        await engine.shutdown()

    asyncio.run(live_and_die())
    assert left.read_text() == elsewhere
    assert removed.read_text() == f"{elsewhere} {{'{left}'}}"


def test_a_process_that_hangs_ends_every_call_and_can_be_started_again(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backends.ray.actors, "BEAT_S", 0.1)
    engine = engine_elsewhere(tmp_path / "left", generate_timeout_s=600.0)

    async def scenario() -> None:
        await engine.start()
        # Looking through what it had imported took its process 0.5 s every four seconds, and all requests with it.
        assert await engine._call("__ray_call__", lambda _: gc.get_freeze_count() > len(gc.get_objects()))
        engine._settings = replace(engine._settings, generate_timeout_s=5.0)  # not before: it may be slow to answer
        assert engine._watcher is not None
        engine._watcher.cancel()  # its report in progress has the old limit
        engine._watcher = asyncio.create_task(engine._watch())
        generating = asyncio.create_task(engine.generate(REQUEST))
        while not (tmp_path / "hangs").exists():
            await asyncio.sleep(0.01)
        for end in await asyncio.gather(generating, engine.checksums(), return_exceptions=True):
            assert isinstance(end, EngineLostError)
            assert "no sign of life of its process for 5 s" in str(end)
        await engine.shutdown()
        await engine.start()
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 600))


@pytest.mark.usefixtures("two_machines")
def test_an_answer_that_is_cut_by_the_death_of_its_process_has_all_that_was_reported_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backends.ray.actors, "VLLMEngine", telltale())
    engine = engine_elsewhere(tmp_path / "left")

    async def scenario() -> None:
        await engine.start()
        with pytest.raises(AnswerLostError, match="engine 2 lost: phase=generate: ") as lost:
            await engine.generate(REQUEST)
        await engine.shutdown()
        known = lost.value.known
        assert (known.tokens_T.tolist(), known.logprob_T.tolist()) == ([1, 2], [-1.0, -2.0])
        assert known.spans == VersionSpans((1, 2), (1, 2))

    asyncio.run(asyncio.wait_for(scenario(), 600))


@pytest.mark.usefixtures("two_machines")
def test_an_engine_is_placed_within_the_time_of_its_start_and_later_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends.ray.actors, "PLACING_S", 0.5)
    monkeypatch.setattr(backends.ray.actors, "SHUTDOWN_TIMEOUT_S", 0.5)
    engine = RayEngine(settings(Path("model"), start_timeout_s=0.75), {"num_cpus": 100})

    async def scenario() -> None:
        for limit in ("0.75", "0.5"):
            with pytest.raises(EngineLostError, match=rf"engine 2 lost: phase=placing: no answer for {limit} s; "):
                await engine.start()
            await engine.shutdown()

    asyncio.run(scenario())


@pytest.mark.usefixtures("two_machines")
def test_machines_are_known_before_engines_start_and_accelerators_in_use_are_waited_for_and_then_named() -> None:
    """An engine and a rank of one accelerator each, on two machines of one; the test below takes one away."""
    config, impatient = (
        config_of(engines=1, train={"placement_timeout_s": limit_s, "transport": "broadcast"})
        for limit_s in (600.0, 1.0)
    )
    with accelerators(config) as places:
        found = shares(config, places)
        while ray.available_resources().get("CPU"):  # Ray's view of a machine is a little old
            time.sleep(0.01)
        refusal = message(accelerators(impatient).__enter__)
    assert sorted((one.workers, one.ranks, one.leads) for one in found) == [(0, 1, True), (1, 0, False)]
    assert all(one.memory == psutil.virtual_memory().total for one in found)
    assert refusal == (
        "cluster.accelerators=2 were not free in the Ray cluster within train.placement_timeout_s=1: CPUs asked for, "
        "each number on one machine: 2 times 1; free by machine: 0, 0"
    )


def test_environments_come_up_on_all_machines_and_a_machine_that_is_gone_costs_its_own(
    two_machines: tuple[Cluster, Any],
) -> None:
    cluster, other = two_machines
    hosts = Hosts()
    pool = WorkerPool(ENVIRONMENT, TaskConfig(name="calculator"), number=3, log=None, launch=hosts.launched)
    reset, step = {"index": 0, "held_out": False}, {"tokens": (), "text": "3+4"}

    async def asked(worker: Worker, request: dict[str, Any]) -> Any:
        return (await ask(worker, request, "step", timeout_s=600))["content"]

    async def asked_for_ever(worker: Worker) -> None:
        while True:
            await asked(worker, step)

    async def scenario() -> None:
        first, second = await pool.take(), await pool.take()
        assert len(hosts._hosts) == 2
        for worker in (first, second):
            assert (await asked(worker, reset)).endswith("=")
            assert await asked(worker, step) == "7,"
        here, there = (second, first) if first._host is hosts._hosts[other.node_id] else (first, second)
        here.kill()
        assert (here.alive, there.alive) == (False, True)
        pool.give_back(here)
        cluster.remove_node(other, allow_graceful=False)
        with pytest.raises(WorkerFailedError, match="its process ended in its step"):
            await asked_for_ever(there)
        while len([node for node in ray.nodes() if node["Alive"]]) > 1:
            await asyncio.sleep(0.1)
        alone = await pool.take()
        assert await asked(alone, step) == "7,"
        assert isinstance(alone, LocalWorker)
        await pool.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 900))
