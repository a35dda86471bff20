"""The state of a rank: a copy of it, the file that the copy goes into, and reading it on any number of ranks.

Theory of operation. An element of a parameter has three float32 numbers: its master, and AdamW's two moments. ZeRO
splits them over the ranks, so that a rank has *pieces*: elements [begin, end) of some parameters, flattened. A file
holds the pieces of one rank under kind, begin and name. A reader takes the parts of all files that overlap its own
pieces: the number of ranks and ZeRO's stage may have changed. Parameters are the masters, rounded, and not written.

A copy is made while nothing is trained, in memory that is kept for the next one. It is written while training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from backends.trainer.model import trained_parameters
from backends.transfer.row import SharedRow
from pipelinerl.errors import BackendError

FILES = "rank_*.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of an element, besides the number of steps."""
COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter whose state is on this rank."""

    name: str
    begin: int
    holder: torch.Tensor
    """The tensor that AdamW updates; it contains this piece."""
    views: dict[str, torch.Tensor]
    """By kind, flat: ``master`` and ``MOMENTS``."""


class RankState:
    """The state of one rank; all ranks call ``load`` together. ``engine`` is DeepSpeed's."""

    def __init__(self, engine: Any, *, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._stage = engine.zero_optimization_stage()
        self._memory: SharedRow | None = None  # of the copy
        self._header: dict[str, Any] = {}

    def copy(self) -> None:
        """Copy it into the host's memory, unchanged by later training; ``BackendError`` if memory is too small."""
        writes = self._stage > 0 or self._rank == 0  # without ZeRO all ranks have the same
        views = {
            f"{kind}:{piece.begin}:{piece.name}": view
            for piece in (self._pieces() if writes else ())
            for kind, view in piece.views.items()
        }
        on_gpu = self._engine.device.type == "cuda"
        if self._memory is None:
            self._memory = SharedRow.make(4 * sum(view.numel() for view in views.values()), self._engine.device)
        row = self._memory.row.view(torch.float32)
        self._header, at = {"__metadata__": {"progress": json.dumps(self._progress())}}, 0
        for key, view in views.items():
            end = at + view.numel()
            row[at:end].copy_(view, non_blocking=on_gpu)
            self._header[key] = {"dtype": "F32", "shape": [view.numel()], "data_offsets": [4 * at, 4 * end]}
            at = end
        if on_gpu:
            torch.cuda.synchronize()

    def write(self, folder: Path) -> dict[str, str]:
        """Write the copy into a safetensors file of the folder, and fsync it; return name and SHA-256, made meanwhile.

        The safetensors library is not used: it holds the interpreter's lock while it writes, and training would wait.
        """
        assert self._memory is not None
        folder.mkdir(parents=True, exist_ok=True)
        header = json.dumps(self._header).encode()
        header += b" " * (-len(header) % 8)
        path, parts = folder / FILES.replace("*", f"{self._rank:05d}"), [len(header).to_bytes(8, "little") + header]
        parts.append(self._memory.row.numpy().data)
        digest = hashlib.sha256()
        with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
            hashed = beside.map(digest.update, parts)  # lets go of the interpreter's lock, too
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
            list(hashed)
        return {path.name: digest.hexdigest()}

    def load(self, folder: Path) -> None:
        """Load the state that a trainer's ranks wrote; ``BackendError`` if something is missing."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            files = _opened(folder, stack)
            progress = json.loads(files[0].metadata()["progress"])
            written = _written(files)
            for piece in self._pieces():
                for kind, view in piece.views.items():
                    if _fill(view, piece.begin, written[kind, piece.name]) != view.numel():
                        raise BackendError(f"checkpoint cannot be loaded: {folder} lacks {kind} of {piece.name}")
                state, steps = self._state_of(piece.holder), progress["adamw_steps"]
                state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps
            self._round_masters()
        for name in COUNTS:
            setattr(self._engine, name, progress[name])
        scheduler = self._engine.lr_scheduler
        scheduler.load_state_dict(progress["schedule"])
        rates = zip(self._adamw.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, rate, factor in rates:  # not the rate that was kept: the run may have been made longer
            group["lr"] = rate * factor(scheduler.last_epoch)

    # ------------------------------------------------------------------------------- DeepSpeed from inside

    @property
    def _adamw(self) -> Any:
        return self._engine.optimizer.optimizer if self._stage else self._engine.optimizer

    def _pieces(self) -> Iterator[Piece]:
        for name, parameter in trained_parameters(self._engine.module):
            holder, at, begin, length = self._place(parameter)
            if length > 0:
                kinds = {"master": holder} | {moment: self._state_of(holder)[moment] for moment in MOMENTS}
                views = {kind: tensor.detach().view(-1)[at : at + length] for kind, tensor in kinds.items()}
                yield Piece(name, begin, holder, views)

    def _place(self, parameter: Any) -> tuple[Any, int, int, int]:
        """Return the tensor that AdamW updates, a parameter's place in it, and begin and length of its piece."""
        zero = self._engine.optimizer
        if self._stage == 0:
            return parameter, 0, 0, parameter.numel()
        if self._stage == 3:
            group, at, size = zero.grad_position[zero.get_param_id(parameter)]
            begin = self._rank * size
            return zero.fp32_partitioned_groups_flat[group], at, begin, min(size, parameter.ds_numel - begin)
        mapping = parameter._hp_mapping
        if mapping is None:
            return None, 0, 0, 0
        inside, address = mapping.hp_fragment_address, mapping.lp_fragment_address
        (holder,) = self._adamw.param_groups[mapping.param_group_index]["params"]
        return holder, inside.start, address.start, address.numel

    def _state_of(self, holder: torch.Tensor) -> dict[str, Any]:
        """Return AdamW's state, as it makes it itself in its first step."""
        state: dict[str, Any] = self._adamw.state[holder]
        if not state:
            is_torchs = isinstance(self._adamw, torch.optim.AdamW)
            state["step"] = torch.zeros((), device=holder.device) if is_torchs else 0
            state |= {moment: torch.zeros_like(holder, requires_grad=False) for moment in MOMENTS}
        return state

    def _progress(self) -> dict[str, Any]:
        steps = [int(state["step"]) for state in self._adamw.state.values()]
        return {
            "adamw_steps": max(steps, default=0),
            "schedule": self._engine.lr_scheduler.state_dict(),
            **{name: getattr(self._engine, name) for name in COUNTS},
        }

    def _round_masters(self) -> None:
        zero = self._engine.optimizer
        if self._stage == 3:
            zero.checkpoint_event_prologue()
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            zero.checkpoint_event_epilogue()
        elif self._stage:
            zero.update_lp_params()


def fill_policy(policy: torch.nn.Module, folder: Path) -> None:
    """Fill a policy in the host's memory with the masters of all ranks, rounded; ``BackendError`` if one is missing."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        written = _written(_opened(folder, stack))
        for name, parameter in trained_parameters(policy):
            master = torch.empty(parameter.numel())
            if _fill(master, 0, written["master", f"policy.{name}"]) != parameter.numel():
                raise BackendError(f"checkpoint cannot be loaded: {folder} lacks master of policy.{name}")
            parameter.data = master.view(parameter.shape).to(parameter.dtype)


def _opened(folder: Path, stack: contextlib.ExitStack) -> list[Any]:
    files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob(FILES))]
    if not files:
        raise BackendError(f"checkpoint cannot be loaded: {folder} has no {FILES}")
    return files


def _written(files: Sequence[Any]) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    """Return begin and reader of each piece, by kind and name of the parameter."""
    written = defaultdict(list)
    for file in files:
        for key in file.keys():  # noqa: SIM118  # no mapping
            kind, begin, name = key.split(":", maxsplit=2)
            written[kind, name].append((int(begin), file.get_slice(key)))
    return written


def _fill(view: torch.Tensor, begin: int, written: Sequence[tuple[int, Any]]) -> int:
    """Fill a piece that begins at ``begin`` from overlapping pieces; return the number of filled elements."""
    num_filled = 0
    for start, reader in written:
        low, high = max(begin, start), min(begin + view.numel(), start + reader.get_shape()[0])
        if low < high:
            view[low - begin : high - begin] = reader[low - start : high - start]
            num_filled += high - low
    return num_filled
