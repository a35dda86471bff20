"""Weights in a test's own process, gathered in parts that the test chooses, and their sender."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from backends.transfer.streamed import StreamSender
from backends.transfer.transport import Parameters, SenderContext


@dataclass
class Source:
    """A ``WeightSource`` on CPU."""

    parameters: Parameters
    parts: Iterable[dict[str, Any]]
    largest_bytes: int = 1000
    device = torch.device("cpu")

    def buckets(self, bucket_bytes: int | None = None) -> Iterator[dict[str, Any]]:
        return iter(self.parts)

    def largest_bucket_bytes(self, bucket_bytes: int) -> int:
        return self.largest_bytes


def stream_sender(group: Any) -> StreamSender:
    return StreamSender(SenderContext(receives=True, folder=Path(), group=SimpleNamespace(sender=group)))
