"""A snapshot of the weights in rank 0's host memory, sent to every machine while engines generate and ranks train.

Theory of operation. All ranks gather the parameters; rank 0 copies them into a row of bytes, made once and used for
every version; the trainer stands still for that copy only. On GPUs the row is pinned, and checksums are computed
on the device, before parameters are copied to the host. ``group.py`` sends the row. In a worker a thread of its own
receives, so that transfers do not disturb decode. The row's label shows whether a version has arrived when it is to be
loaded. One worker of every machine receives; the threads of the others end when they have opened the row.

Each group has a thread and a ``Staging`` of its own: nobody sees an abandoned thread's work. The next thread waits for
it before it makes a row: there are never two. A joining thread waits ``timeout_s`` for the thread before and for the
others. A receiving one waits without limit for the sender's notice, then ``timeout_s`` per bucket; it ends at once when
the sender ends or it is abandoned.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from backends.interface import TRANSFER_ATTEMPTS, Weights
from backends.transfer.checksum64 import checksum64
from backends.transfer.group import Receiver
from backends.transfer.row import SharedRow, digest, label, layout, machine, row_bytes, view_of
from backends.transfer.transport import Membership, SenderContext, TransportEnds, WeightSource, place_of
from pipelinerl.errors import BackendError
from pipelinerl.hardware import transport

NICER = 19
"""Niceness of the thread: decode waits for the engine's scheduler and front end, which go first."""


class BroadcastSender:
    """Rank 0 keeps the snapshot and sends it."""

    def __init__(self, context: SenderContext) -> None:
        self._receives, self._group = context.receives, context.group
        self._row: SharedRow | None = None
        self._held: tuple[int, list[int]] | None = None  # version and checksums in the row

    def publish(self, source: WeightSource, version: int) -> Weights | None:
        """Copy the weights into the row; ``BackendError`` if the host has no memory for it."""
        self._held = None
        if not self._receives:
            for _ in source.buckets():  # a collective of all ranks
                pass
            return None
        places = {place.name: place for place in layout(source.parameters)}
        if self._row is None:
            self._row = SharedRow.make(row_bytes(list(places.values())), source.device)
        on_gpu = source.device.type == "cuda"
        sums: dict[str, Any] = {}
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
            for bucket in source.buckets():
                for name, weight in bucket.items():
                    kept, sent = view_of(self._row.row, places[name]), weight.detach()
                    kept.copy_(sent, non_blocking=on_gpu)
                    sums[name] = checksum64(sent) if on_gpu else threads.submit(checksum64, kept)
                if on_gpu:
                    torch.cuda.synchronize()
        in_order = [sums[name] if on_gpu else sums[name].result() for name in places]
        self._held = version, in_order
        checksum = digest(source.parameters, in_order)
        location = f"{transport.BROADCAST.name}:{label(version, checksum)}"
        return Weights(version, location, {"all parameters": checksum})

    def send(self, source: WeightSource, version: int) -> str | None:  # noqa: ARG002
        """Send the row to all members of the group."""
        group = self._group.sender
        if group is None or self._row is None or self._held is None or self._held[0] != version:
            return f"version {version} cannot be sent: {'no group' if group is None else 'it is not held'}"
        try:
            for _ in range(TRANSFER_ATTEMPTS):
                num_refusing = group.send(self._row.row, version=version, sums=self._held[1])
                if not num_refusing:
                    return None
        except BackendError as error:
            return str(error)
        return f"version {version} was refused {TRANSFER_ATTEMPTS} times (machines: {num_refusing})"

    def close(self) -> None:
        """Do nothing: the row goes with the process."""


class BroadcastReceiver:
    """A worker's end: it reads parameters from the received row."""

    def __init__(self, model_path: str) -> None:  # noqa: ARG002
        self._staging: Staging | None = None

    def join(self, member: Membership) -> None:
        """Begin to join a group."""
        self._staging = Staging(member, before=self._staging)

    def receive(self, weights: Weights) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters as they lie in the row."""
        return self._staged(weights).items()

    def loaded(self, weights: Weights) -> None:
        """Check that the row still holds these weights; else the model may be a mixture."""
        self._staged(weights)

    def close(self) -> None:
        """Leave the group."""
        if self._staging is not None:
            self._staging.abandon()
            self._staging = None

    def _staged(self, weights: Weights) -> dict[str, torch.Tensor]:
        if self._staging is None:
            raise BackendError("the engine has joined no group")
        return self._staging.staged(place_of(weights, transport.BROADCAST))


BROADCAST = TransportEnds(BroadcastSender, BroadcastReceiver)


class Staging:
    """The thread of one group in a worker, started here, and the row that it receives into; ``before`` is abandoned."""

    def __init__(self, member: Membership, *, before: Staging | None = None) -> None:
        self._member = member
        self._abandoned = False
        self._receiver: Receiver | None = None
        self._failure = "it has not been joined yet"
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

    def staged(self, label: str) -> dict[str, torch.Tensor]:
        """Return the parameters in the row, no copies; ``BackendError`` if not these, complete and verified."""
        receiver = self._receiver
        if receiver is None:
            raise BackendError(f"no weights are staged: {self._failure}")
        if (there := receiver.row.label) != label:
            what = f"{there[:16]} are" if there else "nothing that is complete and right is"
            raise BackendError(f"weights {label[:16]} are not staged: {what}")
        return {place.name: view_of(receiver.row.row, place) for place in layout(receiver.parameters)}

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
            while receiver.leads and not self._abandoned:
                receiver.receive(receiver.next_transfer())
        except Exception as error:  # the group reports it to the sender, ``staged`` to the engine
            self._failure = str(error)
        finally:  # the row stays
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
