"""One rank of the FSDP2 trainer.

Optimizer and state see a rank's own piece of each parameter as a plain tensor: an element is on exactly one rank,
however many share its parameter, so the norm of the gradient is one sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from backends.trainer.fsdp2.shards import shard
from backends.trainer.model import TRAINED_DTYPES, Split, trained_parameters
from backends.trainer.rank import TrainerRank
from backends.trainer.settings import make_optimizer
from backends.trainer.state import MOMENTS, Piece, RankState


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
