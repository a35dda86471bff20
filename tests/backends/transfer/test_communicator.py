"""Bytes from device to device: who agrees to it, what happens where one cannot, what the loss of a member leaves."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gloo_communicator import Gloo  # noqa: E402
from transfer_group import Meeting, Source  # noqa: E402

import backends.transfer.communicator as module  # noqa: E402
from backends.transfer import streamed as streaming  # noqa: E402
from backends.transfer.communicator import COMMUNICATORS, HOST  # noqa: E402
from backends.transfer.group import Receiver  # noqa: E402
from backends.transfer.row import parameters_of  # noqa: E402
from backends.transfer.streamed import Streaming  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

WEIGHTS = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3, dtype=torch.bfloat16)}
PARAMETERS = parameters_of(WEIGHTS)
SHAPES = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
NUM_WORKERS = 2
TIMEOUT_S = 60.0
made: list[Noted] = []


class Noted(Gloo):
    """It is known which there are."""

    def __init__(self, common: str, rank: int, size: int, device: Any) -> None:
        super().__init__(common, rank, size, device)
        made.append(self)


def sends(meeting: Meeting, version: int) -> str | None:
    return meeting.streams.send(Source(PARAMETERS, [{name: WEIGHTS[name]} for name in WEIGHTS]), version)


@pytest.fixture
def group(meet: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(COMMUNICATORS, "cpu", Noted)
    made.clear()
    return lambda timeout_s=TIMEOUT_S: meet(NUM_WORKERS, tensors=WEIGHTS, timeout_s=timeout_s).stream()


def arrives(worker: Streaming, version: int) -> bool:
    got = {name: tensor.clone() for name, tensor in worker.arriving(version)}
    return list(got) == list(WEIGHTS) and all(torch.equal(got[name], weight) for name, weight in WEIGHTS.items())


def test_all_agree_once_and_what_they_have_made_goes_with_the_group(group: Any, threads: ThreadPoolExecutor) -> None:
    there = group()
    for version in (1, 2):
        loading = [threads.submit(arrives, worker, version) for worker in there.workers]
        assert sends(there, version) is None
        assert all(one.result(TIMEOUT_S) for one in loading)
    assert sorted(one.rank for one in made) == [0, 1, 2]
    assert not any(one.closed for one in made)
    there.group.leave()
    for worker in there.workers:
        worker.abandon()
    assert all(one.closed for one in made)


class NoId(Noted):
    @staticmethod
    def new_id() -> str:
        raise OSError("no such library")


class CannotBeMade(Noted):
    def __init__(self, common: str, rank: int, size: int, device: Any) -> None:
        super().__init__(common, rank, size, device)
        if rank == 2:
            made.remove(self)
            raise BackendError("invalid usage")


class Wrong(Noted):
    def broadcast(self, row: Any, **options: Any) -> None:
        super().broadcast(row, **options)
        row[-1] += self.rank == 1


class NoRoom(Noted):
    def broadcast(self, row: Any, **options: Any) -> None:
        if self.rank == 2:
            raise torch.OutOfMemoryError("3 GiB")
        super().broadcast(row, **options)


class Late(Noted):
    """Comes when all have waited long enough."""

    over: threading.Event


class NeverMade(Late):
    def __init__(self, common: str, rank: int, size: int, device: Any) -> None:
        if rank == 1:
            self.over.wait(TIMEOUT_S)
        super().__init__(common, rank, size, device)


class Hangs(Late):
    """As NCCL does in the first row, in which nobody is asked whether the others are there."""

    def broadcast(self, row: Any, **options: Any) -> None:
        self.over.wait(TIMEOUT_S)


def time_stands_until_engine_1_has_said_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the others, which wait for it, have waited long enough."""
    said, tried = threading.Event(), module._tried

    def noted(member: Any, *others: Any) -> Any:
        answer = tried(member, *others)
        if member.rank == 2:
            said.set()
        return answer

    monkeypatch.setattr(module, "_tried", noted)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1e6 if said.is_set() else 0.0))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NoId, "trainer: no such library"),
        (CannotBeMade, "engine 1: BackendError: invalid usage"),
        (NoRoom, "engine 1: OutOfMemoryError: 3 GiB"),
        (Wrong, "engine 0: BackendError: what arrives is not what is sent"),
        (NeverMade, "engine 0: TimeoutError: no communicator of all after 1 s"),
        (Hangs, "engine 0: TimeoutError: no communicator of all after 1 s"),
    ],
)
def test_where_one_cannot_all_take_the_way_through_the_host_and_a_line_says_why(
    group: Any,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Noted],
    reason: str,
) -> None:
    monkeypatch.setitem(COMMUNICATORS, "cpu", kind)
    over = threading.Event()
    if issubclass(kind, Late):
        monkeypatch.setattr(kind, "over", over, raising=False)
        monkeypatch.setattr(module, "MAKE_TIMEOUT_S", 1.0)
    elif kind in (CannotBeMade, NoRoom):
        time_stands_until_engine_1_has_said_what_is_wrong(monkeypatch)
        monkeypatch.setattr(module, "MAKE_TIMEOUT_S", 2.0)
    there = group()
    with caplog.at_level(logging.WARNING, "pipelinerl"):
        for version in (1, 2):  # it is tried once
            loading = [threads.submit(arrives, worker, version) for worker in there.workers]
            assert sends(there, version) is None
            assert all(one.result(TIMEOUT_S) for one in loading)
    said = [one.message for one in caplog.records if "host's memory" in one.message]
    assert len(said) == 1
    assert reason in said[0]
    over.set()
    until_s = time.monotonic() + TIMEOUT_S  # who comes late is closed, too
    while not all(one.closed for one in made) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert all(one.closed for one in made)


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "silent"])
def test_a_member_lost_while_all_wait_for_bytes_ends_it_for_all(
    group: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """One that has gone ends it at once, its connection being closed; one that is silent when the time is over."""
    there = group()
    loading = [threads.submit(arrives, worker, 1) for worker in there.workers]
    assert sends(there, 1) is None
    assert all(one.result(TIMEOUT_S) for one in loading)
    if not gone:  # from now on, and for the sender alone: a worker that gives up before it has gone, too
        there.group._timeout_s = 1.0
    take, ended = Receiver.take, threading.Event()

    def lost(receiver: Receiver, places: Any, row: Any) -> Any:
        if receiver._communicator.rank != 2:
            return take(receiver, places, row)
        if gone:
            receiver.close()
        ended.wait(TIMEOUT_S)
        raise ConnectionError("lost")

    monkeypatch.setattr(Receiver, "take", lost)
    loading = [threads.submit(arrives, worker, 2) for worker in there.workers]
    fault = sends(there, 2)
    assert "phase=send at trainer" in str(fault)
    assert ("gone" in str(fault)) == gone
    assert isinstance(loading[0].exception(TIMEOUT_S), OSError)
    ended.set()
    assert isinstance(loading[1].exception(TIMEOUT_S), OSError)
    assert all(one.closed for one in made if one.rank != 2)
    assert there.group.left


def test_a_member_lost_while_all_agree_ends_it_for_all_at_once(
    group: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others wait for is 300 s away, and they do not wait for it."""
    monkeypatch.setattr(module, "MAKE_TIMEOUT_S", 300.0)
    there = group(600.0)

    class Leaves(Noted):
        def __init__(self, common: str, rank: int, size: int, device: Any) -> None:
            if rank == 2:
                there.workers[1].abandon()
            super().__init__(common, rank, size, device)

        def broadcast(self, row: Any, *, check: Any, timeout_s: float) -> None:
            while True:
                check()
                time.sleep(0.01)

    monkeypatch.setitem(COMMUNICATORS, "cpu", Leaves)
    loading = [threads.submit(arrives, worker, 1) for worker in there.workers]
    begin_s = time.monotonic()
    fault = sends(there, 1)
    assert "phase=connect at trainer" in str(fault)
    assert all(isinstance(one.exception(TIMEOUT_S), OSError) for one in loading)
    assert time.monotonic() - begin_s < 150.0
    assert there.group.left


def test_a_worker_receives_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, where the memory of another worker cannot be handed over."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    streaming._begin(torch.device("cuda", 3))
    streaming._begin(HOST)
    assert chosen == [torch.device("cuda", 3)]
