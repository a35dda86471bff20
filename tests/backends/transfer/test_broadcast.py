"""The thread that receives while its process does something else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transfer_group import Group, Tensors, label_of  # noqa: E402

import backends.transfer.broadcast  # noqa: E402
import backends.transfer.group  # noqa: E402
from backends.transfer.broadcast import NICER, Staging  # noqa: E402
from backends.transfer.row import parameters_of  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

MakeGroup = Callable[[], Group]


def model(version: int) -> Tensors:
    return {"a": torch.full((40, 3), float(version)), "b": torch.full((7,), version, dtype=torch.bfloat16)}


def name_of(version: int) -> str:
    return label_of(model(version), version)


@pytest.fixture
def new_group(group_of: Any) -> MakeGroup:
    return lambda: group_of(1, tensors=model(0))


def staging(group: Group, before: Staging | None = None, **changed: Any) -> Staging:
    one = Staging(group.member(1, **changed), before=before)
    group.ends.callback(one.abandon)
    return one


def values(tensors: Tensors) -> set[float]:
    assert parameters_of(tensors) == parameters_of(model(0))
    return {float(value) for tensor in tensors.values() for value in tensor.reshape(-1)}


def check_ends(one: Staging) -> None:
    one._thread.join(60)
    assert not one._thread.is_alive()


def test_weights_arrive_unasked_and_no_others_are_given(new_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_group()
    one = staging(group)
    monkeypatch.setattr(backends.transfer.broadcast, "JOINED_S", 0.01)
    with pytest.raises(BackendError, match="no weights are staged: it has not been joined yet"):
        one.staged("7 x")
    group.meet()
    for version in (7, 8):
        assert group.send(version, tensors=model(version)) == 0
        assert values(dict(one.staged(name_of(version)))) == {version}
        with pytest.raises(BackendError, match=r"^weights 9 x are not staged: "):
            one.staged("9 x")
    assert group.send(9, tensors=model(9), label_as=model(8)) == 1
    for version in (9, 8):  # neither the refused ones nor the old ones, which are overwritten
        with pytest.raises(BackendError, match="are not staged: nothing that is complete and right is"):
            one.staged(name_of(version))


def test_a_new_group_takes_the_row_of_the_one_before_whose_weights_stay_until_then(new_group: MakeGroup) -> None:
    before, after = new_group(), new_group()
    first = staging(before)
    before.meet()
    before.send(7, tensors=model(7))
    before.sender.leave()
    check_ends(first)
    assert values(dict(first.staged(name_of(7)))) == {7}  # the sender has gone, the weights have not
    memory = dict(first.staged(name_of(7)))["a"].data_ptr()
    second = staging(after, first)
    after.meet()
    after.send(8, tensors=model(8))
    assert values(dict(second.staged(name_of(8)))) == {8}
    assert dict(second.staged(name_of(8)))["a"].data_ptr() == memory
    with pytest.raises(BackendError, match="no weights are staged"):
        first.staged(name_of(8))
    second.abandon()
    check_ends(second)


def test_a_thread_that_is_joining_a_dead_group_is_waited_for_before_the_next_makes_a_row(new_group: MakeGroup) -> None:
    dead = new_group()
    stuck = staging(dead)  # nobody joins there
    waiting = staging(new_group(), stuck, timeout_s=0.5)
    check_ends(waiting)
    with pytest.raises(BackendError, match=r"the group before is still being waited for, after 0.5 s"):
        waiting.staged("1 x")
    dead.meet()
    check_ends(stuck)  # it was abandoned


def test_the_thread_and_its_threads_have_a_lower_priority_than_the_rest_of_the_process(
    new_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    checksum = backends.transfer.group.checksum64

    def noted(tensor: Any) -> int:
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        return checksum(tensor)

    monkeypatch.setattr(backends.transfer.group, "checksum64", noted)
    group = new_group()
    staging(group)
    group.meet()
    assert group.send(1) == 0
    assert set(seen) == {min(19, before + NICER)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_the_thread_runs_on_the_cores_that_its_process_does_not_use(
    new_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores are read where the thread is made, and set in the thread alone."""
    calls: list[tuple[bool, Any]] = []  # whether in this thread, and the argument
    here = threading.get_ident()

    def read(process: int) -> set[int]:
        calls.append((threading.get_ident() == here, process))
        return {0, 2}

    def bind(process: int, cores: set[int]) -> None:
        calls.append((threading.get_ident() == here, cores))
        raise OSError("there are no others")

    monkeypatch.setattr(backends.transfer.broadcast.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", read)
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    group = new_group()
    staging(group)
    group.meet()
    assert calls[:2] == [(True, 0), (False, {1, 3})]
    assert group.send(1) == 0
