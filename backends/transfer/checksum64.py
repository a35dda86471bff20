"""A 64-bit checksum of a tensor's bytes: the same bits on every device, computed where the tensor lies.

It guards transfers against faults, not against an adversary: files keep SHA-256 (``verify.py``). With all
arithmetic modulo 2**64, bytes as little-endian words x, the last one filled up with zeros, word i of chunk k::

    y = ((x + (k + 1) * C1) ^ w_i) * C2,    y = (y ^ (y >> 32)) * w_i,    checksum = sum of y + number of bytes

``w_i`` are odd, from a splitmix step. The step in the middle makes it non-linear: a linear sum is blind to two flipped
signs, for 2**63 times an odd number, twice, is 0. The order of a sum does not matter, so neither does how many chunks
are computed at a time.

torch has signed words: constants from 2**63 on are negative, and a mask takes off the sign that ``>>`` keeps.
"""

from __future__ import annotations

import functools

import torch

CHUNK_WORDS = 2**15
"""Words (8 bytes) after which the factors repeat; temporaries of one chunk stay in a CPU's cache."""
CHUNKS_AT_A_TIME = {"cpu": 1, "cuda": 256}
"""A GPU wants large steps, each of 64 MiB."""
WORD_BYTES = 8
LOW_HALF = 2**32 - 1


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


C1, C2 = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)
C3 = _signed(0x94D049BB133111EB)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return w_i, shape [``CHUNK_WORDS``]: odd, as if drawn at random."""
    word = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device) * C1
    for shift, factor in ((30, C2), (27, C3)):
        word = (word ^ (word >> shift & 2 ** (64 - shift) - 1)) * factor
    return (word ^ (word >> 31 & 2**33 - 1)) | 1


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, shape [bytes], on its device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum64(tensor: torch.Tensor, *, computed_on: torch.device | None = None) -> int:
    """Return the checksum of a tensor's bytes in row-major order, a signed 64-bit number, whatever its shape and type.

    ``computed_on``: where the bytes are copied to, a few chunks at a time, to be summed. None: where they lie.
    """
    row = as_bytes(tensor)
    device = computed_on or row.device
    at_a_time = CHUNKS_AT_A_TIME.get(device.type, 1)
    chunk_bytes = CHUNK_WORDS * WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=device)
    for begin in range(0, row.numel(), at_a_time * chunk_bytes):
        part = row[begin : begin + at_a_time * chunk_bytes].to(device)
        whole = part.numel() // chunk_bytes * chunk_bytes
        first = begin // chunk_bytes
        if whole:
            total += _mixed(_words(part[:whole]).view(-1, CHUNK_WORDS), first)
        if whole < part.numel():
            total += _mixed(_words(part[whole:])[None], first + whole // chunk_bytes)
    return _signed(int(total.item()) + row.numel())


def _words(part: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, the last one filled up with zeros; a copy only where they cannot be seen as words."""
    missing = -part.numel() % WORD_BYTES
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    elif part.storage_offset() % WORD_BYTES:
        part = part.clone()
    return part.view(torch.int64)


def _mixed(words: torch.Tensor, first_chunk: int) -> torch.Tensor:
    """Return the sum over chunks, shape [chunks, words], that begin with the ``first_chunk``-th."""
    chunk = torch.arange(first_chunk, first_chunk + words.shape[0], device=words.device)
    return _terms(words, chunk[:, None], _factors(words.device)[: words.shape[1]])


def _terms(words: torch.Tensor, chunk: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    word = words + (chunk + 1) * C1
    word = word.bitwise_xor_(factors).mul_(C2)
    return word.bitwise_xor_(word >> 32 & LOW_HALF).mul_(factors).sum()


class ChosenWords:
    """Some words of a row: what their change makes of its checksum, without a look at the others."""

    def __init__(self, words: torch.Tensor, index_W: torch.Tensor) -> None:
        """``words``: the row, ``int64``; ``index_W``: each once."""
        self._words, self._index_W = words, index_W
        self._chunk_W = index_W >> CHUNK_WORDS.bit_length() - 1
        self._factor_W = torch.index_select(_factors(words.device), 0, index_W & CHUNK_WORDS - 1)
        self._before = self._sum()

    def checksum_now(self, before: int) -> int:
        """Return the checksum of the row, from the one when this was made."""
        return _signed(before - self._before + self._sum())

    def _sum(self) -> int:
        return int(_terms(torch.index_select(self._words, 0, self._index_W), self._chunk_W, self._factor_W))
