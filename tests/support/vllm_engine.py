"""Settings and marks of the tests of the vLLM engine, and its weights version by version."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.interface import Generated, Weights
from backends.vllm.engine import VLLMEngine
from backends.vllm.process import VLLMSettings

PROMPT = (3, 13, 4, 16)

HAS_VLLM = importlib.util.find_spec("vllm") is not None


REAL = [
    pytest.mark.real,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # vLLM, torch and transformers warn of much
]
"""Marks of tests that need vLLM."""


def real(test: Any) -> Any:
    for mark in REAL:
        test = mark(test)
    return test


def settings(model_path: Path, **changed: Any) -> VLLMSettings:
    values: dict[str, Any] = {"engine_id": 2, "num_slots": 64, "max_tokens": 512, "device": "cpu"}
    values["cpu_in_place"] = True  # as on a GPU: weights are brought in by direct copies
    return VLLMSettings(model_path=str(model_path), **{**values, **changed})


@dataclass
class Subject:
    """The engine under test, and every version of its weights."""

    engine: VLLMEngine
    folder: Path
    versions: list[Any] = field(default_factory=list)

    def next_weights(self) -> Weights:
        """Disturb the last version's weights, strongly, and write them into a file."""
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        from backends.transfer.file import write_weights

        model = copy.deepcopy(self.versions[-1])
        version = len(self.versions)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        self.versions.append(model)
        path = self.folder / f"weights-{version}"
        sent = revert_weight_conversion(model, dict(model.named_parameters()))
        return Weights(version, f"file:{path}", write_weights(path, sent))

    def error(
        self, generated: Generated, prompt: tuple[int, ...] = PROMPT, *, keep: bool, temperature: float = 1.0
    ) -> float:
        """Return the largest difference of log-probabilities to transformers, with the version of each span (nats).

        With ``keep`` a new version goes on with the keys and values of the old one; without, it computes them again
        for the whole prefix.
        """
        import torch

        row = torch.tensor([[*prompt, *generated.tokens_T.tolist()]])
        logprob: list[float] = []
        cache, done = None, 0
        for version, end in zip(generated.spans.versions, generated.spans.ends, strict=True):
            upto = len(prompt) + end - 1  # the input of the span's last token
            start = done if keep else 0
            with torch.no_grad():
                result = self.versions[version](row[:, start:upto], past_key_values=cache, use_cache=keep)
            cache = result.past_key_values if keep else None
            logits_LV = result.logits[0, -(end - len(logprob)) :] / temperature
            tokens_L = row[0, len(prompt) + len(logprob) : len(prompt) + end]
            logprob += torch.log_softmax(logits_LV, -1).gather(1, tokens_L[:, None])[:, 0].tolist()
            done = upto
        return float(np.abs(np.array(logprob) - generated.logprob_T).max())
