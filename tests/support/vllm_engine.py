"""Settings and mark of the tests of the vLLM engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from backends.vllm.process import VLLMSettings

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def real(test: Any) -> Any:
    """Mark a test that needs vLLM; it, torch and transformers warn of much."""
    for mark in (
        pytest.mark.real,
        pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
        pytest.mark.filterwarnings("ignore"),
    ):
        test = mark(test)
    return test


def settings(model_path: Path, **changed: Any) -> VLLMSettings:
    values: dict[str, Any] = {"engine_id": 2, "num_slots": 64, "max_tokens": 512, "device": "cpu", "cpu_cores": "0"}
    return VLLMSettings(model_path=str(model_path), **{**values, **changed})
