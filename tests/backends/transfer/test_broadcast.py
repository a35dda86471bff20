"""The thread that receives while its process does something else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transfer_group import Meeting, Tensors, digest_of, row_of, sums_of  # noqa: E402

import backends.transfer.broadcast  # noqa: E402
import backends.transfer.group  # noqa: E402
from backends.transfer.broadcast import NICER, Staging  # noqa: E402
from backends.transfer.group import Sender  # noqa: E402
from backends.transfer.row import label, parameters_of  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

Group = Callable[[], Meeting]


def model(version: int) -> Tensors:
    return {"a": torch.full((40, 3), float(version)), "b": torch.full((7,), version, dtype=torch.bfloat16)}


@pytest.fixture
def group(meet: Any) -> Group:
    return lambda: meet(1, tensors=model(0))


def staging(group: Meeting, before: Staging | None = None, **changed: Any) -> Staging:
    one = Staging(group.member(1, **changed), before=before)
    group.made.append(one)
    return one


def send(sender: Sender, version: int, *, sums: list[int] | None = None) -> tuple[int, str]:
    """Send a version; return how many refuse it, and its label."""
    tensors = model(version)
    num_refusing = sender.send(row_of(tensors), version=version, sums=sums or sums_of(tensors))
    return num_refusing, label(version, digest_of(tensors))


def values(tensors: Tensors) -> set[float]:
    assert parameters_of(tensors) == parameters_of(model(0))
    return {float(value) for tensor in tensors.values() for value in tensor.reshape(-1)}


def test_weights_arrive_without_being_asked_for_and_only_what_is_there_is_given(group: Group) -> None:
    rendezvous = group()
    one = staging(rendezvous)
    with pytest.raises(BackendError, match="no weights are staged: it has not been joined yet"):
        one.staged("7 x")
    sender = rendezvous.sender()
    for version in (7, 8):
        num_refusing, name = send(sender, version)
        assert num_refusing == 0
        assert values(one.staged(name)) == {version}
        with pytest.raises(BackendError, match=r"^weights 9 x are not staged: "):
            one.staged("9 x")
    refused = send(sender, 9, sums=[1, 2])
    assert refused[0] == 1
    for wrong in (refused[1], name):  # neither the new ones nor the old ones, which are overwritten
        with pytest.raises(BackendError, match="are not staged: nothing that is complete and right is"):
            one.staged(wrong)


def test_a_new_group_takes_the_row_of_the_one_before_and_what_was_staged_stays_until_then(group: Group) -> None:
    before, after = group(), group()
    first, sender = staging(before), before.sender()
    _, name = send(sender, 7)
    sender.leave()
    first._thread.join(60)
    assert not first._thread.is_alive()
    assert values(first.staged(name)) == {7}  # the sender has gone, the weights have not
    memory = first.staged(name)["a"].data_ptr()
    second = staging(after, first)
    _, name = send(after.sender(), 8)
    assert values(second.staged(name)) == {8}
    assert second.staged(name)["a"].data_ptr() == memory
    with pytest.raises(BackendError, match="no weights are staged"):
        first.staged(name)
    second.abandon()
    second._thread.join(60)
    assert not second._thread.is_alive()


def test_a_thread_that_is_joining_a_dead_group_is_waited_for_before_the_next_makes_a_row(group: Group) -> None:
    dead = group()
    stuck = staging(dead)  # nobody joins there
    waiting = staging(group(), stuck, timeout_s=0.5)
    waiting._thread.join(60)
    with pytest.raises(BackendError, match=r"the group before is still being waited for, after 0.5 s"):
        waiting.staged("1 x")
    dead.sender()
    stuck._thread.join(60)
    assert not stuck._thread.is_alive()  # it was abandoned


def test_another_models_parameters_are_named_to_the_sender_and_to_whoever_loads(group: Group) -> None:
    rendezvous = group()
    one = staging(rendezvous, shapes={"a": (40, 3), "b": (7,), "c": (1,)})
    with pytest.raises(BackendError, match="weights to be sent lack 1 of 3 parameters: c"):
        rendezvous.sender()
    one._thread.join(60)
    with pytest.raises(BackendError, match=r"no weights are staged: .*lack 1 of 3 parameters: c"):
        one.staged("1 x")


def test_the_thread_and_what_it_starts_are_nicer_than_the_rest_of_the_process(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    checksum = backends.transfer.group.checksum64

    def noted(tensor: Any) -> int:
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        return checksum(tensor)

    monkeypatch.setattr(backends.transfer.group, "checksum64", noted)
    rendezvous = group()
    one = staging(rendezvous)
    assert send(rendezvous.sender(), 1)[0] == 0
    one.abandon()
    assert set(seen) == {min(19, before + NICER)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_the_thread_runs_on_the_cores_that_its_process_does_not_use(
    group: Group, monkeypatch: pytest.MonkeyPatch
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
    rendezvous = group()
    staging(rendezvous)
    sender = rendezvous.sender()
    assert calls[:2] == [("asked", 0), ("bound in the thread", {1, 3})]
    assert send(sender, 1)[0] == 0
