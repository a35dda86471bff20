"""Speed of a delta on one core: made and applied, beside plain copies of the same bytes.

Seconds are processor time, the best of a few rounds; only ratios within one run are asserted.
"""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import backends.transfer.delta  # noqa: E402
from backends.transfer.delta import Payload, body, encode, header  # noqa: E402
from backends.transfer.verify import checksum64  # noqa: E402

pytestmark = pytest.mark.benchmark(timer=time.process_time)
NUMBERS = 20_000_000
PARTS = 20
SHARE = 0.012
"""Of bf16 numbers that change at a learning rate of 1e-6."""


@pytest.fixture(autouse=True)
def _one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def versions():
    """Two rows of bf16 numbers, as units."""
    torch.manual_seed(0)
    before = torch.randn(NUMBERS).bfloat16().view(torch.int16)
    return before, before ^ (torch.rand(NUMBERS) < SHARE)


def copied_s(*tensors):
    """Seconds of a copy of the same bytes into memory that exists."""
    there = [one.clone() for one in tensors]
    times = []
    for _ in range(5):
        begin_s = time.process_time()
        for one, copy in zip(tensors, there, strict=True):
            copy.copy_(one)
        times.append(time.process_time() - begin_s)
    return min(times)


def test_a_delta_is_made_in_a_few_copies_of_the_weights(benchmark, table, versions):
    benchmark.pedantic(encode, versions, rounds=5, warmup_rounds=1)
    made_s, copy_s = benchmark.stats.stats.min, copied_s(versions[1])
    table.append(("encode, ns per number", f"{made_s / NUMBERS * 1e9:.2f}"))
    table.append(("encode, copies of the weights", f"{made_s / copy_s:.1f}"))
    assert made_s < 12 * copy_s


def test_a_delta_is_applied_and_summed_sooner_than_the_whole_row_is_summed(benchmark, table, versions, monkeypatch):
    """At a share of 1.2 %, in parts as of 20 ranks."""
    monkeypatch.setattr(backends.transfer.delta, "APPLY_THREADS", 1)
    row, size = versions[0].clone().view(torch.uint8), NUMBERS // PARTS
    pairs = list(zip(*(one.split(size) for one in versions), strict=True))
    changes, sums = [encode(*pair) for pair in pairs], [checksum64(before) for before, _ in pairs]
    begins = [(2 * size * number, len(one.gaps_C)) for number, one in enumerate(changes)]
    payload = Payload(torch.cat([header(begins, 2), body(changes)]))
    benchmark.pedantic(payload.apply_to, (row, sums), rounds=5, warmup_rounds=1)
    applied_s, num_changed = benchmark.stats.stats.min, sum(one.num_changed for one in changes)
    begin_s = time.process_time()
    whole = [checksum64(after) for _, after in pairs]
    summed_s = time.process_time() - begin_s
    table.append(("apply and sum, ns per changed number", f"{applied_s / num_changed * 1e9:.1f}"))
    table.append(("apply and sum, sums of the whole row", f"{applied_s / summed_s:.2f}"))
    assert payload.apply_to(versions[0].clone().view(torch.uint8), sums) == whole
    assert torch.equal(row, versions[1].view(torch.uint8))
    assert applied_s < summed_s


class Written(TorchDispatchMode):
    """Counts the bytes that operations write; views write none."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.arguments)
        if isinstance(result, torch.Tensor) and not is_view:
            self.num_bytes += result.nbytes
        return result


def test_a_byte_of_a_delta_is_copied_twice_until_it_is_sent(table, versions):
    """Into the bytes of all parts, from there into the room behind the row; a receiver reads it where it arrives."""
    changes, room = encode(*versions), torch.empty(2 * NUMBERS, dtype=torch.uint8)
    head = header([(0, len(changes.gaps_C))], 2)
    with Written() as written:
        whole = body([changes])
        room[len(head) : len(head) + len(whole)].copy_(whole)
        room[: len(head)].copy_(head)
        (_, arrived), *_ = Payload(room).parts()
    assert torch.equal(arrived.values_C, changes.values_C)
    table.append(("copies per byte of a delta", f"{written.num_bytes / len(whole):.2f}"))
    table.append(("bytes per changed number", f"{len(whole) / changes.num_changed:.2f}"))
    assert written.num_bytes < 2.01 * len(whole)
