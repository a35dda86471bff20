"""Parameters one after the other in a row of bytes, which is what crosses from the trainer to the engines."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 16
"""Parameters begin at a multiple of it, so that their bytes can be seen in their own type (bytes)."""

BUCKET_BYTES = 16 * 2**20
"""Size of what is handed on from machine to machine at a time (bytes)."""

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


def row_bytes(places: Sequence[Place]) -> int:
    """Return the size of the row (bytes)."""
    return places[-1].end if places else 0


def cuts(num_bytes: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each bucket of a row."""
    for begin in range(0, num_bytes, bucket_bytes):
        yield begin, min(begin + bucket_bytes, num_bytes)


def seen_as(row: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the parameter at a place of the row of bytes, without a copy."""
    return row[place.begin : place.end].view(place.dtype).reshape(place.shape)


def digest(parameters: Parameters, sums: Sequence[int]) -> str:
    """Return one checksum of all parameters: SHA-256 of their list and of the checksum of each, in hexadecimal digits.

    Args:
        parameters: The list.
        sums: ``checksum64`` of each, in the same order.
    """
    return hashlib.sha256(json.dumps([parameters, sums]).encode()).hexdigest()


def label(version: int, checksum: str) -> str:
    """Return the label of a row that holds these weights."""
    return f"{version} {checksum}"
