"""What a rank measures of its own work: seconds of each phase, FLOP, memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.deepspeed.packing import PackedRow
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import LanguageModel, find_model, gpu_of_device

PHASES = ("forward_s", "backward_s", "optimizer_s")
"""Phases of a rank's work on a micro-batch. With waits for the other ranks, which it meets in all of them."""


class StepMeter:
    """Measures the phases of one micro-batch after the other; on GPU with events, so that the host does not wait.

    Args:
        device: Where the rank computes.
        model_path: Folder in Hugging Face format.
    """

    def __init__(self, device: torch.device, model_path: str) -> None:
        self._cuda = device.type == "cuda"
        self._model = _known_model(model_path)
        gpu = gpu_of_device(torch.cuda.get_device_name(device)) if self._cuda else None
        self._peak = None if gpu is None else gpu.bf16_flops
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._marks = [("", self._now())]

    def done(self, phase: str) -> None:
        """End a phase, one of ``PHASES``, which began when the one before it ended."""
        self._marks.append((phase, self._now()))

    def metrics(self, rows: Sequence[PackedRow]) -> dict[str, float]:
        """End a micro-batch.

        Args:
            rows: What was trained on.

        Returns:
            Seconds by phase; ``peak_memory_gb``: on GPU the most that tensors took in it, on CPU that the process
            has ever had; ``flop_sum`` and, on GPUs of the catalogue, ``peak_flops``.
        """
        measured = dict.fromkeys(PHASES, 0.0)
        if self._cuda:
            torch.cuda.synchronize()
        for (_, before), (phase, after) in pairwise(self._marks):
            measured[phase] += before.elapsed_time(after) / 1000 if self._cuda else after - before
        if self._cuda:
            measured["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        else:
            measured["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        if self._model is not None:
            measured["flop_sum"] = sum(training_flop(self._model, row.lengths_S) for row in rows)
        if self._peak is not None:
            measured["peak_flops"] = self._peak
        return measured

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def training_flop(model: LanguageModel, length_S: np.ndarray) -> float:
    """Return the FLOP of training on sequences: 6 per active parameter and token, as is usual, and causal attention's.

    Attention: 2 products of 2 FLOP over half of the squared length, forward, and twice that backward. What is computed
    again in the backward pass does not count, as is usual for model FLOP.

    Args:
        model: The language model.
        length_S: Tokens of each sequence.
    """
    squares = float(np.square(length_S, dtype=np.float64).sum())
    return 6.0 * model.active_parameters * float(length_S.sum()) + 6.0 * model.layers * model.attention_width * squares


def _known_model(model_path: str) -> LanguageModel | None:
    try:
        return find_model(str(Path(model_path) / "config.json"))
    except ConfigError:  # of a kind whose parameters the catalogue cannot count
        return None
