"""The sender of a group and its receivers, in threads of a test's own process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from backends.transfer.checksum64 import checksum64
from backends.transfer.connection import RendezvousServer
from backends.transfer.group import Receiver, Sender
from backends.transfer.row import digest, layout, parameters_of, row_bytes, view_of
from backends.transfer.streamed import Streaming, StreamSender
from backends.transfer.transport import Membership, Parameters, SenderContext

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


def row_of(tensors: Tensors) -> torch.Tensor:
    places = layout(parameters_of(tensors))
    row = torch.zeros(row_bytes(places), dtype=torch.uint8)
    for place in places:
        view_of(row, place).copy_(tensors[place.name])
    return row


def sums_of(tensors: Tensors) -> list[int]:
    return [checksum64(tensors[name]) for name in sorted(tensors)]


def digest_of(tensors: Tensors) -> str:
    return digest(parameters_of(tensors), sums_of(tensors))


def held_by(receiver: Receiver) -> Tensors:
    return {place.name: view_of(receiver.row.row, place) for place in layout(receiver.parameters)}


class Meeting:
    """A server, and what joins there."""

    def __init__(self, num_workers: int, *, timeout_s: float = 60.0, tensors: Tensors | None = None) -> None:
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self.tensors = weights() if tensors is None else tensors
        self.server = RendezvousServer.open("127.0.0.1")
        self.at = self.server.rendezvous
        self.made: list[Any] = [self.server]

    def sender(self) -> Sender:
        names = ["trainer", *(f"engine {number}" for number in range(self.num_workers))]
        sender = Sender(self.server, names=names, parameters=parameters_of(self.tensors), timeout_s=self.timeout_s)
        self.made.append(sender)
        sender.meet()
        return sender

    def member(self, worker: int, **changed: Any) -> Membership:
        arguments = {"shapes": {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}, "device": CPU}
        arguments |= {"rendezvous": self.at, "worker": worker, "timeout_s": self.timeout_s}
        return Membership(**{**arguments, **changed})

    def receiver(self, worker: int, place: str = "", *, reuse: Any = None, **changed: Any) -> Receiver:
        receiver = Receiver(self.member(worker, **changed), place=place or f"machine {worker}", reuse=reuse)
        self.made.append(receiver)
        return receiver

    def stream(self, *, before: list[Streaming] | None = None) -> Meeting:
        """Have all workers join that load what passes, and the sender of it, ``streams``."""
        self.workers = [Streaming(self.member(1 + n), before=before and before[n]) for n in range(self.num_workers)]
        self.made += self.workers
        self.group = self.sender()
        self.streams = stream_sender(self.group)
        return self

    def end(self) -> None:
        for one in reversed(self.made):
            next(getattr(one, name) for name in ("leave", "abandon", "close") if hasattr(one, name))()


@dataclass
class Source:
    """A ``WeightSource`` on CPU, gathered in parts that the test chooses."""

    parameters: Parameters
    parts: Iterable[dict[str, Any]]
    largest_bytes: int = 1000
    device = CPU

    def buckets(self, bucket_bytes: int | None = None) -> Iterator[dict[str, Any]]:
        return iter(self.parts)

    def largest_bucket_bytes(self, bucket_bytes: int) -> int:
        return self.largest_bytes


def stream_sender(group: Any) -> StreamSender:
    return StreamSender(SenderContext(receives=True, folder=Path(), group=SimpleNamespace(sender=group)))
