"""One rank of a trainer; usually the inside of a Ray actor.

Theory of operation. All ranks get the same calls in the same order, each with its own rows. Everything but
the constructor and ``free_address`` is a collective: it returns when all ranks have been called.

The gradient of an optimizer step is the sum over its answer tokens divided by ``train_batch_size``. With
``sequence_parallel`` each of the ranks of a row adds the gradient of its own tokens.

Kinds of trainers differ in how they split parameters, gradients and optimizer states over the ranks: a subclass each.
A value head (``value_coefficient``) is trained with the policy, never published or exported. Rank 0 holds published
weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import transformers
from numpy.typing import NDArray

from backends.interface import RankFacts, Weights
from backends.lora import add_adapters
from backends.trainer.attention import hopper_kernel, packed_attention
from backends.trainer.fused import check_compiler, compiled
from backends.trainer.model import PolicyModel, Split, copy_policy, load_policy, recompute, save_policy
from backends.trainer.packing import PackedRow
from backends.trainer.publish import Publisher
from backends.trainer.replay import Replay
from backends.trainer.sequence_parallel import SequenceGroup, over_ranks, spread
from backends.trainer.settings import RankSettings, nccl_logs
from backends.trainer.state import RankState
from backends.trainer.step import StepMeter, learning_rate_factor, row_loss
from backends.transfer.rendezvous import RendezvousStore, address_towards, own_address, reserved_port
from backends.transfer.verify import checksum64
from backends.workers.main import log_to
from pipelinerl.errors import BackendError
from pipelinerl.util.user_code import kind_and_line

MAX_SKIPPED = 5
"""Optimizer steps in a row whose gradient is not finite, after which the run ends."""
ANSWER_S = 10.0
"""For rank 0's machine to accept or refuse a connection; it is silent where packets are dropped."""


class TrainerRank(ABC):
    """One rank: see the head of this file."""

    _trained: Callable[..., Any]
    """Runs the model on a row: ``_model``, or a trainer's wrapper of it."""
    _state: RankState

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._publisher = Publisher(
            settings.rank,
            device=settings.device,
            transport=settings.transport,
            folder=Path(settings.weights_folder),
            model_path=settings.model_path,
            lora=settings.lora,
        )
        self._reserved: socket.socket | None = None  # has the port until the ranks have met
        self._num_skipped = 0  # in a row

    def free_address(self) -> tuple[str, int]:
        """Return this machine's address and a free port, for the ranks to meet at; nobody else is given it before."""
        address = own_address()
        self._reserved = reserved_port(address)
        return address, self._reserved.getsockname()[1]

    def address_towards(self, address: str) -> str:
        """Return the address that this rank comes from when it connects to another one."""
        return address_towards(address)

    def start(
        self,
        master_address: str,
        master_port: int,
        members: Sequence[str] | None = None,
        recomputed: int | None = None,
    ) -> None:
        """Join the other ranks at a free port of rank 0's machine (``RendezvousStore``); load the model.

        ``recomputed``: layers. None: as ``activation_checkpointing`` says.
        """
        settings = self._settings
        log_to(settings.logs and f"{settings.logs}/rank-{settings.rank}.log")
        os.environ |= {
            "RANK": str(settings.rank),
            "WORLD_SIZE": str(settings.num_ranks),
            "LOCAL_RANK": "0",  # a process sees its own GPU only
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
        }
        self._device = torch.device("cpu" if settings.device == "cpu" else "cuda:0")
        if settings.device == "gpu":
            os.environ |= nccl_logs(settings.logs, settings.rank)
            torch.cuda.set_device(self._device)
        _silence_libraries()
        fuses = settings.trainer.fuses(settings.device)
        if fuses:
            check_compiler(settings.device)
        with self._reserved or contextlib.nullcontext():
            self._meet(master_address, master_port, members)
        wait_at_most(settings.trainer.start_timeout_s)
        policy = load_policy(settings.model_path, device=settings.device, split=self._split())
        if settings.lora is not None:
            add_adapters(policy, settings.lora)
        torch.distributed.barrier()  # groups made later wait less long for a rank that still reads
        wanted = settings.trainer.activation_checkpointing if recomputed is None else recomputed
        self._num_recomputed = recompute(policy, wanted)
        group = None
        if settings.trainer.sequence_parallel > 1:
            group = SequenceGroup.of(settings.trainer.sequence_parallel, settings.rank)
            spread(policy, group)
        value_head = settings.loss.value_coefficient > 0
        compiler = compiled if fuses else None
        self._model = PolicyModel(policy, temperature=settings.temperature, value_head=value_head, compiler=compiler)
        self._meter = StepMeter(
            self._device, settings.model_path, adapter_rank=0 if settings.lora is None else settings.lora.rank
        )
        self._set_up(learning_rate_factor(settings.optimizer, optimizer_steps=settings.optimizer_steps))
        self._replay = Replay(policy, group) if settings.trainer.router_replay else None
        if group is not None:
            self._trained = over_ranks(self._trained, group)
        self._publisher.check(self._model)
        wait_at_most(settings.trainer.collective_timeout_s)

    @abstractmethod
    def _split(self) -> Split | None:
        """Return how parameters are split while they are loaded, all ranks together. None: each has them whole."""

    @abstractmethod
    def _set_up(self, factor: Callable[[int], float]) -> None:
        """Make optimizer, schedule (see ``learning_rate_factor``), ``_trained`` and ``_state``."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor, completes_step: bool, /) -> None:
        """Add this row's gradient, summed over the ranks."""

    @abstractmethod
    def _update(self) -> float:
        """Make the optimizer step and move the schedule on; return the gradient's norm before it was clipped.

        Forget the gradient. If it is not finite change nothing else.
        """

    @abstractmethod
    def _learning_rate(self) -> float: ...

    def _meet(self, master_address: str, master_port: int, members: Sequence[str] | None) -> None:
        """Make the group of ranks before DeepSpeed does: its own is bound to a device, and further groups can hang.

        Groups are kept for the life of a process, so a second trainer in this process has the same.
        """
        if torch.distributed.is_initialized():
            return
        settings, timeout_s = self._settings, self._settings.trainer.start_timeout_s
        if settings.rank == 0:
            store: Any = RendezvousStore(master_address, master_port, timeout_s=timeout_s, members=members)
        else:
            reach(master_address, master_port, timeout_s=timeout_s)
            store = torch.distributed.TCPStore(master_address, master_port, timeout=timedelta(seconds=timeout_s))
        torch.distributed.init_process_group(
            "gloo" if settings.device == "cpu" else "nccl",
            store=store,
            rank=settings.rank,
            world_size=settings.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )

    def train(
        self, rows: Sequence[PackedRow], *, completes_step: bool
    ) -> tuple[dict[int, NDArray[np.float32]], dict[str, float]]:
        """Accumulate the gradient of this rank's rows of a micro-batch (as many as other ranks have, at least one).

        Makes the optimizer step if they complete the batch. Returns log-probabilities of answer tokens before the step
        by sample (nats), and numbers to log; see ``StepMeter.metrics`` and ``RayTrainer.train``. ``BackendError`` if
        ``MAX_SKIPPED`` optimizer steps in a row had a gradient that is not finite; ``ValueError``: see ``row_loss``.
        """
        logprob: dict[int, NDArray[np.float32]] = {}
        sums: defaultdict[str, Any] = defaultdict(float)
        metrics: dict[str, float] = {}
        self._meter.begin()
        for index, row in enumerate(rows):
            boundary = completes_step and index == len(rows) - 1
            if self._replay is not None:
                self._replay.begin(row, self._device)
            logprob_M, entropy_M, parts = row_loss(
                self._trained,
                row,
                config=self._settings.loss,
                train_batch_size=self._settings.train_batch_size,
                device=self._device,
            )
            loss = torch.stack(list(parts.values())).sum()
            self._meter.done("forward_s")
            self._backward(loss, boundary)
            self._meter.done("backward_s")
            logprob |= row.split(logprob_M.detach().cpu().numpy())
            for name, part in ({"loss": loss, "entropy_sum": entropy_M.sum()} | parts).items():
                sums[name] += part.detach()
            sums["answer_tokens_sum"] += len(row.answer_M)
            if boundary:
                metrics = self._step()
            self._meter.done("optimizer_s")
        del sums["policy_loss"]
        metrics["recomputed_layers"] = float(self._num_recomputed)
        return logprob, {name: float(value) for name, value in sums.items()} | metrics | self._meter.metrics(rows)

    def _step(self) -> dict[str, float]:
        learning_rate = self._learning_rate()  # the schedule moves on within the step
        norm = self._update()
        skipped = not np.isfinite(norm)
        self._num_skipped = self._num_skipped + 1 if skipped else 0
        if self._num_skipped == MAX_SKIPPED:
            raise BackendError(f"the gradient was not finite in {MAX_SKIPPED} optimizer steps in a row (norm: {norm})")
        return {"gradient_norm": norm, "learning_rate": learning_rate, "skipped": float(skipped)}

    def publish(self, version: int) -> Weights | None:
        return self._publisher.publish(self._model, version)

    def open_group(self) -> str:
        return self._publisher.group.open()

    def join_group(self, names: Sequence[str], timeout_s: float) -> str | None:
        return self._publisher.join_group(names, timeout_s)

    def abort_group(self, rendezvous: str, why: str) -> None:
        self._publisher.group.abort(rendezvous, why)

    def send(self, version: int) -> str | None:
        return self._publisher.send(version)

    def snapshot(self) -> None:
        self._state.copy()

    def save(self, folder: Path) -> dict[str, str]:
        """Write this rank's part of the ``snapshot`` beside training; ``BackendError`` with the folder if it fails."""
        try:
            return self._state.write(Path(folder))
        except OSError as error:
            raise BackendError(f"cannot write {folder}: {kind_and_line(error)}") from error

    def load(self, folder: Path) -> None:
        self._state.load(Path(folder))

    def export(self, folder: Path) -> None:
        copies = copy_policy(self._model, receive=self._settings.rank == 0)
        if self._settings.rank == 0:
            save_policy(self._model, copies, folder)
            transformers.AutoTokenizer.from_pretrained(self._settings.model_path).save_pretrained(folder)

    def self_test(self, num_bytes: int) -> RankFacts:
        return self_test(self._device, num_bytes, nccl_log=os.environ.get("NCCL_DEBUG_FILE"))

    @abstractmethod
    def offload(self) -> None:
        """Move everything from the GPU to the host's memory. On CPU there is nothing to move."""

    @abstractmethod
    def reload(self) -> None: ...

    def shutdown(self) -> None:
        """Remove the published files and give up the model. The process is to end then."""
        self._publisher.close()


def reach(address: str, port: int, *, timeout_s: float) -> None:
    """Wait until something listens there; ``BackendError`` after ``ANSWER_S`` if packets are dropped."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address, port), timeout=ANSWER_S).close()
        except OSError as error:
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > until_s:
                raise BackendError(
                    f"no connection to rank 0 at {address}:{port}: {kind_and_line(error)}; the trainer's machines must "
                    "reach each other directly, without a firewall or NAT between them"
                ) from None
        time.sleep(0.1)  # rank 0 does not listen yet


def wait_at_most(seconds: float) -> None:
    """Set how long collectives wait for other ranks, in all groups: DeepSpeed makes one of its own."""
    groups = torch.distributed.distributed_c10d
    for group in groups._world.pg_map:
        groups._set_pg_timeout(timedelta(seconds=seconds), group)


def _silence_libraries() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # DeepSpeed uses old names of torch
    transformers.utils.logging.disable_progress_bar()


# ---------------------------------------------------- measurements for train --check, by the calls that training makes

SEED = 0
LENGTHS = (1, 7, 120, 64)
"""Of sequences of the row on which attention is compared (tokens)."""
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 64
REPEATS = 3
"""Of a speed, after once to warm up; the fastest counts: others may use the link, too."""


def self_test(device: torch.device, num_bytes: int, *, nccl_log: str | None = None) -> RankFacts:
    """Measure with all-reduce, broadcast and copy of so many bytes; all ranks call it together."""
    torch.manual_seed(SEED)
    cuda = device.type == "cuda"
    reduce_gb_s, broadcast_gb_s = _links_gb_s(device, num_bytes)
    kernel = "scaled_dot_product_attention, one sequence at a time"
    if cuda:
        kernel = "torch varlen_attn" if hopper_kernel(device) is None else "FlashAttention 3"
    return RankFacts(
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        kernel=kernel,
        attention_error=attention_error(device, torch.bfloat16 if cuda else torch.float32),
        same_checksum=same_checksum(device),
        reduce_gb_s=reduce_gb_s,
        broadcast_gb_s=broadcast_gb_s,
        link_gb=num_bytes / 1e9,
        to_host_gb_s=_to_host_gb_s(device, num_bytes) if cuda else None,
        total_gb=torch.cuda.mem_get_info(device)[1] / 1e9 if cuda else None,
        host=socket.gethostname(),
        network=nccl_network(nccl_log),
    )


def nccl_network(log: str | None) -> str | None:
    """Return the network between machines that NCCL has logged: ``IB``, ``Socket``, ...; None: nothing is logged."""
    text = Path(log).read_text(errors="replace") if log is not None and Path(log).is_file() else ""
    found = re.search(r"NCCL INFO Using network (.+)", text)
    return None if found is None else found[1].strip()


def attention_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of packed attention, over the largest value of plain attention in float32 on CPU."""
    num, sizes = sum(LENGTHS), (HEADS, KEY_HEADS, KEY_HEADS)
    query, key, value = (torch.randn(1, heads, num, HEAD_SIZE).to(dtype) for heads in sizes)
    sequence_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (sequence_N[:, None] == sequence_N) & torch.ones(num, num, dtype=torch.bool).tril()
    plain = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    boundary = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    packed, _ = packed_attention(
        torch.nn.Module(),
        query.to(device),
        key.to(device),
        value.to(device),
        None,
        cu_seq_lens_q=boundary,
        max_length_q=max(LENGTHS),
    )
    return float((packed.float().cpu() - plain).abs().max() / plain.abs().max())


def same_checksum(device: torch.device) -> bool:
    """Return whether a checksum has the same bits on this device and on the host."""
    numbers = torch.randn(1_000_003).to(torch.bfloat16)
    return bool(checksum64(numbers) == checksum64(numbers.to(device)))


def _links_gb_s(device: torch.device, num_bytes: int) -> tuple[float | None, float | None]:
    """Return the speeds of an all-reduce (2 (n - 1) / n of the bytes on every link) and a broadcast; None: one rank."""
    ranks = int(torch.distributed.get_world_size())
    if ranks == 1:
        return None, None
    numbers = torch.zeros(num_bytes // 4, device=device)
    reduced = _gb_s(device, num_bytes, lambda: torch.distributed.all_reduce(numbers))
    return 2 * (ranks - 1) / ranks * reduced, _gb_s(
        device, num_bytes, lambda: torch.distributed.broadcast(numbers, src=0)
    )


def _to_host_gb_s(device: torch.device, num_bytes: int) -> float:
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    return _gb_s(device, num_bytes, lambda: here.copy_(there, non_blocking=True))


def _gb_s(device: torch.device, num_bytes: int, work: Callable[[], Any]) -> float:
    seconds: list[float] = []
    for _ in range(1 + REPEATS):
        begin_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
    return num_bytes / 1e9 / min(seconds[1:])
