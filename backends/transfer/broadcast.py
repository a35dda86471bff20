"""A snapshot of the weights in rank 0's host memory, brought to every machine while engines generate and ranks train.

Theory of operation. All ranks gather the parameters, a bucket at a time; the trainer stands still until the snapshot is
complete. Rank 0 keeps it in a row of bytes, made once (pinned on GPUs), and ``group.py`` sends the row. In a worker a
thread of its own receives, so that transfers do not disturb decode. The row's label shows whether a version has arrived
when it is to be loaded. One worker of every machine receives; the threads of the others end when they have opened the
row.

A *delta* (``delta.py``) holds only the changed numbers. Every rank keeps its *shard* of the published weights, an equal
part of each bucket; it compares the shard with the new one on its device and sends the changes to rank 0. Then the
trainer is free. ``send`` brings rank 0's row to the new version and sends the same changes to all machines. New members
get the whole row; so do all after a refusal, and after a dense publication: the first one, every
``DENSE_EVERY``-th, and one whose delta would be too large. So the row is always whole, and ``broadcast`` is ``delta``
without deltas.

Each group has a thread and a ``Staging`` of its own: nobody sees an abandoned thread's work. The next thread waits for
it before it makes a row: there are never two. A joining thread waits ``timeout_s`` for the thread before and for the
others. A receiving one waits without limit for the sender's notice, then ``timeout_s`` per bucket; it ends at once when
the sender ends or it is abandoned.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from backends.interface import TRANSFER_ATTEMPTS, Weights
from backends.transfer.delta import APPLY_THREADS, UNITS, Changes, Delta, Payload, body, encode, header, num_bytes_of
from backends.transfer.group import Receiver
from backends.transfer.row import Place, SharedRow, aligned, digest, label, layout, machine, ranges, row_bytes, view_of
from backends.transfer.transport import (
    DAMAGED,
    REFUSED,
    Membership,
    SenderContext,
    Tensors,
    TransportEnds,
    WeightSource,
    place_of,
)
from backends.transfer.verify import as_bytes, checksum64
from pipelinerl.errors import BackendError
from pipelinerl.hardware import transport
from pipelinerl.hardware.transport import LARGEST_DELTA, WeightTransport

DENSE_EVERY = 64
"""Deltas in a row before all weights are sent again (versions)."""
JOINED_S = 10.0
"""Longest wait for the thread of a group that has formed."""
NICER = 19
"""Niceness of the thread: decode waits for the engine's scheduler and front end, which go first."""


class SnapshotSender:
    """A rank's end; rank 0 keeps the snapshot and sends it. ``deltas``: whether it may publish deltas."""

    def __init__(self, context: SenderContext, *, name: str, deltas: bool) -> None:
        self._context, self._name, self._deltas = context, name, deltas
        self._row: SharedRow | None = None  # rank 0's: the weights, then room for a delta
        self._places: list[Place] = []  # of all parameters in the row
        self._num_bytes = 0  # of the weights in it
        self._held: tuple[int, str, list[int]] | None = None  # version, label and checksums of the newest snapshot
        self._base = ""  # label of the weights that the delta behind the row changes; empty: there is none
        self._ends: list[int] = []  # of the ranges that checksums are of
        self._shards: list[torch.Tensor] = []  # this rank's, of every bucket, as published
        self._num_deltas = 0  # since the last dense publication
        self._row_sums: list[int] | None = None  # checksums of the row; None: it has not been compared with them
        self._damaged = False  # the row: the next publication is dense

    def publish(self, source: WeightSource, version: int) -> Weights | None:
        """Complete the snapshot, or a delta; ``BackendError`` if the host has no memory for it."""
        if not self._places:
            self._places = layout(source.parameters)
            self._num_bytes = row_bytes(self._places)
        if self._context.receives and self._row is None:
            room = int(self._num_bytes * LARGEST_DELTA) if self._deltas else 0
            self._row = self._context.group.row = SharedRow.make(self._num_bytes + room, source.device)
        if self._row is not None and self._held is not None:  # if it has not been sent
            self._apply()
            if self._deltas:
                self._verify()
        base, self._held, self._base = self._held[1] if self._held else "", None, ""
        as_delta = self._deltas and bool(self._shards) and self._num_deltas < DENSE_EVERY and not self._damaged
        ranks = Ranks(source.device)
        changed = self._publish_delta(source, ranks) if all(wish for (wish,) in ranks.gather([as_delta])) else None
        if changed is None:
            self._publish_dense(source, ranks)
        self._num_deltas = 0 if changed is None else self._num_deltas + 1
        if self._row is None:
            return None
        checksum = digest(source.parameters, self._sums)
        self._held = version, label(version, checksum), self._sums
        weights = Weights(version, f"{self._name}:{self._held[1]}", {"all parameters": checksum})
        if changed is None:
            self._row.label, self._row_sums, self._damaged = self._held[1], None, False
            return weights
        self._base = base
        numbers = sum(math.prod(place.shape) for place in self._places)
        return replace(weights, delta_bytes=self._payload.num_bytes, delta_share=changed / numbers)

    def send(self, version: int) -> str | None:
        """Bring the row to the newest version, if that is a delta; send the row, or the delta, to all members."""
        group = self._context.group.sender
        if group is None or self._row is None or self._held is None or self._held[0] != version:
            return f"version {version} cannot be sent: {'no group' if group is None else 'it is not held'}"
        self._apply()
        self._verify()
        if not self._row.label:
            return f"version {version} cannot be sent: {DAMAGED}"
        try:
            for _ in range(TRANSFER_ATTEMPTS):
                base = self._base if group.base == self._base else ""  # empty after a refusal
                content = self._payload.whole if base else self._row.row[: self._num_bytes]
                num_refusing = group.send(content, version=version, sums=self._held[2], ends=self._ends, base=base)
                if not num_refusing:
                    return None
        except BackendError as error:
            return str(error)
        self._damaged = True  # the row, it may be
        return f"version {version} {REFUSED} {TRANSFER_ATTEMPTS} times (machines: {num_refusing})"

    def close(self) -> None:
        """Do nothing: the row goes with the process."""

    @property
    def _payload(self) -> Payload:
        assert self._row is not None
        return Payload(self._row.row[self._num_bytes :])

    def _apply(self) -> None:
        """Bring the row to the newest version, if a delta waits."""
        assert self._row is not None
        assert self._held is not None
        _, name, sums = self._held
        if (before := self._row.label) == name:
            return
        self._row.label = ""
        row = self._row.row[: self._num_bytes]
        self._damaged = (
            before != self._base or not self._row_sums or self._payload.apply_to(row, self._row_sums) != sums
        )
        if not self._damaged:
            self._row_sums = sums
            self._row.set_label(name, base=self._base)

    def _verify(self) -> None:
        """Compare a row that was copied with the checksums of the ranks: engines of this machine read it as it is."""
        assert self._row is not None
        if self._row_sums is not None or self._held is None:
            return
        with ThreadPoolExecutor(APPLY_THREADS) as threads:
            sums = list(threads.map(checksum64, ranges(self._row.row[: self._num_bytes], self._ends)))
        self._damaged = sums != self._held[2]
        if self._damaged:
            self._row.label = ""
        else:
            self._row_sums = sums

    def _publish_dense(self, source: WeightSource, ranks: Ranks) -> None:
        """Copy all weights into the row."""
        self._shards, own, buckets = [], list[int](), list[list[Place]]()
        if self._row is not None:
            self._row.label = ""
        for places, bucket in self._placed(source):
            if self._row is not None:
                for place in places:
                    sent = bucket[place.name].detach()
                    view_of(self._row.row, place).copy_(sent, non_blocking=source.device.type == "cuda")
            shard = ranks.shard(bucket, places)
            own.append(checksum64(shard))  # waits for the copies, too
            buckets.append(places)
            if self._deltas:
                self._shards.append(shard)
        self._sums = ranks.in_row_order(own)
        self._ends = [end for places in buckets for _, end in ranks.parts(places)]

    def _publish_delta(self, source: WeightSource, ranks: Ranks) -> int | None:
        """Put a delta behind the row; return the number of changed units, None if the delta is too large."""
        unit = UNITS[unit_bytes := min(place.dtype.itemsize for place in self._places)]
        own, begins, changes = list[int](), list[int](), list[Changes]()
        limit, num_changed = int(self._num_bytes * LARGEST_DELTA), 0
        most = limit // (1 + unit_bytes)  # units of all ranks whose changes can be small enough
        for number, (places, bucket) in enumerate(self._placed(source)):
            shard, before = ranks.shard(bucket, places), self._shards[number]
            own.append(checksum64(shard))
            begins.append(ranks.parts(places)[ranks.number][0])
            changes.append(encode(before.view(unit), shard.view(unit), most=most - num_changed))
            num_changed += sum(one for (one,) in ranks.gather([changes[-1].num_changed]))
            self._shards[number] = shard
        self._sums = ranks.in_row_order(own)
        if num_changed > most:
            return None
        entries = ranks.gather([len(one.gaps_C) for one in changes])
        sizes = [sum(num_bytes_of(one, unit_bytes) for one in rank) for rank in entries]
        parts = itertools.chain.from_iterable(map(zip, ranks.gather(begins), entries))
        head = header(list(parts), unit_bytes)
        if len(head) + sum(sizes) > limit:
            return None
        at = self._num_bytes
        if self._row is not None:
            self._row.label = self._row.label  # the delta behind it goes
        for part in itertools.chain([head], ranks.to_first(body(changes), sizes)):
            if self._row is not None:
                self._row.row[at : at + len(part)].copy_(part)
                at += len(part)
        return num_changed

    def _placed(self, source: WeightSource) -> Iterator[tuple[list[Place], Tensors]]:
        """Yield the weights, a bucket at a time, with their places in the row; all ranks together."""
        by_name = {place.name: place for place in self._places}
        for bucket in source.buckets(everywhere=True):
            yield sorted((by_name[name] for name in bucket), key=lambda place: place.begin), bucket


class Ranks:
    """All ranks of the trainer: each has a part of every bucket. All call the methods together."""

    def __init__(self, device: torch.device) -> None:
        several = dist.is_available() and dist.is_initialized()
        self._device = device
        self.number: int = dist.get_rank() if several else 0
        self._count: int = dist.get_world_size() if several else 1

    def parts(self, places: Sequence[Place]) -> list[tuple[int, int]]:
        """Return begin and end (bytes of the row) of every rank's part of a bucket."""
        begin, end = places[0].begin, aligned(places[-1].end)
        step = aligned(-(-(end - begin) // self._count))
        cuts = [min(begin + number * step, end) for number in range(self._count + 1)]
        return list(itertools.pairwise(cuts))

    def shard(self, bucket: Tensors, places: Sequence[Place]) -> torch.Tensor:
        """Return the bytes of this rank's part of a bucket, as they lie in a row whose gaps are zero."""
        begin, end = self.parts(places)[self.number]
        pieces, at = [], begin
        for place in places:
            first, last = max(begin, place.begin), min(end, place.end)
            if first < last:
                sent = as_bytes(bucket[place.name])
                pieces += [sent.new_zeros(first - at), sent[first - place.begin : last - place.begin]]
                at = last
        pieces.append(torch.zeros(end - at, dtype=torch.uint8, device=self._device))
        return torch.cat(pieces)

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank; all have equally many."""
        if self._count == 1:
            return [list(own)]
        mine = torch.tensor(own, dtype=torch.int64, device=self._device)
        all_ranks = [torch.empty_like(mine) for _ in range(self._count)]
        dist.all_gather(all_ranks, mine)
        return [one.tolist() for one in all_ranks]

    def in_row_order(self, own: Sequence[int]) -> list[int]:
        """Return a number for each part of each bucket, from each rank's own."""
        return list(itertools.chain.from_iterable(zip(*self.gather(own), strict=True)))

    def to_first(self, own: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Send this rank's bytes to rank 0; there, yield the bytes of every rank. ``sizes``: their numbers, by rank."""
        if self.number:
            _exchange(dist.isend, own, 0)
            return
        yield own
        for rank, size in enumerate(sizes[1:], start=1):
            other = torch.empty(size, dtype=torch.uint8, device=self._device)
            _exchange(dist.irecv, other, rank)
            yield other


def _exchange(how: Any, content: torch.Tensor, rank: int) -> None:
    """Send or receive through the communicator of all ranks: alone, each pair would get one of its own."""
    for work in dist.batch_isend_irecv([dist.P2POp(how, content, rank)]):
        work.wait()


class BroadcastReceiver:
    """A worker's end: it reads parameters from the received row."""

    def __init__(self, model_path: str, *, transport: WeightTransport) -> None:  # noqa: ARG002
        self._transport = transport
        self._staging: Staging | None = None

    def join(self, member: Membership) -> None:
        """Begin to join a group."""
        self._staging = Staging(member, before=self._staging)

    def receive(self, weights: Weights) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters as they lie in the row."""
        return self._staged(weights)

    def delta(self, weights: Weights, held: Weights) -> Delta | None:
        """Return what turns weights that a model holds into these, if they came as such a delta."""
        self._staged(weights)
        assert self._staging is not None
        return self._staging.delta(held.location.partition(":")[2])

    def loaded(self, weights: Weights) -> None:
        """Check that the row still holds these weights; else the model may be a mixture."""
        self._staged(weights)

    def close(self) -> None:
        """Leave the group."""
        if self._staging is not None:
            self._staging.abandon()
            self._staging = None

    def _staged(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        if self._staging is None:
            raise BackendError("the engine has joined no group")
        return self._staging.staged(place_of(weights, self._transport))


def _ends(transport: WeightTransport) -> TransportEnds:
    sender = partial(SnapshotSender, name=transport.name, deltas=transport.keeps_shards)
    return TransportEnds(sender, partial(BroadcastReceiver, transport=transport))


BROADCAST, DELTA = _ends(transport.BROADCAST), _ends(transport.DELTA)


class Staging:
    """The thread of one group in a worker, started here, and the row that it receives into; ``before`` is abandoned."""

    def __init__(self, member: Membership, *, before: Staging | None = None) -> None:
        self._member = member
        self._abandoned = False
        self._receiver: Receiver | None = None
        self._failure, self._joined = "it has not been joined yet", threading.Event()
        decoding = os.sched_getaffinity(0)  # of the worker's own loop: this is called from there
        if before is not None:
            before.abandon()
        self._thread = threading.Thread(target=self._run, args=(decoding, before), name="weights", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Have the thread end, without waiting for it."""
        self._abandoned = True
        if self._receiver is not None:
            self._receiver.close()

    def staged(self, label: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters in the row, no copies; ``BackendError`` if not these, complete and verified."""
        self._joined.wait(JOINED_S)  # the sender knows that all have joined before this thread does
        receiver = self._receiver
        if receiver is None:
            raise BackendError(f"no weights are staged: {self._failure}")
        if (there := receiver.row.label) != label:
            what = f"{there[:16]} are" if there else "nothing that is complete and right is"
            raise BackendError(f"weights {label[:16]} are not staged: {what}")
        # A view is made when it is read: 20,000 of them take 0.2 s.
        return ((place.name, view_of(receiver.row.row, place)) for place in layout(receiver.parameters))

    def delta(self, base: str) -> Delta | None:
        """Return the delta behind the row, if it is of the weights labelled ``base``."""
        receiver = self._receiver
        if receiver is None or not base or receiver.row.base != base:
            return None
        return Delta(layout(receiver.parameters), receiver.row.row)

    # ------------------------------------------------------------------------------------ in the thread

    def _run(self, decoding: set[int], before: Staging | None) -> None:
        # A thread begins on the cores of whoever starts it: it would take turns with decode.
        with contextlib.suppress(OSError):  # there are no others
            os.sched_setaffinity(0, set(range(os.cpu_count() or 1)) - decoding)
        os.nice(NICER)  # of this thread and threads that it starts: on Linux each thread has a priority
        try:
            if self._member.device.type == "cuda":
                torch.cuda.set_device(self._member.device)
            self._receiver = receiver = self._join(before)
            self._joined.set()
            while receiver.leads and not self._abandoned:
                receiver.receive(receiver.next_transfer())
        except Exception as error:  # the group reports it to the sender, ``staged`` to the engine
            self._failure = str(error)
        finally:  # the row stays
            self._joined.set()
            if self._receiver is not None:
                self._receiver.close()

    def _join(self, before: Staging | None) -> Receiver:
        reuse: SharedRow | None = None
        if before is not None:
            before._thread.join(self._member.timeout_s)
            if before._thread.is_alive():
                raise BackendError(f"the group before is still being waited for, after {self._member.timeout_s:g} s")
            reuse = before._take_row()
        return Receiver(self._member, place=machine(), reuse=reuse)

    def _take_row(self) -> SharedRow | None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return None
        if not receiver.leads:
            receiver.row.close()
            return None
        return receiver.row
