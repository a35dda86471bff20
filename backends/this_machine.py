"""This machine: memory that a process may use, its GPU driver, the network's variables, the cache of compiled code."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Of a control group, versions 2 and 1 (bytes)."""
DRIVER = "libcuda.so.1"


def memory_bytes(groups: Path = Path("/proc/self/cgroup")) -> float:
    """Return the memory of the machine, or less if a control group of this process, as Slurm's or Docker's, has less.

    A container may see its own group at the root of the tree, but its path on the host: so all parents are read.
    """
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers in ("", "memory"):
            group = CGROUPS / controllers / path.lstrip("/")
            for file in (one / name for one in (group, *group.parents) for name in LIMITS):
                if file.is_relative_to(CGROUPS) and file.is_file() and (text := file.read_text().strip()) != "max":
                    limits.append(float(text))
    return min(limits)


def driver_fault() -> str | None:
    """Return why torch cannot use this machine's NVIDIA driver; None: it can, or there is no driver.

    CUDA promises that a driver of one major version runs all programs built for it.
    """
    import torch

    version = ctypes.c_int()
    try:
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    built, has = torch.version.cuda, version.value // 1000
    if built is None or has >= int(built.partition(".")[0]):
        return None
    return f"the NVIDIA driver runs CUDA {has}.{version.value % 1000 // 10}, and torch was built for {built}"


NETWORK = ("NCCL_", "UCX_", "TORCH_NCCL_", "TORCH_FR_")
"""Begin variables that all processes of a run must have alike."""


def network_variables() -> dict[str, str]:
    """Return the network's variables of this process, the driver, for ranks and engines on any machine."""
    return {name: value for name, value in os.environ.items() if name.startswith(NETWORK)}


LOCAL_DISK = Path("/tmp")


def local_cache() -> dict[str, str]:
    """Return the variable that keeps vLLM's compiled code on this machine's disk, in a folder of its user alone.

    By default it is in the home folder: where machines share it, their engines compile into one folder at once.
    """
    folder = LOCAL_DISK / f"pipelinerl-compiled-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    there = folder.lstat()
    own = stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid() and not there.st_mode & 0o077
    return {"VLLM_CACHE_ROOT": str(folder)} if own else {}
