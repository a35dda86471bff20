"""The state of a rank: a copy of it, the file that the copy goes into, and reading it on any number of ranks.

Theory of operation. An element of a parameter has three float32 numbers: its master, and AdamW's two moments. The
trainer splits them over the ranks, so that a rank has *pieces*: elements [begin, end) of some parameters, flattened. A
file holds the pieces of one rank under kind, begin and name. A reader takes the parts of all files that overlap its own
pieces: the number of ranks and the trainer's kind may have changed. Parameters are the masters, rounded; not written.

A copy is made while nothing is trained, in memory that is kept for the next one. It is written while training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter whose state is on this rank."""

    name: str
    begin: int
    length: int
    holder: torch.Tensor
    """The float32 tensor that AdamW updates; it contains this piece."""
    at: int = 0
    """Place of the piece in it."""


class RankState:
    """The state of one rank; all ranks call ``load`` together."""

    def __init__(
        self,
        pieces: Callable[[], Iterable[Piece]],
        *,
        adamw: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LambdaLR,
        rank: int,
        device: torch.device,
        writes: bool = True,
        round_masters: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep where it is; ``writes``: another rank has the same otherwise."""
        self._pieces, self._adamw, self._schedule = pieces, adamw, schedule
        self._rank, self._device, self._writes, self._round_masters = rank, device, writes, round_masters
        self._memory: SharedRow | None = None  # of the copy
        self._header: dict[str, Any] = {}

    def copy(self) -> None:
        """Copy it into the host's memory, unchanged by later training; ``BackendError`` if memory is too small."""
        views = {
            f"{kind}:{piece.begin}:{piece.name}": view
            for piece in (self._pieces() if self._writes else ())
            for kind, view in self._views(piece).items()
        }
        on_gpu = self._device.type == "cuda"
        if self._memory is None:
            self._memory = SharedRow.make(4 * sum(view.numel() for view in views.values()), self._device)
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
                for kind, view in self._views(piece).items():
                    if _fill(view, piece.begin, written[kind, piece.name]) != view.numel():
                        raise BackendError(f"checkpoint cannot be loaded: {folder} lacks {kind} of {piece.name}")
                state, steps = self._state_of(piece.holder), progress["adamw_steps"]
                state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps
            self._round_masters()
        scheduler = self._schedule
        scheduler.load_state_dict(progress["schedule"])
        rates = zip(self._adamw.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, rate, factor in rates:  # not the rate that was kept: the run may have been made longer
            group["lr"] = rate * factor(scheduler.last_epoch)

    def _views(self, piece: Piece) -> dict[str, torch.Tensor]:
        """Return the numbers of a piece by kind, flat: ``master`` and ``MOMENTS``."""
        kinds = {"master": piece.holder} | {moment: self._state_of(piece.holder)[moment] for moment in MOMENTS}
        return {kind: tensor.detach().view(-1)[piece.at : piece.at + piece.length] for kind, tensor in kinds.items()}

    def _state_of(self, holder: torch.Tensor) -> dict[str, Any]:
        """Return AdamW's state, as it makes it itself in its first step."""
        state: dict[str, Any] = self._adamw.state[holder]
        if not state:
            is_torchs = isinstance(self._adamw, torch.optim.AdamW)
            state["step"] = torch.zeros((), device=holder.device) if is_torchs else 0
            state |= {moment: torch.zeros_like(holder, requires_grad=False) for moment in MOMENTS}
        return state

    def _progress(self) -> dict[str, Any]:
        steps = [int(state["step"]) for state in self._adamw.state.values() if state]
        return {"adamw_steps": max(steps, default=0), "schedule": self._schedule.state_dict()}


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
