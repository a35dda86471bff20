"""The weight sync group: rank 0 of the trainer sends bytes to all workers of all engines.

Theory of operation. Rank 0 sends the weights to one worker per machine (its *leader*), which writes them to memory that
the machine's workers share (``row.py``) and forwards them to the next machine: every weight leaves every machine once,
over several streams. Workers on rank 0's own machine read rank 0's row: nothing is sent to them. Every worker has a
connection to the sender for messages. The list of parameters is sent once, when the group is formed.

==========  ===========================================  ======================================================
step        sender                                       receiver
==========  ===========================================  ======================================================
join        waits for all; names the leaders             leader: makes its machine's row; others: open it
notice      version, checksum of every range of bytes    waits without limit
bytes       from its row, without a copy                 into its row; forwards; verifies complete ranges
verdict     waits for all leaders                        accepted or refused; labels its row if accepted
==========  ===========================================  ======================================================

In place of the row a *delta* can be sent (``delta.py``). Its receiver has the row of the version before. It verifies
the delta and applies it; the checksum of the whole row follows from the one before and the changed words. A lost,
repeated or reordered delta is refused.

A refused transfer can be repeated, in full. After any other failure (a member died, or is silent for ``timeout_s``) the
group is closed and a new one is formed. ``leave`` ends a transfer at once, from any thread; a receiver leaves when the
sender has, whatever it waits for.

Plain TCP: a connection can be closed under a waiting thread and reports the death of its peer; gloo aborts the whole
process when several sends are under way. A GPU verifies the bytes in the host's memory on its own stream: beside decode
no kernel may wait for a peer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from backends.transfer.delta import Payload
from backends.transfer.rendezvous import Connection, RendezvousServer, address_towards, connect, recv_bytes, send_bytes
from backends.transfer.row import BUCKET_BYTES, SharedRow, cuts, digest, label, layout, machine, ranges, row_bytes
from backends.transfer.transport import Membership, Parameters
from backends.transfer.verify import check_names, checksum64
from pipelinerl.errors import BackendError

JOIN_TIMEOUT_S = 180.0
"""Longest wait for the workers of a group, whose joining threads yield to all others."""
CHAIN = 0
"""Key of the first connection to the first machine, the others are below; workers count from 1."""
STREAMS = 4
"""Connections from machine to machine: one TCP stream carries 1.7 to 2.2 GB/s (measured on the machine of an H100)."""
BLAME_TIMEOUT_S = 2.0
"""For finding the failed member of a transfer."""


class Sender:
    """Rank 0's end; call ``meet`` first."""

    def __init__(self, server: RendezvousServer) -> None:
        self._server, self.rendezvous = server, server.rendezvous
        self._connections: dict[int, Connection] = {}  # by worker; CHAIN: to the first machine
        self._leaders: list[int] = []
        self._awaited: list[int] = []  # leaders without a verdict on the weights received last
        self._why_left: str | None = None  # None: it has not been left
        self.base = ""
        """Label of the weights that all machines have; empty: they differ, or have none."""

    @property
    def left(self) -> bool:
        """Whether the group has been left, and is unusable."""
        return self._why_left is not None

    def meet(
        self, names: Sequence[str], parameters: Parameters, *, timeout_s: float, row: SharedRow | None = None
    ) -> None:
        """Wait for all workers; ``BackendError`` if one is late or refuses the parameters, or the group is left.

        ``names`` for messages: the sender, then every worker of every engine. ``timeout_s``: longest wait for the
        others, now and in every step of a transfer. ``row``: of rank 0, for workers on its machine; others make one of
        the same size.
        """
        self._names, self._parameters, self._timeout_s, self._row = names, parameters, timeout_s, row
        began = time.perf_counter()
        try:
            self._meet()
        except Exception as error:
            absent = [name for worker, name in enumerate(self._names) if worker and worker not in self._connections]
            who = f"{', '.join(absent)} did not come; " if absent else ""
            raise self._broken("join", began, error, who) from error
        finally:
            self._server.close()

    def send(
        self, content: torch.Tensor, *, version: int, sums: Sequence[int], ends: Sequence[int], base: str = ""
    ) -> int:
        """Send a row of bytes to all machines; return the number that refused the weights.

        ``content``: parameters as ``layout`` places them, in the host's memory, unchanged until this returns. ``sums``:
        ``checksum64`` of each range of the row that ends at ``ends`` (bytes). ``base``: label of the weights that the
        content, a delta's payload, is to be applied to. ``BackendError`` if a machine does not answer, or the group is
        left; it is unusable then.
        """
        if self._why_left is not None:
            raise BackendError(f"the group has been left{self._why_left and ': '}{self._why_left}")
        began = time.perf_counter()
        self.base = ""
        notice = {"version": version, "sums": sums, "ends": ends}
        notice |= {"base": base, "delta": [content.numel(), checksum64(content)]} if base else {}
        try:
            self._awaited = list(self._leaders)
            for worker in self._leaders:
                self._connections[worker].send(**notice)
            if self._leaders:
                self._send_bytes(content)
            num_refusing = 0
            while self._awaited:
                num_refusing += self._connections[self._awaited[0]].recv()["refused"]
                self._awaited.pop(0)
            if not num_refusing:
                self.base = label(version, digest(self._parameters, sums))
            return num_refusing
        except Exception as error:
            raise self._broken("send", began, error, "" if self.left else self._to_blame()) from error

    def leave(self, why: str = "") -> None:
        """Leave the group, also under another thread, whose wait fails at once; a second call does nothing."""
        if self._why_left is None:
            self._why_left = why
        self._server.close()
        for connection in list(self._connections.values()):
            connection.close()

    def _send_bytes(self, row: torch.Tensor) -> None:
        content = memoryview(row.numpy())
        with Streams([self._connections[CHAIN - stream] for stream in range(STREAMS)]) as streams:
            for number, (begin, end) in enumerate(cuts(row.numel(), BUCKET_BYTES)):
                streams.submit(number, send_bytes, content[begin:end])
            streams.wait()

    def _meet(self) -> None:
        until_s = time.monotonic() + min(self._timeout_s, JOIN_TIMEOUT_S)
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) + 1 < len(self._names):
            connection, hello = self._server.accept(until_s=until_s, timeout_s=self._timeout_s)
            self._keep(hello["worker"], connection)
            hellos[hello["worker"]] = hello
        workers = sorted(hellos)
        places = [hellos[worker]["place"] for worker in workers]
        rows = {} if self._row is None else {machine(): self._row.path}
        room = 0 if self._row is None else self._row.num_bytes - row_bytes(layout(self._parameters))
        first = (workers[index] for index, place in enumerate(places) if place not in places[:index])
        self._leaders = [worker for worker in first if hellos[worker]["place"] not in rows]
        for worker, after in zip(self._leaders, [*self._leaders[1:], None], strict=False):
            rendezvous = None if after is None else hellos[after]["rendezvous"]
            self._connections[worker].send(parameters=self._parameters, leads=True, room=room, after=rendezvous)
        for worker in self._leaders:
            rows[hellos[worker]["place"]] = self._connections[worker].recv()["row"]
        mates = [worker for worker in workers if worker not in self._leaders]
        for worker in mates:
            row = rows[hellos[worker]["place"]]
            self._connections[worker].send(parameters=self._parameters, leads=False, room=room, row=row)
        for worker in mates:
            self._connections[worker].recv()
        for stream in range(STREAMS if self._leaders else 0):
            first_machine = hellos[self._leaders[0]]["rendezvous"]
            self._keep(CHAIN - stream, connect(first_machine, timeout_s=self._timeout_s, stream=stream))

    def _keep(self, worker: int, connection: Connection) -> None:
        self._connections[worker] = connection
        if self.left:  # meanwhile, by another thread
            connection.close()

    def _to_blame(self) -> str:
        causes, until_s = [], time.monotonic() + BLAME_TIMEOUT_S
        for worker in self._awaited:
            try:
                Connection(self._connections[worker].sock, max(0.01, until_s - time.monotonic())).recv()
            except ConnectionError:
                causes.append(f"{self._names[worker]} has gone; ")
            except (OSError, ValueError, BackendError) as error:
                causes.append(f"{self._names[worker]}: {error}; ")
        return "".join(causes)

    def _broken(self, phase: str, began: float, error: Exception, who: str) -> BackendError:
        seconds = time.perf_counter() - began
        why = f"{who}{error}" if self._why_left is None else self._why_left
        failure = f"transfer failed: phase={phase} at {self._names[0]} after {seconds:.1f} s; {why}"
        self.leave(failure)
        return BackendError(failure)


class GroupHost:
    """Rank 0's newest group; opened, joined, used and aborted from different threads."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        """From ``join`` to ``open``."""
        self.row: SharedRow | None = None
        """Of rank 0, if its transport keeps one."""
        self._opened: Sender | None = None

    def open(self) -> str:
        """Leave the previous group; return the rendezvous of a new one."""
        from backends.transfer.rendezvous import own_address  # Ray, which vLLM's workers do without

        self.close()
        self.sender, opened = None, Sender(RendezvousServer.open(own_address()))
        self._opened = opened
        return opened.rendezvous

    def abort(self, rendezvous: str, why: str) -> None:
        """End transfers in this group, but in no later one, from another thread; they report ``why``."""
        opened = self._opened
        if opened is not None and opened.rendezvous == rendezvous:
            opened.leave(why)

    def join(self, names: Sequence[str], parameters: Parameters, timeout_s: float) -> str | None:
        """Join the group that was opened last; return the fault, if any, when all have joined; see ``Sender.meet``."""
        self.sender = self._opened
        assert self.sender is not None
        try:
            self.sender.meet(names, parameters, timeout_s=timeout_s, row=self.row)
        except BackendError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Leave the group."""
        if self._opened is not None:
            self._opened.leave()


# ------------------------------------------------------------------------------------------------- a worker's end

HASH_THREADS = 4


class Receiver:
    """A worker's end. Its constructor returns when the sender knows the row of this machine.

    ``place``: of the machine, common to all workers that can open each other's rows. ``reuse``: a row of an earlier
    group, used again if it fits. ``BackendError`` if the others do not come in time, or the model has other parameters.
    """

    def __init__(self, member: Membership, *, place: str, reuse: SharedRow | None = None) -> None:
        self._connections: list[Connection] = []
        self._closed = False
        self._sums: Sequence[int] = ()  # of the weights in the row
        began = time.perf_counter()
        rendezvous, timeout_s = member.rendezvous, member.timeout_s
        address, _, password = rendezvous.split(":")
        server = RendezvousServer.open(address_towards(address), password)
        try:
            introduction = {"worker": member.worker, "place": place, "rendezvous": server.rendezvous}
            self._device = member.device
            self._sender = self._kept(connect(rendezvous, timeout_s=timeout_s, **introduction))
            threading.Thread(target=self._close_with_sender, name="weights-sender", daemon=True).start()
            reply = self._sender.recv()
            self.parameters: Parameters = reply["parameters"]
            self.leads: bool = reply["leads"]
            """Whether this worker receives for its machine."""
            self.row = self._row(reply, member, reuse)
            self._sender.send(row=self.row.path)
            self._after = [
                self._kept(connect(reply["after"], timeout_s=timeout_s, stream=stream))
                for stream in range(STREAMS if reply.get("after") else 0)
            ]
            before: dict[int, Connection] = {}
            while self.leads and len(before) < STREAMS:
                until_s = time.monotonic() + timeout_s
                one, hello = server.accept(until_s=until_s, timeout_s=timeout_s, host=self._sender)
                before[hello["stream"]] = self._kept(one)
            self._before = [before[stream] for stream in sorted(before)]
        except Exception as error:
            self.close()
            seconds = time.perf_counter() - began
            where = rendezvous.rpartition(":")[0]
            raise BackendError(f"transfer failed: phase=join at {where} after {seconds:.1f} s; {error}") from error
        finally:
            server.close()

    def close(self) -> None:
        """Leave the group, also while a thread waits in it; a second call does nothing."""
        self._closed = True
        for connection in list(self._connections):
            connection.close()

    def _close_with_sender(self) -> None:
        """A thread that waits for bytes of the machine before, which may be silent for ever, ends with the sender."""
        self._sender.wait_closed()
        self.close()

    def next_transfer(self) -> dict[str, Any]:
        """Wait without limit for the next transfer's header; ``OSError`` if the sender has gone or after ``close``."""
        return self._sender.recv(patiently=True)

    def receive(self, notice: Mapping[str, Any]) -> bool:
        """Receive weights or a delta into the row; send and return the verdict.

        ``OSError`` if a member has gone or is silent: the group is unusable.
        """
        held, base, self.row.label = self.row.label, notice.get("base", ""), ""
        row, room = self.row.row[: self._num_bytes], self.row.row[self._num_bytes :]
        if base:
            num_bytes, expected = notice["delta"]
            right = self._received([num_bytes], room[:num_bytes]) == [expected] and held == base
            if right:
                right = Payload(room).apply_to(row, self._sums) == notice["sums"]
        else:
            right = self._received(notice["ends"], row) == notice["sums"]
        if right:
            self._sums = notice["sums"]
            self.row.set_label(label(notice["version"], digest(self.parameters, notice["sums"])), base=base)
        self._sender.send(refused=not right)
        return right

    def _received(self, ends: Sequence[int], row: torch.Tensor) -> list[int]:
        """Receive a row and hand it on; return the checksums of the ranges that end there (bytes)."""
        try:
            return self._take(ends, row)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sender.send(error=str(error))
            raise

    def _take(self, ends: Sequence[int], row: torch.Tensor) -> list[int]:
        parts, content = ranges(row, ends), memoryview(row.numpy())
        threads = min(HASH_THREADS, len(os.sched_getaffinity(0))) if self._device.type == "cpu" else 1
        with (
            ThreadPoolExecutor(threads) as hashing,
            Streams(self._after) as handing_on,
            Streams(self._before) as receiving,
        ):
            sums: list[Future[int]] = []
            buckets = list(cuts(row.numel(), BUCKET_BYTES))
            coming = [receiving.submit(n, recv_bytes, content[begin:end]) for n, (begin, end) in enumerate(buckets)]
            for number, ((begin, end), bucket) in enumerate(zip(buckets, coming, strict=True)):
                bucket.result()
                if self._after:
                    handing_on.submit(number, send_bytes, content[begin:end])
                while len(sums) < len(parts) and ends[len(sums)] <= end:
                    sums.append(hashing.submit(self._sum, parts[len(sums)]))
            handing_on.wait()
            return [one.result() for one in sums]

    def _sum(self, tensor: torch.Tensor) -> int:
        """A GPU sums beside decode: on a CPU it is many small steps, each of which waits for the engine's thread."""
        if self._device.type == "cpu":
            return checksum64(tensor)
        with torch.cuda.device(self._device), torch.cuda.stream(_side_stream(self._device)):
            return checksum64(tensor, computed_on=self._device)

    def _row(self, reply: Mapping[str, Any], member: Membership, reuse: SharedRow | None) -> SharedRow:
        try:
            sent = {name: tuple(shape) for name, _, shape in self.parameters}
            check_names(sent, member.shapes, source="weights to be sent")
            self._num_bytes = row_bytes(layout(self.parameters))
            num_bytes = self._num_bytes + reply["room"]
            if reuse is not None and (not self.leads or reuse.num_bytes != num_bytes):
                reuse.close()
                reuse = None
            if not self.leads:
                return SharedRow.open(reply["row"], num_bytes, member.device)
            row = reuse or SharedRow.make(num_bytes, member.device)
            row.label = ""
            return row
        except BackendError as error:
            self._sender.send(error=str(error))
            raise

    def _kept(self, connection: Connection) -> Connection:
        self._connections.append(connection)
        if self._closed:  # meanwhile, by another thread
            connection.close()
        return connection


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a GPU's one stream beside decode: torch keeps memory for every stream that was ever used."""
    return torch.cuda.Stream(device)


Move = Callable[[socket.socket, memoryview], None]


class Streams:
    """Connections that share a row of bytes: bucket n goes through the n-th, modulo their number, in order."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._threads = [ThreadPoolExecutor(1) for _ in connections]
        self._submitted: list[Future[None]] = []

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:  # after an error the rest would wait for a silent peer, bucket by bucket
            thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.shutdown()

    def submit(self, number: int, move: Move, bucket: memoryview) -> Future[None]:
        """Begin to send or receive a bucket."""
        stream = number % len(self._connections)
        self._submitted.append(self._threads[stream].submit(move, self._connections[stream].sock, bucket))
        return self._submitted[-1]

    def wait(self) -> None:
        """Wait for all buckets; raise the first error."""
        for one in self._submitted:
            one.result()


# -------------------------------------------------------- bandwidth to the engines' machines, for ``train --check``

PART_BYTES = 2**24
REPEATS = 2
"""Of sending, after once to warm up; the fastest counts: others may use the network, too."""
TIMEOUT_S = 300.0
"""Longest wait for the others, which import torch first."""


class LinkSender:
    """Rank 0's part in measuring the bandwidth."""

    def __init__(self) -> None:
        self._host = GroupHost()

    def open(self) -> str:
        """Return the rendezvous for the other members."""
        return self._host.open()

    def gb_s(self, num_machines: int, num_bytes: int) -> float:
        """Return the rate at which all machines get so many bytes, verified; ``BackendError`` if one does not."""
        names = ["rank 0", *(f"machine {number} of engines" for number in range(1, 1 + num_machines))]
        row, parameters = torch.zeros(num_bytes, dtype=torch.uint8), _parts(num_bytes)
        ends = [place.end for place in layout(parameters)]
        sums = [checksum64(part) for part in ranges(row, ends)]
        seconds: list[float] = []
        fault, sender = self._host.join(names, parameters, TIMEOUT_S), self._host.sender
        if fault is not None or sender is None:
            raise BackendError(fault)
        try:
            for _ in range(1 + REPEATS):
                begin_s = time.perf_counter()
                if sender.send(row, version=0, sums=sums, ends=ends):
                    raise BackendError("what reached the machines of the engines was not what was sent")
                seconds.append(time.perf_counter() - begin_s)
        finally:
            sender.leave()
        return num_bytes / 1e9 / min(seconds[1:])


def receive(rendezvous: str, worker: int, num_bytes: int) -> None:
    """Receive for a machine of engines; ``worker``: its number, from 1."""
    shapes = {name: tuple(shape) for name, _, shape in _parts(num_bytes)}
    device = torch.device("cpu")
    member = Membership(rendezvous=rendezvous, worker=worker, shapes=shapes, device=device, timeout_s=TIMEOUT_S)
    receiver = Receiver(member, place=f"machine {worker}")
    try:
        for _ in range(1 + REPEATS):
            receiver.receive(receiver.next_transfer())
    finally:
        receiver.close()
        receiver.row.close()


def _parts(num_bytes: int) -> Parameters:
    return [(f"{begin}", "uint8", (end - begin,)) for begin, end in cuts(num_bytes, PART_BYTES)]
