"""The swap by direct copies, on a model whose loader slices and stacks as vLLM's do, and on models that need more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transfer_group import row_of  # noqa: E402

import backends.transfer.delta  # noqa: E402
from backends.transfer.delta import UNITS, Delta, body, encode, header  # noqa: E402
from backends.transfer.row import ALIGNMENT_BYTES, layout, parameters_of, row_bytes, view_of  # noqa: E402
from backends.vllm.direct_copies import NotPlainError, Swap, noted_copies  # noqa: E402

HIDDEN, HEADS = 6, 4


class Model(torch.nn.Module):
    """The second of two workers: its rows of q and k, one below the other, its columns of o; tied embeddings."""

    def __init__(self, change: Callable[[str, Any], Any] = lambda name, tensor: tensor) -> None:
        """``change`` a parameter before it is loaded; None: it is left out."""
        super().__init__()
        self.change = change
        self.qk = torch.nn.Parameter(torch.zeros(2 * HEADS // 2, HIDDEN))
        self.o = torch.nn.Parameter(torch.zeros(HIDDEN, HEADS // 2))
        self.embed = torch.nn.Parameter(torch.zeros(HIDDEN))
        self.head = self.embed
        self.num_loads = 0

    def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
        self.num_loads += 1
        half = HEADS // 2
        for name, loaded in items:
            tensor = self.change(name, loaded)
            if tensor is None:
                continue
            match name:
                case "q":
                    self.qk.data[:half].copy_(tensor.narrow(0, half, half))
                case "k":
                    self.qk.data[half:].copy_(tensor.narrow(0, half, half))
                case "o":
                    self.o.data.copy_(tensor[:, half:])
                case "embed":
                    self.embed.data.copy_(tensor)


def sent(number: int) -> dict[str, Any]:
    """Parameters of a version, one after the other in one memory."""
    row = torch.randn(2 * HEADS * HIDDEN + HIDDEN * HEADS + HIDDEN, generator=torch.Generator().manual_seed(number))
    q, k, o, embed = row.split([HEADS * HIDDEN, HEADS * HIDDEN, HIDDEN * HEADS, HIDDEN])
    return {"q": q.view(HEADS, HIDDEN), "k": k.view(HEADS, HIDDEN), "o": o.view(HIDDEN, HEADS), "embed": embed}


def right(model: Any, tensors: dict[str, Any]) -> bool:
    half = HEADS // 2
    return bool(
        torch.equal(model.qk, torch.cat([tensors["q"][half:], tensors["k"][half:]]))
        and torch.equal(model.o, tensors["o"][:, half:])
        and torch.equal(model.head, tensors["embed"])
    )


def swap_of(model: Any, reload: Callable[[Any], None] | None = None) -> Swap:
    return Swap(model, reload or (lambda tensors: model.load_weights(iter(tensors.items()))))


def test_after_the_first_update_weights_are_brought_in_by_copies_alone() -> None:
    model = Model()
    swap, memory = swap_of(model), model.qk.data_ptr()
    swap(sent(1))
    assert right(model, sent(1))
    assert swap.direct
    loads = model.num_loads
    for number in (2, 3):
        swap(sent(number))
        assert right(model, sent(number))
        assert model.qk.data_ptr() == memory  # a graph that was captured sees them
    assert model.num_loads == loads


def test_recording_copies_changes_nothing() -> None:
    model = Model()
    copies = noted_copies(model, sent(1))
    assert [copy.name for copy in copies] == ["q", "k", "o", "embed"]
    assert not any(one.count_nonzero() for one in model.parameters())


def test_copies_are_proven_by_other_weights_than_those_of_the_model() -> None:
    """A model that starts with the weights of the first update learns from it, too."""
    model = Model()
    model.load_weights(iter(sent(1).items()))
    swap = swap_of(model)
    swap(sent(1))
    assert swap.direct
    assert right(model, sent(1))


@pytest.mark.parametrize("derive", [torch.abs, lambda o: o / o.norm()])
def test_a_model_with_the_new_weights_already_does_not_hide_what_it_derives_from_them(
    derive: Callable[[Any], Any],
) -> None:
    class Deriving(Model):
        def reload(self, tensors: Any) -> None:
            self.load_weights(iter(tensors.items()))
            self.derived = derive(self.o.data)

    model = Deriving()
    model.reload(sent(1))
    swap = swap_of(model, model.reload)
    swap(sent(1))
    assert not swap.direct
    assert torch.equal(model.derived, derive(sent(1)["o"][:, HEADS // 2 :]))


class Derived(Model):
    """Keeps numbers that it derives from its parameters in a reload, beside them or in an object of a kernel."""

    def __init__(self, where: Any) -> None:
        super().__init__()
        self.where = where or self

    def reload(self, tensors: Any) -> None:
        self.load_weights(iter(tensors.items()))
        self.where.derived = self.o.data * 2


class Kernel:
    """An object of a layer that is no module."""


class Scaled(Model):
    def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
        super().load_weights(items)
        self.o.data.mul_(2)


class Quantized(Model):
    """Keeps one parameter in 8 bits with a scale: the loader casts numbers of more bits, a reload quantizes them."""

    def __init__(self) -> None:
        super().__init__()
        self.o = torch.nn.Parameter(torch.zeros(HIDDEN, HEADS // 2, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Buffer(torch.ones(()))

    def reload(self, tensors: Any) -> None:
        self.load_weights(iter(tensors.items()))
        own = tensors["o"][:, HEADS // 2 :]
        self.scale.copy_(own.abs().max() / torch.finfo(self.o.dtype).max)
        self.o.copy_(own / self.scale)


class Packed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.o = torch.nn.Parameter(torch.empty(0))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Scaled(), "NotPlainError: aten.mul_.Tensor changes o"),
        (Model(lambda name, tensor: tensor + 1), "NotPlainError: qk is not a copy of what is sent"),
        (
            Model(lambda name, tensor: None if name == "k" else tensor),
            "NotPlainError: 12 of 24 numbers of qk are copied",
        ),
        (Packed(), "RuntimeError: "),
        (Derived(None), "a reload changes 1 tensors otherwise: .derived.0"),
        (Derived(Kernel()), "a reload changes 1 tensors otherwise: .where.0.derived.0"),
        (Quantized(), "a reload changes 2 tensors otherwise: o, scale"),
    ],
)
def test_a_model_that_is_not_plain_is_reloaded_every_time_and_says_so_once(
    model: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    reloads: list[Any] = []

    def reload(tensors: Any) -> None:
        reloads.append(tensors)
        if isinstance(model, (Derived, Quantized)):
            model.reload(tensors)

    swap = swap_of(model, reload)
    for number in (1, 2, 3):
        swap(sent(number))
        assert not swap.direct
    first = [one["q"][0, 0] for one in reloads][-3:]  # before them other weights, if there is a table to prove
    assert first == [sent(number)["q"][0, 0] for number in (1, 2, 3)]
    (record,) = caplog.records
    assert why in record.getMessage()
    if isinstance(model, Derived):
        assert torch.equal(model.where.derived, sent(3)["o"][:, HEADS // 2 :] * 2)
    if isinstance(model, Quantized):
        error = model.o.float() * model.scale - sent(3)["o"][:, HEADS // 2 :]
        assert error.abs().max() <= 16 * model.scale  # half of the widest step, 32, of numbers up to 448


def test_a_parameter_that_is_not_contiguous_is_not_plain() -> None:
    model = Model()
    model.o = torch.nn.Parameter(torch.zeros(2, 3).t())
    with pytest.raises(NotPlainError, match="o is not contiguous"):
        noted_copies(model, sent(1))


def delta_between(before: dict[str, Any], after: dict[str, Any]) -> Delta:
    """What turns the weights of one version into those of another, in two parts."""
    rows = [row_of(tensors) for tensors in (before, after)]
    unit_bytes = min(one.element_size() for one in after.values())
    half = len(rows[0]) // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    parts = [
        encode(*(row[begin:end].view(UNITS[unit_bytes]) for row in rows)) for begin, end in ((0, half), (half, None))
    ]
    entries = [len(part.gaps_C) for part in parts]
    payload = torch.cat([header(list(zip((0, half), entries, strict=True)), unit_bytes), body(parts)])
    return Delta(layout(parameters_of(after)), torch.cat([rows[1], payload]))


def bits(model: Any) -> list[bytes]:
    return [one.detach().view(torch.uint8).numpy().tobytes() for one in model.parameters()]


VIEWS: list[Callable[[Any], Any]] = [
    lambda sent: sent,
    lambda sent: sent[1:],
    lambda sent: sent[:, 1:],
    lambda sent: sent[:, 1:, :1],
    lambda sent: sent[..., ::2],
    lambda sent: sent.transpose(0, 2),
    lambda sent: sent[1, :, 1],
    lambda sent: sent[1, 1, 1],
]


class Drawn(torch.nn.Module):
    """Parameters in one memory; in each lie views of parameters sent, transposed or not, one behind the other."""

    def __init__(self, targets: list[tuple[Any, list[tuple[int, Any, bool]]]], sent: dict[str, Any]) -> None:
        super().__init__()
        self.targets = targets
        sizes = [sum(view(sent[str(source)]).numel() for source, view, _ in pieces) for _, pieces in targets]
        dtypes = [str(dtype).removeprefix("torch.") for dtype, _ in targets]
        bounds = layout([("", dtype, (size,)) for dtype, size in zip(dtypes, sizes, strict=True)])
        memory = torch.zeros(row_bytes(bounds), dtype=torch.uint8)
        self.all = torch.nn.ParameterList(
            torch.nn.Parameter(view_of(memory, one), requires_grad=False) for one in bounds
        )

    def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
        sent = dict(items)
        for parameter, (_, pieces) in zip(self.all, self.targets, strict=True):
            rest = parameter.data
            for source, view, turned in pieces:
                piece = view(sent[str(source)])
                there, rest = rest[: piece.numel()], rest[piece.numel() :]
                axes = range(piece.dim())[:: -1 if turned else 1]
                there.view([piece.shape[axis] for axis in axes]).permute(tuple(axes)).copy_(piece)


TYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn])
PIECES = st.tuples(st.integers(0, 2), st.sampled_from(VIEWS), st.booleans())


@settings(max_examples=50)
@given(
    sources=st.lists(st.tuples(TYPES, st.tuples(*[st.integers(2, 3)] * 3)), min_size=3, max_size=3),
    targets=st.lists(st.tuples(TYPES, st.lists(PIECES, min_size=1, max_size=4)), min_size=1, max_size=3),
    share=st.sampled_from([0.02, 0.5]),
    at_a_time=st.sampled_from([3, 300]),
)
def test_what_has_changed_goes_where_the_loader_would_copy_it(
    sources: list[Any], targets: list[Any], share: float, at_a_time: int
) -> None:
    """``share``: of the bytes, changed."""
    generator = torch.Generator().manual_seed(0)
    old = {
        str(number): torch.randn(shape, generator=generator).to(dtype) for number, (dtype, shape) in enumerate(sources)
    }
    row, places = row_of(old), layout(parameters_of(old))
    row[torch.rand(len(row), generator=generator) < share] ^= 1
    new = {place.name: view_of(row, place) for place in places}
    model, slow = Drawn(targets, old), Drawn(targets, old)
    swap = swap_of(model)
    assert not swap.patch(delta_between(old, new))  # there is no table yet
    swap(old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends.transfer.delta, "UNPACKED", at_a_time)
        assert swap.patch(delta_between(old, new))
    slow.load_weights(iter(new.items()))
    assert bits(model) == bits(slow)


class Mixture(torch.nn.Module):
    """The second of two workers: half of each expert, in fused tensors."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.zeros(num_experts, 2 * 2, 3), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.zeros(num_experts, 3, 2), requires_grad=False)

    def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
        for name, sent in items:
            kind, expert = name.split(".")
            match kind:
                case "gate":
                    self.w13.data[int(expert), :2].copy_(sent[2:])
                case "up":
                    self.w13.data[int(expert), 2:].copy_(sent[2:])
                case "down":
                    self.w2.data[int(expert)].copy_(sent[:, 2:])


class Operations(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to mypy
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_to_patch_a_mixture(num_experts: int) -> int:
    """Patch all numbers of one, and check that it has the bits of a loaded one."""
    shapes = {"gate": (4, 3), "up": (4, 3), "down": (3, 4)}
    names = {f"{kind}.{expert}": shape for kind, shape in shapes.items() for expert in range(num_experts)}
    old, new = (
        {name: torch.full(shape, version) + torch.rand(shape) for name, shape in names.items()} for version in (1, 2)
    )
    model, slow = Mixture(num_experts), Mixture(num_experts)
    swap = swap_of(model)
    swap(old)
    delta = delta_between(old, new)
    with Operations() as operations:
        assert swap.patch(delta)
    slow.load_weights(iter(new.items()))
    assert bits(model) == bits(slow)
    return operations.count


def test_a_patch_takes_as_many_operations_for_a_thousand_experts_as_for_two() -> None:
    assert operations_to_patch_a_mixture(1500) == operations_to_patch_a_mixture(2)


def test_a_number_that_goes_to_several_places_is_not_patched() -> None:
    class Spread(Model):
        def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
            super().load_weights((name, one[:1].expand(HEADS, HIDDEN) if name == "k" else one) for name, one in items)

    model = Spread()
    swap = swap_of(model)
    swap(sent(1))
    assert swap.direct
    before = model.qk.clone()
    assert not swap.patch(delta_between(sent(1), sent(2)))
    assert torch.equal(model.qk, before)
