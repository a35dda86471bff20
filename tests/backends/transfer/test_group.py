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

from transfer_group import Meeting, Tensors, digest_of, held_by, row_of, sums_of, weights  # noqa: E402

import backends.transfer.connection  # noqa: E402
import backends.transfer.group  # noqa: E402
from backends.transfer.connection import Connection, RendezvousServer, connect, recv_bytes  # noqa: E402
from backends.transfer.group import LinkSender, Receiver, Sender, receive  # noqa: E402
from backends.transfer.row import label, parameters_of  # noqa: E402
from backends.transfer.transport import Membership  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

CPU = torch.device("cpu")
Meet = Callable[..., Meeting]
SHAPES = {name: tuple(one.shape) for name, one in weights().items()}


def label_of(tensors: Tensors, version: int) -> str:
    return label(version, digest_of(tensors))


def take(receiver: Receiver) -> tuple[bool, str]:
    """Receive once; return whether it was right, and what the row is labelled with."""
    return receiver.receive(receiver.next_transfer()), receiver.row.label


def test_all_machines_get_the_weights_and_one_wrong_bit_is_refused_by_all(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(backends.transfer.group, "BUCKET_BYTES", 100)
    rendezvous = meet(3)
    sent, row = rendezvous.tensors, row_of(rendezvous.tensors)
    wrong = row.clone()
    wrong[500] ^= 1

    def receive(worker: int) -> Any:
        receiver = rendezvous.receiver(worker)
        return receiver, [take(receiver) for _ in range(3)]

    receiving = [threads.submit(receive, worker) for worker in (1, 2, 3)]
    sender = rendezvous.sender()
    sums = sums_of(sent)
    assert [sender.send(one, version=7 + n, sums=sums) for n, one in enumerate((row, wrong, row))] == [0, 3, 0]
    for receiver, rounds in (one.result() for one in receiving):
        assert rounds == [(True, label_of(sent, 7)), (False, ""), (True, label_of(sent, 9))]
        assert parameters_of(held_by(receiver)) == parameters_of(sent)
        assert all(torch.equal(tensor, sent[name]) for name, tensor in held_by(receiver).items())
        receiver.close()
    sender.leave("enough")
    sender.leave()
    assert sender.left
    with pytest.raises(BackendError, match=r"^the group has been left: enough$"):
        sender.send(row, version=1, sums=sums)


def test_one_worker_of_a_machine_receives_and_all_of_it_see_the_row(meet: Meet, threads: ThreadPoolExecutor) -> None:
    rendezvous = meet(4)
    places = {1: "one", 2: "other", 3: "one", 4: "other"}
    joining = {worker: threads.submit(rendezvous.receiver, worker, place) for worker, place in places.items()}
    sender = rendezvous.sender()
    receivers = {worker: one.result() for worker, one in joining.items()}
    assert [worker for worker, one in receivers.items() if one.leads] == [1, 2]
    receiving = [threads.submit(take, receivers[worker]) for worker in (1, 2)]
    assert sender.send(row_of(rendezvous.tensors), version=3, sums=sums_of(rendezvous.tensors)) == 0
    assert [one.result()[0] for one in receiving] == [True, True]
    for receiver in receivers.values():
        assert receiver.row.label == label_of(rendezvous.tensors, 3)
        assert all(torch.equal(tensor, rendezvous.tensors[name]) for name, tensor in held_by(receiver).items())
    receivers[1].row.row[0] ^= 1  # the same memory, seen twice
    assert torch.equal(receivers[3].row.row, receivers[1].row.row)
    assert not torch.equal(receivers[2].row.row, receivers[1].row.row)


def test_a_row_is_used_again_if_it_fits(meet: Meet, threads: ThreadPoolExecutor) -> None:
    rows: list[Any] = []
    for tensors in (weights(), weights(), {"other": torch.ones(3)}):
        rendezvous = meet(1, tensors=tensors)
        joining = threads.submit(rendezvous.receiver, 1, reuse=rows[-1] if rows else None)
        sender = rendezvous.sender()
        rows.append(joining.result().row)
        assert rows[-1].label == ""
        rows[-1].label = "old"
        sender.leave()
    assert rows[0] is rows[1] is not rows[2]


def test_a_model_of_empty_parameters_crosses(meet: Meet, threads: ThreadPoolExecutor) -> None:
    rendezvous = meet(1, tensors={"a": torch.empty(0), "b": torch.empty(2, 0)})
    receiving = threads.submit(lambda: take(rendezvous.receiver(1)))
    assert rendezvous.sender().send(row_of(rendezvous.tensors), version=1, sums=sums_of(rendezvous.tensors)) == 0
    assert receiving.result()[0]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({name: shape for name, shape in SHAPES.items() if name != "c.bias"}, "have unknown 1 of 3 parameters: c.bias"),
        ({**SHAPES, "empty": (4, 0)}, "have a wrong shape in 1 of 4 parameters: empty"),
        ({**SHAPES, "d": (1,)}, "lack 1 of 5 parameters: d"),
    ],
)
def test_parameters_of_another_model_are_refused_when_a_group_is_made(
    meet: Meet, threads: ThreadPoolExecutor, shapes: Any, text: str
) -> None:
    rendezvous = meet(2)
    joining = [threads.submit(rendezvous.receiver, 1), threads.submit(rendezvous.receiver, 2, shapes=shapes)]
    with pytest.raises(BackendError, match=f"phase=join at trainer .*weights to be sent {text}"):
        rendezvous.sender()
    assert text in str(joining[1].exception(timeout=600))
    with pytest.raises(BackendError, match="phase=join at ") as other:
        joining[0].result(timeout=600)
    assert "timed out" not in str(other.value)  # it does not wait for that


def test_a_receiver_that_waits_ends_at_once_when_it_is_closed_or_the_sender_goes(
    meet: Meet, threads: ThreadPoolExecutor
) -> None:
    rendezvous = meet(2)
    joining = [threads.submit(rendezvous.receiver, worker) for worker in (1, 2)]
    sender = rendezvous.sender()
    receivers = [one.result() for one in joining]
    waiting = [threads.submit(one.next_transfer) for one in receivers]
    time.sleep(0.1)
    assert not any(one.done() for one in waiting)
    receivers[0].close()
    assert isinstance(waiting[0].exception(timeout=600), ConnectionError)
    assert not waiting[1].done()
    sender.leave()
    assert isinstance(waiting[1].exception(timeout=600), ConnectionError)


def test_a_transfer_to_a_silent_machine_is_ended_by_whoever_knows_that_it_is_lost(
    meet: Meet, threads: ThreadPoolExecutor
) -> None:
    """Its connection stays open, as that of a machine without power; nothing is waited for until its time-out."""
    rendezvous = meet(3, timeout_s=1000.0)
    joining = [threads.submit(rendezvous.receiver, worker) for worker in (1, 2, 3)]
    sender = rendezvous.sender()
    silent, *others = (one.result() for one in joining)
    receiving = [threads.submit(take, one) for one in others]
    sending = threads.submit(sender.send, row_of(rendezvous.tensors), version=1, sums=sums_of(rendezvous.tensors))
    silent.next_transfer()
    assert not any(one.done() for one in (sending, *receiving))
    sender.leave("engine 0 is lost")
    pattern = r"^transfer failed: phase=send at trainer after \d+\.\d s; engine 0 is lost$"
    assert re.match(pattern, str(sending.exception(timeout=600)))
    assert all(isinstance(one.exception(timeout=600), OSError) for one in receiving)
    assert [one.row.label for one in others] == ["", ""]  # what has arrived in part is nothing


def test_a_meeting_is_ended_by_whoever_knows_that_a_member_is_lost(meet: Meet, threads: ThreadPoolExecutor) -> None:
    rendezvous = meet(2, timeout_s=1000.0)
    joining = threads.submit(rendezvous.receiver, 1)
    meets = threads.submit(rendezvous.sender)
    while not (senders := [one for one in rendezvous.made if isinstance(one, Sender)]):
        time.sleep(0.01)
    senders[0].leave("engine 1 is lost")
    pattern = r"^transfer failed: phase=join at trainer after \d+\.\d s; engine 1 is lost$"
    assert re.match(pattern, str(meets.exception(timeout=600)))
    assert isinstance(joining.exception(timeout=600), BackendError)


def test_whoever_does_not_know_the_password_is_turned_away(meet: Meet, threads: ThreadPoolExecutor) -> None:
    rendezvous = meet(1)
    address, port, _ = rendezvous.at.split(":")
    strangers = [
        connect(f"{address}:{port}:guess", timeout_s=600, worker=1, place="", rendezvous=""),
        connect(f"{address}:{port}:", timeout_s=600),
    ]
    noise = socket.create_connection((address, int(port)))
    noise.sendall(b"\xff" * 100)
    joining = threads.submit(rendezvous.receiver, 1)
    sender = rendezvous.sender()
    assert joining.result().leads
    for stranger in strangers:
        with pytest.raises(OSError, match=r"gone|reset"):
            stranger.recv()
        stranger.close()
    noise.close()
    sender.leave()
    with pytest.raises(OSError, match="refused"):  # the server is closed when all are there
        connect(f"{address}:{port}:", timeout_s=5)


def test_a_connection_that_breaks_at_the_first_word_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_who_says_nothing_yet_holds_nobody_up_and_is_let_in_when_it_speaks(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """On a busy machine a thread that connects may wait long for a processor before it says a word."""
    monkeypatch.setattr(backends.transfer.connection, "HELLO_TIMEOUT_S", 0.01)
    rendezvous = meet(2)
    address, port, password = rendezvous.at.split(":")
    slow = Connection(socket.create_connection((address, int(port))), 600)
    joining, meets = threads.submit(rendezvous.receiver, 2), threads.submit(rendezvous.sender)
    while not any(isinstance(one, Sender) and 2 in one._connections for one in rendezvous.made):
        time.sleep(0.01)
    slow.send(password=password, worker=1, place="machine 1", rendezvous=f"{address}:{port}:{password}")
    assert slow.recv()["leads"]
    slow.close()
    assert isinstance(meets.exception(timeout=600), BackendError)
    assert isinstance(joining.exception(timeout=600), BackendError)


def test_the_member_that_does_not_join_is_named(meet: Meet) -> None:
    with pytest.raises(BackendError, match=r"phase=join at trainer after \S+ s; engine 0 did not come; "):
        meet(1, timeout_s=0.5).sender()


def test_a_meeting_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendError, match=r"^transfer failed: phase=join at 127.0.0.1:1 after .*refused"):
        Receiver(Membership(rendezvous="127.0.0.1:1:secret", worker=1, shapes={}, device=CPU, timeout_s=0.5), place="")


def test_the_machine_that_does_not_answer_is_told_from_the_one_that_has_gone(
    meet: Meet, threads: ThreadPoolExecutor
) -> None:
    rendezvous = meet(3)
    joining = [threads.submit(rendezvous.receiver, worker) for worker in (1, 2, 3)]
    sender = rendezvous.sender()
    first, silent, gone = (one.result() for one in joining)
    sender._connections[2]._timeout_s = 1.0
    receiving = threads.submit(take, first)
    gone.close()
    pattern = r"^transfer failed: phase=send at trainer after \S+ s; engine 1: timed out; engine 2 has gone; "
    with pytest.raises(BackendError, match=pattern) as failure:
        sender.send(row_of(rendezvous.tensors), version=1, sums=sums_of(rendezvous.tensors))
    assert receiving.result()[0]  # it has all that it needs
    with pytest.raises(BackendError, match="the group has been left: transfer failed: phase=send") as again:
        sender.send(row_of(rendezvous.tensors), version=1, sums=sums_of(rendezvous.tensors))
    assert str(failure.value) in str(again.value)
    silent.close()


def _process(meeting_at: str, results: Any) -> None:
    """Receive once, then die in the middle of the next transfer."""
    member = Membership(rendezvous=meeting_at, worker=1, shapes=SHAPES, device=CPU, timeout_s=600)
    receiver = Receiver(member, place="1")
    results.put(take(receiver))
    receiver.next_transfer()
    recv_bytes(receiver._before.sock, memoryview(bytearray(1000)))
    multiprocessing.current_process().kill()


@pytest.mark.slow
def test_a_death_in_the_chain_is_noticed_at_once_by_all_and_a_new_group_can_be_made(
    meet: Meet,
    threads: ThreadPoolExecutor,
) -> None:
    rendezvous = meet(2, timeout_s=600.0)  # the process imports torch first
    row, sums = row_of(rendezvous.tensors), sums_of(rendezvous.tensors)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_process, args=(rendezvous.at, results))
    process.start()
    joining = threads.submit(rendezvous.receiver, 2)
    try:
        sender = rendezvous.sender()
        survivor = joining.result()
        receiving = threads.submit(take, survivor)
        assert sender.send(row, version=1, sums=sums) == 0
        assert receiving.result() == (True, label_of(rendezvous.tensors, 1))
        assert results.get(timeout=600) == (True, label_of(rendezvous.tensors, 1))
        receiving = threads.submit(take, survivor)
        with pytest.raises(BackendError, match=r"phase=send at trainer after \S+ s; engine 0 has gone; engine 1: "):
            sender.send(row, version=2, sums=sums)
        assert isinstance(receiving.exception(timeout=600), ConnectionError)  # not a time-out
        assert survivor.row.label == ""  # what has arrived in part is nothing
        again = meet(1)
        joining = threads.submit(again.receiver, 1, reuse=survivor.row)
        sender = again.sender()
        receiving = threads.submit(take, joining.result())
        assert sender.send(row, version=2, sums=sums) == 0
        assert receiving.result() == (True, label_of(rendezvous.tensors, 2))
    finally:
        process.kill()
        process.join(timeout=600)
        results.close()


def test_a_measured_link_brings_all_bytes_to_all_machines_several_times(
    monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(backends.transfer.group, "PART_BYTES", 10_000)
    sender, num_bytes = LinkSender(), 123_456
    rendezvous = sender.open()
    ends = [threads.submit(receive, rendezvous, worker, num_bytes) for worker in (1, 2)]
    assert sender.gb_s(2, num_bytes) > 0
    for end in ends:
        end.result()
