"""A worker's end of the weight sync group; ``broadcast.py`` has the theory of operation."""

from __future__ import annotations

import contextlib
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
from backends.transfer.communicator import HOST, Communicator, answer
from backends.transfer.layout import BUCKET_BYTES, Parameters, Place, cuts, digest, label, layout, row_bytes, seen_as
from backends.transfer.lines import Door, Line, address_towards, come_in, empty, fill
from backends.transfer.shared_row import SharedRow
from backends.transfer.weights_check import check_names
from pipelinerl.errors import BackendError

HASH_THREADS = 4
"""Threads that verify what arrives, if as many cores are allowed (count)."""


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
        self._communicator: Communicator | None = None
        began = time.perf_counter()
        meeting, timeout_s = member.meeting, member.timeout_s
        self._timeout_s = timeout_s
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
        if self._communicator is not None:
            self._communicator.close()

    def _close_with_sender(self) -> None:
        """Leave when the sender has: the machine before, whose bytes are waited for, may be silent for ever."""
        self._sender.wait_for_end()
        self.close()

    def next_transfer(self) -> dict[str, Any]:
        """Wait until the sender begins to send, for as long as it takes; return what it says of it.

        Raises:
            OSError: If the sender has gone, or ``close`` has been called.
        """
        while "communicator" in (notice := self._sender.hear(patiently=True)):
            self._communicator = answer(self._sender, notice, self._device, self._timeout_s)
        return notice

    @property
    def rows_on(self) -> torch.device:
        """Where the rows lie that ``take`` is given."""
        return HOST if self._communicator is None else self._device

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
            BackendError: If bytes cannot be received from device to device. Nor is it then.
        """
        try:
            return self._received(places, row)
        except (OSError, BackendError) as error:
            with contextlib.suppress(OSError):
                self._sender.tell(error=str(error))
            raise

    def judge(self, right: bool) -> None:
        """Tell the sender whether what has been received is right."""
        self._sender.tell(refused=not right)

    def _received(self, places: Sequence[Place], row: torch.Tensor) -> list[int]:
        if self._communicator is not None:
            self._communicator.broadcast(row, check=self._sender.check_there, timeout_s=self._timeout_s)
            return [self._sum(seen_as(row, place)) for place in places]
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
