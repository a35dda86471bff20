"""Who asks Ray for what, and how long it waits, without a Ray; what a machine says of itself."""

from __future__ import annotations

import asyncio
import os
import platform
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import need

need("ray", "torch", "deepspeed")

from in_memory import config_of  # noqa: E402
from refusals import message  # noqa: E402
from tiny_trainer import settings as rank_settings  # noqa: E402

import backends.ray.actors  # noqa: E402
from backends.interface import Place  # noqa: E402
from backends.kinds import DEEPSPEED  # noqa: E402
from backends.ray import placement  # noqa: E402
from backends.ray.actors import RayTrainer  # noqa: E402
from pipelinerl.config.train import TrainerConfig  # noqa: E402
from pipelinerl.errors import TrainerLostError  # noqa: E402

PLACES: Any = object()
GPUS = "NVIDIA H100 80GB HBM3, 580.65.06, 4 MiB, 81559 MiB"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_a_bundle_holds_all_that_is_placed_in_it(device: str, kind: str, kl_coefficient: float) -> None:
    config = config_of(kind=kind, train={"device": device, "loss": {"kl_coefficient": kl_coefficient}})
    reference, ranks = placement._make_reference(config, PLACES, None), placement.rank_options(config, PLACES)
    trainer = DEEPSPEED.make(config, Place(options=tuple(ranks), weights_folder=Path("nowhere")))
    assert isinstance(trainer, RayTrainer)
    asked = [
        *placement.engine_options(config, PLACES),
        *trainer._options,
        *(reference._options if reference is not None else ()),
    ]
    bundles = placement._bundles(config)
    taken: list[Counter[str]] = [Counter() for _ in bundles]
    for options in asked:
        place = taken[options["scheduling_strategy"].placement_group_bundle_index]
        place["CPU"] += options["num_cpus"]
        place["GPU"] += options["num_gpus"]
    for bundle, place in zip(bundles, taken, strict=True):
        assert all(sum(place.values()) > 0 and place[name] <= bundle.get(name, 0.0) for name in place)


def test_variables_of_the_network_reach_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, ranks and replicas of a cluster start in the environment of its machines, not of the driver."""
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    config = config_of(train={"device": "gpu", "loss": {"kl_coefficient": 0.1}})
    reference, ranks = placement._make_reference(config, PLACES, None), placement.rank_options(config, PLACES)
    trainer = DEEPSPEED.make(config, Place(options=tuple(ranks), weights_folder=Path("nowhere")))
    assert isinstance(trainer, RayTrainer)
    assert reference is not None
    for options in (*placement.engine_options(config, PLACES), *trainer._options, *reference._options):
        assert options["runtime_env"]["env_vars"]["NCCL_IB_HCA"] == "mlx5"


def test_files_in_the_memory_of_one_machine_are_refused_where_there_are_more() -> None:
    files = config_of(kind="conventional", train={"transport": "file"})
    assert message(placement._check_folder, files, ["one", "two", "one"]) == (
        "train.weights_folder must be a folder that the 2 machines of the run share, for train.transport='file', "
        "got '/dev/shm'"
    )
    placement._check_folder(files, ["one", "one"])
    shared = config_of(kind="conventional", train={"transport": "file", "weights_folder": "/shared/weights"})
    placement._check_folder(shared, ["one", "two"])
    placement._check_folder(config_of(train={"transport": "broadcast"}), ["one", "two"])


class Actor:
    """In the place of one of Ray's: it answers every call, or none."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *_: Any) -> Any:
        return self

    def future(self) -> Future[None]:
        future: Future[None] = Future()
        if self._answers:
            future.set_result(None)
        return future


def test_a_rank_that_cannot_be_placed_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    making = iter([Actor(answers=True), Actor(answers=False)])
    cls = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: next(making)))
    monkeypatch.setattr(backends.ray.actors, "ray", SimpleNamespace(remote=lambda **_: lambda _: cls))
    given = rank_settings(Path("nowhere"), num_ranks=2, trainer=TrainerConfig(step_timeout_s=3600))
    trainer = RayTrainer(object, given, [{"num_cpus": 1}] * 2, placing_timeout_s=0.05)
    with pytest.raises(TrainerLostError, match=r"^trainer hangs: phase=placing ranks=\[1\] after \S+ s; their accel"):
        asyncio.run(trainer.start())


def test_a_machine_tells_its_memory_its_versions_and_whether_it_sees_a_file(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    facts = placement.place_facts(str(there))
    assert 0 < facts.free_memory_gb < facts.memory_gb
    assert facts.versions["python"] == platform.python_version()
    assert "torch" in facts.versions
    assert (facts.sees_folder, placement.place_facts(str(tmp_path / "not")).sees_folder) == (True, False)
    assert placement.place_facts(None).sees_folder is None


def test_gpus_are_those_that_the_driver_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{GPUS}'\necho '{GPUS}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert placement.place_facts(None).gpus == (GPUS, GPUS)
    command.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert placement.place_facts(None).gpus == ()
