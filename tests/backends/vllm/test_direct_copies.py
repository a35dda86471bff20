"""The swap by direct copies, on a model whose loader slices and stacks as vLLM's do, and on models that need more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from transfer_group import row_of  # noqa: E402

from backends.transfer.delta import Delta, body, encode, header  # noqa: E402
from backends.transfer.row import layout, parameters_of  # noqa: E402
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


def test_an_update_to_equal_weights_shows_nothing_and_the_next_one_does() -> None:
    model = Model()
    model.load_weights(iter(sent(1).items()))
    swap = swap_of(model)
    swap(sent(1))
    assert not swap.direct
    swap(sent(2))
    assert swap.direct


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
    assert [one["q"][0, 0] for one in reloads] == [sent(number)["q"][0, 0] for number in (1, 2, 3)]
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
    """What turns the weights of one version into those of another."""
    rows = [row_of(tensors) for tensors in (before, after)]
    changes = encode(*(row.view(torch.int32) for row in rows))
    payload = torch.cat([header([(0, len(changes.gaps_C))], 4), body([changes])])
    return Delta(layout(parameters_of(after)), torch.cat([rows[1], payload]))


class Turned(Model):
    """Keeps o transposed."""

    def load_weights(self, items: Iterable[tuple[str, Any]]) -> None:
        super().load_weights(
            (name, tensor.view(HEADS, HIDDEN).t() if name == "o" else tensor) for name, tensor in items
        )


@pytest.mark.parametrize("kind", [Model, Turned])
@given(changed=st.sets(st.integers(0, 77), max_size=20))
def test_what_has_changed_goes_where_the_loader_would_copy_it(kind: type[Model], changed: set[int]) -> None:
    model, slow = kind(), kind()
    swap = swap_of(model)
    assert not swap.patch(delta_between(sent(1), sent(2)))  # there is no table yet
    swap(sent(1))
    row = torch.cat([sent(1)[name].reshape(-1) for name in ("q", "k", "o", "embed")])
    row[[index for index in changed if index < len(row)]] += 1
    q, k, o, embed = row.split([HEADS * HIDDEN, HEADS * HIDDEN, HIDDEN * HEADS, HIDDEN])
    new = {"q": q.view(HEADS, HIDDEN), "k": k.view(HEADS, HIDDEN), "o": o.view(HIDDEN, HEADS), "embed": embed}
    assert swap.patch(delta_between(sent(1), new))
    slow.load_weights(iter(new.items()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(slow.named_parameters())[name])


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
