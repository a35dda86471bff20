"""The catalogue: accelerators and language models by name, from a user's TOML file, or from Hugging Face."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.huggingface import model_tables
from pipelinerl.util.explain import did_you_mean, explain, read_text
from pipelinerl.util.strict_model import StrictModel

GPU_RANGES = {
    "bf16_flops": (1e11, 1e17, "FLOP/s", "989e12"),
    "fp8_flops": (1e11, 1e17, "FLOP/s", "1979e12"),
    "memory_bytes": (1e9, 1e14, "bytes", "85.9e9"),
    "bandwidth": (1e9, 1e15, "bytes/s", "3.35e12"),
    "nvlink": (1e9, 1e14, "bytes/s", "450e9"),
    "network": (1e9, 1e14, "bytes/s", "50e9"),
    "gpus_per_node": (1, 10_000, "accelerators", "8"),
    "watts": (1, 1e5, "watts", "700"),
    "price_per_hour": (1e-3, 1e4, "USD per hour", "2.5"),
}
"""Least and largest figure of an accelerator, its unit, and the figure of an H100. A figure outside this range is
probably in another unit.

The largest are 20 to 100 times those of any accelerator on sale; the least are those of a weak laptop.
"""
MODEL_RANGES = {
    "parameters": (1e4, 1e14, "parameters, not billions", "7.6e9"),
    "layers": (1, 10_000, "layers", "28"),
    "width": (1, 1e6, "numbers", "3584"),
    "attention_width": (1, 1e7, "numbers", "3584"),
    "feed_forward_width": (1, 1e8, "numbers", "18944"),
    "vocabulary": (1, 1e8, "entries", "152064"),
    "kv_bytes_per_token": (1, 1e9, "bytes per token", "57344"),
    "attention_heads": (1, 1e5, "heads", "28"),
    "kv_heads": (1, 1e5, "heads", "4"),
    "experts": (1, 1e6, "experts", "128"),
}
"""The same for a language model, with the figures of a 7B model; 0 means "not known" where it is allowed."""


def _check_ranges(entry: Gpu | LanguageModel, ranges: Mapping[str, tuple[float, float, str, str]]) -> None:
    """Raise ValueError if a figure is out of its range. Figures that are not given are not checked."""
    for key, (least, most, unit, example) in ranges.items():
        value = getattr(entry, key)
        if value and not least <= value <= most:
            raise ValueError(f"{key} must be from {least:g} to {most:g} {unit}, got {value:g}; did you mean {example}?")


class Precision(StrEnum):
    """Format of numbers."""

    BF16 = "bf16"
    FP8 = "fp8"


class Named(StrictModel):
    """An entry of the catalogue."""

    name: str = Field(min_length=1)
    """Its name in tables."""
    aliases: list[str] = []
    """Other names that find it; for a model, those of others with the same architecture."""
    source: str = ""
    """Source of the figures."""


class Gpu(Named):
    """One accelerator. Figures are per accelerator, dense (no sparsity), decimal bytes."""

    bf16_flops: float = Field(gt=0)
    """Dense bf16 matrix products (FLOP/s)."""
    fp8_flops: float | None = Field(default=None, gt=0)
    """Dense fp8 matrix products (FLOP/s). None: it has none."""
    memory_bytes: float = Field(gt=0)
    """Device memory (bytes)."""
    bandwidth: float = Field(gt=0)
    """Memory bandwidth (bytes/s)."""
    nvlink: float = Field(default=0.0, ge=0)
    """Bandwidth to the other accelerators of its node, per direction (bytes/s). 0: there is no such link."""
    network: float = Field(gt=0)
    """Bandwidth between nodes (bytes/s)."""
    gpus_per_node: int = Field(default=8, ge=1)
    """Accelerators that share a node's fast link (count)."""
    attention_factor: float = Field(default=1.0, gt=0)
    """Speed of attention in training, where a kernel is faster than FlashAttention 2 (no unit)."""
    training_factor: float = Field(default=1.0, gt=0)
    """Share of peak that training reaches, over the share on an H100 (no unit)."""
    watts: float | None = Field(default=None, gt=0)
    """Board power at full load (W). None: not known."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Rent of one accelerator (USD per hour). None: not known."""

    @model_validator(mode="after")
    def _units_are_plausible(self) -> Self:
        _check_ranges(self, GPU_RANGES)
        return self


class LanguageModel(Named):
    """One language model, in parameters (counts) and bytes of bf16."""

    parameters: float = Field(gt=0)
    """All parameters (count)."""
    active_parameters: float = Field(gt=0)
    """Parameters that one token uses, embeddings included (count); for a dense model all."""
    embedding_parameters: float = Field(default=0.0, ge=0)
    """Input embedding, of which a decode step reads a few rows only (count); 0 if it is also the output head."""
    layers: int = Field(ge=1)
    """Transformer layers (count); pairs, where mixers and feed-forwards are counted apart."""
    width: int = Field(ge=1)
    """Hidden size."""
    attention_width: float = Field(gt=0)
    """Query heads * head size (mean of those of scores and of values, where they differ), averaged over the layers:
    those of linear attention and Mamba have none."""
    feed_forward_width: float = Field(default=0.0, ge=0)
    """Intermediate size that one token passes, of all its experts together, averaged over the layers; half of that
    without a gate, where half as many numbers are kept for the backward pass."""
    vocabulary: int = Field(default=0, ge=0)
    """Entries of the output head (count)."""
    weight_bytes: float = Field(default=2.0, gt=0)
    """Bytes of one weight in an engine."""
    kv_bytes_per_token: float = Field(gt=0)
    """KV cache of one token in bf16 (bytes)."""
    state_bytes: float = Field(default=0.0, ge=0)
    """State of one sequence in layers of linear attention, whatever its length (bytes)."""
    attention_heads: int = Field(default=0, ge=0)
    """Query heads, which an engine divides among its accelerators (count); 0: not known."""
    kv_heads: int = Field(default=0, ge=0)
    """Heads of keys and values (count); 0: not known, or a latent cache."""
    experts: int = Field(default=0, ge=0)
    """Routed experts per layer (count); 0: dense."""
    experts_per_token: int = Field(default=0, ge=0)
    """Routed experts that one token passes (count); 0: dense."""
    expert_parameters: float = Field(default=0.0, ge=0)
    """Routed experts of all layers together (count); 0: dense."""
    expert_layers: int | None = Field(default=None, ge=1)
    """Layers with routed experts (count). None: all."""

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        _check_ranges(self, MODEL_RANGES)
        for key in ("active_parameters", "embedding_parameters", "expert_parameters"):
            if getattr(self, key) > self.parameters:
                raise ValueError(f"{key} must be at most parameters = {self.parameters:g}, got {getattr(self, key):g}")
        given = [bool(self.experts), bool(self.experts_per_token), bool(self.expert_parameters)]
        if any(given) and not all(given):
            raise ValueError("experts, experts_per_token and expert_parameters belong together, got some of them")
        if self.expert_layers is not None and not self.experts:
            raise ValueError(f"expert_layers needs experts, got expert_layers={self.expert_layers} of a dense model")
        if self.expert_layers is not None and self.expert_layers > self.layers:
            raise ValueError(f"expert_layers must be at most layers = {self.layers}, got {self.expert_layers}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token must be at most experts = {self.experts}, got {self.experts_per_token}"
            )
        return self

    @property
    def routed_layers(self) -> int:
        """Layers with routed experts (count); 0 of a dense model."""
        return (self.expert_layers or self.layers) if self.experts else 0

    def divides_by(self, tensor_parallel: int) -> bool:
        """Return whether every accelerator of an engine gets as many whole heads."""
        return self.attention_heads % tensor_parallel == 0

    def cached_bytes(self, tensor_parallel: int) -> float:
        """Return the KV cache of one token on all accelerators of an engine (bytes): with fewer heads, copies."""
        return self.kv_bytes_per_token * (max(1.0, tensor_parallel / self.kv_heads) if self.kv_heads else 1.0)


def in_engine(gpu: Gpu, model: LanguageModel, weights: Precision, cache: Precision) -> tuple[Gpu, LanguageModel]:
    """Return accelerator and model as an engine of these formats has them.

    fp8 weights take half the bytes and are multiplied at the fp8 peak, or where there is none at that of bf16.
    A cache in fp8 takes half the bytes. States of linear attention stay as they are.
    """
    if weights is Precision.FP8:
        gpu = gpu.model_copy(update={"bf16_flops": gpu.fp8_flops or gpu.bf16_flops})
        model = model.model_copy(update={"weight_bytes": model.weight_bytes / 2})
    if cache is Precision.FP8:
        model = model.model_copy(update={"kv_bytes_per_token": model.kv_bytes_per_token / 2})
    return gpu, model


Entry = TypeVar("Entry", bound=Named)


def find_gpu(name: str, *, key: str = "hardware.gpu") -> Gpu:
    """Return an accelerator.

    Args:
        name: Its name in the catalogue, or the path of a TOML file with the keys of ``Gpu``.
        key: Where the name stands, for messages.

    Raises:
        ConfigError: If there is none of that name, or the file is wrong.
    """
    if is_path(name):
        return _from_file(Gpu, Path(name), key)
    return _found(_gpus_by_name(), name, key)


def find_model(name: str) -> LanguageModel:
    """Return a language model.

    Args:
        name: Its name in the catalogue, with or without ``owner/``; or the path of a TOML file with the keys of
            ``LanguageModel``, of a Hugging Face ``config.json``, or of a folder that has one.

    Raises:
        ConfigError: If there is none of that name, or the file is wrong.
    """
    if not is_path(name):
        return _found(_models_by_name(), _base_name(name), "hardware.model")
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".toml":
        return _from_file(LanguageModel, path, "hardware.model")
    text = read_text(path, "hardware.model")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"hardware.model {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"hardware.model {path} must hold a JSON object, as a Hugging Face config.json does")
    return model_from_huggingface(config, path.parent.name or str(path))


def model_from_huggingface(config: Mapping[str, Any], name: str) -> LanguageModel:
    """Return the model that a Hugging Face ``config.json`` describes, parameters counted from its architecture.

    Args:
        config: The content of the file.
        name: Name of the model.

    Raises:
        ConfigError: If a key that is needed is missing or wrong.
    """
    return _checked(LanguageModel, {"name": name, **model_tables(config, name)}, f"model {name}")


def gpu_names() -> list[str]:
    """Return the names of the accelerators in the catalogue."""
    return [gpu.name for gpu in _gpus()]


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return a GPU by the name of its driver, such as ``NVIDIA H100 80GB HBM3``; None: the catalogue has it not."""
    named = [gpu for gpu in _gpus() if gpu.name.casefold() in device_name.casefold()]
    return max(named, key=lambda gpu: len(gpu.name), default=None)


def model_names() -> list[str]:
    """Return the names of the models in the catalogue."""
    return [model.name for model in _models()]


def is_path(name: str) -> bool:
    """Return whether a name of a run file means a file or folder: by its ending, or because it is there."""
    return name.endswith((".toml", ".json")) or ("/" in name and Path(name).exists()) or name.startswith(("/", "."))


def _base_name(name: str) -> str:
    """Return a model's name without its owner and without what training for chat has added."""
    name = name.rpartition("/")[2]
    for ending in ("-instruct", "-base", "-instruct-2507", "-thinking-2507"):
        if name.casefold().endswith(ending):
            name = name[: -len(ending)]
    return name


@functools.cache
def _gpus() -> tuple[Gpu, ...]:
    return _shipped(Gpu, "gpus.toml")


@functools.cache
def _models() -> tuple[LanguageModel, ...]:
    return _shipped(LanguageModel, "models.toml")


def _shipped(kind: type[Entry], file: str) -> tuple[Entry, ...]:
    text = (resources.files("pipelinerl.hardware") / "data" / file).read_text(encoding="utf-8")
    return tuple(_checked(kind, {"name": name, **table}, name) for name, table in tomllib.loads(text).items())


@functools.cache
def _gpus_by_name() -> Mapping[str, Gpu]:
    return _by_name(_gpus())


@functools.cache
def _models_by_name() -> Mapping[str, LanguageModel]:
    return _by_name(_models())


def _by_name(entries: Iterable[Entry]) -> Mapping[str, Entry]:
    """Return entries by all their names, without case."""
    return {known.casefold(): one for one in entries for known in (*one.aliases, one.name)}


def _found(by_name: Mapping[str, Entry], name: str, key: str) -> Entry:
    found = by_name.get(name.casefold())
    if found is not None:
        return found
    shown = {known: its.name for known, its in by_name.items()}
    hint = did_you_mean(name.casefold(), shown, shown_as=shown, num_names=3, cutoff=0.4)
    known_names = ", ".join(dict.fromkeys(shown.values()))
    raise ConfigError(f"{key} must be a name of the catalogue or a file, got {name!r}; {hint}known: {known_names}")


def _from_file(kind: type[Entry], path: Path, key: str) -> Entry:
    text = read_text(path, key)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key} {path} is not valid TOML: {error}") from None
    return _checked(kind, {"name": path.stem, **table}, f"{key} {path}")


def _checked(kind: type[Entry], table: Mapping[str, Any], what: str) -> Entry:
    try:
        return kind.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{what}: {line}" for line in explain(error, kind))) from None
