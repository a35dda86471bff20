"""Bytes from rank 0's GPU to those of all workers, by NCCL: a communicator that a lost member does not take along.

Theory of operation. All members make it at the same time, and then call ``broadcast`` for the same rows in the same
order. Its kernels wait for peers, on a stream of their own: that is safe
while engines stand still, as every peer begins without waiting for anything of this GPU; beside decode it is not.

The calling thread does not wait in CUDA. It looks whether the kernel has ended, and whether the others are still there
(``check``); where somebody is not, it aborts the communicator, which ends the kernel, and raises. torch's own process
groups have a watchdog instead, which ends the process. Only making it, and its first row, for which connections are
made, wait in NCCL: ``communicator.py`` does both in a thread that can be left.

The library is torch's. Only what is used of it is bound here.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from pipelinerl.errors import BackendError

LIBRARY = "libnccl.so.2"
ID_BYTES = 128
"""Size of what members of a communicator have in common (bytes)."""
BYTE = 1
"""The type of what is sent: ``ncclUint8``."""
OK, IN_PROGRESS = 0, 7
"""Results: ``ncclSuccess``, ``ncclInProgress``."""
LOOK_S = 2e-4
"""Time between two looks at whether a row has arrived (seconds)."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@functools.cache
def _library() -> Any:
    """Return NCCL.

    Raises:
        OSError: If it is not there.
    """
    library, pointer = ctypes.CDLL(LIBRARY), ctypes.c_void_p
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [ctypes.c_int]
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_Id)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, _Id, ctypes.c_int]
    library.ncclBroadcast.argtypes = [
        pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer
    ]  # fmt: skip
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def _checked(what: str, result: int) -> None:
    if result not in (OK, IN_PROGRESS):
        raise BackendError(f"NCCL: {what}: {_library().ncclGetErrorString(result).decode()}")


class Nccl:
    """A communicator of GPUs (mutable); ``communicator.py`` says what its methods do."""

    @staticmethod
    def new_id() -> str:
        """Return what its members have in common."""
        common = _Id()
        _checked("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(common)))
        return bytes(common).hex()

    def __init__(self, common: str, rank: int, size: int, device: torch.device) -> None:
        self._device, self._handle = device, ctypes.c_void_p()
        self._in_use = threading.Lock()
        known = _Id.from_buffer_copy(bytes.fromhex(common))
        with torch.cuda.device(device):
            _checked("ncclCommInitRank", _library().ncclCommInitRank(ctypes.byref(self._handle), size, known, rank))

    def broadcast(self, row: torch.Tensor, *, check: Callable[[], None], timeout_s: float) -> None:
        """Send a row of bytes from rank 0 to all others."""
        with self._in_use:
            if not self._handle:
                raise ConnectionError("the group has been left")
            try:
                self._broadcast(row, check, time.monotonic() + timeout_s)
            except BaseException:
                self._abort()
                raise

    def _broadcast(self, row: torch.Tensor, check: Callable[[], None], until_s: float) -> None:
        memory, state = row.data_ptr(), ctypes.c_int()
        with torch.cuda.device(self._device):
            stream, arrived = _stream(self._device), torch.cuda.Event()
            handles = self._handle, stream.cuda_stream
            _checked("ncclBroadcast", _library().ncclBroadcast(memory, memory, row.numel(), BYTE, 0, *handles))
            arrived.record(stream)
            while not arrived.query():
                check()
                _checked("asynchronously", _library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
                _checked("asynchronously", state.value)
                if time.monotonic() > until_s:
                    raise TimeoutError("timed out")
                time.sleep(LOOK_S)

    def close(self) -> None:
        """Abort it, unless another thread uses it, which does so itself when it sees that the group has been left."""
        if self._in_use.acquire(blocking=False):
            try:
                self._abort()
            finally:
                self._in_use.release()

    def _abort(self) -> None:
        if self._handle:
            handle, self._handle = self._handle, ctypes.c_void_p()
            _library().ncclCommAbort(handle)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of what is sent: one, as torch keeps memory for every stream that was ever used."""
    return torch.cuda.Stream(device)
