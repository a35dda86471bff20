"""A group's sender and its workers, in threads of a test's own process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from backends.transfer.group import Receiver, Sender
from backends.transfer.rendezvous import RendezvousServer
from backends.transfer.row import digest, label, layout, parameters_of, row_bytes, view_of
from backends.transfer.transport import Membership, Parameters
from backends.transfer.verify import checksum64

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    torch.manual_seed(0)
    return {
        "b.weight": torch.randn(30, 7),
        "a.weight": torch.randn(64, 3).bfloat16().t(),
        "empty": torch.empty(0, 4),
        "c.bias": torch.randn(5),
    }


def row_of(tensors: Tensors, parameters: Parameters = ()) -> torch.Tensor:
    places = layout(parameters or parameters_of(tensors))
    row = torch.zeros(row_bytes(places), dtype=torch.uint8)
    for place in places:
        view_of(row, place).copy_(tensors[place.name])
    return row


def sums_of(tensors: Tensors) -> list[int]:
    return [checksum64(row_of(tensors))]


def digest_of(tensors: Tensors) -> str:
    return digest(parameters_of(tensors), sums_of(tensors))


def label_of(tensors: Tensors, version: int) -> str:
    return label(version, digest_of(tensors))


def held_by(receiver: Receiver) -> Tensors:
    return {place.name: view_of(receiver.row.row, place) for place in layout(receiver.parameters)}


class Group:
    """A rendezvous, and all that join there."""

    def __init__(
        self, ends: ExitStack, num_workers: int, *, timeout_s: float = 60.0, tensors: Tensors | None = None
    ) -> None:
        self.ends, self.num_workers, self.timeout_s = ends, num_workers, timeout_s
        self.tensors = weights() if tensors is None else tensors
        self.sender = Sender(RendezvousServer.open("127.0.0.1"))
        self.at = self.sender.rendezvous
        ends.callback(self.sender.leave)

    def meet(self) -> None:
        """Have the sender wait for all workers."""
        names = ["trainer", *(f"engine {number}" for number in range(self.num_workers))]
        self.sender.meet(names, parameters_of(self.tensors), timeout_s=self.timeout_s)

    def member(self, worker: int, **changed: Any) -> Membership:
        arguments = {"shapes": {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}, "device": CPU}
        arguments |= {"rendezvous": self.at, "worker": worker, "timeout_s": self.timeout_s}
        return Membership(**{**arguments, **changed})

    def receiver(self, worker: int, place: str = "", *, reuse: Any = None, **changed: Any) -> Receiver:
        receiver = Receiver(self.member(worker, **changed), place=place or f"machine {worker}", reuse=reuse)
        self.ends.callback(receiver.close)
        return receiver

    def join(self, *places: str, reuse: Any = None) -> list[Receiver]:
        """Have sender and workers join, the workers on these machines (each on its own); return the receivers."""
        workers = range(1, 1 + self.num_workers)
        with ThreadPoolExecutor() as threads:
            joining = [
                threads.submit(self.receiver, worker, place, reuse=reuse)
                for worker, place in zip(workers, places or [""] * self.num_workers, strict=True)
            ]
            self.meet()
            return [one.result() for one in joining]

    def send(self, version: int, *, tensors: Tensors | None = None, label_as: Tensors | None = None) -> int:
        """Send weights, with the checksums of others if given; return the number of machines that refused them."""
        sent = self.tensors if tensors is None else tensors
        row = row_of(sent)
        return self.sender.send(row, version=version, sums=sums_of(label_as or sent), ends=[row.numel()])


@dataclass
class Source:
    """A ``WeightSource`` on CPU, gathered in parts that the test chooses."""

    parameters: Parameters
    parts: Iterable[dict[str, Any]]
    device = CPU

    def buckets(self, *, everywhere: bool = False) -> Iterator[dict[str, Any]]:
        return iter(self.parts)
