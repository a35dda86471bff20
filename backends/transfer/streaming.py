"""Weights that pass through two buckets, for machines without memory for a second model.

Theory of operation. Engines stand still meanwhile, and so does the trainer: its ranks put bucket i + 1 together while
bucket i travels, and engines load bucket i - 1 (``broadcast.py`` says how a bucket travels, from worker to worker, and
``communicator.py`` how from GPU to GPU: then buckets lie in the GPUs' memory, and go when a version is complete). A
bucket is loaded when every parameter in it is verified; one that is refused is sent again, before the next. What is
loaded is a mixture until the last bucket is: the engine does not go on before. Loaders read parameters where they have
arrived. They are done with a bucket soon after they have begun the next, as buckets hold whole layers: then its memory
is used again. What is kept longer stays as it is, and memory is made for another bucket.

=================  ==========================================  ===================================================
thread             waits for                                   bounded by
=================  ==========================================  ===================================================
joining            the others                                  ``timeout_s``
loading            the bucket that arrives                     the engine's ``update_timeout_s``
arriving           the sender                                  the same; the end of the sender ends it at once
=================  ==========================================  ===================================================
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from backends.interface import TRANSFER_ATTEMPTS
from backends.transfer.broadcast import Sender
from backends.transfer.checksum64 import checksum64
from backends.transfer.communicator import HOST, settle
from backends.transfer.layout import Parameters, layout, row_bytes, seen_as
from backends.transfer.receiver import Membership, Receiver
from backends.transfer.shared_row import machine
from pipelinerl.errors import BackendError

STREAM_BYTES = 256 * 2**20
"""Size of a bucket, unless one layer is larger (bytes)."""

Tensors = Mapping[str, torch.Tensor]


class StreamSender:
    """Rank 0's end: two buckets that versions pass through.

    Args:
        parameters: What will be sent, every time.
        largest_bytes: Size of the largest bucket (bytes).
        device: Where they are put together.
    """

    def __init__(self, parameters: Parameters, largest_bytes: int, device: torch.device) -> None:
        self._parameters, self._largest_bytes, self._device = parameters, largest_bytes, device
        self._number = {name: number for number, (name, _, _) in enumerate(parameters)}
        self._rows = [Bucket(device), Bucket(device)]

    def send(self, sender: Sender | None, version: int, gathered: Iterable[Tensors]) -> str | None:
        """Send a version, each bucket while the next one is put together.

        Args:
            sender: The group, if there is one.
            version: Optimizer steps done.
            gathered: The parameters of every bucket in turn, by name. It is run to its end whatever happens: other
                ranks put them together, too.

        Returns:
            What went wrong, if something did. The group has been left then.
        """
        fault, where = self._rows_on(sender)
        travelling: Future[None] | None = None
        with ThreadPoolExecutor(1) as thread:
            for index, tensors in enumerate(gathered):
                parts = [self._number[name] for name in tensors]
                places = layout([self._parameters[part] for part in parts])
                row, sums = self._rows[index % 2].row(row_bytes(places), where), []
                for place in places:
                    sent = tensors[place.name].detach()
                    seen_as(row, place).copy_(sent)
                    sums.append(checksum64(sent))
                settle(where)
                fault = fault or _fault_of(travelling)
                if sender is not None and fault is None:
                    travelling = thread.submit(_send_bucket, sender, row, version, parts, sums)
            fault = fault or _fault_of(travelling)
        for row in self._rows:
            row.give_back()
        if sender is not None and fault is not None:
            sender.leave(fault)
        return fault

    def _rows_on(self, sender: Sender | None) -> tuple[str | None, torch.device]:
        """Return why nothing can be sent, if so, and where rows lie. What could not be done once is not tried again."""
        if sender is None:
            return "no group", HOST
        try:
            self._device = sender.rows_on(self._device, len(self._rows) * self._largest_bytes)
        except BackendError as error:
            return str(error), HOST
        return None, self._device


class Bucket:
    """Memory for one bucket at a time, as large as the largest so far (mutable).

    Args:
        device: What reads or writes it: memory of the host is pinned for a GPU.
    """

    reader: torch.cuda.Stream | None = None
    """Whose copies out of it are waited for before a GPU's memory is used for something else."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._lent: StorageWeakRef | None = None

    @property
    def seen(self) -> bool:
        """Whether there is a tensor of what was there last, or of a part of it."""
        return self._lent is not None and not self._lent.expired()

    def row(self, num_bytes: int, where: torch.device) -> torch.Tensor:
        """Return room for so many bytes; what was there is lost, unless it is still seen: then room is elsewhere."""
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
    """Return memory as a tensor with a storage of its own, which lives as long as what is made of it."""
    return torch.from_numpy(memory.numpy()) if memory.device.type == "cpu" else torch.from_dlpack(memory)


def _send_bucket(sender: Sender, row: torch.Tensor, version: int, parts: list[int], sums: list[int]) -> None:
    for _ in range(TRANSFER_ATTEMPTS):
        if not sender.send(row, version=version, sums=sums, parts=parts):
            return
    raise BackendError(f"a bucket of version {version} was refused {TRANSFER_ATTEMPTS} times")


def _fault_of(travelling: Future[None] | None) -> str | None:
    error = None if travelling is None else travelling.exception()
    if error is None or isinstance(error, BackendError):
        return None if error is None else str(error)
    raise error


class Streaming:
    """A worker's end. Making it begins to join the group.

    Args:
        member: What the worker joins the group with.
        before: The end of the group before; it is abandoned.
    """

    def __init__(self, member: Membership, *, before: Streaming | None = None) -> None:
        if before is not None:
            before.abandon()
        self._timeout_s, self._device = member.timeout_s, member.device
        self._rows = [Bucket(member.device), Bucket(member.device)]
        self._joined: Future[Receiver] = Future()
        self._abandoned = False

        def join() -> None:
            try:
                # Every worker has what passes to itself.
                receiver = Receiver(member, place=f"{machine()}:{member.worker}", keeps=False)
            except Exception as error:
                self._joined.set_exception(error)
            else:
                self._joined.set_result(receiver)
                if self._abandoned:
                    self.abandon()

        threading.Thread(target=join, name="weights", daemon=True).start()

    def abandon(self) -> None:
        """Leave the group, also under a thread that waits; a second call does nothing."""
        self._abandoned = True
        if self._joined.done() and self._joined.exception() is None:
            self._joined.result().close()

    def arriving(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of a version as they arrive, verified.

        The memory of a bucket is used again as soon as, with the next one begun, no tensor sees it any more.

        Raises:
            BackendError: If it is another version that comes.
            OSError: If a member has gone. The group is of no use then.
        """
        receiver = self._joined.result(self._timeout_s)
        num_missing = len(receiver.parameters)
        if self._device.type == "cuda":
            for row in self._rows:
                row.reader = torch.cuda.current_stream(self._device)
        with ThreadPoolExecutor(1, initializer=_begin, initargs=(self._device,)) as thread:
            try:
                coming: Future[dict[str, torch.Tensor]] | None = None
                turn = 0
                while num_missing:
                    tensors = (coming or thread.submit(_take, receiver, version, self._rows[turn])).result()
                    num_missing -= len(tensors)
                    coming, turn = None, 1 - turn
                    for item in tensors.items():
                        yield item
                        if num_missing and coming is None and not self._rows[turn].seen:
                            settle(self._device)
                            coming = thread.submit(_take, receiver, version, self._rows[turn])
            except BaseException:  # whoever loads has failed, too: the thread must not wait for what comes next
                receiver.close()
                raise

    def give_back(self) -> None:
        """Give the GPU's memory back when what has arrived is loaded."""
        settle(self._device)
        for row in self._rows:
            row.give_back()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else it is kept for the stream that it has arrived on


def _take(receiver: Receiver, version: int, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Receive a bucket as often as it takes until it is right; return its parameters by name."""
    while True:
        notice = receiver.next_transfer()
        if notice["version"] != version:
            raise BackendError(f"version {notice['version']} comes, not {version}")
        places = layout([receiver.parameters[part] for part in notice["parts"]])
        row = bucket.row(row_bytes(places), receiver.rows_on)
        right = receiver.take(places, row) == notice["sums"]
        receiver.judge(right)
        if right:
            return {place.name: seen_as(row, place) for place in places}


def _begin(device: torch.device) -> None:
    """Have this thread use the worker's GPU, and all cores: a new one begins on those of decode, which stands still."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
