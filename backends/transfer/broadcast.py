"""Weights from the trainer's rank 0 to all workers of all engines, through a group of processes.

Theory of operation. The group is of torch.distributed's making, gloo on CPU and NCCL on GPU, and has nothing to do
with the default group, which DeepSpeed in one process and vLLM in the other use for themselves. Rank 0 sends, all
others receive. Parameters are laid one after the other, as bytes, into one long row, which crosses in buckets of
``BUCKET_BYTES``; sender and receivers cut it alike, since both compute its layout from the same list.

================  ==========================================  ================================================
step              sender                                      every receiver
================  ==========================================  ================================================
arrival           --                                          leaves its mark in the store
buckets           host -> bucket -> broadcast                 broadcast -> bucket -> host; hashes what is whole
vote              all-reduce: 0                               all-reduce: 1 if it refuses, else 0
================  ==========================================  ================================================

The vote comes out the same for all: either every member has all weights, verified, or every member knows that some has
not, and all try again. Where anything else goes wrong (a member has died, or does not answer in ``timeout_s``) the
members are out of step: then a member leaves, for good, and a new group has to be made.

Run on CPU. Not run on GPU: there the calls are the same, but for how the group is made, and a collective is waited
for until the GPU is done with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from backends.transfer.checksum64 import as_bytes
from backends.transfer.meeting import MeetingStore
from pipelinerl.errors import BackendError

BUCKET_BYTES = 256 * 2**20
"""Size of what crosses at a time (bytes): what a member needs on the GPU."""
ALIGNMENT_BYTES = 16
"""Parameters begin at a multiple of it, so that their bytes can be seen in their own type (bytes)."""
WATCHDOG_FACTOR = 4
"""NCCL's own watchdog, which ends the whole process, gets so many times the time that we wait."""

Parameters = Sequence[tuple[str, str, Sequence[int]]]
"""Name, type (``float32``) and shape of each parameter, in the order in which they cross."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies in the row of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def described(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return name, type and shape of each parameter, in the order of their names."""
    return tuple(
        (name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape)) for name in sorted(tensors)
    )


def layout(parameters: Parameters) -> list[Place]:
    """Return the place of each parameter, in the order given."""
    places, end = [], 0
    for name, dtype_name, shape in parameters:
        dtype = getattr(torch, dtype_name)
        begin = math.ceil(end / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(Place(name, dtype, tuple(shape), begin, end))
    return places


def cuts(places: Sequence[Place], bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each bucket."""
    total = places[-1].end if places else 0
    for begin in range(0, total, bucket_bytes):
        yield begin, min(begin + bucket_bytes, total)


def fill(bucket: torch.Tensor, places: Sequence[Place], tensors: Mapping[str, torch.Tensor], *, begin: int) -> None:
    """Copy into a bucket the bytes that lie in it.

    Args:
        bucket: Bytes from ``begin`` on, on any device; what lies between parameters is left as it is.
        places: The layout.
        tensors: Parameters by name.
        begin: Where the bucket begins in the row.
    """
    end = begin + bucket.numel()
    for place in places:
        first, last = max(place.begin, begin), min(place.end, end)
        if first < last:
            source = as_bytes(tensors[place.name])
            bucket[first - begin : last - begin].copy_(source[first - place.begin : last - place.begin])


def seen_as(row: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the parameter at a place of the row of bytes, without a copy."""
    return row[place.begin : place.end].view(place.dtype).reshape(place.shape)


class BroadcastGroup:
    """One member of a group. Joining returns when all members have joined.

    Args:
        store: What the members meet at.
        rank: 0: the sender.
        num_members: The sender and all receivers (count).
        device: What its buckets lie on; a GPU is also the one that NCCL uses.
        timeout_s: Longest wait for the other members, when joining and in every collective (seconds).
        names: What messages call the members; their numbers if not given.

    Raises:
        BackendError: If not all members come in time.
    """

    def __init__(
        self,
        store: TCPStore,
        *,
        rank: int,
        num_members: int,
        device: torch.device,
        timeout_s: float,
        names: Sequence[str] = (),
    ) -> None:
        self._store, self._rank, self._device = store, rank, device
        self._names = names or [f"member {number}" for number in range(num_members)]
        self._timeout = timedelta(seconds=timeout_s)
        self._num_transfers = 0
        self._why_left = ""
        began = time.perf_counter()
        self._mark("join")
        try:
            self._group: Any = _process_group(store, rank, num_members, device, self._timeout)
            self._vote(refused=False)  # NCCL connects the members at the first collective
            if isinstance(store, MeetingStore):
                store.close_to_others()
        except Exception as error:
            raise BackendError(self._failure("join", "join", began, error)) from error

    @classmethod
    def join(
        cls, address: str, port: int, *, rank: int, num_members: int, device: torch.device, timeout_s: float
    ) -> BroadcastGroup:
        """Join a meeting from another process.

        Raises:
            BackendError: If it cannot be reached, or not all members come in time.
        """
        try:
            store = TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
        except Exception as error:
            raise BackendError(f"transfer failed: phase=join at {address}:{port}; {_first_line(error)}") from error
        return cls(store, rank=rank, num_members=num_members, device=device, timeout_s=timeout_s)

    @property
    def left(self) -> bool:
        """Whether this member has left: the group is of no use then."""
        return self._group is None

    def send(self, parameters: Parameters, tensors: Mapping[str, torch.Tensor]) -> int:
        """Send parameters to all others.

        Args:
            parameters: The list that the receivers have, too.
            tensors: Parameters by name, in the host's memory.

        Returns:
            How many members refuse what they have received.

        Raises:
            BackendError: If it did not come to a vote. The group is of no use then.
        """
        group, mark, began = self._present(), self._next_mark(), time.perf_counter()
        try:
            places = layout(parameters)
            for bucket, begin in self._buckets(places):
                fill(bucket, places, tensors, begin=begin)
                self._wait(group.broadcast(bucket, 0))
            return self._vote(refused=False)
        except Exception as error:
            raise self._broken("send", mark, began, error) from error

    def receive(self, parameters: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive what the sender sends, into the host's memory; ``agree`` must follow.

        Args:
            parameters: What it will be.

        Yields:
            Name and parameter, in the order given, each as soon as it is whole.

        Raises:
            BackendError: If a member has died or does not answer. The group is of no use then.
        """
        group, mark, began = self._present(), self._next_mark(), time.perf_counter()
        try:
            self._mark(mark)
            places = layout(parameters)
            row = torch.empty(places[-1].end if places else 0, dtype=torch.uint8)
            whole = received = 0
            for bucket, begin in self._buckets(places):
                self._wait(group.broadcast(bucket, 0))
                received = begin + bucket.numel()
                row[begin:received].copy_(bucket)
                while whole < len(places) and places[whole].end <= received:
                    yield places[whole].name, seen_as(row, places[whole])
                    whole += 1
            for place in places[whole:]:  # empty ones, where nothing has crossed
                yield place.name, seen_as(row, place)
        except Exception as error:
            raise self._broken("receive", mark, began, error) from error

    def agree(self, *, refused: bool) -> int:
        """Tell all members whether this one refuses what it has received; return how many do.

        Raises:
            BackendError: If a member has died or does not answer. The group is of no use then.
        """
        self._present()
        began = time.perf_counter()
        try:
            return self._vote(refused=refused)
        except Exception as error:
            raise self._broken("vote", "", began, error) from error

    def leave(self, why: str = "") -> None:
        """Leave the group: whatever the others wait for fails; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            self._why_left = why
            group.abort()

    # ------------------------------------------------------------------------------------ collectives

    def _buckets(self, places: Sequence[Place]) -> Iterator[tuple[torch.Tensor, int]]:
        size = min(BUCKET_BYTES, places[-1].end) if places else 0
        memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
        for begin, end in cuts(places, BUCKET_BYTES):
            yield memory[: end - begin], begin

    def _vote(self, *, refused: bool) -> int:
        votes = torch.tensor([int(refused)], device=self._device)
        self._wait(self._group.allreduce([votes]))
        return int(votes.item())

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)  # with a time-out NCCL, too, blocks until the GPU is done, and raises if it is not

    # --------------------------------------------------------------------------------- who is there, who is not

    def _present(self) -> Any:
        if self._group is None:
            raise BackendError(f"the group has been left{self._why_left and ': '}{self._why_left}")
        return self._group

    def _next_mark(self) -> str:
        self._num_transfers += 1
        return f"transfer-{self._num_transfers}"

    def _mark(self, mark: str) -> None:
        self._store.set(f"{mark}/{self._rank}", "here")

    def _absent(self, mark: str) -> str:
        """Say which receivers have not come, if any. Only the sender has the store, and can always tell."""
        if self._rank:
            return ""
        absent = [name for rank, name in enumerate(self._names) if rank and not self._store.check([f"{mark}/{rank}"])]
        return f"{', '.join(absent)} did not come; " if absent else ""

    def _failure(self, phase: str, mark: str, began: float, error: Exception) -> str:
        seconds = time.perf_counter() - began
        return (
            f"transfer failed: phase={phase} at {self._names[self._rank]} after {seconds:.1f} s; "
            f"{self._absent(mark)}{_first_line(error)}"
        )

    def _broken(self, phase: str, mark: str, began: float, error: Exception) -> BackendError:
        failure = self._failure(phase, mark, began, error)
        self.leave(failure)
        return BackendError(failure)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _process_group(
    store: TCPStore, rank: int, num_members: int, device: torch.device, timeout: timedelta
) -> ProcessGroup:
    """Return a group beside torch's default one."""
    prefixed = PrefixStore("weights", store)
    group = ProcessGroup(prefixed, rank, num_members)
    kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    if kind == "cuda":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = WATCHDOG_FACTOR * timeout
        backend, backend_type = ProcessGroupNCCL(prefixed, rank, num_members, options), ProcessGroup.BackendType.NCCL
    else:
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        backend = ProcessGroupGloo(prefixed, rank, num_members, timeout)
        backend_type = ProcessGroup.BackendType.GLOO
    group._set_default_backend(backend_type)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(kind), backend_type, backend)
    return group
