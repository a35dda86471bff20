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
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.transfer.checksum64 import checksum64
from backends.transfer.delta import Delta
from backends.transfer.transport import Tensors

LOG = logging.getLogger("pipelinerl")

DEPTH = 3
"""How many objects deep a module's own tensors are looked for."""
MOST_COPIES = 4096
"""Of a table that changed numbers go through: each costs about 20 operations (mixtures of 19,000 load faster whole)."""
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
        """Size, stride in the parameter and stride in the target of each axis, the widest first."""
        axes = zip(self.shape, self.stride, self.target.stride(), strict=True)
        return sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1])

    @property
    def invertible(self) -> bool:
        """Whether every number of the parameter has one place in the target, or none."""
        reach = 1
        for size, stride, _ in reversed(self.axes):
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
        return True

    def put(self, index_C: torch.Tensor, value_C: torch.Tensor) -> None:
        """Set the numbers of the target that have these flat indices in the parameter."""
        rest_C = index_C - self.offset
        inside_C, at_C = rest_C >= 0, torch.zeros_like(rest_C)
        for size, stride, target_stride in self.axes:
            along_C = rest_C // stride
            rest_C = rest_C % stride
            inside_C &= along_C < size
            at_C += along_C * target_stride
        inside_C &= rest_C == 0
        span = 1 + sum((size - 1) * target_stride for size, _, target_stride in self.axes)
        self.target.as_strided((span,), (1,))[at_C[inside_C]] = value_C[inside_C].to(self.target.dtype)


class Swap:
    """How a model gets new weights, by copies or the full ``reload`` (mutable: it learns at the first update)."""

    def __init__(self, model: torch.nn.Module, reload: Callable[[Tensors], None]) -> None:
        self._model, self._reload = model, reload
        self._table: list[_Copy] | None = None
        self._fault = ""
        self._by_name: defaultdict[str, list[_Copy]] | None = None  # the table by parameter, from the first delta on
        self._invertible = False

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
        if not self._table or len(self._table) > MOST_COPIES:
            return False
        if self._by_name is None:
            self._by_name = defaultdict(list)
            for copy in self._table:
                self._by_name[copy.name].append(copy)
            self._invertible = all(copy.invertible for copy in self._table)
        if not self._invertible:
            return False
        with torch.no_grad():
            for place, index_C, value_C in delta.changes(self._table[0].target.device):
                for copy in self._by_name[place.name]:
                    copy.put(index_C, value_C)
        return True

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

    Sign, size and order change, and so does what a model derives from any of them.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return -2 * tensor.flip(tuple(range(tensor.dim())))

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
