"""What the machines of a run say of themselves, for ``train --check``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """A machine that something of the run is placed on."""

    machine: str
    versions: dict[str, str]
    """Of Python and of the packages that must be alike everywhere."""
    gpus: tuple[str, ...]
    """Name, driver and memory in use of each, as the driver prints them."""
    memory_gb: float
    """Memory of the host (GB)."""
    free_memory_gb: float
    """What of it can be had, while trainer and engines are up (GB)."""
    free_shared_gb: float
    """Room for files in memory (GB)."""
    sees_folder: bool | None
    """Whether it sees the run's folder. None: there is none."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank of the trainer."""

    device: str
    """As its driver names it."""
    kernel: str
    """Kernel of attention."""
    attention_error: float
    """Largest error of its attention on packed sequences, over the largest value (no unit)."""
    same_checksum: bool
    """Whether checksums of weights have the same bits on device and host."""
    reduce_gb_s: float | None
    """Bytes that every link carries in an all-reduce of all ranks (GB/s). None: there is one rank."""
    broadcast_gb_s: float | None
    """A broadcast of rank 0 to the others (GB/s). None: there is one rank."""
    link_gb: float
    """Size of what these were measured with (GB)."""
    to_host_gb_s: float | None
    """Copy from the device into pinned memory of the host (GB/s). None: it is the host."""
    total_gb: float | None
    """Memory of the device (GB). None: it is the host."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What a backend finds out about the machines that its parts run on."""

    places: tuple[PlaceFacts, ...]
    """Machines of engines and ranks, each once."""
    ranks: tuple[RankFacts, ...]
    """Ranks of the trainer, in order."""
    to_engines_gb_s: float | None
    """As much as links are measured with, from rank 0's machine to all that have engines, in the group of weights
    (GB/s). None: weights go by files."""
