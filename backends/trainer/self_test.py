"""A rank's measurements of its device and links, for ``train --check``, all by the calls that training makes."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from backends.interface import RankFacts
from backends.trainer.attention import hopper_kernel, packed_attention
from backends.transfer.checksum64 import checksum64

SEED = 0
LENGTHS = (1, 7, 120, 64)
"""Of sequences of the row on which attention is compared (tokens)."""
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 64
REPEATS = 3
"""Of a speed, after once to warm up; the fastest counts: others may use the link, too."""


def _kernel(device: torch.device) -> str:
    if device.type != "cuda":
        return "scaled_dot_product_attention, one sequence at a time"
    return "torch varlen_attn" if hopper_kernel(device) is None else "FlashAttention 3"


def self_test(device: torch.device, num_bytes: int, *, nccl_log: str | None = None) -> RankFacts:
    """Measure with all-reduce, broadcast and copy of so many bytes; all ranks call it together."""
    torch.manual_seed(SEED)
    cuda = device.type == "cuda"
    reduce_gb_s, broadcast_gb_s = _links_gb_s(device, num_bytes)
    return RankFacts(
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        kernel=_kernel(device),
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
