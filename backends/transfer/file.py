"""Weights in safetensors files, written whole or not at all, best in shared memory (``/dev/shm``).

Every reader maps the same pages. Replacing a file leaves those who have mapped the old one undisturbed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from backends.interface import Weights
from backends.transfer.transport import Membership, SenderContext, TransportEnds, WeightSource, place_of
from backends.transfer.verify import checkpoint_shapes, checksums, verified
from pipelinerl.errors import BackendError
from pipelinerl.hardware import transport
from pipelinerl.hardware.transport import KEPT_FILES
from pipelinerl.util.user_code import kind_and_line

FILES = "version-*.safetensors"


class FileSender:
    """Rank 0 writes a file per version and keeps the newest ``KEPT_FILES``."""

    def __init__(self, context: SenderContext) -> None:
        self._receives, self._folder = context.receives, context.folder
        self._files = sorted(context.folder.glob(FILES)) if self._receives else []  # of a rank before, that was killed

    def publish(self, source: WeightSource, version: int) -> Weights | None:
        """Write the weights."""
        copies: dict[str, torch.Tensor] = {}
        for bucket in source.buckets():
            copies |= {name: weight.detach().to("cpu", copy=True) for name, weight in bucket.items()}
        if not self._receives:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / FILES.replace("*", f"{version:08d}")
        weights = Weights(version, f"{transport.FILE.name}:{path}", write_weights(path, copies))
        self._files = [*(old for old in self._files if old != path), path]
        for old in self._files[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
        self._files = self._files[-KEPT_FILES:]
        return weights

    def send(self, version: int) -> str | None:
        """Do nothing: engines read the file."""

    def close(self) -> None:
        """Remove the files."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []


class FileReceiver:
    """Maps the file and verifies it."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path

    def join(self, member: Membership) -> None:
        """Do nothing: there is no group."""

    def receive(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters, mapped from the file."""
        shapes = checkpoint_shapes(self._model_path)
        return iter(read_verified(place_of(weights, transport.FILE), weights.checksums, shapes).items())

    def loaded(self, weights: Weights) -> None:
        """Do nothing: the file stays."""

    def close(self) -> None:
        """Do nothing."""


FILE = TransportEnds(FileSender, FileReceiver)


def write_weights(path: Path | str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write parameters as ``write_tensors`` does; return the SHA-256 of each by name."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(Path(path), on_cpu)
    return checksums(on_cpu.items())


def write_tensors(path: Path, on_cpu: dict[str, torch.Tensor]) -> None:
    """Write tensors into a file: a reader finds the old file or the new one, never a part.

    ``BackendError`` if it cannot be written; nothing is left then.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(on_cpu, str(partial), metadata={"format": "pt"})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise BackendError(f"cannot write {path}: {kind_and_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_verified(
    path: Path | str, expected: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Map a file of ``write_weights``; ``BackendError`` if it is unreadable, or differs in names, shapes or a bit."""
    return verified(_read(path), expected=expected, shapes=shapes, source=f"weights in {path}")


def _read(path: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as opened:
            tensors = [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
    except Exception as error:  # safetensors raises its own types, and OSError
        raise BackendError(f"weights in {path} cannot be read: {error}") from error
    yield from tensors
