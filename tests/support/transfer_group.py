"""A group's sender and its workers, in threads of a test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from backends.interface import Weights
from backends.transfer.checksum64 import checksum64
from backends.transfer.connection import RendezvousServer
from backends.transfer.group import Receiver, Sender
from backends.transfer.row import digest, label, layout, parameters_of, row_bytes, view_of
from backends.transfer.streamed import StreamReceiver, StreamSender
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


def load(worker: StreamReceiver, version: int) -> Tensors:
    return {name: tensor.clone() for name, tensor in worker.receive(Weights(version, f"streamed:{version}"))}


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

    def stream(self, workers: Iterable[StreamReceiver] = ()) -> Group:
        """Have workers (new ones) join that load parameters as they arrive, and their sender ``streams``."""
        self.workers = list(workers) or [StreamReceiver("") for _ in range(self.num_workers)]
        for number, worker in enumerate(self.workers, start=1):
            worker.join(self.member(number))
            self.ends.callback(worker.close)
        self.meet()
        self.streams = stream_sender(self.sender)
        return self

    def send_buckets(self, version: int, buckets: Iterable[Tensors]) -> str | None:
        """Send buckets of parameters as they are gathered; return the fault, if any."""
        return self.streams.send(Source(parameters_of(self.tensors), buckets), version)

    def check_all_load(self, version: int, buckets: list[Tensors], load: Callable[..., Tensors] = load) -> None:
        """Check that all workers load all buckets of parameters, in this order."""
        whole = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
        with ThreadPoolExecutor() as threads:
            loading = [threads.submit(load, worker, version) for worker in self.workers]
            assert self.send_buckets(version, buckets) is None
            for got in (one.result(60) for one in loading):
                assert list(got) == list(whole)
                assert all(torch.equal(got[name], tensor) for name, tensor in whole.items())

    def send(self, version: int, *, tensors: Tensors | None = None, label_as: Tensors | None = None) -> int:
        """Send weights, with the checksums of others if given; return the number of machines that refused them."""
        sent = self.tensors if tensors is None else tensors
        return self.sender.send(row_of(sent), version=version, sums=sums_of(label_as or sent))


@dataclass
class Source:
    """A ``WeightSource`` on CPU, gathered in parts that the test chooses."""

    parameters: Parameters
    parts: Iterable[dict[str, Any]]
    largest_bytes: int = 1000
    device = CPU

    def buckets(self, bucket_bytes: int | None = None, *, everywhere: bool = False) -> Iterator[dict[str, Any]]:
        return iter(self.parts)

    def largest_bucket_bytes(self, bucket_bytes: int) -> int:
        return self.largest_bytes


def stream_sender(group: Any) -> StreamSender:
    return StreamSender(SenderContext(receives=True, folder=Path(), group=SimpleNamespace(sender=group)))
