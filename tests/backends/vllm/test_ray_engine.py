"""An engine in a Ray actor, on a machine that is not the driver's: what is left there when it is killed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import need

need("ray")
ray = pytest.importorskip("ray")
pytest.importorskip("torch")

from ray.cluster_utils import Cluster  # noqa: E402

import backends.vllm.ray_engine  # noqa: E402
from backends.vllm.process import VLLMSettings  # noqa: E402
from backends.vllm.ray_engine import RayEngine  # noqa: E402

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


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A machine of the cluster, which the driver is not on."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1, resources={"elsewhere": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    yield other.node_id
    ray.shutdown()
    cluster.shutdown()


def test_what_a_killed_engine_leaves_is_removed_on_its_machine(elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both machines are this one, so removal says where it was."""
    monkeypatch.setattr(backends.vllm.ray_engine, "VLLMEngine", leaves())
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "removed"

        def remove(paths: set[str]) -> None:
            told.write_text(f"{ray.get_runtime_context().get_node_id()} {paths}")

        monkeypatch.setattr(backends.vllm.ray_engine, "remove_shared_memory", remove)
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
