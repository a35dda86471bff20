"""Weights compared bit for bit: the trainer's checksums, and the check of a receiver, for all transports."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from backends.lora import CONFIG_FILE, adapter_shapes
from backends.transfer.checksum64 import as_bytes
from backends.transfer.transport import LACK, SHAPE, UNKNOWN, WeightMismatchError
from pipelinerl.errors import BackendError
from pipelinerl.util.read import read_json

MAX_NAMES = 3


def checksum(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order, shape and type apart, as 64 hexadecimal digits."""
    return hashlib.sha256(as_bytes(tensor.cpu()).numpy()).hexdigest()


def checksums(items: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the checksum of each parameter by name, in threads at once: hashing releases the interpreter lock."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        started = {name: threads.submit(checksum, tensor) for name, tensor in items}
        return {name: thread.result() for name, thread in started.items()}


def checkpoint_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter in a Hugging Face model folder, from the files' headers only.

    A weight update has to bring exactly these names. A tied parameter is listed once, as in the folder. Layers that
    only draft tokens are left out: neither trained nor loaded by engines that do not draft. Of a folder of adapters:
    those of their model. ``BackendError`` if the folder has no weights in safetensors format.
    """
    folder = Path(folder)
    if (folder / CONFIG_FILE).exists():
        adapters = read_json(folder / CONFIG_FILE)
        return adapter_shapes(checkpoint_shapes(adapters["base_model_name_or_path"]), adapters["r"])
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {folder / name for name in read_json(index)["weight_map"].values()}
    else:
        files = {folder / "model.safetensors"}
    if missing := [str(file) for file in sorted(files) if not file.exists()]:
        raise BackendError(f"model folder must hold weights in safetensors format, {missing[0]} is not there")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(files):
        with safe_open(str(file), framework="pt") as opened:
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    drafting = _draft_layers(folder)
    return {name: shape for name, shape in shapes.items() if not name.startswith(drafting)}


def _draft_layers(folder: Path) -> tuple[str, ...]:
    """Return the prefixes of names of parameters that only draft tokens (multi-token prediction)."""
    file = folder / "config.json"
    config = read_json(file) if file.exists() else {}
    first, num = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers") or 0
    # A part of its own in Qwen3-Next and Qwen3.5, else layers behind the last.
    return ("mtp.", *(f"model.layers.{first + layer}." for layer in range(num)))


def verified(
    items: Iterable[tuple[str, torch.Tensor]],
    *,
    expected: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
) -> dict[str, torch.Tensor]:
    """Return parameters by name; ``BackendError``, naming the first wrong ones, unless all are right, bit for bit.

    ``expected``: checksums of the sender. ``shapes``: of all parameters of the model. ``source`` for messages:
    ``weights in /dev/shm/x``.
    """
    tensors: dict[str, torch.Tensor] = {}

    def kept() -> Any:
        for name, tensor in items:
            tensors[name] = tensor
            yield name, tensor

    actual = checksums(kept())
    faults = {
        "have no checksum for": tensors.keys() - expected.keys(),
        "have a wrong checksum in": {name for name in expected if actual.get(name) != expected[name]},
    }
    _refuse(faults, len(shapes), source)  # first: a damaged name is no other model
    check_names({name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes, source=source)
    return tensors


def check_names(sent: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Raise ``WeightMismatchError`` if a parameter sent is missing, unknown or of another shape than the model's."""
    faults: dict[str, Collection[str]] = {
        LACK: shapes.keys() - sent.keys(),
        UNKNOWN: sent.keys() - shapes.keys(),
        SHAPE: {name for name, shape in sent.items() if shape != shapes.get(name)},
    }
    _refuse(faults, len(shapes), source, WeightMismatchError)


def _refuse(
    faults: Mapping[str, Collection[str]], num_parameters: int, source: str, error: type[BackendError] = BackendError
) -> None:
    for fault, names in faults.items():
        if names:
            listed = ", ".join(sorted(names)[:MAX_NAMES])
            raise error(f"{source} {fault} {len(names)} of {num_parameters} parameters: {listed}")
