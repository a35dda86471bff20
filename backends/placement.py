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
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from backends.deepspeed.rank import RankSettings
from backends.deepspeed.reference_model import RayReference, ReferenceSettings
from backends.deepspeed.trainer import DeepSpeedTrainer
from backends.interface import Generated, GenerateRequest, UpdateTimes, Weights
from backends.transfer.group import WeightSyncGroup
from backends.vllm.engine import VLLMEngine
from backends.vllm.process import VLLMSettings
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, EngineLostError
from pipelinerl.scheduler.events import WeightUpdate

SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
"""Environment variable: Ray ends what a dead actor has started."""
PLACEMENT_TIMEOUT_S = 600.0
"""Seconds to wait for accelerators that exist and are in use."""
SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds an engine has to end before its process is killed."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Shared memory of a Ray of our own (bytes): holds the samples on their way to the ranks."""


@contextlib.contextmanager
def ray_cluster(config: RunConfig) -> Iterator[PlacementGroup]:
    """Join or start a Ray cluster and set the run's accelerators aside.

    Raises:
        ConfigError: If the cluster cannot be reached, or has too few accelerators.
    """
    assert config.train is not None
    address = config.train.ray_address
    subreaper_before = os.environ.get(SUBREAPER)
    if address is None:
        # What a killed actor has started must not outlive it: vLLM's processes are children of their actor.
        os.environ.setdefault(SUBREAPER, "true")
        own: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        own["num_cpus"] = os.cpu_count()
    else:
        own = {"address": address}
    try:
        ray.init(log_to_driver=False, configure_logging=False, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"train.ray_address must lead to a running Ray cluster, got {address!r}: {error}") from None
    finally:
        if subreaper_before is None:  # the next cluster of this process has its own choice
            os.environ.pop(SUBREAPER, None)
    # Ray prints on stdout that an actor died, whatever it is told: there the summary goes, and the loss is told anyway.
    ray._private.worker._worker_logs_enabled = False
    with contextlib.suppress(ValueError):  # not the main thread
        # With the subreaper Ray has this process, too, ignore SIGCHLD: every subprocess would seem to end well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        _check_capacity(config)
        group = placement_group(_bundles(config), strategy="PACK")
        try:
            ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"cluster.accelerators={config.cluster.accelerators} are not free in the Ray cluster, "
                f"after {PLACEMENT_TIMEOUT_S:.0f} s"
            ) from None
        yield group
        remove_placement_group(group)
    finally:
        ray.shutdown()


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
    # Beside a GPU a process needs a core to drive it.
    return [{resource: float(size), **({"CPU": 1.0} if resource == "GPU" else {})} for size in sizes]


@contextlib.contextmanager
def weights_folder(config: RunConfig) -> Iterator[Path]:
    """Make this run's own folder for weights on their way, and remove it in the end."""
    assert config.train is not None
    folder = Path(tempfile.mkdtemp(prefix="pipelinerl-", dir=config.train.weights_folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def transport(config: RunConfig) -> Literal["file", "broadcast"]:
    """Return how weights reach the engines: ``file`` or ``broadcast``."""
    assert config.train is not None
    if config.train.transport is not None:
        return config.train.transport
    return "broadcast" if config.train.device == "gpu" and not config.colocated else "file"


def make_engines(config: RunConfig, group: PlacementGroup) -> list[RayEngine]:
    """Return the engines of a run, not yet started."""
    train, each = config.train, config.cluster.tensor_parallel
    assert train is not None
    share = 0.5 if config.colocated else 1.0
    engines = []
    for index in range(config.num_engines):
        settings = VLLMSettings(
            index=index,
            model_path=train.model.path,
            num_slots=config.scheduler.generation_batch_size,
            max_tokens=train.task.max_prompt_tokens + config.workload.length.max,
            device=train.device,
            transport=transport(config),
            tensor_parallel=each,
            gpu_memory_utilization=train.engine.gpu_memory_utilization,
            colocated=config.colocated,
            cpu_kv_cache_gib=train.engine.cpu_kv_cache_gib,
            cpu_cores=str(index % (os.cpu_count() or 1)) if train.device == "cpu" else None,
            start_timeout_s=train.engine.start_timeout_s,
            update_timeout_s=train.engine.update_timeout_s,
        )
        options = {
            **_accelerators(config, each * share),
            "max_concurrency": 2 * settings.num_slots + 64,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
        }
        engines.append(RayEngine(settings, options))
    return engines


def _accelerators(config: RunConfig, number: float) -> dict[str, float]:
    if _resource(config) == "GPU":
        return {"num_gpus": number, "num_cpus": 0.5}
    return {"num_gpus": 0, "num_cpus": number}


def make_trainer(config: RunConfig, group: PlacementGroup, folder: Path) -> DeepSpeedTrainer:
    """Return the trainer of a run, not yet started; it publishes into ``folder``."""
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
        transport=transport(config),
        weights_folder=str(folder),
    )
    return DeepSpeedTrainer(
        settings, **_accelerators(config, _rank_share(config)), placement_group=group, bundle_indices=bundles
    )


def make_reference(config: RunConfig, group: PlacementGroup) -> RayReference | None:
    """Return the reference model of a run, not yet started; None if its loss needs none."""
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
    )
    options = {
        **_accelerators(config, _rank_share(config)),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
    }
    places = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in _rank_bundles(config)]
    return RayReference(settings, [{**options, "scheduling_strategy": place} for place in places])


def _rank_bundles(config: RunConfig) -> range:
    """Return the bundle of each trainer rank."""
    ranks = config.training_accelerators // (config.cluster.tensor_parallel if config.colocated else 1)
    first = 0 if config.colocated else config.num_engines
    return range(first, first + ranks)


def _rank_share(config: RunConfig) -> float:
    """Return how much of its accelerator a rank asks Ray for: it may share it with an engine, and a reference model."""
    assert config.train is not None
    share = 0.5 if config.colocated else 1.0
    return share / 2 if config.train.loss.kl_coefficient else share


def make_group(config: RunConfig, engines: list[RayEngine], trainer: DeepSpeedTrainer) -> WeightSyncGroup | None:
    """Return what weights are sent through; None if they lie in files."""
    if transport(config) == "file":
        return None
    assert config.train is not None
    return WeightSyncGroup(
        trainer,
        engines,
        workers_each=config.cluster.tensor_parallel,
        timeout_s=config.train.engine.update_timeout_s,
    )


class RayEngine:
    """An ``interface.Engine`` in a process of its own; ``start`` after a loss makes a new process.

    Args:
        settings: What the engine is to be.
        options: Where Ray is to run it.
    """

    def __init__(self, settings: VLLMSettings, options: dict[str, Any]) -> None:
        self._settings, self._options = settings, options
        self._actor: Any = None
        self.num_started = 0

    async def start(self) -> None:
        """Start the process and load the model, at version 0."""
        self.num_started += 1
        self._actor = ray.remote(VLLMEngine).options(**self._options).remote(self._settings)
        await self._call("start")

    async def generate(self, request: GenerateRequest) -> Generated:
        """Generate one answer; see ``interface.Engine``."""
        generated: Generated = await self._call("generate", request)
        return generated

    async def abort(self, rollout_id: int) -> None:
        """End a request early; see ``interface.Engine``."""
        await self._call("abort", rollout_id)

    async def update(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        """Load new weights; see ``interface.Engine``."""
        times: UpdateTimes = await self._call("update", weights, weight_update)
        return times

    async def join_group(self, address: str, port: int, *, rank_offset: int, num_members: int) -> None:
        """Join the group that weights arrive through; see ``group.Receiver``."""
        await self._call("join_group", address, port, rank_offset=rank_offset, num_members=num_members)

    async def checksums(self) -> dict[str, str]:
        """Return the checksums that the last update was verified against; see ``interface.Engine``."""
        checksums: dict[str, str] = await self._call("checksums")
        return checksums

    async def sleep(self) -> None:
        """Give the memory up for training; see ``interface.Engine``."""
        await self._call("sleep")

    async def wake(self) -> None:
        """Take the memory back."""
        await self._call("wake")

    async def shutdown(self) -> None:
        """End the process; a second call does nothing."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_future(actor.shutdown.remote()), SHUTDOWN_TIMEOUT_S)
        finally:  # also when cancelled: nobody else knows of it
            ray.kill(actor)

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        actor = self._actor
        if actor is None:
            raise EngineLostError(f"engine {self._settings.index} lost: phase={method}; it is being started again")
        try:
            return await _future(getattr(actor, method).remote(*arguments, **keywords))
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            what = str(error).strip().partition("\n")[0]
            raise EngineLostError(f"engine {self._settings.index} lost: phase={method}: {what}") from None


async def _future(reference: Any) -> Any:
    return await reference
