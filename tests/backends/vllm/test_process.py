"""vLLM's processes: what they leave in shared memory when they are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")

from backends.vllm.process import remove_shared_memory, shared_memory_of  # noqa: E402

SHARES = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print(memory.name, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is elsewhere")
def test_what_a_killed_process_leaves_in_shared_memory_is_known_before_and_removed_after() -> None:
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
