"""What changed between two versions of the weights: positions and new values, bit for bit.

Theory of operation. Weights lie in a row of bytes, seen as *units* of the size of the smallest number in it (bf16: 2
bytes). At a learning rate of 1e-6 one or two in a hundred units differ from one optimizer step to the next. A position
is stored as its distance from the one before, in a byte; a longer distance is bridged by *fillers*, unchanged units
with the value that they have. So a changed bf16 number takes 3 bytes, and ``encode`` and ``apply`` are a few operations
of torch each, on any device.

A *payload* is self-describing: a header, and the changes of each *part*, a range of the row that one rank compares.
Header, int64: number of parts, bytes of a unit, total bytes, then begin (byte of the row) and entries of each part.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from backends.transfer.row import ALIGNMENT_BYTES, Place, aligned, row_bytes
from backends.transfer.verify import WORD_BYTES, ChosenWords
from pipelinerl.hardware.transport import LONGEST_GAP

UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that units are compared as, by size (bytes): integers, so that NaN equals itself and -0 is not 0."""
HEADER_WORDS = 3
APPLY_THREADS = 16
UNPACKED = 2**21
"""Entries yielded at a time, at most: bringing them into a model takes 40 bytes each. A part is unpacked whole."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Entries C in ascending order: changed units, and fillers."""

    gaps_C: torch.Tensor
    """``uint8``: distance from the entry before, of the first one from the unit before the part."""
    values_C: torch.Tensor
    """The units, new."""
    num_changed: int = 0
    """Units changed, fillers not counted; 0 in a payload."""

    @property
    def positions(self) -> torch.Tensor:
        """Positions in the part (units), ``int64``, shape [C]."""
        return self.gaps_C.cumsum(0, dtype=torch.int64) - 1


def encode(published: torch.Tensor, new: torch.Tensor, *, most: int | None = None) -> Changes:
    """Return what turns one row of units into another, of the same shape [units] and integer type.

    If more than ``most`` units have changed they are only counted: entries take 40 bytes each while they are made.
    """
    changed = published != new
    if most is not None and (counted := int(torch.count_nonzero(changed))) > most:
        return Changes(new.new_empty(0, dtype=torch.uint8), new[:0], counted)
    at_C = torch.nonzero(changed).flatten()
    steps_C = torch.diff(at_C, prepend=at_C.new_full((1,), -1))
    entries_C = (steps_C - 1) // LONGEST_GAP + 1
    num_changed, num_entries = len(at_C), int(entries_C.sum())
    if num_entries > num_changed:
        change_C = torch.repeat_interleave(entries_C, output_size=num_entries)
        nth_C = torch.arange(1, 1 + num_entries, device=at_C.device) - (entries_C.cumsum(0) - entries_C)[change_C]
        at_C = torch.minimum((at_C - steps_C)[change_C] + nth_C * LONGEST_GAP, at_C[change_C])
        steps_C = torch.diff(at_C, prepend=at_C.new_full((1,), -1))
    return Changes(steps_C.to(torch.uint8), new[at_C], num_changed)


def apply(row: torch.Tensor, changes: Changes) -> None:
    """Bring a part of a row, in units, to the new version."""
    row.index_copy_(0, changes.positions, changes.values_C)


def num_bytes_of(num_entries: int, unit_bytes: int) -> int:
    """Return the bytes of so many entries of a part in a payload."""
    return aligned(num_entries) + aligned(num_entries * unit_bytes)


def body(parts: Sequence[Changes]) -> torch.Tensor:
    """Return the bytes of some parts as they lie in a payload, on their device."""
    pieces = []
    for part in parts:
        for one in (part.gaps_C, part.values_C.view(torch.uint8)):
            pieces += [one, one.new_zeros(-len(one) % ALIGNMENT_BYTES)]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def header(parts: Sequence[tuple[int, int]], unit_bytes: int) -> torch.Tensor:
    """Return the bytes before the bodies of all parts, which follow in this order: begins (bytes) and entries."""
    header_bytes = aligned(8 * (HEADER_WORDS + 2 * len(parts)))
    total_bytes = header_bytes + sum(num_bytes_of(entries, unit_bytes) for _, entries in parts)
    words = [len(parts), unit_bytes, total_bytes, *itertools.chain.from_iterable(parts)]
    row = torch.zeros(header_bytes // 8, dtype=torch.int64)
    row[: len(words)] = torch.tensor(words)
    return row.view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload in the host's memory; it begins at the begin of ``memory``, shape [bytes]."""

    memory: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Size (bytes)."""
        return int(self._words[2])

    @property
    def whole(self) -> torch.Tensor:
        """Its bytes."""
        return self.memory[: self.num_bytes]

    @property
    def _words(self) -> torch.Tensor:
        return self.memory[: len(self.memory) // 8 * 8].view(torch.int64)

    def parts(self) -> Iterator[tuple[int, Changes]]:
        """Yield begin (unit of the row) and changes of each part, in the order of the row."""
        num_parts, unit_bytes, total_bytes = self._words[:HEADER_WORDS].tolist()
        table = self._words[HEADER_WORDS : HEADER_WORDS + 2 * num_parts].view(-1, 2).tolist()
        content = self.memory[:total_bytes]
        at, found = aligned(8 * (HEADER_WORDS + 2 * num_parts)), list[tuple[int, int, Changes]]()
        for begin, entries in table:
            values_at = at + aligned(entries)
            values_C = content[values_at : values_at + entries * unit_bytes].view(UNITS[unit_bytes])
            found.append((begin // unit_bytes, -len(found), Changes(content[at : at + entries], values_C)))
            at = values_at + aligned(entries * unit_bytes)
        # The last ranks' parts of a small bucket are empty: they come before the next bucket, where they begin.
        for begin, _, changes in sorted(found, key=lambda part: part[:2]):
            yield begin, changes

    def apply_to(self, row: torch.Tensor, sums: Sequence[int]) -> list[int]:
        """Bring a row of bytes to the new version; return the checksums of all parts, from those before.

        A checksum is a sum over words, so only changed words are read: to sum a whole row of 15 GB takes a core 8 s.
        """
        unit_bytes = int(self._words[1])
        shift = (WORD_BYTES // unit_bytes).bit_length() - 1  # units of a word: a power of two

        def apply_part(part: tuple[int, Changes], checksum: int) -> int:
            begin, changes = part
            units, words = (row[begin * unit_bytes :].view(UNITS[size]) for size in (unit_bytes, WORD_BYTES))
            changed = ChosenWords(words, torch.unique_consecutive(changes.positions >> shift))
            apply(units, changes)
            return changed.checksum_now(checksum)

        with ThreadPoolExecutor(min(APPLY_THREADS, len(os.sched_getaffinity(0)))) as threads:
            return list(threads.map(apply_part, self.parts(), sums))


@dataclass(frozen=True, slots=True)
class Delta:
    """What turns the weights of one version into the next."""

    places: Sequence[Place]
    """Of the parameters in the row."""
    row: torch.Tensor
    """The new weights (bytes), then a payload."""

    @property
    def payload(self) -> Payload:
        """What has changed in the row."""
        return Payload(self.row[row_bytes(self.places) :])

    def changes(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the places of changed units in the row (``int64``, ascending) and their values, on ``device``.

        A few parts of the payload at a time are unpacked.
        """
        parts = list(self.payload.parts())
        while parts:
            unpacked, num_entries = [], 0
            while parts and num_entries < UNPACKED:
                begin, changes = parts.pop(0)
                there = Changes(changes.gaps_C.to(device), changes.values_C.to(device))
                unpacked.append((begin + there.positions, there.values_C))
                num_entries += len(changes.values_C)
            position_C, value_C = (torch.cat(one) for one in zip(*unpacked, strict=True))
            del unpacked, there
            yield from zip(position_C.split(UNPACKED), value_C.split(UNPACKED), strict=True)

    def numbers(self, dtype: torch.dtype, index_N: torch.Tensor) -> torch.Tensor:
        """Return the bits of numbers of the row, by their indices in it as a row of this type."""
        row = self.row[: row_bytes(self.places)].view(UNITS[dtype.itemsize])
        return row[index_N.cpu()].to(index_N.device)
