"""The backend of vLLM engines and a DeepSpeed trainer, on Ray: its checks, and its parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.cores import kept_to, trainer_cores
from backends.huggingface_codec import first_line, load_codec
from backends.interface import Parts
from backends.vllm.version.arguments import check_arguments, check_version
from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.errors import ConfigError, install

NEEDED = {"torch": "torch", "vllm": "vLLM", "deepspeed": "DeepSpeed", "ray": "Ray", "transformers": "transformers"}
"""Packages of a real run: what they are imported as, and what they are called."""


class VLLMDeepSpeed:
    """A ``Backend``; see ``interface.py``."""

    def check(self, config: RunConfig) -> None:
        """Check packages, settings and model; see ``interface.Backend``."""
        train = config.train
        assert train is not None
        missing = [name for package, name in NEEDED.items() if find_spec(package) is None]
        if missing:
            raise ConfigError(f"train needs {', '.join(missing)}, not installed: {install(f'train-{train.device}')}")
        check_version()
        check_arguments(train.engine.vllm, accelerators=config.cluster.tensor_parallel, device=train.device)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; nothing may wait for a network
        _check_settings(config, train)
        _check_model(config, train)
        load_codec(train.model.path)

    @contextlib.contextmanager
    def open(self, config: RunConfig, *, logs: Path | None = None) -> Iterator[Parts]:
        """Set accelerators aside on Ray and make the parts there; see ``interface.Backend``."""
        from backends.placement import accelerators, make_parts, shares, weights_folder
        from backends.ray_cluster import ray_cluster

        assert config.train is not None
        address = config.train.ray_address
        with ray_cluster(address) as lost, accelerators(config) as places, weights_folder(config) as folder:
            if address is not None and config.train.device == "gpu":
                from backends.deepspeed.host_memory import check_host_memory

                check_host_memory(config, _model_config(config.train.model.path), shares(config, places))
            parts = make_parts(config, places, folder, logs)
            with kept_to(trainer_cores(config)):
                yield replace(parts, lost=lost)


def _check_settings(config: RunConfig, train: TrainConfig) -> None:
    """Check the settings, without the model."""
    if train.trainer.pack_tokens < config.room_tokens:
        raise ConfigError(
            f"train.trainer.pack_tokens must hold the longest rollout, {config.room_key} = {config.room_tokens} "
            f"tokens, got pack_tokens={train.trainer.pack_tokens}"
        )
    if train.transport in ("broadcast", "streamed") and config.colocated:
        raise ConfigError(
            f"train.transport={train.transport!r} needs engines and trainer on accelerators of their own, "
            f"got scheduler.kind={config.scheduler.kind!r}"
        )
    folder = Path(train.weights_folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"train.weights_folder must be a folder that can be written, got {train.weights_folder!r}")
    if train.device == "gpu" and train.trainer.zero_stage == 0:
        raise ConfigError("train.trainer.zero_stage must be at least 1 on device='gpu' (DeepSpeed's bfloat16), got 0")
    if train.device == "gpu" and config.colocated and train.trainer.zero_stage == 1:
        raise ConfigError(
            "train.trainer.zero_stage must be 2 or 3 where engines and trainer share GPUs, since DeepSpeed offloads "
            "no other, got 1"
        )


def _check_model(config: RunConfig, train: TrainConfig) -> None:
    """Check that the model can be used on this device, and has as many positions as the longest rollout needs."""
    model = _model_config(train.model.path)
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and positions < config.room_tokens:
        raise ConfigError(
            f"{config.room_key} must be at most the model's {positions} positions, got {config.room_tokens}"
        )
    if train.device == "cpu" and model.tie_word_embeddings:
        raise ConfigError(
            "train.model.path must hold a model with tie_word_embeddings=false on device='cpu', where vLLM would keep "
            f"the old output layer, got {train.model.path!r}"
        )
    _check_trainable(config, train, model)


def _check_trainable(config: RunConfig, train: TrainConfig, model: Any) -> None:
    """Check that the trainer can compute this model, and on GPUs that the run fits."""
    from backends.deepspeed.footprint import check_memory, check_trainable
    from backends.deepspeed.host_memory import check_host_memory

    check_trainable(model)
    if train.device == "gpu":
        check_memory(config, model)
        if train.ray_address is None:
            check_host_memory(config, model)


def _model_config(path: str) -> Any:
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
