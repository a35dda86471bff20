"""Weights from a sender to receivers' rows: between threads and processes, without vLLM and DeepSpeed."""

from __future__ import annotations

import multiprocessing
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transfer_group import CPU, Group, held_by, label_of, weights  # noqa: E402

import backends.transfer.group  # noqa: E402
import backends.transfer.rendezvous  # noqa: E402
from backends.transfer.group import LinkSender, Receiver, receive  # noqa: E402
from backends.transfer.rendezvous import Connection, RendezvousServer, connect, recv_bytes  # noqa: E402
from backends.transfer.row import parameters_of  # noqa: E402
from backends.transfer.transport import Membership  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

GroupOf = Callable[..., Group]
SHAPES = {name: tuple(one.shape) for name, one in weights().items()}


def take(receiver: Receiver) -> tuple[bool, str]:
    """Receive once; return whether it was right, and the row's label."""
    return receiver.receive(receiver.next_transfer()), receiver.row.label


def test_all_machines_get_the_weights_and_one_wrong_bit_is_refused_by_all(
    group_of: GroupOf, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(backends.transfer.group, "BUCKET_BYTES", 100)
    group = group_of(3)
    sent, receivers = group.tensors, group.join()
    wrong = {**sent, "c.bias": sent["c.bias"].clone()}
    wrong["c.bias"].view(torch.uint8)[5] ^= 1
    for version, tensors, refused in ((7, sent, 0), (8, wrong, 3), (9, sent, 0)):
        taking = [threads.submit(take, one) for one in receivers]
        assert group.send(version, tensors=tensors, label_as=sent) == refused
        assert {one.result() for one in taking} == {(False, "") if refused else (True, label_of(sent, version))}
    for receiver in receivers:
        assert parameters_of(held_by(receiver)) == parameters_of(sent)
        assert all(torch.equal(tensor, sent[name]) for name, tensor in held_by(receiver).items())
        receiver.close()
    group.sender.leave("enough")
    group.sender.leave()
    assert group.sender.left
    with pytest.raises(BackendError, match=r"^the group has been left: enough$"):
        group.send(1)


def test_one_worker_of_a_machine_receives_and_all_of_it_see_the_row(
    group_of: GroupOf, threads: ThreadPoolExecutor
) -> None:
    group = group_of(4)
    receivers = group.join("one", "other", "one", "other")
    assert [one.leads for one in receivers] == [True, True, False, False]
    taking = [threads.submit(take, one) for one in receivers[:2]]
    assert group.send(3) == 0
    assert all(one.result()[0] for one in taking)
    for receiver in receivers:
        assert receiver.row.label == label_of(group.tensors, 3)
        assert all(torch.equal(tensor, group.tensors[name]) for name, tensor in held_by(receiver).items())
    receivers[0].row.row[0] ^= 1  # the same memory, seen twice
    assert torch.equal(receivers[2].row.row, receivers[0].row.row)
    assert not torch.equal(receivers[1].row.row, receivers[0].row.row)


def test_a_row_is_used_again_if_it_fits(group_of: GroupOf) -> None:
    rows: list[Any] = [None]
    for tensors in (weights(), weights(), {"other": torch.ones(3)}):
        group = group_of(1, tensors=tensors)
        rows.append(group.join(reuse=rows[-1])[0].row)
        assert rows[-1].label == ""
        rows[-1].label = "old"
        group.sender.leave()
    assert rows[1] is rows[2] is not rows[3]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({name: shape for name, shape in SHAPES.items() if name != "c.bias"}, "have unknown 1 of 3 parameters: c.bias"),
        ({**SHAPES, "empty": (4, 0)}, "have a wrong shape in 1 of 4 parameters: empty"),
        ({**SHAPES, "d": (1,)}, "lack 1 of 5 parameters: d"),
    ],
)
def test_parameters_of_another_model_are_refused_when_a_group_is_made(
    group_of: GroupOf, threads: ThreadPoolExecutor, shapes: Any, text: str
) -> None:
    group = group_of(2)
    joining = [threads.submit(group.receiver, 1), threads.submit(group.receiver, 2, shapes=shapes)]
    with pytest.raises(BackendError, match=f"phase=join at trainer .*weights to be sent {text}"):
        group.meet()
    assert text in str(joining[1].exception(timeout=600))
    with pytest.raises(BackendError, match="phase=join at ") as other:
        joining[0].result(timeout=600)
    assert "timed out" not in str(other.value)  # it does not wait for that


def test_a_waiting_receiver_ends_at_once_when_it_is_closed_or_the_sender_goes(
    group_of: GroupOf, threads: ThreadPoolExecutor
) -> None:
    group = group_of(2)
    receivers = group.join()
    waiting = [threads.submit(one.next_transfer) for one in receivers]
    time.sleep(0.1)
    assert not any(one.done() for one in waiting)
    receivers[0].close()
    assert isinstance(waiting[0].exception(timeout=600), ConnectionError)
    assert not waiting[1].done()
    group.sender.leave()
    assert isinstance(waiting[1].exception(timeout=600), ConnectionError)


def test_leaving_ends_a_transfer_to_a_silent_machine_at_once(group_of: GroupOf, threads: ThreadPoolExecutor) -> None:
    """Its connection stays open, as that of a machine without power; nobody waits for a time-out."""
    group = group_of(3, timeout_s=1000.0)
    silent, *others = group.join()
    taking = [threads.submit(take, one) for one in others]
    sending = threads.submit(group.send, 1)
    silent.next_transfer()
    assert not any(one.done() for one in (sending, *taking))
    group.sender.leave("engine 0 is lost")
    pattern = r"^transfer failed: phase=send at trainer after \d+\.\d s; engine 0 is lost$"
    assert re.match(pattern, str(sending.exception(timeout=600)))
    assert all(isinstance(one.exception(timeout=600), OSError) for one in taking)
    assert [one.row.label for one in others] == ["", ""]  # a row that is filled in part has no label


def test_leaving_ends_a_rendezvous_at_once(group_of: GroupOf, threads: ThreadPoolExecutor) -> None:
    group = group_of(2, timeout_s=1000.0)
    joining, meeting = threads.submit(group.receiver, 1), threads.submit(group.meet)
    while 1 not in group.sender._connections:
        time.sleep(0.01)
    group.sender.leave("engine 1 is lost")
    pattern = r"^transfer failed: phase=join at trainer after \d+\.\d s; engine 1 is lost$"
    assert re.match(pattern, str(meeting.exception(timeout=600)))
    assert isinstance(joining.exception(timeout=600), BackendError)


def test_a_peer_without_the_password_is_turned_away(group_of: GroupOf) -> None:
    group = group_of(1)
    address, port, _ = group.at.split(":")
    strangers = [
        connect(f"{address}:{port}:guess", timeout_s=600, worker=1, place="", rendezvous=""),
        connect(f"{address}:{port}:", timeout_s=600),
    ]
    noise = socket.create_connection((address, int(port)))
    noise.sendall(b"\xff" * 100)
    assert group.join()[0].leads
    for stranger in strangers:
        with pytest.raises(OSError, match=r"gone|reset"):
            stranger.recv()
        stranger.close()
    noise.close()
    with pytest.raises(OSError, match="refused"):  # the server is closed when all are there
        connect(f"{address}:{port}:", timeout_s=5)


def test_a_connection_that_breaks_at_the_first_message_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[Connection] = []

    def send(connection: Connection, **_: Any) -> None:
        connections.append(connection)
        raise BrokenPipeError

    monkeypatch.setattr(Connection, "send", send)
    server = RendezvousServer.open("127.0.0.1")
    with pytest.raises(BrokenPipeError):
        connect(server.rendezvous, timeout_s=600)
    server.close()
    assert connections[0].sock.fileno() == -1


def test_a_silent_peer_holds_nobody_up_and_is_admitted_when_it_speaks(
    group_of: GroupOf, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """On a busy machine a thread that connects may wait long for a processor before it sends its first message."""
    monkeypatch.setattr(backends.transfer.rendezvous, "HELLO_TIMEOUT_S", 0.01)
    group = group_of(2)
    address, port, password = group.at.split(":")
    slow = Connection(socket.create_connection((address, int(port))), 600)
    joining, meeting = threads.submit(group.receiver, 2), threads.submit(group.meet)
    while 2 not in group.sender._connections:
        time.sleep(0.01)
    slow.send(password=password, worker=1, place="machine 1", rendezvous=f"{address}:{port}:{password}")
    assert slow.recv()["leads"]
    slow.close()
    assert isinstance(meeting.exception(timeout=600), BackendError)
    assert isinstance(joining.exception(timeout=600), BackendError)


def test_a_member_that_does_not_join_and_a_closed_rendezvous_are_named(group_of: GroupOf) -> None:
    with pytest.raises(BackendError, match=r"phase=join at trainer after \S+ s; engine 0 did not come; "):
        group_of(1, timeout_s=0.5).meet()
    with pytest.raises(BackendError, match=r"^transfer failed: phase=join at 127.0.0.1:1 after .*refused"):
        group_of(1, timeout_s=0.5).receiver(1, rendezvous="127.0.0.1:1:secret")


def test_a_machine_that_does_not_answer_is_told_from_one_that_has_gone(
    group_of: GroupOf, threads: ThreadPoolExecutor
) -> None:
    group = group_of(3)
    first, _, gone = group.join()
    group.sender._connections[2]._timeout_s = 1.0
    taking = threads.submit(take, first)
    gone.close()
    pattern = r"^transfer failed: phase=send at trainer after \S+ s; engine 1: timed out; engine 2 has gone; "
    with pytest.raises(BackendError, match=pattern) as failure:
        group.send(1)
    assert taking.result()[0]  # it has all that it needs
    with pytest.raises(BackendError, match="the group has been left: transfer failed: phase=send") as again:
        group.send(1)
    assert str(failure.value) in str(again.value)


def _process(rendezvous: str, results: Any) -> None:
    """Receive once, then die in the middle of the next transfer."""
    member = Membership(rendezvous=rendezvous, worker=1, shapes=SHAPES, device=CPU, timeout_s=600)
    receiver = Receiver(member, place="1")
    results.put(take(receiver))
    receiver.next_transfer()
    recv_bytes(receiver._before[0].sock, memoryview(bytearray(1000)))
    multiprocessing.current_process().kill()


@pytest.mark.slow
def test_a_death_in_the_chain_is_noticed_at_once_by_all_and_a_new_group_can_be_made(
    group_of: GroupOf, threads: ThreadPoolExecutor, spawned: Any
) -> None:
    group = group_of(2, timeout_s=600.0)  # the process imports torch first
    results, joining = spawned(_process, group.at), threads.submit(group.receiver, 2)
    group.meet()
    survivor = joining.result()
    taking = threads.submit(take, survivor)
    assert group.send(1) == 0
    assert taking.result() == results.get(timeout=600) == (True, label_of(group.tensors, 1))
    taking = threads.submit(take, survivor)
    with pytest.raises(BackendError, match=r"phase=send at trainer after \S+ s; engine 0 has gone; engine 1: "):
        group.send(2)
    assert isinstance(taking.exception(timeout=600), ConnectionError)  # not a time-out
    assert survivor.row.label == ""  # a row that is filled in part has no label
    again = group_of(1)
    taking = threads.submit(take, *again.join(reuse=survivor.row))
    assert again.send(2) == 0
    assert taking.result() == (True, label_of(group.tensors, 2))


def test_a_measured_link_brings_all_bytes_to_all_machines_several_times(
    monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(backends.transfer.group, "PART_BYTES", 10_000)
    sender = LinkSender()
    rendezvous = sender.open()
    receiving = [threads.submit(receive, rendezvous, worker, 123_456) for worker in (1, 2)]
    assert sender.gb_s(2, 123_456) > 0
    for one in receiving:
        one.result()
