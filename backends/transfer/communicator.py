"""NCCL communicators between rank 0's GPU and the GPUs of all workers, with a fall-back through the host.

Theory of operation. The sender asks all workers to make a communicator with it. Each member makes one, tries it with 16
MB and reports its fault; the sender announces whether it is used. So a GPU shared by two members, one without room for
the weights, or a network that NCCL cannot cross costs a warning in the log: bytes go through the host's memory. A
member that has gone meanwhile ends the group. All of it happens while engines stand still: kernels that wait for peers
would stall beside decode's own collectives.

``Nccl.broadcast`` does not wait in CUDA. It polls the kernel's end and the group's connections (``check``); where a
member has gone it aborts the communicator, which ends the kernel, and raises. The watchdog of torch's process groups
would end the process. Only making a communicator, and its first row, wait in NCCL: a thread does both, which can be
abandoned. The library is torch's; only the calls used are bound here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backends.transfer.connection import Connection
from pipelinerl.errors import BackendError
from pipelinerl.util.user_code import kind_and_line

LIBRARY = "libnccl.so.2"
ID_BYTES = 128
BYTE = 1
"""``ncclUint8``."""
OK, IN_PROGRESS = 0, 7
"""``ncclSuccess``, ``ncclInProgress``."""
LOOK_S = 2e-4
"""Between two polls of a broadcast."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@functools.cache
def _library() -> Any:
    """Return NCCL; ``OSError`` if it is not installed."""
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


def _raise_fault(call: str, result: int) -> None:
    if result not in (OK, IN_PROGRESS):
        raise BackendError(f"NCCL: {call}: {_library().ncclGetErrorString(result).decode()}")


class Nccl:
    """A ``Communicator`` of GPUs."""

    @staticmethod
    def new_id() -> str:
        """Return a ``ncclUniqueId`` in hexadecimal digits."""
        common = _Id()
        _raise_fault("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(common)))
        return bytes(common).hex()

    def __init__(self, common: str, rank: int, size: int, device: torch.device) -> None:
        self._device, self._handle = device, ctypes.c_void_p()
        self._in_use = threading.Lock()
        known = _Id.from_buffer_copy(bytes.fromhex(common))
        with torch.cuda.device(device):
            _raise_fault("ncclCommInitRank", _library().ncclCommInitRank(ctypes.byref(self._handle), size, known, rank))

    def broadcast(self, row: torch.Tensor, *, check: Callable[[], None], timeout_s: float) -> None:
        """Copy rank 0's row to every member."""
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
            stream, arrived = side_stream(self._device, "transfer"), torch.cuda.Event()
            handles = self._handle, stream.cuda_stream
            _raise_fault("ncclBroadcast", _library().ncclBroadcast(memory, memory, row.numel(), BYTE, 0, *handles))
            arrived.record(stream)
            while not arrived.query():
                check()
                _raise_fault("asynchronously", _library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
                _raise_fault("asynchronously", state.value)
                if time.monotonic() > until_s:
                    raise TimeoutError("timed out")
                time.sleep(LOOK_S)

    def close(self) -> None:
        """Abort it; a thread that is using it does so itself when it finds that the group has been left."""
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
def side_stream(device: torch.device, use: str) -> torch.cuda.Stream:  # noqa: ARG001  # a key of the cache
    """Return a GPU's one stream for this use: torch keeps memory for every stream that was ever used."""
    return torch.cuda.Stream(device)


PROBE_BYTES, PROBE = 2**24, 0x5A
CHECK_S = 0.1
"""Between two checks of the other members while a communicator is made."""
MAKE_TIMEOUT_S = 60.0
"""Longest wait for all members to have made it."""
HOST = torch.device("cpu")


class Communicator(Protocol):
    """Sends bytes from device to device."""

    @staticmethod
    def new_id() -> str:
        """Return a new identifier, which all members are made with."""

    def __init__(self, common: str, rank: int, size: int, device: torch.device) -> None:
        """Return when all members have been made; ``BackendError`` if it cannot be made."""

    def broadcast(self, row: torch.Tensor, *, check: Callable[[], None], timeout_s: float) -> None:
        """Copy rank 0's row of bytes, unchanged meanwhile, to every member; return when this member's row is complete.

        ``OSError`` if ``check`` raises it (a member has gone, the group has been left) or after ``timeout_s``;
        ``BackendError`` if the copy fails. The communicator is unusable then.
        """

    def close(self) -> None:
        """Free its resources; a second call does nothing."""


COMMUNICATORS: dict[str, type[Communicator]] = {"cuda": Nccl}
"""By kind of device; others use TCP."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a communicator."""

    common: str
    """From ``new_id`` on rank 0."""
    rank: int
    """0 sends."""
    size: int
    room_bytes: int
    """For the weights under way, on every device."""
    device: torch.device


def agree(
    workers: Mapping[int, Connection], device: torch.device, room_bytes: int, timeout_s: float
) -> tuple[Communicator | None, dict[int, str]]:
    """Make a communicator with all workers (by rank, from 1); return it, or the faults by rank (the sender's part).

    ``room_bytes``: for weights under way, per device. ``OSError`` if a member has gone, or is silent for ``timeout_s``.
    """
    try:
        member = Member(COMMUNICATORS[device.type].new_id(), 0, 1 + len(workers), room_bytes, device)
    except (BackendError, OSError) as error:
        return None, {0: str(error)}
    for rank, connection in workers.items():
        connection.send(communicator=member.common, rank=rank, size=member.size, room_bytes=room_bytes)
    made, fault = _tried(member, list(workers.values()), timeout_s)
    with contextlib.ExitStack() as unless_used:
        if made is not None:
            unless_used.callback(made.close)
        for connection in workers.values():
            connection.check_open()
        replies = {0: fault} | {rank: connection.recv()["fault"] for rank, connection in workers.items()}
        faults = {rank: fault for rank, fault in replies.items() if fault}
        for connection in workers.values():
            connection.send(use=not faults)
        if faults:
            return None, faults
        unless_used.pop_all()
    return made, {}


def answer(sender: Connection, asked: Mapping[str, Any], device: torch.device, timeout_s: float) -> Communicator | None:
    """Join the sender's communicator; None if any member cannot. ``OSError`` if the sender has gone."""
    member = Member(asked["communicator"], asked["rank"], asked["size"], asked["room_bytes"], device)
    made, fault = _tried(member, [sender], timeout_s)
    with contextlib.ExitStack() as unless_used:
        if made is not None:
            unless_used.callback(made.close)
        sender.send(fault=fault)
        if not sender.recv()["use"]:
            return None
        unless_used.pop_all()
    return made


def _tried(member: Member, others: Sequence[Connection], timeout_s: float) -> tuple[Communicator | None, str]:
    """Make a communicator and try it; return it, or its fault. A closed connection to ``others`` is a fault."""
    limit_s = min(timeout_s / 2, MAKE_TIMEOUT_S)  # a member that is done waits as long again for the slowest
    until_s = time.monotonic() + limit_s
    tried: Future[Communicator] = Future()

    def check() -> None:
        for connection in others:
            connection.check_open()

    def make_and_try() -> None:
        try:
            tried.set_result(_right(member, check, limit_s))
        except Exception as error:
            tried.set_exception(error)

    threading.Thread(target=make_and_try, name="communicator", daemon=True).start()
    try:
        while not wait([tried], CHECK_S).done:
            check()
            if time.monotonic() > until_s:
                raise TimeoutError(f"no communicator of all after {limit_s:g} s")
        return tried.result(), ""
    except (BackendError, OSError, RuntimeError) as error:  # without memory torch raises a RuntimeError
        tried.add_done_callback(close_result)  # the thread may still wait in NCCL
        return None, kind_and_line(error)


def _right(member: Member, check: Callable[[], None], timeout_s: float) -> Communicator:
    device = member.device
    communicator = COMMUNICATORS[device.type](member.common, member.rank, member.size, device)
    try:
        row = torch.empty(max(member.room_bytes, PROBE_BYTES), dtype=torch.uint8, device=device)[:PROBE_BYTES]
        row.fill_(PROBE if member.rank == 0 else 0)
        settle(device)
        communicator.broadcast(row, check=check, timeout_s=timeout_s)
        if not bool((row == PROBE).all()):
            raise BackendError("what arrives is not what is sent")
    except BaseException:
        communicator.close()
        raise
    return communicator


def close_result(made: Future[Any]) -> None:
    """Close the object that a thread has made, if any: a callback for its future."""
    if made.exception() is None:
        made.result().close()


def settle(device: torch.device) -> None:
    """Wait for all work of this process on a GPU, of any thread and stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
