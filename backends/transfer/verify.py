"""Weights compared bit for bit: the trainer's checksums, and the check of a receiver, for all transports.

The 64-bit checksum of a tensor's bytes has the same bits on every device, and is computed where the tensor lies.
It guards transfers against faults, not against an adversary: files keep SHA-256. With all
arithmetic modulo 2**64, bytes as little-endian words x, the last one filled up with zeros, word i of chunk k::

    y = ((x + (k + 1) * C1) ^ w_i) * C2,    y = (y ^ (y >> 32)) * w_i,    checksum = sum of y + number of bytes

``w_i`` are odd, from a splitmix step. The step in the middle makes it non-linear: a linear sum is blind to two flipped
signs, for 2**63 times an odd number, twice, is 0. The order of a sum does not matter, so neither does how many chunks
are computed at a time.

torch has signed words: constants from 2**63 on are negative, and a mask takes off the sign that ``>>`` keeps.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from backends.lora import CONFIG_FILE, adapter_shapes
from backends.transfer.transport import LACK, SHAPE, UNKNOWN, WeightMismatchError
from pipelinerl.errors import BackendError
from pipelinerl.util.read import read_json

CHUNK_WORDS = 2**15
"""Words (8 bytes) after which the factors repeat; temporaries of one chunk stay in a CPU's cache."""
CHUNKS_AT_A_TIME = {"cpu": 1, "cuda": 256}
"""A GPU wants large steps, each of 64 MiB."""
WORD_BYTES = 8
LOW_HALF = 2**32 - 1


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


C1, C2 = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)
C3 = _signed(0x94D049BB133111EB)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return w_i, shape [``CHUNK_WORDS``]: odd, as if drawn at random."""
    word = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device) * C1
    for shift, factor in ((30, C2), (27, C3)):
        word = (word ^ (word >> shift & 2 ** (64 - shift) - 1)) * factor
    return (word ^ (word >> 31 & 2**33 - 1)) | 1


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, shape [bytes], on its device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum64(tensor: torch.Tensor, *, computed_on: torch.device | None = None) -> int:
    """Return the checksum of a tensor's bytes in row-major order, a signed 64-bit number, whatever its shape and type.

    ``computed_on``: where the bytes are copied to, a few chunks at a time, to be summed. None: where they lie.
    """
    row = as_bytes(tensor)
    device = computed_on or row.device
    at_a_time = CHUNKS_AT_A_TIME.get(device.type, 1)
    chunk_bytes = CHUNK_WORDS * WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=device)
    for begin in range(0, row.numel(), at_a_time * chunk_bytes):
        part = row[begin : begin + at_a_time * chunk_bytes].to(device)
        whole = part.numel() // chunk_bytes * chunk_bytes
        first = begin // chunk_bytes
        if whole:
            total += _mixed(_words(part[:whole]).view(-1, CHUNK_WORDS), first)
        if whole < part.numel():
            total += _mixed(_words(part[whole:])[None], first + whole // chunk_bytes)
    return _signed(int(total.item()) + row.numel())


def _words(part: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, the last one filled up with zeros; a copy only where they cannot be seen as words."""
    if missing := -part.numel() % WORD_BYTES:
        part = torch.nn.functional.pad(part, (0, missing))
    elif part.storage_offset() % WORD_BYTES:
        part = part.clone()
    return part.view(torch.int64)


def _mixed(words: torch.Tensor, first_chunk: int) -> torch.Tensor:
    """Return the sum over chunks, shape [chunks, words], that begin with the ``first_chunk``-th."""
    chunk = torch.arange(first_chunk, first_chunk + words.shape[0], device=words.device)
    return _terms(words, chunk[:, None], _factors(words.device)[: words.shape[1]])


def _terms(words: torch.Tensor, chunk: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    word = words + (chunk + 1) * C1
    word = word.bitwise_xor_(factors).mul_(C2)
    return word.bitwise_xor_(word >> 32 & LOW_HALF).mul_(factors).sum()


class ChosenWords:
    """Some words of a row: what their change makes of its checksum, without a look at the others."""

    def __init__(self, words: torch.Tensor, index_W: torch.Tensor) -> None:
        """``words``: the row, ``int64``; ``index_W``: each once."""
        self._words, self._index_W = words, index_W
        self._chunk_W = index_W >> CHUNK_WORDS.bit_length() - 1
        self._factor_W = torch.index_select(_factors(words.device), 0, index_W & CHUNK_WORDS - 1)
        self._before = self._sum()

    def checksum_now(self, before: int) -> int:
        """Return the checksum of the row, from the one when this was made."""
        return _signed(before - self._before + self._sum())

    def _sum(self) -> int:
        return int(_terms(torch.index_select(self._words, 0, self._index_W), self._chunk_W, self._factor_W))


MAX_NAMES = 3


def checksum(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order, shape and type apart, as 64 hexadecimal digits."""
    return hashlib.sha256(as_bytes(tensor.cpu()).numpy()).hexdigest()


def checksums(items: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the checksum of each parameter by name, in threads at once: hashing releases the interpreter lock."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        started = {name: threads.submit(checksum, tensor) for name, tensor in items}
        return {name: thread.result() for name, thread in started.items()}


def checkpoint_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter in a Hugging Face model folder, from the files' headers only.

    A weight update has to bring exactly these names. A tied parameter is listed once, as in the folder. Layers that
    only draft tokens are left out: neither trained nor loaded by engines that do not draft. Of a folder of adapters:
    those of their model. ``BackendError`` if the folder has no weights in safetensors format.
    """
    folder = Path(folder)
    if (folder / CONFIG_FILE).exists():
        adapters = read_json(folder / CONFIG_FILE)
        return adapter_shapes(checkpoint_shapes(adapters["base_model_name_or_path"]), adapters["r"])
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {folder / name for name in read_json(index)["weight_map"].values()}
    else:
        files = {folder / "model.safetensors"}
    if missing := [str(file) for file in sorted(files) if not file.exists()]:
        raise BackendError(f"model folder must hold weights in safetensors format, {missing[0]} is not there")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(files):
        with safe_open(str(file), framework="pt") as opened:
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    drafting = _draft_layers(folder)
    return {name: shape for name, shape in shapes.items() if not name.startswith(drafting)}


def _draft_layers(folder: Path) -> tuple[str, ...]:
    """Return the prefixes of names of parameters that only draft tokens (multi-token prediction)."""
    file = folder / "config.json"
    config = read_json(file) if file.exists() else {}
    first, num = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers") or 0
    # A part of its own in Qwen3-Next and Qwen3.5, else layers behind the last.
    return ("mtp.", *(f"model.layers.{first + layer}." for layer in range(num)))


def verified(
    items: Iterable[tuple[str, torch.Tensor]],
    *,
    expected: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
) -> dict[str, torch.Tensor]:
    """Return parameters by name; ``BackendError``, naming the first wrong ones, unless all are right, bit for bit.

    ``expected``: checksums of the sender. ``shapes``: of all parameters of the model. ``source`` for messages:
    ``weights in /dev/shm/x``.
    """
    tensors: dict[str, torch.Tensor] = {}

    def kept() -> Any:
        for name, tensor in items:
            tensors[name] = tensor
            yield name, tensor

    actual = checksums(kept())
    faults = {
        "have no checksum for": tensors.keys() - expected.keys(),
        "have a wrong checksum in": {name for name in expected if actual.get(name) != expected[name]},
    }
    _refuse(faults, len(shapes), source)  # first: a damaged name is no other model
    check_names({name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes, source=source)
    return tensors


def check_names(sent: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Raise ``WeightMismatchError`` if a parameter sent is missing, unknown or of another shape than the model's."""
    faults: dict[str, Collection[str]] = {
        LACK: shapes.keys() - sent.keys(),
        UNKNOWN: sent.keys() - shapes.keys(),
        SHAPE: {name for name, shape in sent.items() if shape != shapes.get(name)},
    }
    _refuse(faults, len(shapes), source, WeightMismatchError)


def _refuse(
    faults: Mapping[str, Collection[str]], num_parameters: int, source: str, error: type[BackendError] = BackendError
) -> None:
    for fault, names in faults.items():
        if names:
            listed = ", ".join(sorted(names)[:MAX_NAMES])
            raise error(f"{source} {fault} {len(names)} of {num_parameters} parameters: {listed}")
