"""Weights that pass through two buckets: what is loaded, what is refused, and what the loss of a member leaves."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gloo_communicator import Gloo  # noqa: E402
from transfer_group import CPU, Source, stream_sender  # noqa: E402

import backends.transfer.group  # noqa: E402
import backends.transfer.streamed as module  # noqa: E402
from backends.transfer.communicator import COMMUNICATORS  # noqa: E402
from backends.transfer.connection import RendezvousServer  # noqa: E402
from backends.transfer.group import Sender  # noqa: E402
from backends.transfer.row import layout, parameters_of, row_bytes  # noqa: E402
from backends.transfer.streamed import Bucket, Streaming  # noqa: E402
from backends.transfer.transport import Membership  # noqa: E402
from backends.vllm.version.client import STREAMED_ENVIRONMENT  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

PARAMETERS = [(f"p{index}", "float32", (index % 3 + 1, 8)) for index in range(9)]
KNOWN = {one[0]: one for one in PARAMETERS}
SHAPES = {name: shape for name, _, shape in PARAMETERS}
BUCKETS = [["p3", "p1"], ["p0"], ["p2", "p4", "p5"], ["p8"], ["p7", "p6"]]
ORDER = [name for bucket in BUCKETS for name in bucket]


def model(version: int) -> dict[str, Any]:
    return {name: torch.full(shape, float(version)) + index for index, (name, _, shape) in enumerate(PARAMETERS)}


def parts(tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parameters bucket by bucket, as ranks gather them."""
    for names in BUCKETS:
        yield {name: tensors[name] for name in names}


def source(tensors: dict[str, Any]) -> Source:
    return Source(PARAMETERS, parts(tensors))


@pytest.fixture(params=["connections", "devices"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """What bytes cross by."""
    if request.param == "devices":
        monkeypatch.setitem(COMMUNICATORS, "cpu", Gloo)
        monkeypatch.setattr(backends.transfer.group, "send_bytes", None)  # nothing goes along the chain
    return str(request.param)


@pytest.fixture
def streaming(meet: Any, way: str) -> Any:
    """Makes a group whose workers load what passes."""
    return lambda num_workers, before=None: meet(num_workers, tensors=model(0)).stream(before=before)


def loaded(worker: Streaming, version: int) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in worker.arriving(version)}


def same(got: dict[str, Any], version: int) -> bool:
    return list(got) == ORDER and all(torch.equal(got[name], tensor) for name, tensor in model(version).items())


def test_every_worker_gets_every_version_through_two_buckets(streaming: Any, threads: ThreadPoolExecutor) -> None:
    rendezvous = streaming(3)
    for version in (1, 2):
        loading = [threads.submit(loaded, worker, version) for worker in rendezvous.workers]
        assert rendezvous.streams.send(source(model(version)), version) is None
        assert all(same(one.result(60), version) for one in loading)
    for worker in rendezvous.workers:
        assert worker._joined.result().leads
        sizes = [one._memory.numel() for one in worker._rows]
        assert sizes == [row_bytes(layout([KNOWN[name] for name in BUCKETS[largest]])) for largest in (2, 3)]


def test_a_bucket_with_a_wrong_bit_is_sent_again_before_the_next(
    streaming: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous, seen = streaming(2), []
    real = Sender.send

    def send(self: Sender, row: Any, **said: Any) -> int:
        seen.append(said["parts"])
        wrong = row.clone()
        wrong[3] ^= seen.count([2, 4, 5]) == 1 and said["parts"] == [2, 4, 5]
        return real(self, wrong, **said)

    monkeypatch.setattr(Sender, "send", send)
    loading = [threads.submit(loaded, worker, 5) for worker in rendezvous.workers]
    assert rendezvous.streams.send(source(model(5)), 5) is None
    assert all(same(one.result(60), 5) for one in loading)
    assert seen == [[3, 1], [0], [2, 4, 5], [2, 4, 5], [8], [7, 6]]


def test_what_is_refused_time_and_again_ends_the_group_and_all_is_put_together_all_the_same(
    streaming: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous, asked = streaming(1), []

    def noted(tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for one in parts(tensors):
            asked.extend(one)
            yield one

    monkeypatch.setattr(module, "checksum64", lambda tensor: 0)
    loading = threads.submit(loaded, rendezvous.workers[0], 1)
    fault = rendezvous.streams.send(Source(PARAMETERS, noted(model(1))), 1)
    assert fault == "a bucket of version 1 was refused 2 times"
    assert asked == ORDER  # other ranks wait for it
    assert isinstance(loading.exception(60), OSError)
    assert rendezvous.group.left
    assert stream_sender(None).send(source(model(1)), 1) == "no group"


def test_the_end_of_a_member_in_the_middle_ends_it_for_all_and_a_new_group_gets_everything(
    streaming: Any, threads: ThreadPoolExecutor
) -> None:
    rendezvous = streaming(2)

    def breaks_off() -> None:
        arriving = rendezvous.workers[1].arriving(1)
        next(arriving)
        arriving.close()  # its loader has failed

    loading = [threads.submit(loaded, rendezvous.workers[0], 1), threads.submit(breaks_off)]
    fault = rendezvous.streams.send(source(model(1)), 1)
    assert "phase=send at trainer" in str(fault)
    assert isinstance(loading[0].exception(60), OSError)
    loading[1].result(60)
    again = streaming(2, before=rendezvous.workers)
    loading = [threads.submit(loaded, worker, 1) for worker in again.workers]
    assert again.streams.send(source(model(1)), 1) is None
    assert all(same(one.result(60), 1) for one in loading)


def test_another_version_than_the_one_asked_for_is_not_loaded(streaming: Any, threads: ThreadPoolExecutor) -> None:
    rendezvous = streaming(1)
    loading = threads.submit(loaded, rendezvous.workers[0], 2)
    assert "engine 0 has gone" in str(rendezvous.streams.send(source(model(1)), 1))
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

    Put the most memory of the process above that before, and what it has in buckets.
    """
    shapes = {name: shape for name, _, shape in LARGE}
    model = {name: torch.zeros(shape) for name, shape in shapes.items()}
    model = {name: tensor + 1 for name, tensor in model.items()}  # packed when the engine starts
    worker = Streaming(Membership(rendezvous=rendezvous, worker=1, shapes=shapes, device=CPU, timeout_s=600))
    worker._joined.result(600)
    status, used, whole = Path("/proc/self/status"), [], dict[str, Any]()

    def own() -> int:
        found = re.search(r"^RssAnon:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    before = own()
    for version in (1, 2):
        for name, tensor in worker.arriving(version):
            whole[name] = tensor
            if name == "head" or len(whole) == len(LAYER):
                for one, arrived in whole.items():
                    made = torch.empty(arrived.shape).copy_(arrived)
                    packed = made + 1
                    used.append(own() - before)
                    model[one] = packed
                    del made, packed
                whole = {}
    results.put((max(used), sum(bucket._memory.numel() for bucket in worker._rows)))
    worker.abandon()


@pytest.mark.slow
def test_a_worker_needs_two_buckets_and_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head, here, made anew and packed, which is more than a layer; 3 MB more in a trial.

    With a copy of every layer that arrives 20 MB more: it fails then, and where a third bucket is made.
    """
    for name, value in STREAMED_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    server, context = RendezvousServer.open("127.0.0.1"), multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_load, args=(server.rendezvous, results))
    process.start()
    try:
        group = Sender(server, names=["trainer", "engine 0"], parameters=LARGE, timeout_s=600)
        group.meet()
        tensors = {name: torch.randn(shape) for name, _, shape in LARGE}
        parts = [tuple(LAYERS[at : at + 5]) for at in (0, 5, 10)]
        for version in (1, 2):
            gathered = (
                {name: tensors[name] for name in sorted(tensors) if name.startswith(part)}
                for part in [("head", *parts[0]), *parts[1:]]
            )
            assert stream_sender(group).send(Source(LARGE, gathered, 0), version) is None
        most, in_buckets = results.get(timeout=600)
        group.leave()
        process.join(timeout=600)
    finally:
        process.kill()
        process.join(timeout=600)
        results.close()
    assert in_buckets == 2 * 5 * LAYER_BYTES + HEAD_BYTES
    assert most < in_buckets + 2 * HEAD_BYTES + 10e6, (most, in_buckets)


@pytest.mark.parametrize("lend", [module._lend, torch.from_dlpack], ids=["host", "device"])
def test_memory_is_used_again_unless_something_of_it_is_seen(lend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_parameter_that_is_kept_stays_as_it_is_when_its_bucket_is_needed(
    streaming: Any, threads: ThreadPoolExecutor
) -> None:
    """As of a layer that is not whole before two more buckets have come."""
    rendezvous = streaming(1)

    def load(version: int) -> bool:
        return same(dict(rendezvous.workers[0].arriving(version)), version)

    for version in (1, 2):
        loading = threads.submit(load, version)
        assert rendezvous.streams.send(source(model(version)), version) is None
        assert loading.result(60)
