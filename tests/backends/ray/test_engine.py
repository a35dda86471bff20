"""An engine in a Ray actor, and processes of environments, on a machine that is not the driver's."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from needs import need

need("ray")
ray = pytest.importorskip("ray")
pytest.importorskip("torch")

from ray.cluster_utils import Cluster  # noqa: E402

import backends.ray.actors  # noqa: E402
from backends.ray.actors import RayEngine  # noqa: E402
from backends.ray.placement import accelerators, shares  # noqa: E402
from backends.vllm.process import VLLMSettings  # noqa: E402
from backends.workers.hosts import Hosts  # noqa: E402
from backends.workers.main import ENVIRONMENT  # noqa: E402
from backends.workers.processes import LocalWorker, Worker, WorkerFailedError, WorkerPool, ask  # noqa: E402
from pipelinerl.config.run_file import load_run  # noqa: E402
from pipelinerl.rl.config import TaskConfig  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny_reasoning.toml"

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]


def leaves() -> type:
    """Return the class; Ray sends what is made in a function as it is, and need not import it."""

    class Leaves:
        """An engine that leaves a file, which says where it was, when it is killed."""

        def __init__(self, settings: VLLMSettings) -> None:
            self._path = f"/dev/shm/psm_{settings.engine_id}"

        def start(self) -> None:
            Path(self._path).write_text(ray.get_runtime_context().get_node_id())

        def shared_memory(self) -> set[str]:
            return {self._path}

        def is_there(self) -> None:
            pass

        def shutdown(self) -> None:
            os._exit(1)

    return Leaves


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
def elsewhere(two_machines: tuple[Cluster, Any]) -> str:
    return two_machines[1].node_id


def test_what_a_killed_engine_leaves_is_removed_on_its_machine(elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both machines are this one, so removal says where it was."""
    monkeypatch.setattr(backends.ray.actors, "VLLMEngine", leaves())
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "removed"

        def remove(paths: set[str]) -> None:
            told.write_text(f"{ray.get_runtime_context().get_node_id()} {paths}")

        monkeypatch.setattr(backends.ray.actors, "remove_shared_memory", remove)
        settings = VLLMSettings(engine_id=os.getpid(), model_path="nowhere", num_slots=1, max_tokens=1, device="cpu")
        engine = RayEngine(settings, {"num_cpus": 0, "resources": {"elsewhere": 1}})

        async def live_and_die() -> None:
            await engine.start()
            await engine.shutdown()

        asyncio.run(live_and_die())
        left = Path(f"/dev/shm/psm_{os.getpid()}")
        assert left.read_text() == elsewhere
        left.unlink()
        assert told.read_text() == f"{elsewhere} {{'{left}'}}"


def test_what_will_be_on_each_machine_is_known_before_engines_start(two_machines: tuple[Cluster, Any]) -> None:
    """An engine and a rank of one accelerator each, on two machines of one; the tests below take one away."""
    config = load_run(EXAMPLE, ["train.transport=broadcast"])
    with accelerators(config) as places:
        found = shares(config, places)
    assert sorted((one.workers, one.ranks, one.leads) for one in found) == [(0, 1, True), (1, 0, False)]
    assert all(one.memory == psutil.virtual_memory().total for one in found)


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
