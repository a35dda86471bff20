"""Calls of NCCL, on stand-ins for the library and for the GPU."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from backends.transfer import communicator as nccl  # noqa: E402
from backends.transfer.communicator import Nccl  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

HANDLE, STREAM = 7, 5
REMOTE_ERROR = 6
GPU = torch.device("cuda", 3)


class Library:
    """Notes calls; their results are settings. A row arrives after so many ``looks``; None: never."""

    looks: int | None = None

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.aborted: list[int] = []
        self.made = self.sent = self.state = 0

    def ncclGetUniqueId(self, common: Any) -> int:
        common._obj.internal = bytes(range(1, 129))
        return 0

    def ncclCommInitRank(self, handle: Any, size: int, common: Any, rank: int) -> int:
        self.calls.append((bytes(common), rank, size))
        handle._obj.value = None if self.made else HANDLE
        return self.made

    def ncclBroadcast(self, *arguments: Any) -> int:
        *plain, handle, stream = arguments
        self.calls.append((*plain, handle.value, stream))
        return self.sent

    def ncclCommGetAsyncError(self, handle: Any, state: Any) -> int:
        assert handle.value == HANDLE
        state._obj.value = self.state
        return 0

    def ncclCommAbort(self, handle: Any) -> int:
        self.aborted.append(handle.value)
        return 0

    def ncclGetErrorString(self, result: int) -> bytes:
        return f"result {result}".encode()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()

    class Event:
        def record(self, stream: Any) -> None:
            assert stream.cuda_stream == STREAM
            self.left = made.looks

        def query(self) -> bool:
            self.left = None if self.left is None else self.left - 1
            return self.left is not None and self.left < 0

    monkeypatch.setattr(nccl, "_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(device.index))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(nccl, "side_stream", lambda *_: SimpleNamespace(cuda_stream=STREAM))
    return made


ROW = torch.zeros(48, dtype=torch.uint8)


def all_there() -> None:
    pass


def gone() -> None:
    raise ConnectionError("the other end has gone")


def test_members_have_one_id_and_send_from_rank_0_into_the_same_memory(library: Library) -> None:
    common = Nccl.new_id()
    one = Nccl(common, 2, 4, GPU)
    library.looks = 3
    one.broadcast(ROW, check=all_there, timeout_s=60.0)
    assert library.calls == [
        (bytes(range(1, 129)), 2, 4),
        (ROW.data_ptr(), ROW.data_ptr(), 48, nccl.BYTE, 0, HANDLE, STREAM),
    ]
    assert not library.aborted
    one.close()
    one.close()
    assert library.aborted == [HANDLE]


def test_a_communicator_that_cannot_be_made_says_why_in_a_line(library: Library) -> None:
    library.made = 5
    with pytest.raises(BackendError, match=r"^NCCL: ncclCommInitRank: result 5$"):
        Nccl("00" * nccl.ID_BYTES, 0, 2, GPU)


@pytest.mark.parametrize(
    ("check", "settings", "timeout_s", "error", "says"),
    [
        (gone, {}, 60.0, ConnectionError, "the other end has gone"),
        (all_there, {"state": REMOTE_ERROR}, 60.0, BackendError, "NCCL: asynchronously: result 6"),
        (all_there, {"sent": 5}, 60.0, BackendError, "NCCL: ncclBroadcast: result 5"),
        (all_there, {}, 0.05, TimeoutError, "timed out"),
    ],
    ids=["gone", "remote error", "refused", "silent"],
)
def test_a_failure_ends_the_kernel_and_the_communicator_once(
    library: Library, check: Any, settings: dict[str, int], timeout_s: float, error: Any, says: str
) -> None:
    one = Nccl(Nccl.new_id(), 1, 2, GPU)
    for name, value in settings.items():
        setattr(library, name, value)
    with pytest.raises(error, match=f"^{says}$"):
        one.broadcast(ROW, check=check, timeout_s=timeout_s)
    assert library.aborted == [HANDLE]
    with pytest.raises(ConnectionError):
        one.broadcast(ROW, check=all_there, timeout_s=60.0)
    one.close()
    assert library.aborted == [HANDLE]


def test_a_broadcast_ends_its_communicator_when_another_thread_leaves(
    library: Library, threads: ThreadPoolExecutor
) -> None:
    """NCCL does not say that two threads may use a communicator at a time; so ``close`` aborts none in use."""
    one = Nccl(Nccl.new_id(), 1, 2, GPU)
    looked, left = threading.Event(), threading.Event()

    def check() -> None:
        looked.set()
        if left.is_set():
            gone()

    waiting = threads.submit(one.broadcast, ROW, check=check, timeout_s=60.0)
    assert looked.wait(60.0)
    one.close()
    assert not library.aborted
    left.set()
    assert isinstance(waiting.exception(60.0), ConnectionError)
    assert library.aborted == [HANDLE]
