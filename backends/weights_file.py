"""Weights in files: written whole or not at all, and compared bit for bit.

Trainer and engines share it. A file is in safetensors format, under the parameters' Hugging Face names. It
lies where both can read it, best in shared memory (``/dev/shm``): then it is written once and mapped by every
reader. Replacing a file leaves those who have mapped the old one undisturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipelinerl.errors import BackendError

MAX_NAMES = 3
"""Parameters that an error message names (count)."""


def checksum(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order, as 64 hexadecimal digits.

    Shape and type do not enter, only bytes: the same numbers in another type have another checksum.
    """
    bytes_N = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes_N.numpy()).hexdigest()


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor by name, on all cores (hashing releases the interpreter lock)."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        return dict(zip(tensors, threads.map(checksum, tensors.values()), strict=True))


def write_weights(path: Path | str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write parameters into a file: a reader finds the old file or the new one, never a part.

    Args:
        path: Where to; a file that is there is replaced.
        tensors: Parameters by Hugging Face name, on any device, in the type they are sent in.

    Returns:
        Checksum of each parameter.

    Raises:
        OSError: If the file cannot be written; nothing is left behind then.
    """
    path = Path(path)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(on_cpu, str(partial), metadata={"format": "pt"})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return checksums(on_cpu)


def checkpoint_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter in a Hugging Face model folder, from the files' headers only.

    This is the full list of names that a weight update has to bring. A tied parameter is listed once, as in the
    folder.

    Raises:
        BackendError: If the folder has no weights in safetensors format.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    else:
        files = {folder / "model.safetensors"}
    if missing := [str(file) for file in sorted(files) if not file.exists()]:
        raise BackendError(f"model folder must hold weights in safetensors format, {missing[0]} is not there")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(files):
        with safe_open(str(file), framework="pt") as opened:
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    return shapes


def read_verified(
    path: Path | str, expected: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Read a file of weights and return it only if it is complete and right, bit for bit.

    Args:
        path: What ``write_weights`` wrote.
        expected: What ``write_weights`` returned.
        shapes: Shape of every parameter of the model, by name.

    Returns:
        Parameters by name, mapped from the file.

    Raises:
        BackendError: If the file is missing or unreadable, if a parameter is missing, unknown or of another shape,
            or if a checksum differs. The text names the first parameters concerned.
    """
    try:
        with safe_open(str(path), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own types, and OSError
        raise BackendError(f"weights in {path} cannot be read: {error}") from error
    actual = checksums(tensors)
    faults = {
        "lack": shapes.keys() - tensors.keys(),
        "have unknown": tensors.keys() - shapes.keys(),
        "have no checksum for": tensors.keys() - expected.keys(),
        "have a wrong shape in": {name for name in tensors if tuple(tensors[name].shape) != shapes.get(name)},
        "have a wrong checksum in": {name for name in tensors if actual[name] != expected.get(name)},
    }
    for fault, names in faults.items():
        if names:
            listed = ", ".join(sorted(names)[:MAX_NAMES])
            raise BackendError(f"weights in {path} {fault} {len(names)} of {len(shapes)} parameters: {listed}")
    return tensors
