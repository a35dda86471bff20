"""What a machine says of itself."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from needs import need

need("ray", "torch")

from backends.ray.placement import place_facts  # noqa: E402

GPUS = "NVIDIA H100 80GB HBM3, 580.65.06, 4 MiB, 81559 MiB"


def test_a_machine_tells_its_memory_its_versions_and_whether_it_sees_a_file(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    facts = place_facts(str(there))
    assert 0 < facts.free_memory_gb < facts.memory_gb
    assert facts.versions["python"] == platform.python_version()
    assert "torch" in facts.versions
    assert (facts.sees_folder, place_facts(str(tmp_path / "not")).sees_folder) == (True, False)
    assert place_facts(None).sees_folder is None


def test_gpus_are_those_that_the_driver_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{GPUS}'\necho '{GPUS}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert place_facts(None).gpus == (GPUS, GPUS)
    command.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert place_facts(None).gpus == ()
