"""vLLM's processes: how they are ended, and the shared memory that killed ones leave."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

psutil = pytest.importorskip("psutil")

from backends.vllm import process as module  # noqa: E402
from backends.vllm.process import end_processes, process_tree, remove_shared_memory, shared_memory_of  # noqa: E402

SHARES = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print(memory.name, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is elsewhere")
def test_shared_memory_of_a_killed_process_is_found_before_and_removed_after() -> None:
    nobody = shared_memory_of([])
    with subprocess.Popen([sys.executable, "-c", SHARES], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        used = shared_memory_of(family) - nobody
        for one in family:  # the one that would tidy up, too, as Ray does
            one.kill()
    assert f"/dev/shm/{name}" in used
    assert {Path(path).name[:4] for path in used} == {"psm_", "sem."}
    assert all(Path(path).exists() for path in used)
    remove_shared_memory(used)
    assert not any(Path(path).exists() for path in used)
    remove_shared_memory(used)  # nothing happens


def _ignore_termination(started: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started.set()
    time.sleep(600)


def test_new_children_are_found_and_killed_if_they_ignore_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHUTDOWN_TIMEOUT_S", 0.5)
    context, before = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    started = context.Event()
    child = context.Process(target=_ignore_termination, args=(started,))
    child.start()
    assert started.wait(600)
    tree = process_tree(before)
    assert [one.pid for one in tree] == [child.pid]
    end_processes(tree)
    assert not psutil.pid_exists(child.pid)
