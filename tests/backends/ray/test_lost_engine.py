"""An engine's process under a real Ray: one that hangs, one that cannot be placed, accelerators that are in use."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from needs import need

need("ray", "vllm", "deepspeed", "tensorboard")

import ray  # noqa: E402
from in_memory import config_of  # noqa: E402
from vllm_engine import settings  # noqa: E402

import backends.ray.actors  # noqa: E402
from backends.interface import GenerateRequest  # noqa: E402
from backends.ray.actors import RayEngine  # noqa: E402
from backends.ray.placement import accelerators  # noqa: E402
from pipelinerl.errors import ConfigError, EngineLostError  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
REQUEST = GenerateRequest(0, prompt_tokens=(1,), max_new_tokens=1, seed=0, temperature=1.0)


def stand_in() -> type[Any]:
    """A class that crosses to Ray's process by value."""

    class StandIn:
        """In the place of ``VLLMEngine``: its whole process hangs when it is to generate."""

        def __init__(self, settings: Any) -> None:
            self._model_path = settings.model_path

        async def start(self) -> None:
            pass

        async def shared_memory(self) -> set[str]:
            return set()

        async def is_there(self) -> None:
            pass

        async def checksums(self) -> dict[str, str]:
            return {}

        async def generate(self, request: Any) -> None:
            Path(self._model_path, "hangs").touch()
            time.sleep(1000)

        async def shutdown(self) -> None:
            pass

    return StandIn


@pytest.mark.usefixtures("own_ray")
def test_accelerators_that_are_in_use_are_waited_for_and_then_named() -> None:
    config, impatient = (config_of(engines=1, train={"placement_timeout_s": limit_s}) for limit_s in (600.0, 1.0))
    with accelerators(config):
        while ray.available_resources().get("CPU"):  # Ray's view of a machine is a little old
            time.sleep(0.01)
        with pytest.raises(ConfigError) as refused, accelerators(impatient):
            pass
    assert str(refused.value) == (
        "cluster.accelerators=2 were not free in the Ray cluster within train.placement_timeout_s=1: CPUs asked for, "
        "each number on one machine: 2 times 1; free by machine: 0"
    )


@pytest.mark.usefixtures("own_ray")
def test_a_process_that_hangs_ends_every_call_and_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backends.ray.actors, "VLLMEngine", stand_in())
    monkeypatch.setattr(backends.ray.actors, "BEAT_S", 0.1)
    engine = RayEngine(settings(tmp_path, generate_timeout_s=600.0), {"num_cpus": 2})

    async def scenario() -> None:
        await engine.start()
        # Looking through what it had imported took its process 0.5 s every four seconds, and all requests with it.
        assert await engine._call("__ray_call__", lambda _: gc.get_freeze_count() > len(gc.get_objects()))
        engine._settings = replace(engine._settings, generate_timeout_s=5.0)  # not before: it may be slow to answer
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


@pytest.mark.usefixtures("own_ray")
def test_an_engine_that_cannot_be_placed_is_lost_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.ray.actors, "PLACING_S", 0.5)
    monkeypatch.setattr(backends.ray.actors, "SHUTDOWN_TIMEOUT_S", 0.5)
    engine = RayEngine(settings(Path("model"), start_timeout_s=1000.0), {"num_cpus": 100})
    engine.num_started = 1  # it has run, until its machine went away

    async def scenario() -> None:
        with pytest.raises(EngineLostError, match=r"engine 2 lost: phase=placing: no answer for 0\.5 s; "):
            await engine.start()
        await engine.shutdown()

    asyncio.run(scenario())
