"""The checksum of transfers: against the same arithmetic in Python's integers, and the faults it must find."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import backends.transfer.verify as module  # noqa: E402
from backends.transfer.verify import CHUNK_WORDS, checksum64  # noqa: E402

MASK = 2**64 - 1
CHUNK_BYTES = CHUNK_WORDS * 8


def by_hand(content: bytes) -> int:
    """The definition, word by word, in unsigned integers."""
    total = len(content)
    padded = content + bytes(-len(content) % 8)
    for index in range(len(padded) // 8):
        chunk, place = divmod(index, CHUNK_WORDS)
        factor = ((place + 1) * 0x9E3779B97F4A7C15) & MASK
        factor = ((factor ^ (factor >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        factor = ((factor ^ (factor >> 27)) * 0x94D049BB133111EB) & MASK
        factor = (factor ^ (factor >> 31)) | 1
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little")
        mixed = ((((word + (chunk + 1) * 0x9E3779B97F4A7C15) & MASK) ^ factor) * 0xBF58476D1CE4E5B9) & MASK
        total += ((mixed ^ (mixed >> 32)) * factor) & MASK
    return total & MASK


def of(content: bytes) -> int:
    return checksum64(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)) & MASK


@given(st.binary(max_size=80))
def test_it_is_what_pythons_integers_give(content: bytes) -> None:
    assert of(content) == by_hand(content)


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES - 3, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 12])
def test_it_is_what_pythons_integers_give_over_several_chunks(num_bytes: int) -> None:
    content = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert checksum64(content) & MASK == by_hand(bytes(content.tolist()))


def test_the_first_value_by_hand() -> None:
    """splitmix64 of 0 begins with e220a8397b1dcdaf, a published number: the factor of the first word."""
    assert int(module._factors(torch.device("cpu"))[0]) & MASK == 0xE220A8397B1DCDAF
    assert of(b"") == 0
    word = ((0x9E3779B97F4A7C15 ^ 0xE220A8397B1DCDAF) * 0xBF58476D1CE4E5B9) & MASK
    assert of(bytes(8)) == (((word ^ (word >> 32)) * 0xE220A8397B1DCDAF) + 8) & MASK


@pytest.mark.parametrize("at_a_time", [2, 3, 256])
def test_it_does_not_depend_on_how_many_chunks_are_computed_at_a_time(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 65536, 300_001)]
    alone = [checksum64(tensor) for tensor in tensors]
    monkeypatch.setitem(module.CHUNKS_AT_A_TIME, "cpu", at_a_time)
    assert [checksum64(tensor) for tensor in tensors] == alone


def test_it_is_of_the_bytes_in_row_major_order_wherever_they_lie() -> None:
    row = torch.arange(4001, dtype=torch.float32)
    matrix = row[1:].reshape(40, 100)  # begins in the middle of a word
    assert checksum64(matrix) == checksum64(matrix.clone()) == checksum64(matrix.reshape(-1))
    assert checksum64(matrix.t()) == checksum64(matrix.t().contiguous()) != checksum64(matrix)
    assert checksum64(matrix.bfloat16()) != checksum64(matrix)
    assert checksum64(torch.tensor(1.0)) == checksum64(torch.ones(1))
    assert checksum64(matrix, computed_on=torch.device("cpu")) == checksum64(matrix)


def test_rows_of_zeros_are_told_apart_by_their_length() -> None:
    lengths = [0, 1, 7, 8, 9, 16, 4096]
    assert len({of(bytes(length)) for length in lengths}) == len(lengths)


@st.composite
def a_row_and_a_fault(draw: Any) -> tuple[Any, Any]:
    """A row of numbers as weights are, and the same with one fault."""
    dtype = getattr(torch, draw(st.sampled_from(["float32", "bfloat16"])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    row = torch.randn(draw(st.integers(1000, 5000)) * 4, generator=generator).to(dtype)
    words = row.view(torch.int64)
    one, other = sorted(draw(st.lists(st.integers(0, words.numel() - 1), min_size=2, max_size=2, unique=True)))
    kind = draw(st.sampled_from(["bit", "signs", "swap", "swap signs", "rows", "tail"]))
    if kind == "swap signs":
        words[other] = words[one] ^ -(2**63)
    wrong = row.clone()
    words, content = wrong.view(torch.int64), wrong.view(torch.uint8)
    if kind == "bit":
        content[8 * one + draw(st.integers(0, 7))] ^= 1 << draw(st.integers(0, 7))
    elif kind == "signs":  # a linear sum is blind to it
        words[[one, other]] ^= -(2**63)
    elif kind in {"swap", "swap signs"}:
        words[[one, other]] = words[[other, one]]
    elif kind == "rows":
        wrong[:1000], wrong[1000:2000] = row[1000:2000], row[:1000]
    else:
        content[-1] ^= 128
    return row, wrong


@settings(max_examples=300)
@given(a_row_and_a_fault())
def test_every_kind_of_fault_changes_it(pair: tuple[Any, Any]) -> None:
    row, wrong = pair
    same = torch.equal(row.view(torch.uint8), wrong.view(torch.uint8))  # two equal words may have been swapped
    assert (checksum64(row) == checksum64(wrong)) is same
