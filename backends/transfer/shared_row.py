"""A row of bytes in the host's memory that all workers of a machine see: one copy per machine.

It has no name in any file system. Whoever has made it can be asked for it by the number of its process, and the memory
is given back when the last process that sees it has let go of it, or has died. The trainer's ranks keep their copies in
rows, too: torch rounds pinned memory up to a power of two, to twice of what was asked for at worst.
"""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelinerl.errors import BackendError

HEAD_BYTES = 4096
"""Room before the row for what is said of it: a page (bytes)."""
MOST_THREADS = 16
"""Threads that have the system find memory for a row, at most (count)."""


def machine() -> str:
    """Return what all processes share that can see each other's rows, and no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


class SharedRow:
    """A row, and which weights lie in it, complete and verified: ``label``, empty while there are none.

    Args:
        file: Of the memory.
        num_bytes: Of the row.
        device: The GPU that will read it: the memory is pinned for it. On CPU nothing is.
    """

    def __init__(self, file: int, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        """Where other processes of this machine find it."""
        self._memory = mmap.mmap(file, HEAD_BYTES + max(1, num_bytes))
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.row = whole[HEAD_BYTES : HEAD_BYTES + num_bytes]
        """The bytes, shape [``num_bytes``]."""
        pinned = whole if device.type == "cuda" else None
        if pinned is not None:
            _check_cuda(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
        self._let_go = weakref.finalize(self, _let_go, file, pinned)
        self._let_go.atexit = False  # the process's end does it

    @classmethod
    def make(cls, num_bytes: int, device: torch.device) -> SharedRow:
        """Make a row.

        Raises:
            BackendError: If there is not enough memory.
        """
        free = _free_bytes()
        if num_bytes > free:
            raise BackendError(f"the host has no memory for a copy: {num_bytes} bytes are needed, {free} are free")
        file = os.memfd_create("pipelinerl-weights")
        os.truncate(file, HEAD_BYTES + max(1, num_bytes))
        if device.type == "cuda":
            have_pages(file)
        return cls(file, num_bytes, device)

    @classmethod
    def open(cls, path: str, num_bytes: int, device: torch.device) -> SharedRow:
        """See a row that another process of this machine has made.

        Raises:
            BackendError: If it is not there, or not as large.
        """
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
        """What lies in the row; empty: nothing that is complete and verified."""
        return bytes(self._memory[:HEAD_BYTES]).rstrip(b"\0").decode()

    @label.setter
    def label(self, label: str) -> None:
        self._memory[:HEAD_BYTES] = label.encode().ljust(HEAD_BYTES, b"\0")

    def close(self) -> None:
        """Let go of it. The memory itself goes when nothing sees its numbers any more; a second call does nothing."""
        self._let_go()


def _let_go(file: int, pinned: torch.Tensor | None) -> None:
    if pinned is not None:
        _check_cuda(torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr()))
    os.close(file)


def have_pages(file: int) -> None:
    """Have the system find memory for all of a file that is empty, on many cores.

    Else pinning does it on one, which zeroes a gigabyte in 0.5 to 0.8 s: 10 s for the checkpoint of a 1.5B model.
    """
    first_bytes = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=np.uint8)[:: mmap.PAGESIZE]
    num_threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(_zero, np.array_split(first_bytes, num_threads)))


def _zero(part: NDArray[np.uint8]) -> None:
    part[:] = 0


def _free_bytes() -> int:
    """Return the memory of this machine that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise BackendError("/proc/meminfo has no line MemAvailable")


def _check_cuda(status: Any) -> None:
    if int(getattr(status, "value", status)):
        raise BackendError(f"memory for weights cannot be pinned: {status}")
