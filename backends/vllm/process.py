"""Starting and ending vLLM: an engine's settings, and its processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backends.interface import STREAM_TOKENS
from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.train import LoraConfig
from pipelinerl.hardware.transport import FILE, WeightTransport

SHARED_MEMORY = Path("/dev/shm")
"""Folder of shared memory and semaphores. Only we remove the files of a killed process."""
SHARED_NAMES = ("psm_*", "sem.mp-*", "vllm_dist_*")
"""Python's shared memory and semaphores, and memory in which vLLM's workers on a CPU reduce."""
SHUTDOWN_TIMEOUT_S = 10.0
"""Then vLLM's processes are killed."""
STOP_PERIOD_S = 0.1
"""A process that is slowed down is stopped once in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    """Settings of an engine."""

    engine_id: int
    model_path: str
    """In Hugging Face format; its weights are version 0."""
    num_slots: int
    """Sequences in progress. Paper symbol H."""
    max_tokens: int
    """Longest prompt and answer together."""
    device: Literal["cpu", "gpu"]
    """GPU: bfloat16. CPU: float32, the only type that vLLM's CPU build runs everywhere."""
    transport: WeightTransport = FILE
    """Every ``Weights.location`` begins with its name."""
    lora: LoraConfig | None = None
    """The adapters that weights are. None: whole models."""
    speculation: SpeculationConfig | None = None
    """A drafter, whose tokens the model verifies. None: a token a step."""
    routes: bool = False
    """Whether answers carry the experts of their tokens."""
    tensor_parallel: int = 1
    """Accelerators of the engine: they share the model, but for vLLM's ``data_parallel_size`` replicas."""
    gpu_memory_utilization: float = 0.9
    colocated: bool = False
    """The trainer uses the same GPUs, in turn: ``sleep`` and ``wake`` do something."""
    cpu_kv_cache_gib: int = 1
    cpu_in_place: bool = False
    """On CPU: leave parameters as they are loaded, as on a GPU, to try direct copies. Decode is 2 to 3 times slower."""
    request_times: bool = False
    """Whether answers carry their prefill and decode times; costs the front end some 5 us a token."""
    kv_cache_use: bool = False
    """Whether answers carry how full the KV cache is."""
    cpu_cores: str | None = None
    """Of several workers, one after the other, such as ``0|1``. None: vLLM chooses. An only one is bound to none."""
    log_file: str | None = None
    """Of all its processes. None: they print to where this one does, errors only."""
    start_timeout_s: float = 1200.0
    update_timeout_s: float = 600.0
    """Of each phase of an update, and every other call but ``generate``."""
    generate_timeout_s: float = 300.0
    """Without a decode step while requests are in progress; then the engine hangs."""
    stream_tokens: int = STREAM_TOKENS
    """Decode steps between two reports of answers in progress."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's engine, by name; see ``version/arguments.py``."""


def process_tree(before: set[multiprocessing.process.BaseProcess]) -> list[Any]:
    """Return the child processes started since ``before``, and all of theirs."""
    import psutil

    tree: list[Any] = []
    for child in set(multiprocessing.active_children()) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child.pid)
            tree += [process, *process.children(recursive=True)]
    return tree


def shared_memory_of(processes: list[Any]) -> set[str]:
    """Return shared memory and semaphores in use (Linux), by inode: a semaphore is mapped under another name."""
    mapped = set()
    for pid in (os.getpid(), *(process.pid for process in processes)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {line.split()[4] for line in lines if f" {SHARED_MEMORY}/" in line}
    files = [path for names in SHARED_NAMES for path in SHARED_MEMORY.glob(names)]
    found = set()
    for path in files:
        with contextlib.suppress(OSError):
            if str(path.stat().st_ino) in mapped:
                found.add(str(path))
    return found


def remove_shared_memory(paths: set[str]) -> None:
    """Remove shared memory left by dead processes."""
    for path in paths:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def slow_down(pid: int, seconds: float, factor: float) -> None:
    """Have a process and its children run ``1 / factor`` of the next ``seconds``; blocks. They end if it ends."""
    import psutil

    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    end_s, runs_s = time.monotonic() + seconds, STOP_PERIOD_S / factor

    def signalled(number: signal.Signals) -> bool:
        for one in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)

    while (left_s := end_s - time.monotonic()) > 0 and signalled(signal.SIGSTOP):
        time.sleep(min(left_s, STOP_PERIOD_S - runs_s))
        if runs_s:
            signalled(signal.SIGCONT)
            time.sleep(runs_s)
    if not signalled(signal.SIGCONT):
        signalled(signal.SIGKILL)


def end_processes(processes: list[Any]) -> None:
    """Terminate processes, then kill the rest; blocks until none is left."""
    if not processes:
        return
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=SHUTDOWN_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_TIMEOUT_S)
