"""One rank of the FSDP2 trainer.

Theory of operation. The parameters are the float32 masters. Before its forward and its backward pass all ranks gather a
layer in the type of training; gradients are added up over the ranks in float32. Of a parameter of n rows (its first
dimension) rank k of R has rows [k c, k c + c), c = n / R rounded up, or as far as there are any.

With expert parallelism e, rank r has experts only of part j = r mod e, which has the E / e experts from j E / e; of
these n = E / e rows FSDP2 gives it the chunk k = r div e of R / e. So a rank's piece of any parameter is a range of the
flattened parameter. A parameter that R / e ranks share has e parts.

Optimizer and state see a rank's own piece of each parameter as a plain tensor: an element is on exactly one rank,
however many share its parameter, so the norm of the gradient is one sum over all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from backends.trainer.fsdp2.experts import experts_of, share_experts
from backends.trainer.model import TRAINED_DTYPES, PolicyModel, Split, decoder_layers, trained_parameters
from backends.trainer.rank import TrainerRank
from backends.trainer.settings import make_optimizer
from backends.trainer.state import MOMENTS, Piece, RankState


@dataclass(frozen=True, slots=True)
class Shards:
    """A ``Sharding``: FSDP2's."""

    num_ranks: int
    dtype: torch.dtype
    """Of training."""

    def piece(self, parameter: Any, rank: int) -> tuple[int, int]:
        """Return begin and length of a rank's piece of a parameter, flattened."""
        sharers, num_rows = parameter.device_mesh.size(), parameter.shape[0]
        chunk, part = divmod(rank, self._parts(parameter))
        rows = -(-num_rows // sharers)
        low, high = (min(num_rows, one * rows) for one in (chunk, chunk + 1))
        width = parameter.numel() // num_rows
        return width * (part * num_rows + low), width * (high - low)

    def empty(self, weight: Any) -> torch.Tensor:
        if not isinstance(weight, DTensor):
            return torch.empty_like(weight, device="meta")
        num_rows, *others = weight.shape
        return torch.empty(self._parts(weight) * num_rows, *others, dtype=self.dtype, device="meta")

    @contextlib.contextmanager
    def whole(self, weights: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {name: self._gather(one) if isinstance(one, DTensor) else one for name, one in weights.items()}

    def _parts(self, parameter: Any) -> int:
        return int(self.num_ranks // parameter.device_mesh.size())

    def _gather(self, parameter: Any) -> torch.Tensor:
        pieces = [self.piece(parameter, rank) for rank in range(self.num_ranks)]
        own = parameter.detach().to_local().flatten().to(self.dtype)
        longest = max(length for _, length in pieces)
        received = own.new_empty(self.num_ranks * longest)
        torch.distributed.all_gather_into_tensor(received, torch.nn.functional.pad(own, (0, longest - len(own))))
        in_order = sorted(range(self.num_ranks), key=lambda rank: pieces[rank])
        flat = torch.cat([received[rank * longest :][: pieces[rank][1]] for rank in in_order])
        return flat.view(self.empty(parameter).shape)


def shard(model: PolicyModel, *, device: torch.device, dtype: torch.dtype, expert_parallel: int) -> Shards:
    """Split a model that is whole on rank 0 and without memory elsewhere; a layer at a time is whole on the device."""
    num_ranks = torch.distributed.get_world_size()
    mesh, mixed = init_device_mesh(device.type, (num_ranks,)), MixedPrecisionPolicy(dtype, torch.float32)
    shared: set[torch.nn.Parameter] = set()
    if expert_parallel > 1:
        shape = num_ranks // expert_parallel, expert_parallel
        parts = init_device_mesh(device.type, shape, mesh_dim_names=("chunks", "parts"))
        over_chunks = ShardPlacementResult(Shard(0), FSDPMeshInfo(parts["chunks"], shard_mesh_dim=0))
    for module in (*decoder_layers(model.policy), model):  # the last has what is in no layer
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = _read(parameter, device, dtype).float()
        for experts in experts_of(module) if expert_parallel > 1 and module is not model else ():
            for parameter in experts.parameters():
                parameter.data = parameter.chunk(expert_parallel)[parts.get_local_rank("parts")].detach()
                shared.add(parameter)
            share_experts(experts, parts.get_group("parts"))
        # Not wrapped by themselves: a layer that is recomputed would gather them once more.
        placement = (lambda parameter: over_chunks if parameter in shared else None) if shared else None
        fully_shard(module, mesh=mesh, mp_policy=mixed, shard_placement_fn=placement)
        shared.clear()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums
            module.set_force_sum_reduction_for_comms(True)
    return Shards(num_ranks, dtype)


def _read(parameter: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return rank 0's parameter."""
    whole = torch.empty(parameter.shape, dtype=dtype, device=device)
    if torch.distributed.get_rank() == 0:
        whole.copy_(parameter.detach())
    torch.distributed.broadcast(whole, src=0)
    return whole


class FSDP2Rank(TrainerRank):
    """One rank: see the head of this file."""

    def _split(self) -> Split | None:
        return lambda *_: None  # ``_set_up`` splits it, with the value head

    def _set_up(self, factor: Callable[[int], float]) -> None:
        settings = self._settings
        shards = shard(
            self._model,
            device=self._device,
            dtype=TRAINED_DTYPES[settings.device],
            expert_parallel=settings.trainer.expert_parallel,
        )
        self._model.sharding = shards
        named = trained_parameters(self._model)
        self._parameters = [parameter for _, parameter in named]
        self._masters = [torch.nn.Parameter(one.detach().to_local()) for one in self._parameters]
        self._adamw = make_optimizer(settings.optimizer, self._masters)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adamw, factor)
        self._trained = self._model
        self._host: list[torch.UntypedStorage] = []

        def pieces() -> Iterator[Piece]:
            for (name, parameter), master in zip(named, self._masters, strict=True):
                begin, length = shards.piece(parameter, settings.rank)
                if length:
                    yield Piece(name, begin, length, master)

        self._state = RankState(
            pieces, adamw=self._adamw, schedule=self._schedule, rank=settings.rank, device=self._device
        )

    def _backward(self, loss: torch.Tensor, _: bool, /) -> None:
        loss.backward()

    def _update(self) -> float:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad, parameter.grad = parameter.grad.to_local(), None
        square = torch.nn.utils.get_total_norm([master.grad for master in self._masters]) ** 2
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._masters, self._settings.optimizer.gradient_clip, norm)
            self._adamw.step()
            self._schedule.step()
        self._adamw.zero_grad()
        return float(norm)

    def _learning_rate(self) -> float:
        return float(self._adamw.param_groups[0]["lr"])

    def offload(self) -> None:
        if self._settings.device == "gpu":
            self._move_out()
            torch.cuda.empty_cache()

    def reload(self) -> None:
        if self._settings.device == "gpu":
            self._move_back()

    def _move_out(self) -> None:
        for number, storage in enumerate(self._storages()):
            if number == len(self._host):  # kept for the next time
                copy = torch.UntypedStorage(storage.nbytes())
                self._host.append(copy.pin_memory() if storage.device.type == "cuda" else copy)
            self._host[number].copy_(storage)
            storage.resize_(0)

    def _move_back(self) -> None:
        for storage, copy in zip(self._storages(), self._host, strict=True):
            storage.resize_(copy.nbytes())
            storage.copy_(copy)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of masters, then of moments, which the first step makes. Leave empty ones out."""
        masters = [master for master in self._masters if master.numel()]
        for kind in (None, *MOMENTS):
            for master in masters:
                if kind is None or self._adamw.state.get(master):
                    yield (master if kind is None else self._adamw.state[master][kind]).untyped_storage()
