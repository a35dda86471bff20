"""This machine: limits of its control groups, a driver that is too old, and folders and variables of processes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import this_machine
from backends.this_machine import driver_fault, local_cache, memory_bytes, network_variables


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(this_machine, "CGROUPS", tmp_path)
    return tmp_path


def limit(path: Path, value: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/job_7/step_0", {"job_7/memory.max": "1000", "job_7/step_0/memory.max": "max"}, 1000),
        ("0::/job_7/step_0", {"job_7/memory.max": "1000", "job_7/step_0/memory.max": "900"}, 900),
        ("0::/", {"memory.max": "800"}, 800),
        ("5:cpu:/a\n4:memory:/job_7", {"memory/job_7/memory.limit_in_bytes": "700", "cpu/a/memory.max": "1"}, 700),
        # Docker's first version: the path is the host's, the group at the root of the tree.
        ("4:memory:/docker/abc", {"memory/memory.limit_in_bytes": "600"}, 600),
    ],
)
def test_memory_is_what_all_control_groups_of_a_process_leave_it(
    groups: Path, own: str, limits: dict[str, str], expected: int
) -> None:
    limit(groups / "self", own)
    for name, value in limits.items():
        limit(groups / name, value)
    assert memory_bytes(groups / "self") == expected


def test_without_a_limit_memory_is_that_of_the_machine(groups: Path) -> None:
    """The first version has a limit of 2^63 bytes, less a page, for none."""
    psutil = pytest.importorskip("psutil")
    limit(groups / "self", "4:memory:/")
    limit(groups / "memory" / "memory.limit_in_bytes", str(2**63 - 4096))
    assert memory_bytes(groups / "self") == memory_bytes(groups / "missing") == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("built", "driver", "fault"),
    [
        ("13.0", 12080, "the NVIDIA driver runs CUDA 12.8, and torch was built for 13.0"),
        ("13.2", 13000, None),  # of one major version all work
        ("12.8", 13010, None),
        (None, 12080, None),  # torch without CUDA
        ("13.0", None, None),  # no driver: Ray finds no GPU
    ],
)
def test_a_driver_is_too_old_if_it_is_of_an_older_major_version(
    monkeypatch: pytest.MonkeyPatch, built: str | None, driver: int | None, fault: str | None
) -> None:
    torch = pytest.importorskip("torch")

    def library(name: str) -> Any:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")

        def version(number: Any) -> int:
            ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = driver
            return 0

        return SimpleNamespace(cuDriverGetVersion=version)

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(this_machine.ctypes, "CDLL", library)
    assert driver_fault() == fault


def test_compiled_code_is_kept_on_the_local_disk_in_a_folder_that_nobody_else_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "LOCAL_DISK", tmp_path)
    (folder,) = local_cache().values()
    assert Path(folder).parent == tmp_path
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert local_cache() == {"VLLM_CACHE_ROOT": folder}
    Path(folder).chmod(0o777)  # somebody else's code would be run from there
    assert local_cache() == {}


def test_variables_of_the_network_are_found_by_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_IB_HCA", "UCX_TLS", "TORCH_NCCL_TRACE_CPP_STACK", "MY_NCCL_"):
        monkeypatch.setenv(name, "x")
    assert network_variables().keys() >= {"NCCL_IB_HCA", "UCX_TLS", "TORCH_NCCL_TRACE_CPP_STACK"}
    assert "MY_NCCL_" not in network_variables()
