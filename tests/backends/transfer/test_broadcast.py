"""Weights through a group of processes: gloo between threads and processes, without vLLM and DeepSpeed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import backends.transfer.broadcast  # noqa: E402
from backends.transfer.broadcast import (  # noqa: E402
    ALIGNMENT_BYTES,
    BroadcastGroup,
    cuts,
    described,
    fill,
    layout,
    seen_as,
)
from backends.transfer.checksum64 import as_bytes  # noqa: E402
from backends.transfer.meeting import MeetingStore  # noqa: E402
from backends.transfer.weights_check import checksum, checksums, verified  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool", "complex64", "float8_e4m3fn")
Tensors = dict[str, "torch.Tensor"]


def same(left: Tensors, right: Tensors) -> bool:
    return described(left) == described(right) and all(
        as_bytes(left[name]).tolist() == as_bytes(right[name]).tolist() for name in left
    )


# ------------------------------------------------------------------------------------------- layout


@st.composite
def tensors_of_all_kinds(draw: Any) -> Tensors:
    """Parameters of random bytes, so NaN of all kinds among them; some transposed, some without elements."""
    names = draw(st.lists(st.text(min_size=1), unique=True, max_size=6))
    made = {}
    for name in names:
        dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        content = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        if dtype is torch.bool:
            content = bytes(byte & 1 for byte in content)
        row = torch.tensor(list(content), dtype=torch.uint8)
        made[name] = row.view(dtype).reshape(shape)
        if draw(st.booleans()) and made[name].dim() > 1:
            made[name] = made[name].transpose(0, -1)
    return made


@given(tensors=tensors_of_all_kinds(), bucket_bytes=st.integers(1, 200))
def test_whatever_is_cut_into_buckets_comes_together_bit_for_bit(tensors: Tensors, bucket_bytes: int) -> None:
    places = layout(described(tensors))
    assert [place.name for place in places] == sorted(tensors)
    assert all(place.begin % ALIGNMENT_BYTES == 0 for place in places)
    row = torch.empty(places[-1].end if places else 0, dtype=torch.uint8)
    ends = [0]
    for begin, end in cuts(places, bucket_bytes):
        assert begin == ends[-1] < end <= begin + bucket_bytes
        fill(row[begin:end], places, tensors, begin=begin)
        ends.append(end)
    assert ends[-1] == row.numel()
    assert same({place.name: seen_as(row, place) for place in places}, tensors)


def test_a_layout_is_in_the_order_given_and_aligned() -> None:
    places = layout([("b", "uint8", (3,)), ("a", "bfloat16", (2, 5)), ("c", "float32", ())])
    assert [(place.name, place.begin, place.end) for place in places] == [("b", 0, 3), ("a", 16, 36), ("c", 48, 52)]


# -------------------------------------------------------------------------------------------- group


def weights() -> Tensors:
    torch.manual_seed(0)
    return {
        "b.weight": torch.randn(30, 7),
        "a.weight": torch.randn(64, 3).bfloat16().t(),
        "empty": torch.empty(0, 4),
        "c.bias": torch.randn(5),
    }


def sender(num_members: int, *, timeout_s: float = 20.0) -> tuple[Any, Callable[[], BroadcastGroup]]:
    """Return the store, and what joins as rank 0."""
    store = MeetingStore("127.0.0.1", timeout_s=timeout_s)
    names = ["trainer", *(f"engine {number}" for number in range(num_members - 1))]
    return store, lambda: BroadcastGroup(
        store, rank=0, num_members=num_members, device=CPU, timeout_s=timeout_s, names=names
    )


def receiver(store: Any, rank: int, num_members: int, *, timeout_s: float = 20.0) -> BroadcastGroup:
    return BroadcastGroup.join(
        "127.0.0.1", store.port, rank=rank, num_members=num_members, device=CPU, timeout_s=timeout_s
    )


def received(group: BroadcastGroup, sent: Tensors, expected: dict[str, str]) -> tuple[Tensors | None, int]:
    """Receive as a worker does; return what was verified, and how many members refused."""
    shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    try:
        got = verified(group.receive(described(sent)), expected=expected, shapes=shapes, source="weights")
    except BackendError:
        return None, group.agree(refused=True)
    return got, group.agree(refused=False)


def test_all_members_get_the_weights_and_a_wrong_byte_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.transfer.broadcast, "BUCKET_BYTES", 100)
    sent = weights()
    corrupted = {**sent, "b.weight": sent["b.weight"].clone()}
    corrupted["b.weight"].view(torch.uint8)[29, 0] ^= 1  # one bit
    expected = checksums(sent.items())
    store, join = sender(3)

    def receive(rank: int) -> Any:
        group = receiver(store, rank, 3)
        rounds = [received(group, sent, expected) for _ in range(3)]
        group.leave()
        return rounds

    with ThreadPoolExecutor() as threads:
        receiving = [threads.submit(receive, rank) for rank in (1, 2)]
        group = join()
        assert [group.send(described(sent), one) for one in (sent, corrupted, sent)] == [0, 2, 0]
    for rounds in (one.result() for one in receiving):
        assert [refused for _, refused in rounds] == [0, 2, 0]
        assert rounds[1][0] is None
        assert same(rounds[0][0], sent)
        assert same(rounds[2][0], sent)
    assert not torch.distributed.is_initialized()
    group.leave()
    group.leave()
    assert group.left
    with pytest.raises(BackendError, match=r"^the group has been left$"):
        group.send(described(sent), sent)


def test_a_model_of_empty_parameters_crosses() -> None:
    sent = {"a": torch.empty(0), "b": torch.empty(2, 0)}
    store, join = sender(2)
    with ThreadPoolExecutor() as threads:
        receiving = threads.submit(lambda: received(receiver(store, 1, 2), sent, checksums(sent.items())))
        assert join().send(described(sent), sent) == 0
    assert same(receiving.result()[0], sent)


@pytest.mark.slow
def test_the_member_that_does_not_come_is_named() -> None:
    sent = weights()
    store, join = sender(3, timeout_s=1.0)
    pattern = r"^transfer failed: phase=send at trainer after \d\.\d s; engine 1 did not come; "

    def receive() -> None:
        received(receiver(store, 1, 3, timeout_s=1.0), sent, checksums(sent.items()))

    def hang() -> None:
        group = receiver(store, 2, 3, timeout_s=1.0)
        time.sleep(2.5)
        group.leave()

    with ThreadPoolExecutor() as threads:
        receiving, _ = threads.submit(receive), threads.submit(hang)
        group = join()
        with pytest.raises(BackendError, match=pattern) as failure:
            group.send(described(sent), sent)
    assert isinstance(receiving.exception(), BackendError)
    assert group.left
    with pytest.raises(BackendError, match="the group has been left: transfer failed: phase=send") as again:
        group.send(described(sent), sent)
    assert str(failure.value) in str(again.value)


def test_the_member_that_does_not_join_is_named() -> None:
    _, join = sender(2, timeout_s=0.5)
    with pytest.raises(BackendError, match=r"phase=join at trainer after \d\.\d s; engine 0 did not come; "):
        join()


def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendError, match=r"^transfer failed: phase=join at 127.0.0.1:1; "):
        BroadcastGroup.join("127.0.0.1", 1, rank=1, num_members=2, device=CPU, timeout_s=0.5)


def _process(port: int, sent: Tensors, results: Any) -> None:
    """Receive once, then die in the middle of the next transfer."""
    group = BroadcastGroup.join("127.0.0.1", port, rank=1, num_members=2, device=CPU, timeout_s=20)
    got, refused = received(group, sent, checksums(sent.items()))
    assert got is not None
    results.put(({name: checksum(tensor) for name, tensor in got.items()}, refused))
    backends.transfer.broadcast.BUCKET_BYTES = 64
    next(iter(group.receive(described(sent))))
    multiprocessing.current_process().kill()


@pytest.mark.slow
def test_a_process_gets_the_weights_and_its_death_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = weights()
    store, join = sender(2)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_process, args=(store.port, sent, results))
    process.start()
    try:
        group = join()
        assert group.send(described(sent), sent) == 0
        assert results.get(timeout=20) == (checksums(sent.items()), 0)
        monkeypatch.setattr(backends.transfer.broadcast, "BUCKET_BYTES", 64)
        began = time.monotonic()
        with pytest.raises(BackendError, match=r"phase=send at trainer after \d\.\d s; .*[Cc]onnection"):
            group.send(described(sent), sent)
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.join(timeout=10)
        results.close()
