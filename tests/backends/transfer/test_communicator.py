"""Communicators: all members agree on one, fall back to the host where one cannot, or lose a member."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gloo_communicator import Gloo  # noqa: E402
from transfer_group import Group, load  # noqa: E402

import backends.transfer.communicator as module  # noqa: E402
from backends.transfer import streamed  # noqa: E402
from backends.transfer.communicator import COMMUNICATORS, HOST  # noqa: E402
from backends.transfer.group import Receiver  # noqa: E402

WEIGHTS = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3, dtype=torch.bfloat16)}
BUCKETS = [{name: weight} for name, weight in WEIGHTS.items()]
TIMEOUT_S = 60.0


@pytest.fixture
def new_group(group_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a group of two workers that load parameters as they arrive."""
    monkeypatch.setitem(COMMUNICATORS, "cpu", Gloo)
    Gloo.made.clear()
    return lambda timeout_s=TIMEOUT_S: group_of(2, tensors=WEIGHTS, timeout_s=timeout_s).stream()


def start_loading(group: Group, version: int, threads: ThreadPoolExecutor) -> list[Future[Any]]:
    return [threads.submit(load, worker, version) for worker in group.workers]


def test_all_agree_once_and_communicators_go_with_the_group(new_group: Any) -> None:
    group = new_group()
    for version in (1, 2):
        group.check_all_load(version, BUCKETS)
    assert sorted(one.rank for one in Gloo.made) == [0, 1, 2]
    assert not any(one.closed for one in Gloo.made)
    group.sender.leave()
    for worker in group.workers:
        worker.close()
    assert all(one.closed for one in Gloo.made)


class NoId(Gloo):
    @staticmethod
    def new_id() -> str:
        raise OSError("no such library")


class Wrong(Gloo):
    def broadcast(self, row: Any, **options: Any) -> None:
        super().broadcast(row, **options)
        row[-1] += self.rank == 1


class NoRoom(Gloo):
    def broadcast(self, row: Any, **options: Any) -> None:
        super().broadcast(row, **options)
        if self.rank == 2:
            raise torch.OutOfMemoryError("3 GiB")


class Hangs(Gloo):
    """As NCCL does in the first row, in which it does not ask whether the others are there."""

    over: threading.Event

    def broadcast(self, row: Any, **options: Any) -> None:
        self.over.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NoId, "trainer: no such library"),
        (NoRoom, "engine 1: OutOfMemoryError: 3 GiB"),
        (Wrong, "engine 0: BackendError: what arrives is not what is sent"),
        (Hangs, "engine 0: TimeoutError: no communicator of all after 1 s"),
    ],
)
def test_where_one_cannot_all_fall_back_to_the_host_and_a_warning_says_why(
    new_group: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Gloo],
    reason: str,
) -> None:
    monkeypatch.setitem(COMMUNICATORS, "cpu", kind)
    over = threading.Event()
    if kind is Hangs:
        monkeypatch.setattr(kind, "over", over, raising=False)
        monkeypatch.setattr(module, "MAKE_TIMEOUT_S", 1.0)
    group = new_group()
    with caplog.at_level(logging.WARNING, "pipelinerl"):
        for version in (1, 2):  # it is tried once
            group.check_all_load(version, BUCKETS)
    (warning,) = [one.message for one in caplog.records if "host's memory" in one.message]
    assert reason in warning
    over.set()
    until_s = time.monotonic() + TIMEOUT_S  # one that is made late is closed, too
    while not all(one.closed for one in Gloo.made) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert all(one.closed for one in Gloo.made)


def test_a_member_that_is_silent_while_all_wait_for_bytes_ends_it_for_all_after_the_time_out(
    new_group: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = new_group()
    group.check_all_load(1, BUCKETS)
    group.sender._timeout_s = 1.0  # for the sender alone: a worker that gives up before it is gone, too
    take, ended = Receiver.take, threading.Event()

    def silent(receiver: Receiver, places: Any, row: Any) -> Any:
        if receiver._communicator.rank != 2:
            return take(receiver, places, row)
        ended.wait(TIMEOUT_S)
        raise ConnectionError("lost")

    monkeypatch.setattr(Receiver, "take", silent)
    loading = start_loading(group, 2, threads)
    fault = str(group.send_buckets(2, BUCKETS))
    assert "phase=send at trainer" in fault
    assert "gone" not in fault
    assert isinstance(loading[0].exception(TIMEOUT_S), OSError)
    ended.set()
    assert isinstance(loading[1].exception(TIMEOUT_S), OSError)
    assert all(one.closed for one in Gloo.made if one.rank != 2)
    assert group.sender.left


def test_a_member_lost_while_all_agree_ends_it_for_all_at_once(
    new_group: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' time-out is 300 s away, and they do not wait for it."""
    monkeypatch.setattr(module, "MAKE_TIMEOUT_S", 300.0)
    group = new_group(600.0)

    class Leaves(Gloo):
        def __init__(self, common: str, rank: int, size: int, device: Any) -> None:
            if rank == 2:
                group.workers[1].close()
            super().__init__(common, rank, size, device)

        def broadcast(self, row: Any, *, check: Any, timeout_s: float) -> None:
            while True:
                check()
                time.sleep(0.01)

    monkeypatch.setitem(COMMUNICATORS, "cpu", Leaves)
    loading = start_loading(group, 1, threads)
    begin_s = time.monotonic()
    assert "phase=connect at trainer" in str(group.send_buckets(1, BUCKETS))
    assert all(isinstance(one.exception(TIMEOUT_S), OSError) for one in loading)
    assert time.monotonic() - begin_s < 150.0
    assert group.sender.left


def test_a_worker_receives_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, where the memory of another worker cannot be handed over."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    streamed._begin(torch.device("cuda", 3))
    streamed._begin(HOST)
    assert chosen == [torch.device("cuda", 3)]
