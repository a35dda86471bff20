"""The kinds of trainer and of engine, chosen apart by the run file, and the backend that puts them together on Ray.

``train.trainer.kind`` and ``train.engine.kind`` name one of ``TRAINERS`` and ``ENGINES``, or a user's own as
``package.module:ATTRIBUTE``. Packages are imported when a run needs them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.driver.evaluation import evaluation_slots
from backends.huggingface_codec import load_codec
from backends.interface import STREAM_TOKENS, Engine, EngineKind, Parts, Place, Share, Trainer, TrainerKind
from backends.owner import temporary_folder
from backends.this_machine import driver_fault
from backends.vllm.version import arguments
from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.run import RunConfig, is_model_id
from pipelinerl.config.train import TrainConfig
from pipelinerl.errors import ConfigError, install
from pipelinerl.hardware.catalogue import Precision
from pipelinerl.util.user_code import first_line, named_value

MODEL_FILES, OTHER_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"], ["*/*", "consolidated*"]
"""Files of a model at Hugging Face that are wanted; among them weights in other formats, in folders or not."""
NEEDED = {"torch": "torch", "ray": "Ray", "transformers": "transformers"}
"""Packages of every real run: name of the import, name of the package."""


@dataclass(frozen=True, slots=True)
class RayBackend:
    """A ``Backend``: engines of one kind and a trainer of another, on Ray."""

    engine: EngineKind
    trainer: TrainerKind

    def missing(self) -> list[str]:
        """Return the packages that a run needs and that are not installed."""
        needed = {**NEEDED, **self.engine.packages, **self.trainer.packages}
        return [name for package, name in needed.items() if find_spec(package) is None]

    def check(self, config: RunConfig) -> None:
        """Check packages, settings and model; see ``interface.Backend``."""
        train = config.train_table
        if missing := self.missing():
            raise ConfigError(f"train needs {', '.join(missing)}, not installed: {install(f'train-{train.device}')}")
        if train.device == "gpu" and train.ray_address is None and (fault := driver_fault()):
            raise ConfigError(f"train.device='gpu' needs a newer driver on this machine, or another torch: {fault}")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local now; nothing may wait for a network
        _check_settings(config, train)
        if train.loss.teacher is not None:
            _check_teacher(config, train.loss.teacher)
        for kind in (self.engine, self.trainer):
            kind.check(config)
        load_codec(config)

    @contextlib.contextmanager
    def open(self, config: RunConfig, *, logs: Path | None = None) -> Iterator[Parts]:
        """Set accelerators aside on Ray and make the parts there; see ``interface.Backend``."""
        from backends.ray.cluster import ray_cluster
        from backends.ray.placement import accelerators, make_parts, more_engines, shares

        train, where = config.train_table, config.train_table.weights_folder
        logs = None if logs is None else logs.resolve()
        with ray_cluster(train.ray_address) as lost, accelerators(config) as places, temporary_folder(where) as folder:
            if train.ray_address is not None and train.device == "gpu":
                self.trainer.check_machines(config, shares(config, places))
            with more_engines(config, engine=self.engine, folder=folder, logs=logs) as more:
                parts = make_parts(
                    config, places, engine=self.engine, trainer=self.trainer, folder=folder, logs=logs, more=more
                )
                yield replace(parts, lost=lost)


def backend_of(train: TrainConfig) -> RayBackend:
    """Return the backend that a run file names; ``ConfigError`` if there is no such kind."""
    return RayBackend(
        engine=named_value(train.engine.kind, ENGINES, EngineKind, key="train.engine.kind"),
        trainer=named_value(train.trainer.kind, TRAINERS, TrainerKind, key="train.trainer.kind"),
    )


def _check_settings(config: RunConfig, train: TrainConfig) -> None:
    if config.generation is not None:
        raise ConfigError("generation must be left out: engines that only prefill are simulated only")
    if train.trainer.row_tokens < config.room_tokens:
        raise ConfigError(
            "train.trainer.pack_tokens times sequence_parallel must hold the longest rollout, "
            f"{config.room_key} = {config.room_tokens} tokens, got pack_tokens={train.trainer.pack_tokens}, "
            f"sequence_parallel={train.trainer.sequence_parallel}"
        )
    if train.transport and config.colocated and not train.chosen_transport(colocated=False).colocated:
        raise ConfigError(
            f"train.transport={train.transport!r} needs engines and trainer on accelerators of their own, "
            f"got scheduler.kind={config.scheduler.kind!r}"
        )
    folder = Path(train.weights_folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"train.weights_folder must be a folder that can be written, got {train.weights_folder!r}")


def _check_teacher(config: RunConfig, teacher: str) -> None:
    """Check that a teacher can be used, and knows all tokens of the model; else ``ConfigError``."""
    from transformers import AutoTokenizer

    from backends.trainer.footprint import check_trainable

    path = config.train_table.model.path
    own = model_config(path).get_text_config()
    tokens = load_codec(config).vocabulary.items()
    try:
        check_trainable(model := model_config(teacher))
    except ConfigError as error:
        raise ConfigError(*(str(one).replace("train.model.path", "train.loss.teacher") for one in error.args)) from None
    other = model.get_text_config()
    try:
        others = AutoTokenizer.from_pretrained(teacher).get_vocab().items()
    except Exception as error:
        raise ConfigError(f"train.loss.teacher: its tokenizer cannot be loaded: {first_line(error)}") from None
    if tokens - others:
        raise ConfigError(f"train.loss.teacher must have the tokens of train.model.path, {path!r}, got {teacher!r}")
    _check_positions(other, config, "the teacher")
    if other.vocab_size < own.vocab_size:
        raise ConfigError(
            f"train.loss.teacher needs a vocab_size of at least the model's {own.vocab_size}, got {other.vocab_size}"
        )


def _check_positions(model: Any, config: RunConfig, whose: str) -> None:
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and positions < config.room_tokens:
        raise ConfigError(
            f"{config.room_key} must be at most {whose}'s {positions} positions, got {config.room_tokens}"
        )


def with_local_model(config: RunConfig, *, with_teacher: bool = True) -> RunConfig:
    """Return a run whose models are folders: ids at Hugging Face are downloaded into its cache, or ``ConfigError``."""
    train = config.train_table
    model = train.model.model_copy(update={"path": _folder(train.model.path, "train.model.path", train.device)})
    loss = train.loss
    if with_teacher and loss.teacher is not None:
        loss = loss.model_copy(update={"teacher": _folder(loss.teacher, "train.loss.teacher", train.device)})
    return config.model_copy(update={"train": train.model_copy(update={"model": model, "loss": loss})})


def _folder(path: str, key: str, device: str) -> str:
    if not is_model_id(path):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        what = install(f"train-{device}")
        raise ConfigError(f"train needs huggingface_hub to read {path!r}, not installed: {what}") from None
    try:
        return str(snapshot_download(path, allow_patterns=MODEL_FILES, ignore_patterns=OTHER_FILES))
    except Exception as error:  # its errors have no common root
        raise ConfigError(
            f"{key} must be a folder with a model, or an id at Hugging Face that is in its cache or can be "
            f"downloaded, got {path!r}: {first_line(error)}"
        ) from None


def model_config(path: str) -> Any:
    """Return the configuration of the model in a folder; ``ConfigError`` if it cannot be used."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"train.model.path must be a folder with a model (config.json), got {path!r}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"train.model.path must hold weights as *.safetensors, got {path!r}")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"train.model.path: its config.json cannot be used: {first_line(error)}") from None


# ------------------------------------------------------------------------------------- engines


def _check_vllm(config: RunConfig) -> None:
    train = config.train_table
    model = model_config(train.model.path)
    arguments.check_version()
    arguments.check_arguments(train.engine.vllm, accelerators=config.cluster.tensor_parallel, device=train.device)
    if config.speculation is not None:
        arguments.check_speculation(train, config.speculation)
    simulated, in_fp8 = config.hardware.engine_weights, "quantization" in train.engine.vllm
    if config.hardware.by_name and in_fp8 != (simulated is Precision.FP8):
        needed = "'fp8' with" if in_fp8 else "'bf16' without"
        raise ConfigError(
            f"hardware.engine_weights must be {needed} train.engine.vllm.quantization, got {simulated.value!r}"
        )
    if train.trainer.router_replay:
        environment = config.environment
        arguments.check_returns_routes(
            train.engine.vllm,
            train.device,
            caches=environment is None or environment.prefix_cache is not PrefixCaching.OFF,
        )
    if train.lora is not None:
        arguments.check_serves_adapters(model, train.device)
    _check_positions(model, config, "the model")
    if train.device == "cpu" and model.tie_word_embeddings and train.lora is None:
        raise ConfigError(
            "train.model.path must hold a model with tie_word_embeddings=false on device='cpu', where vLLM would keep "
            f"the old output layer, got {train.model.path!r}"
        )


def _make_vllm(config: RunConfig, engine_id: int, place: Place) -> Engine:
    from backends.ray.actors import RayEngine
    from backends.vllm.process import VLLMSettings

    train, each = config.train_table, config.cluster.tensor_parallel
    environment = config.environment
    caches_off = environment is not None and environment.prefix_cache is PrefixCaching.OFF
    settings = VLLMSettings(
        engine_id=engine_id,
        model_path=train.model.path,
        num_slots=config.scheduler.generation_batch_size + evaluation_slots(config),
        max_tokens=config.room_tokens,
        device=train.device,
        transport=config.train_transport,
        lora=train.lora,
        speculation=config.speculation,
        routes=train.trainer.router_replay,
        tensor_parallel=each,
        gpu_memory_utilization=train.engine.gpu_memory_utilization,
        colocated=config.colocated,
        cpu_kv_cache_gib=train.engine.cpu_kv_cache_gib,
        request_times=environment is not None,
        kv_cache_use=config.scheduler.admission is not None,
        cpu_cores=cores_of(engine_id, each) if train.device == "cpu" else None,
        log_file=None if place.logs is None else str(place.logs / f"engine-{engine_id}.log"),
        start_timeout_s=train.engine.start_timeout_s,
        update_timeout_s=train.engine.update_timeout_s,
        generate_timeout_s=train.engine.generate_timeout_s,
        stream_tokens=STREAM_TOKENS if config.fleet is None else config.fleet.stream_tokens,
        arguments=train.engine.vllm | ({"enable_prefix_caching": False} if caches_off else {}),
    )
    (options,) = place.options
    return RayEngine(settings, {**options, "max_concurrency": 2 * settings.num_slots + 64})


def cores_of(engine_id: int, workers: int) -> str:
    """Return the cores of an engine's workers, as vLLM reads them (``0|1``); on a small machine engines share them."""
    first = engine_id * workers
    return "|".join(str(core % (os.cpu_count() or 1)) for core in range(first, first + workers))


VLLM = EngineKind(name="vllm", make=_make_vllm, check=_check_vllm, packages={"vllm": "vLLM"})
ENGINES = {kind.name: kind for kind in (VLLM,)}


# ------------------------------------------------------------------------------------- trainers


def _check_deepspeed(config: RunConfig) -> None:
    train = config.train_table
    if train.trainer.expert_parallel > 1:
        raise ConfigError(
            f"train.trainer.expert_parallel must be 1 with kind='deepspeed', got {train.trainer.expert_parallel}"
        )
    if train.device == "gpu" and train.trainer.zero_stage == 0:
        raise ConfigError("train.trainer.zero_stage must be at least 1 on device='gpu' (DeepSpeed's bfloat16), got 0")
    if train.device == "gpu" and config.colocated and train.trainer.zero_stage == 1:
        raise ConfigError(
            "train.trainer.zero_stage must be 2 or 3 where engines and trainer share GPUs, since DeepSpeed offloads "
            "no other, got 1"
        )
    _check_model(config)


def _check_fsdp2(config: RunConfig) -> None:
    from backends.trainer.footprint import shape_of

    trainer = config.train_table.trainer
    if trainer.zero_stage != 3:
        raise ConfigError(f"train.trainer.zero_stage must be 3 with kind='fsdp2', got {trainer.zero_stage}")
    if trainer.expert_parallel > 1:
        from backends.trainer.fsdp2.experts import check_experts

        check_experts(config, shape_of(model_config(config.train_table.model.path)).policy)
    _check_model(config)


def own_share(config: RunConfig) -> Any:
    """Return what counts the GPU memory of a trainer of our own, by its kind (``footprint.Own``)."""
    from backends.trainer.footprint import of_deepspeed, of_fsdp2

    return of_fsdp2 if config.train_table.trainer.kind == FSDP2.name else of_deepspeed


def _check_model(config: RunConfig) -> None:
    from backends.trainer.footprint import (
        check_adapters,
        check_host_memory,
        check_memory,
        check_routers,
        check_trainable,
    )
    from backends.trainer.fused import check_compiler
    from backends.trainer.sequence_parallel import check_sequence_parallel

    train = config.train_table
    if train.trainer.fuses(train.device) and train.ray_address is None:
        check_compiler(train.device)
    model = model_config(train.model.path)
    check_trainable(model)
    if train.lora is not None:
        if train.device == "gpu" and config.colocated:
            raise ConfigError(
                "train.lora must be left out where engines and trainer share GPUs, since weights that are not trained "
                f"are not offloaded, got scheduler.kind={config.scheduler.kind!r}"
            )
        check_adapters(model, train.model.path, train.lora)
    check_sequence_parallel(config, model)
    if train.trainer.router_replay:
        check_routers(model)
    if train.device == "gpu":
        check_memory(config, model, own_share(config))
        if train.ray_address is None:
            check_host_memory(config, model)


def _check_host_memory(config: RunConfig, shares: Sequence[Share]) -> None:
    from backends.trainer.footprint import check_host_memory

    check_host_memory(config, model_config(config.train_table.model.path), shares)


def _make_deepspeed(config: RunConfig, place: Place) -> Trainer:
    from backends.trainer.deepspeed.rank import DeepSpeedRank

    return _make_trainer(DeepSpeedRank, config, place)


def _make_fsdp2(config: RunConfig, place: Place) -> Trainer:
    from backends.trainer.fsdp2.rank import FSDP2Rank

    return _make_trainer(FSDP2Rank, config, place)


def _make_trainer(rank: type, config: RunConfig, place: Place) -> Trainer:
    from backends.ray.actors import RayTrainer
    from backends.trainer.footprint import recomputed_layers
    from backends.trainer.settings import RankSettings

    train = config.train_table
    settings = RankSettings(
        num_ranks=len(place.options),
        device=train.device,
        model_path=train.model.path,
        optimizer=train.optimizer,
        loss=train.loss,
        trainer=train.trainer,
        temperature=train.sampling.temperature,
        train_batch_size=config.scheduler.train_batch_size,
        optimizer_steps=config.optimizer_steps,
        transport=config.train_transport,
        weights_folder=str(place.weights_folder),
        logs=None if place.logs is None else str(place.logs),
        colocated=config.colocated,
        lora=train.lora,
    )
    path, chooses = train.model.path, train.device == "gpu" and train.trainer.activation_checkpointing is True

    def chosen(memory: float) -> int:
        return recomputed_layers(config, model_config(path), memory, own_share(config))

    return RayTrainer(
        rank,
        settings,
        place.options,
        placing_timeout_s=train.placement_timeout_s,
        recomputed=chosen if chooses else None,
    )


DEEPSPEED = TrainerKind(
    name="deepspeed",
    make=_make_deepspeed,
    check=_check_deepspeed,
    check_machines=_check_host_memory,
    packages={"deepspeed": "DeepSpeed"},
)
FSDP2 = TrainerKind(name="fsdp2", make=_make_fsdp2, check=_check_fsdp2, check_machines=_check_host_memory, packages={})
TRAINERS = {kind.name: kind for kind in (DEEPSPEED, FSDP2)}
