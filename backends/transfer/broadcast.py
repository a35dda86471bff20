"""Weights from the trainer's rank 0 to all machines of all engines, host to host, while the engines generate.

Theory of operation. A *group* is rank 0, which sends, and all workers of all engines. One worker of every machine
receives, into a row of bytes that all workers of that machine see (``shared_row.py``). Every worker has a line to the
sender, for messages; the bytes go along a chain, from the sender to one machine and on to the next, so every weight
leaves every machine once. What the row holds is said when the group is made, not with every version.

==========  ===========================================  ======================================================
step        sender                                       receiver
==========  ===========================================  ======================================================
join        waits for all; says who receives             makes its machine's row, or sees it
notice      version, checksum of every parameter         waits for it, for as long as it takes
bytes       from its row, without a copy                 into its row; hands on; verifies what is whole meanwhile
verdict     waits for all                                right, or refused; labels its row if right
==========  ===========================================  ======================================================

When all say that it is right the weights can be loaded everywhere. When one refuses they can be sent again. Where
anything else goes wrong (a member has died, or does not answer in ``timeout_s``) the group is left, and a new one made.
Whoever knows before these time-outs that a member is lost has the sender leave at once, from another thread; and a
receiver leaves when the sender has, whatever it waits for.

Plain connections, because they can be closed under whoever waits, and report the death of the other end; with several
sends under way gloo ends the whole process then. The bytes stay in the host's memory. A GPU reads them there to verify
them, on a stream of its own: none of its kernels waits for a peer, beside those of decode.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from backends.transfer.checksum64 import checksum64
from backends.transfer.layout import Parameters, Place, cuts, digest, layout, row_bytes, seen_as
from backends.transfer.lines import Door, Line, address_towards, come_in, empty, fill
from backends.transfer.shared_row import SharedRow
from backends.transfer.weights_check import check_names
from pipelinerl.errors import BackendError

BUCKET_BYTES = 16 * 2**20
"""Size of what is handed on at a time (bytes)."""
HASH_THREADS = 4
"""Threads that verify what arrives, if as many cores are allowed (count)."""
JOIN_TIMEOUT_S = 60.0
"""Longest wait for the workers of a group: they have been told of it (seconds)."""
CHAIN = 0
"""Stands for the sender where workers are counted from 1."""
BLAME_TIMEOUT_S = 2.0
"""Time to look for the member that is to blame when a transfer has failed (seconds)."""


class Sender:
    """Rank 0's end: to ``meet`` first.

    Args:
        door: What the members meet at.
        names: What messages call them: the sender, then every worker of every engine.
        parameters: What will be sent, every time.
        timeout_s: Longest wait for the others, when joining and in every step of a transfer (seconds).
    """

    def __init__(self, door: Door, *, names: Sequence[str], parameters: Parameters, timeout_s: float) -> None:
        self._door, self._names, self._parameters, self._timeout_s = door, names, parameters, timeout_s
        self._lines: dict[int, Line] = {}  # by worker; CHAIN: to the first machine
        self._leaders: list[int] = []
        self._awaited: list[int] = []  # leaders that have not said whether what they received is right
        self._why_left: str | None = None  # None: it has not been left

    @property
    def left(self) -> bool:
        """Whether the group has been left: it is of no use then."""
        return self._why_left is not None

    def meet(self) -> None:
        """Return when all workers have joined.

        Raises:
            BackendError: If not all come in time, or one refuses the list of parameters, or the group is left.
        """
        began = time.perf_counter()
        try:
            self._meet()
        except Exception as error:
            absent = [name for worker, name in enumerate(self._names) if worker and worker not in self._lines]
            who = f"{', '.join(absent)} did not come; " if absent else ""
            raise self._broken("join", began, error, who) from error
        finally:
            self._door.close()

    def send(self, row: torch.Tensor, *, version: int, sums: Sequence[int], parts: Sequence[int] | None = None) -> int:
        """Send a row of bytes to all machines.

        Args:
            row: Parameters as ``layout`` has them; it must stay as it is until this returns.
            version: Optimizer steps done.
            sums: ``checksum64`` of each parameter.
            parts: Which of the parameters they are, in their order. None: all.

        Returns:
            How many machines refuse what they have received.

        Raises:
            BackendError: If a machine does not say, or the group is left. It is of no use then.
        """
        if self._why_left is not None:
            raise BackendError(f"the group has been left{self._why_left and ': '}{self._why_left}")
        began = time.perf_counter()
        try:
            self._awaited = list(self._leaders)
            for worker in self._leaders:
                self._lines[worker].tell(version=version, sums=sums, parts=parts)
            content = memoryview(row.numpy())
            for begin, end in cuts(row.numel(), BUCKET_BYTES):
                empty(self._lines[CHAIN].connection, content[begin:end])
            num_refusing = 0
            while self._awaited:
                num_refusing += self._lines[self._awaited[0]].hear()["refused"]
                self._awaited.pop(0)
            return num_refusing
        except Exception as error:
            raise self._broken("send", began, error, "" if self.left else self._to_blame()) from error

    def leave(self, why: str = "") -> None:
        """Leave the group, also under a thread that meets or sends: whatever anybody waits for fails at once.

        A second call does nothing.
        """
        if self._why_left is None:
            self._why_left = why
        self._door.close()
        for line in list(self._lines.values()):
            line.close()

    def _meet(self) -> None:
        until_s = time.monotonic() + min(self._timeout_s, JOIN_TIMEOUT_S)
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) + 1 < len(self._names):
            line, hello = self._door.let_in(until_s=until_s, timeout_s=self._timeout_s)
            self._keep(hello["worker"], line)
            hellos[hello["worker"]] = hello
        workers = sorted(hellos)
        places = [hellos[worker]["place"] for worker in workers]
        self._leaders = [workers[index] for index, place in enumerate(places) if place not in places[:index]]
        rows: dict[str, str] = {}
        for worker, after in zip(self._leaders, [*self._leaders[1:], None], strict=True):
            meeting = None if after is None else hellos[after]["meeting"]
            self._lines[worker].tell(parameters=self._parameters, leads=True, after=meeting)
        for worker in self._leaders:
            rows[hellos[worker]["place"]] = self._lines[worker].hear()["row"]
        mates = [worker for worker in workers if worker not in self._leaders]
        for worker in mates:
            self._lines[worker].tell(parameters=self._parameters, leads=False, row=rows[hellos[worker]["place"]])
        for worker in mates:
            self._lines[worker].hear()
        self._keep(CHAIN, come_in(hellos[self._leaders[0]]["meeting"], timeout_s=self._timeout_s))

    def _keep(self, worker: int, line: Line) -> None:
        self._lines[worker] = line
        if self.left:  # meanwhile, by another thread
            line.close()

    def _to_blame(self) -> str:
        """Say which members have gone or have failed, if any."""
        said, until_s = [], time.monotonic() + BLAME_TIMEOUT_S
        for worker in self._awaited:
            try:
                Line(self._lines[worker].connection, max(0.01, until_s - time.monotonic())).hear()
            except ConnectionError:
                said.append(f"{self._names[worker]} has gone; ")
            except (OSError, ValueError, BackendError) as error:
                said.append(f"{self._names[worker]}: {error}; ")
        return "".join(said)

    def _broken(self, phase: str, began: float, error: Exception, who: str) -> BackendError:
        seconds = time.perf_counter() - began
        why = f"{who}{error}" if self._why_left is None else self._why_left
        failure = f"transfer failed: phase={phase} at {self._names[0]} after {seconds:.1f} s; {why}"
        self.leave(failure)
        return BackendError(failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a worker joins a group with."""

    meeting: str
    """Where the members meet: what the sender's door says."""
    worker: int
    """Number of this worker among all, from 1."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter of the model by name."""
    device: torch.device
    """Of the engine."""
    timeout_s: float
    """Longest wait for the others (seconds)."""


class Receiver:
    """A worker's end. Making it returns when its machine has a row, and the sender knows of it.

    Args:
        member: What it joins with.
        place: The machine: what all workers have in common that can see each other's rows.
        reuse: A row that this worker has made before, to be used again if it fits.
        keeps: Whether the row has room for all parameters, or for nothing: then ``take`` is told where to.

    Raises:
        BackendError: If the others do not come in time, or the parameters to come are not the model's.
    """

    def __init__(self, member: Membership, *, place: str, reuse: SharedRow | None = None, keeps: bool = True) -> None:
        self._lines: list[Line] = []
        self._closed = False
        began = time.perf_counter()
        meeting, timeout_s = member.meeting, member.timeout_s
        address, _, password = meeting.split(":")
        door = Door.open(address_towards(address), password)
        try:
            said = {"worker": member.worker, "place": place, "meeting": door.meeting}
            self._device = member.device
            self._sender = self._kept(come_in(meeting, timeout_s=timeout_s, **said))
            threading.Thread(target=self._close_with_sender, name="weights-sender", daemon=True).start()
            told = self._sender.hear()
            self.parameters: Parameters = told["parameters"]
            self.leads: bool = told["leads"]
            """Whether this worker receives for its machine."""
            self.row = self._row(told, member, reuse, keeps=keeps)
            self._sender.tell(row=self.row.path)
            self._after = self._kept(come_in(told["after"], timeout_s=timeout_s)) if told.get("after") else None
            if self.leads:
                before, _ = door.let_in(until_s=time.monotonic() + timeout_s, timeout_s=timeout_s, host=self._sender)
                self._before = self._kept(before)
        except Exception as error:
            self.close()
            seconds = time.perf_counter() - began
            where = meeting.rpartition(":")[0]
            raise BackendError(f"transfer failed: phase=join at {where} after {seconds:.1f} s; {error}") from error
        finally:
            door.close()

    def close(self) -> None:
        """Leave the group, also under a thread that waits; a second call does nothing."""
        self._closed = True
        for line in list(self._lines):
            line.close()

    def _close_with_sender(self) -> None:
        """Leave when the sender has: the machine before, whose bytes are waited for, may be silent for ever."""
        self._sender.wait_for_end()
        self.close()

    def next_transfer(self) -> dict[str, Any]:
        """Wait until the sender begins to send, for as long as it takes; return what it says of it.

        Raises:
            OSError: If the sender has gone, or ``close`` has been called.
        """
        return self._sender.hear(patiently=True)

    def receive(self, notice: Mapping[str, Any]) -> bool:
        """Receive what the sender sends into the row, verify it, and say whether it is right.

        Args:
            notice: What the sender said of it.

        Returns:
            Whether it is right: then the row is labelled with what it holds.

        Raises:
            OSError: If a member has gone or does not answer. The group is of no use then.
        """
        self.row.label = ""
        sums = self.take(layout(self.parameters), self.row.row)
        right = bool(sums == notice["sums"])
        if right:
            self.row.label = label(notice["version"], digest(self.parameters, sums))
        self.judge(right)
        return right

    def take(self, places: Sequence[Place], row: torch.Tensor) -> list[int]:
        """Receive parameters into a row and hand them on; return the checksum of each.

        Raises:
            OSError: If a member has gone or does not answer. The group is of no use then.
        """
        try:
            return self._received(places, row)
        except OSError as error:
            self._sender.tell(error=str(error))
            raise

    def judge(self, right: bool) -> None:
        """Tell the sender whether what has been received is right."""
        self._sender.tell(refused=not right)

    def _received(self, places: Sequence[Place], row: torch.Tensor) -> list[int]:
        content = memoryview(row.numpy())
        threads = min(HASH_THREADS, len(os.sched_getaffinity(0))) if self._device.type == "cpu" else 1
        with ThreadPoolExecutor(threads) as hashing, ThreadPoolExecutor(1) as handing_on:
            sums: list[Future[int]] = []
            handed_on: list[Future[None]] = []
            for begin, end in [(0, 0), *cuts(row_bytes(places), BUCKET_BYTES)]:
                fill(self._before.connection, content[begin:end])
                if self._after is not None:
                    handed_on.append(handing_on.submit(empty, self._after.connection, content[begin:end]))
                while len(sums) < len(places) and places[len(sums)].end <= end:
                    sums.append(hashing.submit(self._sum, seen_as(row, places[len(sums)])))
            for one in handed_on:
                one.result()
            return [one.result() for one in sums]

    def _sum(self, tensor: torch.Tensor) -> int:
        """Return the checksum of what has arrived.

        A GPU computes it, beside decode: on a CPU it is many small steps, each of which waits for the engine's thread.
        """
        if self._device.type == "cpu":
            return checksum64(tensor)
        with torch.cuda.device(self._device), torch.cuda.stream(_verifying_stream(self._device)):
            return checksum64(tensor, computed_on=self._device)

    def _row(self, told: Mapping[str, Any], member: Membership, reuse: SharedRow | None, *, keeps: bool) -> SharedRow:
        """Return the row of this machine, unless what will lie there is not the model's: then all are told."""
        try:
            sent = {name: tuple(shape) for name, _, shape in self.parameters}
            check_names(sent, member.shapes, source="weights to be sent")
            num_bytes = row_bytes(layout(self.parameters)) if keeps else 0
            if reuse is not None and (not self.leads or reuse.num_bytes != num_bytes):
                reuse.close()
                reuse = None
            if not self.leads:
                return SharedRow.open(told["row"], num_bytes, member.device)
            row = reuse or SharedRow.make(num_bytes, member.device)
            row.label = ""
            return row
        except BackendError as error:
            self._sender.tell(error=str(error))
            raise

    def _kept(self, line: Line) -> Line:
        self._lines.append(line)
        if self._closed:  # meanwhile, by another thread
            line.close()
        return line


@functools.cache
def _verifying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a GPU verifies: one, as torch keeps memory for every stream that was ever used."""
    return torch.cuda.Stream(device)


def label(version: int, checksum: str) -> str:
    """Return the label of a row that holds these weights."""
    return f"{version} {checksum}"
