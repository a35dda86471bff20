"""New weights by direct copies: a table of which part of which parameter sent goes to which part of the model.

Theory of operation. The model's own loader is run once and its copies are recorded instead of made. So the table has
the slices of tensor parallelism, packed projections and tied parameters. A model is *plain* if its loader makes only
copies, which cover every parameter.

A model may also keep numbers derived from its parameters. So before the first update other weights are brought in
twice, by the table and by a full reload, and every tensor of the model is compared bit for bit after each. Where they
are equal the table alone is used from then on, else the reload.

A *delta* is brought in by the same table: an index in a parameter is split along the axes of each copy of it, from the
widest stride to the narrowest, which gives the index in the target, or shows that the number is not copied.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.transfer.delta import Delta
from backends.transfer.row import Place
from backends.transfer.transport import Tensors
from backends.transfer.verify import checksum64

LOG = logging.getLogger("pipelinerl")

DEPTH = 3
"""How many objects deep a module's own tensors are looked for."""
KV_CACHE = "kv_cache"
"""Attribute of vLLM's attention layers that no weights are in."""


class NotPlainError(Exception):
    """A model whose weights cannot be brought in by copies alone."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A part of a parameter sent, and its target."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target: torch.Tensor

    def carry_out(self, tensors: Tensors) -> None:
        sent = tensors[self.name]
        self.target.copy_(sent.as_strided(self.shape, self.stride, sent.storage_offset() + self.offset))

    @property
    def axes(self) -> list[tuple[int, int, int]]:
        """Size, stride in the parameter and in the target of each axis, the widest first, the last of stride 1."""
        axes: list[tuple[int, int, int]] = []
        sent = zip(self.shape, self.stride, self.target.stride(), strict=True)
        for size, stride, target_stride in sorted(sent, key=lambda axis: -axis[1]):
            along = size
            if axes and axes[-1][1:] == (size * stride, size * target_stride):  # they lie alike on both sides: one axis
                along *= axes.pop()[0]
            if along > 1:
                axes.append((along, stride, target_stride))
        return axes if axes and axes[-1][1] == 1 else [*axes, (1, 1, 0)]

    @property
    def reach(self) -> int:
        """Numbers of the parameter from the first copied one to the last; 0: one goes to several places."""
        reach = 1
        for size, stride, _ in reversed(self.axes):
            if stride < reach:
                return 0
            reach += stride * (size - 1)
        return reach

    def route(self, place: Place) -> list[int]:
        """Return, in numbers: begin and end in the row, begin in the target's storage, target stride of the last axis.

        Then of each other axis: both strides, and the length of the next axis in the parameter.
        """
        axes, begin = self.axes, place.begin // place.dtype.itemsize + self.offset
        route = [begin, begin + self.reach, self.target.storage_offset(), axes[-1][2]]
        for (_, *strides), (size, stride, _) in itertools.pairwise(axes):
            route += [*strides, size * stride]
        return route


@dataclass(frozen=True, slots=True)
class _Routes:
    """Copies K of numbers of one type along as many axes, of all targets T one after the other."""

    dtype: torch.dtype
    memory_T: list[torch.Tensor]
    """All numbers of the storage that the target lies in."""
    last_T: torch.Tensor
    """The last copy of each."""
    route_RK: torch.Tensor

    def put(self, delta: Delta, position_C: torch.Tensor, value_C: torch.Tensor) -> None:
        """Set all numbers N of the targets to which changed units go."""
        units = self.dtype.itemsize // value_C.element_size()
        number_C = position_C // units if units > 1 else position_C
        first_K, end_K = torch.searchsorted(number_C, self.route_RK[:2])
        begin_K, _, at_K, step_K = self.route_RK[:4]
        last_K = (end_K - first_K).cumsum(0)
        copy_N, end_T = torch.repeat_interleave(end_K - first_K), last_K[self.last_T]
        from_N = torch.arange(len(copy_N), device=copy_N.device) + (end_K - last_K)[copy_N]
        rest_N, at_N = number_C[from_N] - begin_K[copy_N], at_K[copy_N]
        for stride_K, target_stride_K, next_K in self.route_RK[4:].view(-1, 3, len(at_K)):
            stride_N = stride_K[copy_N]
            at_N += rest_N // stride_N * target_stride_K[copy_N]
            rest_N %= stride_N
            kept_N = (rest_N < next_K[copy_N]).nonzero().flatten()
            copy_N, from_N, rest_N, at_N = (one_N[kept_N] for one_N in (copy_N, from_N, rest_N, at_N))
            end_T = torch.searchsorted(kept_N, end_T)
        at_N += rest_N * step_K[copy_N]
        new_N = value_C[from_N] if units == 1 else delta.numbers(self.dtype, number_C[from_N])
        for memory, (begin, end) in zip(self.memory_T, itertools.pairwise([0, *end_T.tolist()]), strict=True):
            if begin < end:
                memory[at_N[begin:end]] = new_N[begin:end].view(self.dtype).to(memory.dtype)


def _routes(table: Sequence[_Copy], places: Sequence[Place]) -> Iterator[_Routes]:
    """Yield the routes of all copies from parameters at these places of the row."""
    by_name = {place.name: place for place in places}
    groups: defaultdict[Any, defaultdict[Any, list[_Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in table:
        target = copy.target.untyped_storage().data_ptr(), copy.target.dtype
        groups[by_name[copy.name].dtype, len(copy.axes)][target].append(copy)
    for (dtype, _), by_target in groups.items():
        tensor = partial(torch.tensor, device=table[0].target.device)
        memory_T = [one.target.new_empty(0).set_(one.target.untyped_storage()) for one, *_ in by_target.values()]
        routes = [one.route(by_name[one.name]) for one in itertools.chain(*by_target.values())]
        last_T = tensor([*map(len, by_target.values())]).cumsum(0) - 1
        yield _Routes(dtype, memory_T, last_T, tensor(routes).t().contiguous())


class Swap:
    """How a model gets new weights, by copies or the full ``reload`` (mutable: it learns at the first update)."""

    def __init__(self, model: torch.nn.Module, reload: Callable[[Tensors], None]) -> None:
        self._model, self._reload = model, reload
        self._table: list[_Copy] | None = None
        self._fault = ""
        self._routes: list[_Routes] = []  # through the table, from these places of the row
        self._places: Sequence[Place] = ()

    @property
    def direct(self) -> bool:
        """Whether weights are brought in by copies alone."""
        return self._table is not None

    def __call__(self, tensors: Tensors) -> None:
        """Bring parameters in, by their names in the checkpoint."""
        with torch.no_grad():
            if self._table is not None:
                for copy in self._table:
                    copy.carry_out(tensors)
            elif self._fault:
                self._reload(tensors)
            else:
                self._learn(tensors)

    def patch(self, delta: Delta) -> bool:
        """Bring in what has changed, by the table; return whether it can, else nothing is changed."""
        if not self._table:
            return False
        if self._places != delta.places:
            self._places, plain = delta.places, all(copy.reach for copy in self._table)
            self._routes = [*_routes(self._table, delta.places)] if plain else []
        with torch.no_grad():
            for position_C, value_C in delta.changes(self._table[0].target.device) if self._routes else ():
                for routes in self._routes:
                    routes.put(delta, position_C, value_C)
        return bool(self._routes)

    def _learn(self, tensors: Tensors) -> None:
        try:
            table = noted_copies(self._model, tensors)
        except Exception as error:  # a loader that finds its parameters changed may raise anything
            self._refuse(f"{type(error).__name__}: {error}")
            self._reload(tensors)
            return
        other = _Other(tensors)
        for copy in table:
            copy.carry_out(other)
        copied = _sums(self._model)
        self._reload(other)
        reloaded = _sums(self._model)
        if wrong := [name for name in reloaded if copied.get(name) != reloaded[name]]:
            self._refuse(f"a reload changes {len(wrong)} tensors otherwise: {', '.join(wrong[:3])}")
            self._reload(tensors)
            return
        self._table = table
        for copy in table:
            copy.carry_out(tensors)

    def _refuse(self, fault: str) -> None:
        self._fault = fault
        LOG.warning("weights are reloaded in full at every update, direct copies will not do: %s", fault)


class _Other(Mapping[str, torch.Tensor]):
    """Tensors of other numbers, each made when it is asked for: a model may have the new weights already.

    The sign changes, and the size to twice or half of it; of zeros, too. So does what a model derives from any of them.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._last = tensors, ("", torch.empty(0))

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._last[0] != name:  # several copies of a parameter come one after the other
            tensor = self._tensors[name]
            bits = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}"))
            exponent = -round(math.log2(torch.finfo(tensor.dtype).eps)) if tensor.is_floating_point() else 0
            self._last = name, (bits ^ ((1 << exponent) - (1 << 8 * tensor.element_size() - 1))).view(tensor.dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def noted_copies(model: torch.nn.Module, tensors: Tensors) -> list[_Copy]:
    """Return the copies that the model's loader would make; ``NotPlainError`` if it does more, or skips a part."""
    notes = _Notes(model, tensors)
    with notes:
        model.load_weights(iter(tensors.items()))
    notes.check_complete()
    return notes.copies


class _Spans:
    """Finds the owner of an address."""

    def __init__(self, tensors: Tensors) -> None:
        spans = [(one.data_ptr(), one.data_ptr() + one.nbytes, name) for name, one in tensors.items() if one.numel()]
        self._spans = sorted(spans)

    def owner(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the tensor in whose memory this one lies, if any."""
        begin = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        index = bisect.bisect_right(self._spans, begin, key=lambda span: span[0]) - 1
        if index < 0 or begin + (last + 1) * tensor.element_size() > self._spans[index][1]:
            return None
        return self._spans[index][2]


class _Notes(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to mypy
    """Records copies into a model instead of making them."""

    def __init__(self, model: torch.nn.Module, tensors: Tensors) -> None:
        super().__init__()
        self._parameters = dict(model.named_parameters())
        if crooked := [name for name, one in self._parameters.items() if not one.is_contiguous()]:
            raise NotPlainError(f"{crooked[0]} is not contiguous")
        self._of_model, self._of_sent, self._sent = _Spans(self._parameters), _Spans(tensors), tensors
        self._covered = dict.fromkeys(self._parameters, 0)
        self.copies: list[_Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and args[0].numel():
            owner = self._of_model.owner(args[0])
            if owner is not None:
                if func is not torch.ops.aten.copy_.default:
                    raise NotPlainError(f"{func} changes {owner}")
                self._note(owner, args[0], args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _note(self, owner: str, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._of_sent.owner(source)
        if name is None or source.shape != target.shape or source.dtype != self._sent[name].dtype:
            raise NotPlainError(f"{owner} is not a copy of what is sent")
        sent = self._sent[name]
        offset = (source.data_ptr() - sent.data_ptr()) // sent.element_size()
        self.copies.append(_Copy(name, tuple(source.shape), source.stride(), offset, target.detach()))
        self._covered[owner] += target.numel()

    def check_complete(self) -> None:
        """Raise NotPlainError unless every number of every parameter is copied once."""
        for name, parameter in self._parameters.items():
            if self._covered[name] != parameter.numel():
                raise NotPlainError(f"{self._covered[name]} of {parameter.numel()} numbers of {name} are copied")


def _sums(model: torch.nn.Module) -> dict[str, int]:
    """Return the checksum of every tensor of a model: parameters, buffers, and other tensors kept by its modules."""
    return {name: checksum64(tensor) for name, tensor in _tensors_of(model)}


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    seen: set[int] = set()
    for name, module in model.named_modules():
        yield from _kept(name, module, depth=DEPTH, seen=seen)


def _kept(owner: str, kept_by: Any, *, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an object and of the objects in it, such as a layer's kernel."""
    for name, value in vars(kept_by).items():
        for index, part in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(part, torch.Tensor):
                if not part.is_meta and name != KV_CACHE:
                    yield f"{owner}.{name}.{index}", part
            elif depth and id(part) not in seen and hasattr(part, "__dict__"):
                seen.add(id(part))
                if not isinstance(part, (torch.nn.Module, type)):
                    yield from _kept(f"{owner}.{name}.{index}", part, depth=depth - 1, seen=seen)
