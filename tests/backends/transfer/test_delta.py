"""What has changed between two rows: encoded, sent, applied to rows and models, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from transfer_group import Group, Source, Tensors, row_of  # noqa: E402

import backends.transfer.broadcast as module  # noqa: E402
from backends.interface import Weights  # noqa: E402
from backends.transfer.broadcast import DENSE_EVERY, BroadcastReceiver, SnapshotSender  # noqa: E402
from backends.transfer.delta import UNITS, Payload, apply, body, encode, header, num_bytes_of  # noqa: E402
from backends.transfer.group import Receiver, Sender  # noqa: E402
from backends.transfer.row import ALIGNMENT_BYTES, layout, parameters_of, row_bytes  # noqa: E402
from backends.transfer.transport import SenderContext  # noqa: E402
from backends.transfer.verify import checksum64  # noqa: E402
from backends.vllm.direct_copies import Swap  # noqa: E402
from pipelinerl.hardware import transport  # noqa: E402
from pipelinerl.hardware.transport import LARGEST_DELTA, LONGEST_GAP  # noqa: E402


@given(
    length=st.integers(0, 2000),
    changed=st.sets(st.integers(0, 1999), max_size=40),
    unit=st.sampled_from(list(UNITS.values())),
)
def test_applying_what_has_changed_gives_the_new_row(length: int, changed: set[int], unit: Any) -> None:
    """A change takes an entry, and a filler for each whole 255 units that lie between it and the one before."""
    published = torch.arange(length).to(unit)
    new, at = published.clone(), sorted(one for one in changed if one < length)
    new[at] = ~new[at]
    changes = encode(published, new)
    assert changes.num_changed == len(at)
    assert len(changes.gaps_C) == sum(
        math.ceil((after - before) / LONGEST_GAP) for before, after in pairwise([-1, *at])
    )
    assert set(at) <= set(changes.positions.tolist())
    apply(published, changes)
    assert torch.equal(published, new)


@given(length=st.integers(1, 500), changed=st.sets(st.integers(0, 499), max_size=40), most=st.integers(-1, 40))
def test_more_changes_than_are_wanted_are_only_counted(length: int, changed: set[int], most: int) -> None:
    published = torch.arange(length, dtype=torch.int16)
    new, at = published.clone(), [one for one in changed if one < length]
    new[at] = ~new[at]
    changes, whole = encode(published, new, most=most), encode(published, new)
    assert changes.num_changed == whole.num_changed == len(at)
    expected = whole if len(at) <= most else encode(new, new)
    assert torch.equal(changes.gaps_C, expected.gaps_C)
    assert torch.equal(changes.values_C, expected.values_C)


def test_bits_are_compared_and_not_numbers() -> None:
    published = torch.tensor([0.0, torch.nan, 1.0]).bfloat16().view(torch.int16)
    new = torch.tensor([-0.0, torch.nan, 1.0]).bfloat16().view(torch.int16)
    assert encode(published, new).positions.tolist() == [0]


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
def test_a_payload_holds_all_parts_in_the_order_of_the_row(unit_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    published = torch.randint(0, 100, (5008,), dtype=UNITS[unit_bytes], generator=generator)
    new = torch.where(torch.rand(5008, generator=generator) < 0.01, published + 1, published)
    borders = [(3200, 5008), (0, 16), (16, 3200)]
    parts = [encode(published[begin:end], new[begin:end]) for begin, end in borders]
    entries = [len(one.gaps_C) for one in parts]
    begins = [begin * unit_bytes for begin, _ in borders]
    payload = Payload(torch.cat([header(list(zip(begins, entries, strict=True)), unit_bytes), body(parts)]))
    assert payload.num_bytes == len(payload.memory) == len(payload.whole)
    assert len(body(parts)) == sum(num_bytes_of(one, unit_bytes) for one in entries)
    assert [begin for begin, _ in payload.parts()] == [0, 16, 3200]
    row = published.clone().view(torch.uint8)
    before, after = ([checksum64(one[begin:end]) for begin, end in sorted(borders)] for one in (published, new))
    assert payload.apply_to(row, before) == after
    assert torch.equal(row.view(UNITS[unit_bytes]), new)


# --------------------------------------------------------------------------------------- versions on their way

SHAPES = {"a": (40, 33), "b": (7,), "d": (300,), "e": (2, 8)}
WIDE = "b"
"""In float32 among bf16: a number of two units."""
BUCKETS = (("a",), ("b",), ("d", "e"))
"""The second is so small that the last of three ranks has no part of it."""


def weights_of(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: one if name == WIDE else one.bfloat16() for name, one in made.items()}


def trained(tensors: Tensors, seed: int, share: float) -> Tensors:
    """About this share of the numbers changes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(one.shape, generator=generator) < share, one + one.abs() + 1, one)
        for name, one in tensors.items()
    }


class Model(torch.nn.Module):
    """The second of two workers: half of the rows of a, half of the columns of e, the rest whole; its loader slices."""

    def __init__(self) -> None:
        super().__init__()
        tensors = weights_of(0)
        self.load_weights = self._load
        for name, one in tensors.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros_like(self.part(name, one)), requires_grad=False))

    def part(self, name: str, tensor: Any) -> Any:
        return {"a": lambda: tensor[20:], "e": lambda: tensor[:, 4:]}.get(name, lambda: tensor)()

    def _load(self, items: Any) -> None:
        for name, tensor in items:
            getattr(self, name).data.copy_(self.part(name, tensor))

    def holds(self, tensors: Tensors) -> bool:
        return all(
            torch.equal(getattr(self, name).view(torch.uint8), self.part(name, one).contiguous().view(torch.uint8))
            for name, one in tensors.items()
        )


class Engine:
    """A worker: what ``VLLMReceiver`` does with a receiver, without vLLM."""

    def __init__(self) -> None:
        self.model, self.receiver, self.held = Model(), BroadcastReceiver("", transport=transport.DELTA), None
        self.swap = Swap(self.model, lambda tensors: self.model.load_weights(tensors.items()))
        self.num_patches = 0

    def load(self, weights: Weights) -> None:
        tensors, held = dict(self.receiver.receive(weights)), self.held
        self.held: Weights | None = None
        delta = self.receiver.delta(weights, held) if held else None
        if delta is not None and self.swap.patch(delta):
            self.num_patches += 1
        else:
            self.swap(tensors)
        self.receiver.loaded(weights)
        self.held = weights


def joined_on(member: Any, *, place: str, reuse: Any) -> Receiver:
    return Receiver(member, place=place if member.worker == 1 else "elsewhere", reuse=reuse)


class Run:
    """A trainer's rank 0 and two engines, one on its machine and one elsewhere."""

    def __init__(self, ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends = ends
        monkeypatch.setattr(module, "Receiver", joined_on)
        self.tensors, self.version = weights_of(1), 0
        self.engines = [Engine(), Engine()]
        self.restart_trainer()

    def restart_trainer(self) -> None:
        self.group = SimpleNamespace(sender=None, row=None)
        context = SenderContext(receives=True, folder=Path(), group=self.group)
        self.sender = SnapshotSender(context, name="delta", deltas=True)

    def train(self, share: float) -> None:
        self.tensors, self.version = trained(self.tensors, self.version, share), self.version + 1

    def source(self) -> Source:
        parts = [{name: self.tensors[name] for name in names} for names in BUCKETS]
        return Source(parameters_of(self.tensors), parts)

    def publish(self) -> Weights:
        published = self.sender.publish(self.source(), self.version)
        assert published is not None
        return published

    def form_group(self) -> None:
        group = Group(self.ends, len(self.engines), tensors=self.tensors)
        for number, engine in enumerate(self.engines):
            engine.receiver.join(group.member(1 + number))
        names = ["trainer", "engine 0", "engine 1"]
        group.sender.meet(names, parameters_of(self.tensors), timeout_s=60, row=self.group.row)
        self.group.sender = group.sender

    def send(self, weights: Weights) -> str | None:
        return self.sender.send(weights.version)

    def bring(self) -> Weights:
        """Publish, send and load; check that all engines have the weights of the trainer, to the last bit."""
        weights = self.publish()
        assert self.send(weights) is None
        self.check_all_have(weights)
        return weights

    def check_all_have(self, weights: Weights) -> None:
        for engine in self.engines:
            engine.load(weights)
            assert engine.model.holds(self.tensors)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with ExitStack() as ends:
        made = Run(ends, monkeypatch)
        ends.callback(lambda: [engine.receiver.close() for engine in made.engines])
        yield made


def test_deltas_bring_every_engine_to_the_last_bit(run: Run) -> None:
    """The first version, whole, teaches the models their table; from then on deltas change them in place."""
    sizes, num_bytes = [], row_bytes(layout(parameters_of(run.tensors)))
    for version in range(1, 9):
        weights = run.publish()
        sizes.append(weights.delta_bytes)
        if version == 1:
            run.form_group()
        assert run.send(weights) is None
        run.check_all_have(weights)
        run.train(0.02)
    assert sizes[0] == 0
    assert all(0 < size <= num_bytes * LARGEST_DELTA for size in sizes[1:])
    assert [engine.receiver._staging._receiver.leads for engine in run.engines] == [False, True]
    assert [engine.num_patches for engine in run.engines] == [7, 7]


def test_engines_on_the_trainers_machine_read_its_row_and_nothing_is_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Receiver", Receiver)
    monkeypatch.setattr(Sender, "_send_bytes", None)
    weights = run.publish()
    run.form_group()
    assert run.send(weights) is None
    run.check_all_have(weights)
    run.train(0.02)
    assert run.bring().delta_bytes > 0
    assert [engine.num_patches for engine in run.engines] == [1, 1]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_delta_that_saves_nothing_is_not_sent(run: Run, share: float) -> None:
    first = run.publish()
    run.form_group()
    assert run.send(first) is None
    run.check_all_have(first)
    run.train(share)
    second = run.bring()
    assert (second.delta_bytes == 0) == (share == 1.0)
    run.train(0.02)
    assert run.bring().delta_bytes > 0  # the next is tried again


def test_every_nth_version_is_sent_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DENSE_EVERY", 3)
    sizes = []
    for version in range(9):
        sizes.append(run.publish().delta_bytes)
        assert sizes[-1] == 0 or version
        run.train(0.01)
    assert [size > 0 for size in sizes] == [False, True, True, True, False, True, True, True, False]
    assert DENSE_EVERY > 3


def flipped_once(send_bytes: Any) -> Any:
    """``Sender._send_bytes`` that flips a bit of what it sends first."""
    seen: list[bool] = []

    def sent(self: Sender, content: Any) -> None:
        content = content.clone()
        content[len(content) // 2] ^= 0 if seen else 1
        seen.append(True)
        send_bytes(self, content)

    return sent


FAULTS = [
    "none",
    "a flipped bit",
    "a lost delta",
    "a repeated delta",
    "a new member",
    "a new trainer",
    "a damaged delta",
    "a damaged row",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_to_a_delta_engines_get_the_weights_of_the_trainer(
    run: Run, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault after three versions; the versions after it are right, and deltas again."""
    first = run.publish()
    run.form_group()
    assert run.send(first) is None
    run.check_all_have(first)
    for _ in range(2):
        run.train(0.02)
        run.bring()
    run.train(0.02)
    match fault:
        case "a flipped bit":  # the receivers refuse it; they get the whole row
            monkeypatch.setattr(Sender, "_send_bytes", flipped_once(Sender._send_bytes))
        case "a lost delta":  # published and never sent
            run.publish()
            run.train(0.02)
        case "a repeated delta":
            weights = run.publish()
            assert run.send(weights) is None
            assert run.send(weights) is None
            run.check_all_have(weights)
            run.train(0.02)
        case "a new member":
            run.engines[1].receiver.close()
            run.engines[1] = Engine()
            run.form_group()
        case "a new trainer":
            run.restart_trainer()
            run.publish()
            run.form_group()
        case "a damaged delta":  # the trainer notices it, and the next publication is whole
            weights = run.publish()
            run.sender._payload.whole[-ALIGNMENT_BYTES] ^= 1
            assert "its snapshot is damaged" in str(run.send(weights))
            assert run.publish().delta_bytes == 0
        case "a damaged row":  # a new member refuses it, and the next publication is whole
            weights = run.publish()
            run.group.row.row[5] ^= 1
            run.form_group()
            assert "was refused 2 times (machines: 1)" in str(run.send(weights))
            assert run.publish().delta_bytes == 0
    patches = [engine.num_patches for engine in run.engines]
    for _ in range(4):
        run.bring()
        run.train(0.02)
    assert all(engine.num_patches >= before + 2 for engine, before in zip(run.engines, patches, strict=True))


def publish_as(rank: int, ranks: int, store: str, results: Any) -> None:
    """Be a rank that publishes four versions; rank 0 puts whether its row is right after each, and who sent deltas."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = SimpleNamespace(sender=None, row=None)
    sender = SnapshotSender(SenderContext(receives=rank == 0, folder=Path(), group=group), name="delta", deltas=True)
    tensors, found = weights_of(1), []
    for version, share in enumerate((0.02, 0.01, 1.0, 0.02), start=1):
        parts = [{name: tensors[name] for name in names} for names in BUCKETS]
        weights = sender.publish(Source(parameters_of(tensors), parts), version)
        if rank == 0:
            sender._apply()
            row = group.row.row[: row_bytes(layout(parameters_of(tensors)))]
            found.append((torch.equal(row, row_of(tensors)) and not sender._damaged, weights.delta_bytes > 0))
        tensors = trained(tensors, version, share)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_compare_a_part_each_publish_the_same_row(spawned: Any, tmp_path: Path) -> None:
    for rank in range(3):
        results = spawned(publish_as, rank, 3, str(tmp_path / "store"))
    assert results.get(timeout=600) == [(True, False), (True, True), (True, True), (True, False)]
