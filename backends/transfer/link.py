"""How fast weights reach the machines of the engines: for ``train --check``.

The group is that of weights (``broadcast.py``), with one process per machine that has nothing else to do.
"""

from __future__ import annotations

import math
import time

import torch

from backends.transfer.broadcast import Sender
from backends.transfer.checksum64 import checksum64
from backends.transfer.layout import Parameters, cuts, layout, seen_as
from backends.transfer.lines import Door
from backends.transfer.meeting import own_address
from backends.transfer.receiver import Membership, Receiver
from pipelinerl.errors import BackendError

PART_BYTES = 2**24
"""Size of what is verified at a time (bytes)."""
REPEATS = 2
"""Times that it is sent, after once to warm up; the fastest counts: others may use the network, too."""
TIMEOUT_S = 300.0
"""Longest wait for the others, which import torch first (seconds)."""


class LinkSender:
    """Rank 0's end."""

    def open(self) -> str:
        """Return what the others have to know to join."""
        self._door = Door.open(own_address())
        return self._door.meeting

    def gb_s(self, num_machines: int, num_bytes: int) -> float:
        """Return how fast all machines have so many bytes, verified (GB/s).

        Raises:
            BackendError: If one does not join, or does not get them.
        """
        names = ["rank 0", *(f"machine {number} of engines" for number in range(1, 1 + num_machines))]
        sender = Sender(self._door, names=names, parameters=_parts(num_bytes), timeout_s=TIMEOUT_S)
        row = torch.zeros(num_bytes, dtype=torch.uint8)
        sums = [checksum64(seen_as(row, place)) for place in layout(_parts(num_bytes))]
        best_s = math.inf
        sender.meet()
        try:
            for number in range(1 + REPEATS):
                begin_s = time.perf_counter()
                if sender.send(row, version=0, sums=sums):
                    raise BackendError("what reached the machines of the engines was not what was sent")
                best_s = min(best_s, time.perf_counter() - begin_s) if number else best_s
        finally:
            sender.leave()
        return num_bytes / 1e9 / best_s


def receive(meeting: str, worker: int, num_bytes: int) -> None:
    """Be the end of a machine of engines.

    Args:
        meeting: What the sender's ``open`` has returned.
        worker: Its number among them, from 1.
        num_bytes: That will be sent.
    """
    shapes = {name: tuple(shape) for name, _, shape in _parts(num_bytes)}
    member = Membership(meeting=meeting, worker=worker, shapes=shapes, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    receiver = Receiver(member, place=f"machine {worker}")
    try:
        for _ in range(1 + REPEATS):
            receiver.receive(receiver.next_transfer())
    finally:
        receiver.close()
        receiver.row.close()


def _parts(num_bytes: int) -> Parameters:
    return [(f"{begin}", "uint8", (end - begin,)) for begin, end in cuts(num_bytes, PART_BYTES)]
