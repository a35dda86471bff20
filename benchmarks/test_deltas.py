"""Speed of a delta on one core: made and applied, beside plain copies of the same bytes.

Seconds are processor time, the best of a few rounds; only ratios within one run are asserted.
"""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from backends.transfer.delta import Payload, apply, body, encode, header  # noqa: E402

pytestmark = pytest.mark.benchmark(timer=time.process_time)
NUMBERS = 20_000_000
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


def test_a_delta_is_applied_in_about_a_copy_of_the_weights(benchmark, table, versions):
    row, changes = versions[0].clone(), encode(*versions)
    benchmark.pedantic(apply, (row, changes), rounds=5, warmup_rounds=1)
    applied_s, entries = benchmark.stats.stats.min, len(changes.values_C)
    table.append(("patch, ns per changed number", f"{applied_s / entries * 1e9:.1f}"))
    table.append(("patch, copies of the weights", f"{applied_s / copied_s(versions[1]):.1f}"))
    assert torch.equal(row, versions[1])
    assert applied_s < 4 * copied_s(versions[1])


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
