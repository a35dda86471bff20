"""The thread that receives while its process does something else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import backends.transfer.broadcast  # noqa: E402
import backends.transfer.group  # noqa: E402
from backends.transfer.broadcast import NICER, Staging  # noqa: E402
from backends.transfer.checksum64 import checksum64  # noqa: E402
from backends.transfer.connection import RendezvousServer  # noqa: E402
from backends.transfer.group import Sender  # noqa: E402
from backends.transfer.row import (  # noqa: E402
    digest,
    label,
    layout,
    parameters_of,
    row_bytes,
    view_of,
)
from backends.transfer.transport import Membership  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

PARAMETERS = [("a", "float32", (40, 3)), ("b", "bfloat16", (7,))]
SHAPES = {name: shape for name, _, shape in PARAMETERS}


class Trainer:
    """Sends rows of one number."""

    def __init__(self) -> None:
        self.server = RendezvousServer.open("127.0.0.1")
        self.sender: Sender | None = None

    def join(self, num_workers: int = 1) -> None:
        names = ["trainer", *(f"engine {number}" for number in range(num_workers))]
        self.sender = Sender(self.server, names=names, parameters=PARAMETERS, timeout_s=600)
        self.sender.meet()

    def send(self, version: int, *, sums: list[int] | None = None) -> tuple[int, str]:
        places = layout(PARAMETERS)
        row = torch.zeros(row_bytes(places), dtype=torch.uint8)
        for place in places:
            view_of(row, place).fill_(version)
        right = [checksum64(view_of(row, place)) for place in places]
        assert self.sender is not None
        num_refusing = self.sender.send(row, version=version, sums=sums or right)
        return num_refusing, label(version, digest(PARAMETERS, right))


def staging(trainer: Trainer, before: Staging | None = None, **changed: Any) -> Staging:
    arguments = {"worker": 1, "shapes": SHAPES, "device": torch.device("cpu"), "timeout_s": 60.0}
    return Staging(Membership(rendezvous=trainer.server.rendezvous, **{**arguments, **changed}), before=before)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.server.close()
    if trainer.sender is not None:
        trainer.sender.leave()


def values(tensors: dict[str, Any]) -> set[float]:
    assert parameters_of(tensors) == tuple(PARAMETERS)
    return {float(value) for tensor in tensors.values() for value in tensor.reshape(-1)}


def test_weights_arrive_without_being_asked_for_and_only_what_is_there_is_given(trainer: Trainer) -> None:
    one = staging(trainer)
    with pytest.raises(BackendError, match="no weights are staged: it has not been joined yet"):
        one.staged("7 x")
    trainer.join()
    for version in (7, 8):
        num_refusing, name = trainer.send(version)
        assert num_refusing == 0
        assert values(one.staged(name)) == {version}
        with pytest.raises(BackendError, match=r"^weights 9 x are not staged: "):
            one.staged("9 x")
    refused = trainer.send(9, sums=[1, 2])
    assert refused[0] == 1
    for wrong in (refused[1], name):  # neither the new ones nor the old ones, which are overwritten
        with pytest.raises(BackendError, match="are not staged: nothing that is complete and right is"):
            one.staged(wrong)
    one.abandon()


def test_a_new_group_takes_the_row_of_the_one_before_and_what_was_staged_stays_until_then(trainer: Trainer) -> None:
    first = staging(trainer)
    trainer.join()
    _, name = trainer.send(7)
    assert trainer.sender is not None
    trainer.sender.leave()
    first._thread.join(60)
    assert not first._thread.is_alive()
    assert values(first.staged(name)) == {7}  # the sender has gone, the weights have not
    memory = first.staged(name)["a"].data_ptr()
    trainer.server = RendezvousServer.open("127.0.0.1")
    second = staging(trainer, first)
    trainer.join()
    _, name = trainer.send(8)
    assert values(second.staged(name)) == {8}
    assert second.staged(name)["a"].data_ptr() == memory
    with pytest.raises(BackendError, match="no weights are staged"):
        first.staged(name)
    second.abandon()
    second._thread.join(60)
    assert not second._thread.is_alive()


def test_a_thread_that_is_joining_a_dead_group_is_waited_for_before_the_next_makes_a_row(trainer: Trainer) -> None:
    stuck = staging(trainer)  # nobody joins there
    other = Trainer()
    waiting = staging(other, stuck, timeout_s=0.5)
    waiting._thread.join(60)
    with pytest.raises(BackendError, match=r"the group before is still being waited for, after 0.5 s"):
        waiting.staged("1 x")
    trainer.join()
    stuck._thread.join(60)
    assert not stuck._thread.is_alive()  # it was abandoned
    other.server.close()


def test_another_models_parameters_are_named_to_the_sender_and_to_whoever_loads(trainer: Trainer) -> None:
    one = staging(trainer, shapes={**SHAPES, "c": (1,)})
    with pytest.raises(BackendError, match="weights to be sent lack 1 of 3 parameters: c"):
        trainer.join()
    one._thread.join(60)
    with pytest.raises(BackendError, match=r"no weights are staged: .*lack 1 of 3 parameters: c"):
        one.staged("1 x")


def test_the_thread_and_what_it_starts_are_nicer_than_the_rest_of_the_process(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    checksum = backends.transfer.group.checksum64

    def noted(tensor: Any) -> int:
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        return checksum(tensor)

    monkeypatch.setattr(backends.transfer.group, "checksum64", noted)
    one = staging(trainer)
    trainer.join()
    assert trainer.send(1)[0] == 0
    one.abandon()
    assert set(seen) == {min(19, before + NICER)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_the_thread_runs_on_the_cores_that_its_process_does_not_use(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which they are is asked for where it is made, and set in the thread alone."""
    calls: list[tuple[str, Any]] = []
    here = threading.get_ident()

    def asked(process: int) -> set[int]:
        calls.append(("asked" if threading.get_ident() == here else "asked in the thread", process))
        return {0, 2}

    def bind(process: int, cores: set[int]) -> None:
        calls.append(("bound" if threading.get_ident() == here else "bound in the thread", cores))
        raise OSError("there are no others")

    monkeypatch.setattr(backends.transfer.broadcast.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", asked)
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    one = staging(trainer)
    trainer.join()
    assert calls[:2] == [("asked", 0), ("bound in the thread", {1, 3})]
    assert trainer.send(1)[0] == 0
    one.abandon()
