"""Parameters side by side in a row of bytes, and memory for such rows that all workers of a machine share."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from backends.transfer.transport import Parameters
from pipelinerl.errors import BackendError

ALIGNMENT_BYTES = 16
"""Parameters begin at a multiple of it, so that their bytes can be seen in their own type."""

BUCKET_BYTES = 16 * 2**20
"""Of a part handed on from machine to machine."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies in the row of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def parameters_of(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return name, type and shape of each parameter, in the order of their names."""
    return tuple(
        (name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape)) for name in sorted(tensors)
    )


def aligned(num_bytes: int) -> int:
    """Return the next multiple of the alignment (bytes)."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def layout(parameters: Parameters) -> list[Place]:
    """Return the place of each parameter, in the order given."""
    places, end = [], 0
    for name, dtype_name, shape in parameters:
        dtype = getattr(torch, dtype_name)
        begin = aligned(end)
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(Place(name, dtype, tuple(shape), begin, end))
    return places


def row_bytes(places: Sequence[Place]) -> int:
    """Return the size of the row (bytes)."""
    return aligned(places[-1].end)


def cuts(num_bytes: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each bucket of a row."""
    for begin in range(0, num_bytes, bucket_bytes):
        yield begin, min(begin + bucket_bytes, num_bytes)


def view_of(row: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the parameter at a place of the row of bytes, without a copy."""
    return row[place.begin : place.end].view(place.dtype).reshape(place.shape)


def ranges(row: torch.Tensor, ends: Sequence[int]) -> list[torch.Tensor]:
    """Return the parts of a row that end there (bytes), without copies."""
    return [row[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def digest(parameters: Parameters, sums: Sequence[int]) -> str:
    """Return the SHA-256 of a list of parameters and of the ``checksum64`` of each range, in hexadecimal digits."""
    return hashlib.sha256(json.dumps([parameters, sums]).encode()).hexdigest()


def label(version: int, checksum: str) -> str:
    """Return the label of a row with these weights."""
    return f"{version} {checksum}"


# ------------------------------------------------------------------------------------------ memory that workers share
#
# It has no name in any file system: other processes open it under its maker's process id, and it is freed when the last
# process has closed it or died. The trainer's ranks keep their copies in rows, too: torch rounds pinned memory up to a
# power of two, at worst to twice the size.

HEAD_BYTES = 4096
"""A page before the row, for its label."""
MOST_THREADS = 16


def machine() -> str:
    """Return a name common to all processes that can open each other's rows."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


class SharedRow:
    """A row in memory (pinned for a GPU) and the ``label`` of its weights, empty unless complete and verified.

    ``base``: label of the weights that a delta, which lies behind the weights, has turned into these. Empty: there is
    no delta.
    """

    def __init__(self, file: int, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._memory = mmap.mmap(file, HEAD_BYTES + num_bytes)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.row = whole[HEAD_BYTES : HEAD_BYTES + num_bytes]
        pinned = whole if device.type == "cuda" else None
        if pinned is not None:
            _check_cuda(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
        self._let_go = weakref.finalize(self, _let_go, file, pinned)
        self._let_go.atexit = False  # the process's end does it

    @classmethod
    def make(cls, num_bytes: int, device: torch.device) -> SharedRow:
        """Make a row; ``BackendError`` if there is not enough memory."""
        free = psutil.virtual_memory().available
        if num_bytes > free:
            raise BackendError(f"the host has no memory for a copy: {num_bytes} bytes are needed, {free} are free")
        file = os.memfd_create("pipelinerl-weights")
        os.truncate(file, HEAD_BYTES + num_bytes)
        if device.type == "cuda":
            have_pages(file)
        return cls(file, num_bytes, device)

    @classmethod
    def open(cls, path: str, num_bytes: int, device: torch.device) -> SharedRow:
        """Open a row that another process of this machine has made; ``BackendError`` if it is missing or smaller."""
        try:
            file = os.open(path, os.O_RDWR)
            if os.fstat(file).st_size < HEAD_BYTES + num_bytes:
                os.close(file)
                raise OSError("it is smaller")
        except OSError as error:
            raise BackendError(f"the row of weights at {path} cannot be seen: {error}") from None
        return cls(file, num_bytes, device)

    @property
    def label(self) -> str:
        """Name of the weights in the row; empty: none that are complete and verified."""
        return self._head[0]

    @label.setter
    def label(self, label: str) -> None:
        self.set_label(label)

    @property
    def base(self) -> str:
        """Name of the weights before the delta."""
        return self._head[1]

    def set_label(self, label: str, *, base: str = "") -> None:
        """Name the weights in the row, and those before the delta."""
        self._memory[:HEAD_BYTES] = f"{label}\n{base}".encode().ljust(HEAD_BYTES, b"\0")

    @property
    def _head(self) -> list[str]:
        return [*bytes(self._memory[:HEAD_BYTES]).rstrip(b"\0").decode().split("\n"), ""]

    def close(self) -> None:
        """Close it; its memory is freed with the last tensor that views it. A second call does nothing."""
        self._let_go()


def _let_go(file: int, pinned: torch.Tensor | None) -> None:
    if pinned is not None:
        _check_cuda(torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr()))
    os.close(file)


def have_pages(file: int) -> None:
    """Allocate the memory of an empty file, on many cores.

    Else pinning does it on one, which zeroes a gigabyte in 0.5 to 0.8 s: 10 s for the checkpoint of a 1.5B model.
    """
    first_bytes = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=np.uint8)[:: mmap.PAGESIZE]
    num_threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda part: part.fill(0), np.array_split(first_bytes, num_threads)))


def _check_cuda(status: Any) -> None:
    if int(getattr(status, "value", status)):
        raise BackendError(f"memory for weights cannot be pinned: {status}")
