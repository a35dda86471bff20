"""Weights that pass through two buckets: they are loaded, refused, or lost with a member of the group."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gloo_communicator import Gloo  # noqa: E402
from own_memory import own_bytes  # noqa: E402
from transfer_group import CPU, Source, load, stream_sender  # noqa: E402

import backends.transfer.group  # noqa: E402
import backends.transfer.streamed as module  # noqa: E402
from backends.interface import Weights  # noqa: E402
from backends.transfer.communicator import COMMUNICATORS  # noqa: E402
from backends.transfer.group import Sender  # noqa: E402
from backends.transfer.row import layout, parameters_of, row_bytes  # noqa: E402
from backends.transfer.streamed import Bucket, StreamReceiver  # noqa: E402
from backends.transfer.transport import Membership  # noqa: E402
from backends.vllm.version.client import STREAMED_ENVIRONMENT  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

PARAMETERS = [(f"p{index}", "float32", (index % 3 + 1, 8)) for index in range(9)]
KNOWN = {one[0]: one for one in PARAMETERS}
BUCKETS = [["p3", "p1"], ["p0"], ["p2", "p4", "p5"], ["p8"], ["p7", "p6"]]


def model(version: int) -> dict[str, Any]:
    return {name: torch.full(shape, float(version)) + index for index, (name, _, shape) in enumerate(PARAMETERS)}


def buckets(version: int) -> list[dict[str, Any]]:
    tensors = model(version)
    return [{name: tensors[name] for name in names} for names in BUCKETS]


@pytest.fixture(params=["connections", "devices"])
def streaming(request: Any, group_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a group whose workers load parameters as they arrive, by TCP or from device to device."""
    if request.param == "devices":
        monkeypatch.setitem(COMMUNICATORS, "cpu", Gloo)
        monkeypatch.setattr(backends.transfer.group, "send_bytes", None)  # nothing goes along the chain
    return lambda num_workers, workers=(): group_of(num_workers, tensors=model(0)).stream(workers)


def test_every_worker_gets_every_version_through_two_buckets(streaming: Any) -> None:
    group = streaming(3)
    for version in (1, 2):
        group.check_all_load(version, buckets(version))
    for worker in group.workers:
        assert worker._joined.result().leads
        sizes = [one._memory.numel() for one in worker._rows]
        assert sizes == [row_bytes(layout([KNOWN[name] for name in BUCKETS[largest]])) for largest in (2, 3)]


def test_a_parameter_that_is_kept_stays_as_it_is_when_its_bucket_is_needed(streaming: Any) -> None:
    """A layer may not be whole before two more buckets have come."""
    group = streaming(1)
    for version in (1, 2):
        group.check_all_load(
            version, buckets(version), lambda worker, version: dict(worker.receive(Weights(version, "")))
        )


def test_a_bucket_with_a_wrong_bit_is_sent_again_before_the_next(
    streaming: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    send = Sender.send

    def wrong_once(self: Sender, row: Any, **others: Any) -> int:
        seen.append(others["parts"])
        wrong = row.clone()
        wrong[3] ^= seen.count([2, 4, 5]) == 1 and others["parts"] == [2, 4, 5]
        return send(self, wrong, **others)

    monkeypatch.setattr(Sender, "send", wrong_once)
    streaming(2).check_all_load(5, buckets(5))
    assert seen == [[3, 1], [0], [2, 4, 5], [2, 4, 5], [8], [7, 6]]


def test_a_bucket_that_is_refused_repeatedly_ends_the_group_and_all_others_are_gathered_all_the_same(
    streaming: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, gathered = streaming(1), []

    def noted() -> Iterator[dict[str, Any]]:
        for one in buckets(1):
            gathered.extend(one)
            yield one

    monkeypatch.setattr(module, "checksum64", lambda *_, **__: 0)
    loading = threads.submit(load, group.workers[0], 1)
    assert group.send_buckets(1, noted()) == "a bucket of version 1 was refused 2 times"
    assert gathered == [name for names in BUCKETS for name in names]  # other ranks wait for it
    assert isinstance(loading.exception(60), OSError)
    assert group.sender.left
    assert stream_sender(None).send(Source(PARAMETERS, buckets(1)), 1) == "no group"


def test_the_loss_of_a_member_during_a_transfer_ends_it_for_all_and_a_new_group_gets_everything(
    streaming: Any, threads: ThreadPoolExecutor
) -> None:
    group = streaming(2)

    def breaks_off() -> None:
        arriving = group.workers[1].receive(Weights(1, "streamed:1"))
        next(arriving)
        arriving.close()  # its loader has failed

    loading = [threads.submit(load, group.workers[0], 1), threads.submit(breaks_off)]
    assert "phase=send at trainer" in str(group.send_buckets(1, buckets(1)))
    assert isinstance(loading[0].exception(60), OSError)
    loading[1].result(60)
    streaming(2, group.workers).check_all_load(1, buckets(1))


def test_another_version_than_the_requested_one_is_not_loaded(streaming: Any, threads: ThreadPoolExecutor) -> None:
    group = streaming(1)
    loading = threads.submit(load, group.workers[0], 2)
    assert "engine 0 has gone" in str(group.send_buckets(1, buckets(1)))
    with pytest.raises(BackendError, match=r"^version 1 comes, not 2$"):
        loading.result(60)


LAYERS = [f"model.layers.{number}." for number in range(12)]
LAYER = {"gate": (2816, 1024), "down": (1024, 2816), "o": (1024, 1024)}
LAYER_BYTES = 4 * (2 * 2816 + 1024) * 1024
HEAD = (4096, 1024)
HEAD_BYTES = 4 * 4096 * 1024
LARGE = parameters_of(
    {"head": torch.empty(HEAD)} | {at + name: torch.empty(LAYER[name]) for at in LAYERS for name in LAYER}
)


def _load(rendezvous: str, results: Any) -> None:
    """Load twice as vLLM does on a CPU: a layer, when it is whole, into a new one, which is packed in place of the old.

    Put the largest growth of this process's memory, and the memory of its buckets.
    """
    shapes = {name: shape for name, _, shape in LARGE}
    model = {name: torch.zeros(shape) for name, shape in shapes.items()}
    model = {name: tensor + 1 for name, tensor in model.items()}  # packed when the engine starts
    worker = StreamReceiver("")
    worker.join(Membership(rendezvous=rendezvous, worker=1, shapes=shapes, device=CPU, timeout_s=600))
    worker._joined.result(600)
    used, whole, before = list[int](), dict[str, Any](), own_bytes()
    for version in (1, 2):
        for name, tensor in worker.receive(Weights(version, "")):
            whole[name] = tensor
            if name == "head" or len(whole) == len(LAYER):
                for one, arrived in whole.items():
                    made = torch.empty(arrived.shape).copy_(arrived)
                    packed = made + 1
                    used.append(own_bytes() - before)
                    model[one] = packed
                    del made, packed
                whole = {}
    results.put((max(used), sum(bucket._memory.numel() for bucket in worker._rows)))
    worker.close()


@pytest.mark.slow
def test_a_worker_needs_two_buckets_and_a_layer(group_of: Any, spawned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head, here, made anew and packed, which is more than a layer; 3 MB more in a trial.

    With a copy of every layer that arrives 20 MB more: it fails then, and where a third bucket is made.
    """
    for name, value in STREAMED_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    tensors = {name: torch.randn(shape) for name, _, shape in LARGE}
    group = group_of(1, tensors=tensors, timeout_s=600)
    results = spawned(_load, group.at)
    group.meet()
    parts = [tuple(LAYERS[at : at + 5]) for at in (0, 5, 10)]
    for version in (1, 2):
        gathered = (
            {name: tensors[name] for name in sorted(tensors) if name.startswith(part)}
            for part in [("head", *parts[0]), *parts[1:]]
        )
        assert stream_sender(group.sender).send(Source(LARGE, gathered, 0), version) is None
    most, in_buckets = results.get(timeout=600)
    assert in_buckets == 2 * 5 * LAYER_BYTES + HEAD_BYTES
    assert most < in_buckets + 2 * HEAD_BYTES + 10e6, (most, in_buckets)


@pytest.mark.parametrize("lend", [module._lend, torch.from_dlpack], ids=["host", "device"])
def test_memory_is_used_again_unless_a_tensor_views_it(lend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_lend", lend)
    bucket = Bucket(CPU)
    row = bucket.row(16, CPU)
    first, part = row.data_ptr(), row.view(torch.float32)[1:2].fill_(5.0)
    del row
    row = bucket.row(16, CPU).zero_()
    second = row.data_ptr()
    assert second != first
    assert part.tolist() == [5.0]
    del row, part
    assert bucket.row(8, CPU).data_ptr() == second
