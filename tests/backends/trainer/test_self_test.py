"""What NCCL and torch are told to write down, and what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from backends.trainer.rank import nccl_network
from backends.trainer.settings import nccl_logs

LINES = """node-3:7121:7121 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.3<0>
node-3:7121:7388 [0] NCCL INFO NET/IB : No device found.
node-3:7121:7388 [0] NCCL INFO Using network {}
"""
"""As NCCL writes them (``Using network %s`` in its init.cc)."""


@pytest.mark.parametrize("network", ["Socket", "IB", "AWS Libfabric"])
def test_the_network_between_machines_is_read_from_the_log_of_nccl(tmp_path: Path, network: str) -> None:
    log = tmp_path / "nccl-0.log"
    assert nccl_network(None) is nccl_network(str(log)) is None
    log.write_text(LINES.format(network))
    assert nccl_network(str(log)) == network


def test_nccl_and_the_recorder_of_collectives_write_into_the_logs_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    told = nccl_logs("/run/logs", 3)
    assert told["NCCL_DEBUG"] == "WARN"
    assert told["NCCL_DEBUG_FILE"] == "/run/logs/nccl-3.log"
    assert told["TORCH_FR_DUMP_TEMP_FILE"] == "/run/logs/collectives-"
    assert told["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert int(told["TORCH_FR_BUFFER_SIZE"]) > 0
    assert not {name for name in nccl_logs(None, 3) if name.endswith("FILE")}
