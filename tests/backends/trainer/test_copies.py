"""Copies that a rank keeps in the host's memory take what they hold and no more: ``SharedRow`` pins no power of two."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import need

need("torch", "transformers", "deepspeed")

import torch  # noqa: E402
from tiny_trainer import save_tiny_model  # noqa: E402

from backends.trainer.deepspeed.state import RankState  # noqa: E402
from backends.trainer.model import PolicyModel, load_policy  # noqa: E402
from backends.trainer.publish import Publisher  # noqa: E402
from backends.transfer import row as shared_row  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402
from pipelinerl.hardware.transport import BROADCAST  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed uses what torch renamed


def adamw_of(module: torch.nn.Module) -> Any:
    """In the place of DeepSpeed's engine, without ZeRO."""
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    counts = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 0)
    return SimpleNamespace(
        module=module,
        optimizer=optimizer,
        lr_scheduler=schedule,
        device=torch.device("cpu"),
        zero_optimization_stage=lambda: 0,
        **counts,
    )


def test_a_checkpoint_that_the_host_has_no_memory_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RankState(adamw_of(torch.nn.Linear(100, 7)), rank=0)
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: 12 * 707 - 1)
    with pytest.raises(
        BackendError, match=r"^the host has no memory for a copy: 8484 bytes are needed, 8483 are free$"
    ):
        state.copy()
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: 12 * 707)
    state.copy()


def test_weights_that_the_host_has_no_memory_for_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu", dtype=torch.bfloat16)
    model = PolicyModel(policy, temperature=1.0, value_head=False)
    num_bytes = 2 * sum(parameter.numel() for parameter in policy.parameters())
    publisher = Publisher(0, device="cpu", transport=BROADCAST, folder=tmp_path, model_path=str(tmp_path))
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: num_bytes - 1)
    with pytest.raises(BackendError, match=f": {num_bytes} bytes are needed"):
        publisher.publish(model, 1)
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: num_bytes)
    assert publisher.publish(model, 1) is not None
