"""Weights that pass through two buckets, for machines without memory for a second model.

Theory of operation. Engines and trainer stand still: the ranks gather bucket i + 1 while bucket i travels and engines
load bucket i - 1 (``group.py``: from worker to worker through the host; ``communicator.py``: from GPU to GPU, in memory
that is freed after each version). A bucket is loaded when every parameter in it is verified; a refused one is sent
again before the next. Until the last bucket the model is a mixture, so the engine stays paused. Loaders read
parameters where they have arrived; buckets hold whole layers, so a bucket is done with soon after the next has begun,
and its memory is used again. A tensor kept longer keeps its memory, and the bucket gets new memory.

Joining waits ``timeout_s`` for the others. Loading waits for a bucket, arriving for the sender, both for the engine's
``update_timeout_s``; the end of the sender ends them at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from backends.interface import TRANSFER_ATTEMPTS, Weights
from backends.transfer.checksum64 import checksum64
from backends.transfer.communicator import HOST, close_result, settle
from backends.transfer.group import Receiver, Sender
from backends.transfer.row import layout, machine, row_bytes, view_of
from backends.transfer.transport import Membership, SenderContext, TransportEnds, WeightSource
from pipelinerl.errors import BackendError
from pipelinerl.hardware import transport

STREAM_BYTES = 256 * 2**20
"""Of a bucket, unless one layer is larger."""


class StreamSender:
    """The ranks gather while rank 0 sends, through two buckets."""

    def __init__(self, context: SenderContext) -> None:
        self._receives, self._group = context.receives, context.group
        self._rows: list[Bucket] = []
        self._device = HOST

    def publish(self, source: WeightSource, version: int) -> Weights | None:  # noqa: ARG002
        """Copy nothing: ``send`` reads the current weights."""
        return Weights(version, f"{transport.STREAMED.name}:{version}") if self._receives else None

    def send(self, source: WeightSource, version: int) -> str | None:
        """Send the weights of this moment, each bucket while the next one is gathered; all ranks together.

        All parts are consumed, also after a fault, which ends the group: gathering is a collective of all ranks.
        """
        gathered = source.buckets(STREAM_BYTES)
        if not self._receives:
            for _ in gathered:
                pass
            return None
        if not self._rows:
            self._rows, self._device = [Bucket(source.device), Bucket(source.device)], source.device
        group = self._group.sender
        fault, where = self._rows_on(group, source)
        number = {name: number for number, (name, _, _) in enumerate(source.parameters)}
        travelling: Future[str | None] | None = None
        with ThreadPoolExecutor(1) as thread:
            for index, tensors in enumerate(gathered):
                parts = [number[name] for name in tensors]
                places = layout([source.parameters[part] for part in parts])
                row = self._rows[index % 2].row(row_bytes(places), where)
                for place in places:
                    view_of(row, place).copy_(tensors[place.name].detach())
                settle(where)
                sums = [checksum64(row, computed_on=source.device)]
                fault = fault or (travelling.result() if travelling else None)
                if group is not None and fault is None:
                    travelling = thread.submit(_send_bucket, group, row, version, parts, sums)
            fault = fault or (travelling.result() if travelling else None)
        for bucket in self._rows:
            bucket.give_back()
        if group is not None and fault is not None:
            group.leave(fault)
        return fault

    def close(self) -> None:
        """Do nothing: buckets go with the process."""

    def _rows_on(self, group: Sender | None, source: WeightSource) -> tuple[str | None, torch.device]:
        """Return why nothing can be sent, if so, and where rows lie. A failed communicator is not tried again."""
        if group is None:
            return "no group", HOST
        try:
            room_bytes = len(self._rows) * source.largest_bucket_bytes(STREAM_BYTES)
            self._device = group.rows_on(self._device, room_bytes)
        except BackendError as error:
            return str(error), HOST
        return None, self._device


class StreamReceiver:
    """A worker's end: parameters as they arrive."""

    def __init__(self, model_path: str) -> None:  # noqa: ARG002
        self._joined: Future[Receiver] | None = None  # the group joined last; its thread may still wait for others

    def join(self, member: Membership) -> None:
        """Begin to join a group in a thread, and leave the one before."""
        self.close()
        self._timeout_s, self._device = member.timeout_s, member.device
        self._rows = [Bucket(member.device), Bucket(member.device)]
        joined: Future[Receiver] = Future()

        def join() -> None:
            try:
                # A place of its own: every worker receives for itself.
                joined.set_result(Receiver(member, place=f"{machine()}:{member.worker}", keeps=False))
            except Exception as error:
                joined.set_exception(error)

        threading.Thread(target=join, name="weights", daemon=True).start()
        self._joined = joined

    def receive(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the verified parameters as they arrive.

        A bucket's memory is reused once the next bucket has begun and no tensor views it. ``BackendError`` if no group
        has been joined, or another version arrives; ``OSError`` if a member has gone. The group is unusable then.
        """
        if self._joined is None:
            raise BackendError("the engine has joined no group")
        receiver, rows = self._joined.result(self._timeout_s), self._rows
        num_missing = len(receiver.parameters)
        if self._device.type == "cuda":
            for row in rows:
                row.reader = torch.cuda.current_stream(self._device)
        with ThreadPoolExecutor(1, initializer=_begin, initargs=(self._device,)) as thread:
            try:
                coming: Future[dict[str, torch.Tensor]] | None = None
                turn = 0
                while num_missing:
                    tensors = (coming or thread.submit(_take, receiver, weights.version, rows[turn])).result()
                    num_missing -= len(tensors)
                    coming, turn = None, 1 - turn
                    for item in tensors.items():
                        yield item
                        if num_missing and coming is None and not rows[turn].seen:
                            settle(self._device)
                            coming = thread.submit(_take, receiver, weights.version, rows[turn])
            except BaseException:  # the loader has failed, too: the thread must not wait for the next bucket
                receiver.close()
                raise

    def loaded(self, weights: Weights) -> None:  # noqa: ARG002
        """Free a GPU's memory once the arrived weights are loaded."""
        if self._joined is None:
            return
        settle(self._device)
        for row in self._rows:
            row.give_back()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else it is kept for the stream that it has arrived on

    def close(self) -> None:
        """Leave the group, also while a thread waits in it."""
        if self._joined is not None:
            self._joined.add_done_callback(close_result)
            self._joined = None


STREAMED = TransportEnds(StreamSender, StreamReceiver)


class Bucket:
    """Memory for one bucket at a time, as large as the largest so far (mutable); the host's is pinned for a GPU."""

    reader: torch.cuda.Stream | None = None
    """Its copies out of it are waited for before a GPU's memory is used for something else."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._lent: StorageWeakRef | None = None

    @property
    def seen(self) -> bool:
        """Whether a tensor still views the last content."""
        return self._lent is not None and not self._lent.expired()

    def row(self, num_bytes: int, where: torch.device) -> torch.Tensor:
        """Return room for so many bytes; it overwrites the last content, or is new memory while a tensor views that."""
        if self._memory.numel() < num_bytes or self._memory.device.type != where.type or self.seen:
            self._memory = torch.empty(0, dtype=torch.uint8)
            pinned = self._pinned and where.type == "cpu"
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=where, pin_memory=pinned)
            if self.reader is not None and where.type == "cuda":
                self._memory.record_stream(self.reader)
        whole = _lend(self._memory)
        self._lent = StorageWeakRef(whole.untyped_storage())
        return whole[:num_bytes]

    def give_back(self) -> None:
        """Give memory of a GPU back, which model and KV cache need between two versions. The host's is kept."""
        if self._memory.device.type == "cuda":
            self._memory = torch.empty(0, dtype=torch.uint8)


def _lend(memory: torch.Tensor) -> torch.Tensor:
    """Return memory as a tensor whose storage lives as long as its views."""
    return torch.from_numpy(memory.numpy()) if memory.device.type == "cpu" else torch.from_dlpack(memory)


def _send_bucket(sender: Sender, row: torch.Tensor, version: int, parts: list[int], sums: list[int]) -> str | None:
    """Return the fault, if any."""
    try:
        for _ in range(TRANSFER_ATTEMPTS):
            if not sender.send(row, version=version, sums=sums, parts=parts):
                return None
    except BackendError as error:
        return str(error)
    return f"a bucket of version {version} was refused {TRANSFER_ATTEMPTS} times"


def _take(receiver: Receiver, version: int, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Receive a bucket until it is verified; return its parameters by name."""
    while True:
        notice = receiver.next_transfer()
        if notice["version"] != version:
            raise BackendError(f"version {notice['version']} comes, not {version}")
        places = layout([receiver.parameters[part] for part in notice["parts"]])
        row = bucket.row(row_bytes(places), receiver.rows_on)
        right = receiver.take(notice["ends"], row) == notice["sums"]
        receiver.judge(right)
        if right:
            return {place.name: view_of(row, place) for place in places}


def _begin(device: torch.device) -> None:
    """Bind this thread to the worker's GPU and to all cores: new threads start on the cores of decode, now idle."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
