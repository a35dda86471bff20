"""Engines and trainer ranks on Ray: who runs where, on one machine or many.

A placement group sets the accelerators of ``cluster`` aside. Pipeline: a bundle of ``tensor_parallel`` accelerators
for every engine, then one of one accelerator for every rank. Conventional: one bundle of one accelerator for every
engine and the rank that takes turns with it, each of which asks for half of it. Where there is a reference model, a
replica of it goes halves with every rank. On CPU an accelerator is a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from backends.cores import cores_for, trainer_cores
from backends.deepspeed.host_memory import Share
from backends.deepspeed.rank_settings import RankSettings, rank_environment
from backends.deepspeed.reference_model import RayReference, ReferenceSettings
from backends.deepspeed.trainer import DeepSpeedTrainer
from backends.evaluation import evaluation_slots
from backends.facts import SelfTest
from backends.huggingface_codec import load_codec
from backends.interface import GroupMembers, Parts
from backends.place_facts import SHARED_MEMORY, name_and_memory, place_facts
from backends.preflight import trainer_ranks
from backends.transfer.link import LinkSender, receive
from backends.vllm.process import VLLMSettings
from backends.vllm.ray_engine import RayEngine
from backends.worker_hosts import Hosts
from pipelinerl.config.environment import EnvironmentConfig, PrefixCaching
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, ConfigError

DRIVING_CORES = 0.25
"""Cores that Ray sets aside for a process that drives a GPU: engine, rank and reference model share one (count)."""


@contextlib.contextmanager
def accelerators(config: RunConfig) -> Iterator[PlacementGroup]:
    """Set the run's accelerators aside in the Ray cluster that this process is connected to.

    Raises:
        ConfigError: If the cluster has too few, or they are not free.
    """
    _check_capacity(config)
    assert config.train is not None
    limit_s = config.train.placement_timeout_s
    group = placement_group(_bundles(config), strategy="PACK")
    try:
        ray.get(group.ready(), timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise ConfigError(_what_is_missing(config, limit_s)) from None
    _check_folder(config, ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    yield group
    remove_placement_group(group)


def _what_is_missing(config: RunConfig, limit_s: float) -> str:
    """Return in one line what the run asks Ray for, and what is free, machine by machine."""
    resource, wanted = _resource(config), [int(bundle[_resource(config)]) for bundle in _bundles(config)]
    asked = ", ".join(f"{number} times {size}" for size, number in sorted(Counter(wanted).items(), reverse=True))
    free = [f"{there.get(resource, 0):g}" for there in available_resources_per_node().values()]
    return (
        f"cluster.accelerators={config.cluster.accelerators} were not free in the Ray cluster within "
        f"train.placement_timeout_s={limit_s:g}: {resource}s asked for, each number on one machine: {asked}; free by "
        f"machine: {', '.join(free)}"
    )


def _check_folder(config: RunConfig, machines: Collection[str]) -> None:
    """Refuse files of weights that lie in the memory of one machine where others are to read them."""
    assert config.train is not None
    folder, number = config.train.weights_folder, len(set(machines))
    if number == 1 or config.train.chosen_transport(colocated=config.colocated) != "file":
        return
    if Path(folder).is_relative_to(SHARED_MEMORY):
        raise ConfigError(
            f"train.weights_folder must be a folder that the {number} machines of the run share, for "
            f"train.transport='file', got {folder!r}"
        )


def _resource(config: RunConfig) -> str:
    assert config.train is not None
    return "GPU" if config.train.device == "gpu" else "CPU"


def _check_capacity(config: RunConfig) -> None:
    there, wanted = int(ray.cluster_resources().get(_resource(config), 0)), config.cluster.accelerators
    if wanted > there:
        what = "GPUs" if _resource(config) == "GPU" else "CPU cores"
        raise ConfigError(f"cluster.accelerators must be at most the {there} {what} of the Ray cluster, got {wanted}")
    if config.colocated and _resource(config) == "GPU" and config.cluster.tensor_parallel > 1:
        raise ConfigError(
            "cluster.tensor_parallel must be 1 where engines and trainer share GPUs (scheduler.kind='conventional'), "
            f"got {config.cluster.tensor_parallel}"
        )


def _bundles(config: RunConfig) -> list[dict[str, float]]:
    resource, each = _resource(config), config.cluster.tensor_parallel
    sizes = [each] * config.num_engines
    if not config.colocated:
        sizes += [1] * config.training_accelerators
    # Beside a GPU its processes need a core to drive it.
    return [{resource: float(size), **({"CPU": 1.0} if resource == "GPU" else {})} for size in sizes]


def shares(config: RunConfig, places: PlacementGroup) -> list[Share]:
    """Ask the machines that accelerators were set aside on for their memory; return what will be on each."""
    look, on_nodes = ray.remote(num_cpus=0)(name_and_memory), _bundles_by_node(places)
    facts = ray.get([look.options(scheduling_strategy=_at(node)).remote() for node in on_nodes])
    engines, ranks = range(config.num_engines), _rank_bundles(config)
    return [
        Share(
            machine,
            memory,
            workers=config.cluster.tensor_parallel * len(here.intersection(engines)),
            ranks=len(here.intersection(ranks)),
            leads=ranks.start in here,
        )
        for (machine, memory), here in zip(facts, on_nodes.values(), strict=True)
    ]


@contextlib.contextmanager
def weights_folder(config: RunConfig) -> Iterator[Path]:
    """Make this run's own folder for weights on their way, and remove it in the end."""
    assert config.train is not None
    folder = Path(tempfile.mkdtemp(prefix="pipelinerl-", dir=config.train.weights_folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_parts(config: RunConfig, places: PlacementGroup, folder: Path, logs: Path | None) -> Parts:
    """Return the parts of a run, not yet started; the trainer publishes into ``folder``, all print into ``logs``."""
    assert config.train is not None
    logs = None if logs is None else logs.resolve()
    engines, trainer = _make_engines(config, places, logs), _make_trainer(config, places, folder, logs)
    members = GroupMembers(
        trainer,
        engines,
        workers_each=config.cluster.tensor_parallel,
        timeout_s=config.train.engine.update_timeout_s,
        standing_still=config.train.chosen_transport(colocated=config.colocated) == "streamed",
    )
    return Parts(
        engines=engines,
        trainer=trainer,
        codec=load_codec(config.train.model.path),
        reference=_make_reference(config, places, logs),
        group=None if config.train.chosen_transport(colocated=config.colocated) == "file" else members,
        self_test=partial(self_test, places, trainer, config),
        launch=Hosts().launched,
    )


async def self_test(
    places: PlacementGroup, trainer: DeepSpeedTrainer, config: RunConfig, num_bytes: int, marker: str | None
) -> SelfTest:
    """Measure where trainer and engines are, while they are up; see ``interface.Parts``."""
    look, on_nodes = ray.remote(num_cpus=0)(place_facts), _bundles_by_node(places)
    facts = [await look.options(scheduling_strategy=_at(node)).remote(marker) for node in on_nodes]
    assert config.train is not None
    to_engines_gb_s = None
    if config.train.chosen_transport(colocated=config.colocated) != "file":
        to_engines_gb_s = await _to_engines_gb_s(config, on_nodes, num_bytes)
    machines = {one.machine: one for one in facts}
    return SelfTest(tuple(machines.values()), await trainer.self_test(num_bytes), to_engines_gb_s)


async def _to_engines_gb_s(config: RunConfig, on_nodes: dict[str, set[int]], num_bytes: int) -> float:
    """Return how fast so many bytes are on all machines that have engines (GB/s)."""
    first_rank, engines = _rank_bundles(config).start, range(config.num_engines)
    (home,) = (node for node, bundles in on_nodes.items() if first_rank in bundles)
    there = [node for node, bundles in on_nodes.items() if bundles.intersection(engines)]
    sender = ray.remote(num_cpus=0)(LinkSender).options(scheduling_strategy=_at(home)).remote()
    receiver = ray.remote(num_cpus=0)(receive)
    try:
        meeting = await sender.open.remote()
        ends = [
            receiver.options(scheduling_strategy=_at(node)).remote(meeting, worker, num_bytes)
            for worker, node in enumerate(there, start=1)
        ]
        gb_s: float = await sender.gb_s.remote(len(there), num_bytes)
        await asyncio.gather(*ends)
    except ray.exceptions.RayTaskError as error:
        raise BackendError(str(error.cause)) from None
    finally:
        ray.kill(sender)
    return gb_s


def _bundles_by_node(places: PlacementGroup) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for bundle, node in placement_group_table(places)["bundles_to_node_id"].items():
        found.setdefault(node, set()).add(bundle)
    return found


def _at(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _make_engines(config: RunConfig, places: PlacementGroup, logs: Path | None) -> dict[int, RayEngine]:
    train, each = config.train, config.cluster.tensor_parallel
    assert train is not None
    share = 0.5 if config.colocated else 1.0
    engines = {}
    for engine_id in range(config.num_engines):
        settings = VLLMSettings(
            engine_id=engine_id,
            model_path=train.model.path,
            num_slots=config.scheduler.generation_batch_size + evaluation_slots(config),
            max_tokens=config.room_tokens,
            device=train.device,
            transport=train.chosen_transport(colocated=config.colocated),
            tensor_parallel=each,
            gpu_memory_utilization=train.engine.gpu_memory_utilization,
            colocated=config.colocated,
            cpu_kv_cache_gib=train.engine.cpu_kv_cache_gib,
            request_times=config.environment is not None,
            cpu_cores=cores_of(engine_id, each) if train.device == "cpu" else None,
            kept_to=cores_for(config, range(engine_id * each, (engine_id + 1) * each)),
            log_file=None if logs is None else str(logs / f"engine-{engine_id}.log"),
            start_timeout_s=train.engine.start_timeout_s,
            update_timeout_s=train.engine.update_timeout_s,
            generate_timeout_s=train.engine.generate_timeout_s,
            arguments=train.engine.vllm | _caching(config.environment),
        )
        options = {
            **_accelerators(config, each * share),
            "max_concurrency": 2 * settings.num_slots + 64,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(places, engine_id),
        }
        engines[engine_id] = RayEngine(settings, options)
    return engines


def _caching(environment: EnvironmentConfig | None) -> dict[str, Any]:
    """Return vLLM's arguments of what becomes of a KV cache between two turns."""
    off = environment is not None and environment.prefix_cache is PrefixCaching.OFF
    return {"enable_prefix_caching": False} if off else {}


def cores_of(engine_id: int, workers: int) -> str:
    """Return the cores of an engine's workers, as vLLM reads them (``0|1``); on a small machine engines share them."""
    first = engine_id * workers
    return "|".join(str(core % (os.cpu_count() or 1)) for core in range(first, first + workers))


def _accelerators(config: RunConfig, number: float) -> dict[str, float]:
    if _resource(config) == "GPU":
        return {"num_gpus": number, "num_cpus": DRIVING_CORES}
    return {"num_gpus": 0, "num_cpus": number}


def _make_trainer(config: RunConfig, places: PlacementGroup, folder: Path, logs: Path | None) -> DeepSpeedTrainer:
    train = config.train
    assert train is not None
    bundles = _rank_bundles(config)
    settings = RankSettings(
        rank=0,
        num_ranks=len(bundles),
        device=train.device,
        model_path=train.model.path,
        optimizer=train.optimizer,
        loss=train.loss,
        trainer=train.trainer,
        temperature=train.sampling.temperature,
        train_batch_size=config.scheduler.train_batch_size,
        optimizer_steps=config.optimizer_steps,
        transport=train.chosen_transport(colocated=config.colocated),
        weights_folder=str(folder),
        kept_to=trainer_cores(config),
        logs=None if logs is None else str(logs),
        colocated=config.colocated,
    )
    return DeepSpeedTrainer(
        settings,
        **_accelerators(config, _rank_share(config)),
        placing_timeout_s=train.placement_timeout_s,
        placement_group=places,
        bundle_indices=bundles,
    )


def _make_reference(config: RunConfig, places: PlacementGroup, logs: Path | None) -> RayReference | None:
    """Return the reference model; None if the loss needs none."""
    train = config.train
    assert train is not None
    if not train.loss.kl_coefficient:
        return None
    settings = ReferenceSettings(
        device=train.device,
        model_path=train.model.path,
        temperature=train.sampling.temperature,
        pack_tokens=train.trainer.pack_tokens,
        timeout_s=train.trainer.step_timeout_s,
        kept_to=trainer_cores(config),
        logs=None if logs is None else str(logs),
    )
    options = {
        **_accelerators(config, _rank_share(config)),
        "runtime_env": {"env_vars": rank_environment(train.device, num_threads=1)},
    }
    strategies = [PlacementGroupSchedulingStrategy(places, bundle) for bundle in _rank_bundles(config)]
    return RayReference(settings, [{**options, "scheduling_strategy": one} for one in strategies])


def _rank_bundles(config: RunConfig) -> range:
    first = 0 if config.colocated else config.num_engines
    return range(first, first + trainer_ranks(config))


def _rank_share(config: RunConfig) -> float:
    """Return how much of its accelerator a rank asks Ray for: it may share it with an engine, and a reference model."""
    assert config.train is not None
    share = 0.5 if config.colocated else 1.0
    return share / 2 if config.train.loss.kl_coefficient else share
