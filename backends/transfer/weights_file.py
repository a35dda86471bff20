"""Weights in files: written whole or not at all.

Trainer and engines share it. A file is in safetensors format, under the parameters' Hugging Face names. It
lies where both can read it, best in shared memory (``/dev/shm``): then it is written once and mapped by every
reader. Replacing a file leaves those who have mapped the old one undisturbed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from backends.transfer.weights_check import checksums, verified
from pipelinerl.errors import BackendError
from pipelinerl.util.user_code import kind_and_line


def write_weights(path: Path | str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write parameters into a file: a reader finds the old file or the new one, never a part.

    Args:
        path: Where to; a file that is there is replaced.
        tensors: Parameters by Hugging Face name, on any device, in the type they are sent in.

    Returns:
        Checksum of each parameter.

    Raises:
        BackendError: If the file cannot be written; nothing is left behind then.
    """
    path = Path(path)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(on_cpu, str(partial), metadata={"format": "pt"})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise BackendError(f"cannot write {path}: {kind_and_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)
    return checksums(on_cpu.items())


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
        BackendError: If the file is missing or unreadable, or not what ``verified`` asks for.
    """
    return verified(_read(path), expected=expected, shapes=shapes, source=f"weights in {path}")


def _read(path: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as opened:
            tensors = [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
    except Exception as error:  # safetensors raises its own types, and OSError
        raise BackendError(f"weights in {path} cannot be read: {error}") from error
    yield from tensors
