"""The step of a trainer: the loss of a row, the learning rate, and a rank's measurements of its own work."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.interface import PHASES
from backends.trainer.model import row_tensors
from backends.trainer.packing import PackedRow
from pipelinerl.config.train import OptimizerConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import LanguageModel, find_model, gpu_of_device
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.losses import kl_to_reference, policy_loss, value_loss


def row_loss(
    model: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    row: PackedRow,
    *,
    config: LossConfig,
    train_batch_size: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return logprob_M, entropy_M (nats), and the parts by name of a row's share of the batch's loss.

    The loss is the sum over tokens divided by ``train_batch_size`` sequences (paper symbol B). With a teacher the
    advantage of a token is ``log teacher - log pi``: on policy, the gradient is that of the token's KL(pi || teacher).
    ``ValueError`` if the row lacks the log-probabilities of a reference model that the loss needs.
    Source: Agarwal et al. 2023 (arXiv:2306.13649) with lambda = 1 and the reverse KL, estimated from the sampled token.
    """
    if config.needs_reference and row.reference_logprob_M is None:
        raise ValueError("reference_logprob_T must be there with loss.kl_coefficient > 0 or a loss.teacher, got None")
    reward_M = torch.tensor(row.reward_M, device=device)
    logprob_M, entropy_M, value_M = model(**row_tensors(row, device))
    advantage_M = torch.tensor(row.advantage_M, device=device) if value_M is None else reward_M - value_M
    if config.teacher is not None:
        advantage_M = torch.tensor(row.reference_logprob_M, device=device) - logprob_M
    loss_M = policy_loss(
        config,
        logprob_N=logprob_M,
        behaviour_logprob_N=torch.tensor(row.behaviour_logprob_M, device=device),
        advantage_N=advantage_M,
        sequence_N=torch.tensor(row.sequence_M, device=device),
        num_sequences=len(row.sample_index_S),
    )
    parts = {"policy_loss": loss_M.sum() / train_batch_size}
    if config.kl_coefficient > 0:
        kl_M = kl_to_reference(logprob_M, reference_logprob_N=torch.tensor(row.reference_logprob_M, device=device))
        parts["kl_loss"] = config.kl_coefficient * kl_M.sum() / train_batch_size
    if value_M is not None:
        value_part = config.value_coefficient * value_loss(value_M, reward_N=reward_M).sum()
        parts["value_loss"] = value_part / train_batch_size
    return logprob_M, entropy_M, parts


def learning_rate_factor(config: OptimizerConfig, *, optimizer_steps: int) -> Callable[[int], float]:
    """Return the share of the largest learning rate, in [0, 1], as a function of the optimizer steps done.

    With k steps done, w steps of warm-up, and K in all: (k + 1) / w for k < w; from then on, with
    x = (k - w) / (K - w), 1 (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine). No step has a rate of zero.
    """

    def factor(done: int) -> float:
        if done < config.warmup_steps:
            return (done + 1) / config.warmup_steps
        share = min(1.0, (done - config.warmup_steps) / max(1, optimizer_steps - config.warmup_steps))
        match config.schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - share
            case "cosine":
                return (1.0 + math.cos(math.pi * share)) / 2

    return factor


class StepMeter:
    """Measures the phases of one micro-batch after the other; on GPU with events, so that the host does not wait."""

    def __init__(self, device: torch.device, model_path: str, *, adapter_rank: int = 0) -> None:
        """``adapter_rank``: of LoRA; 0: all weights are trained."""
        self._cuda, self._adapter_rank = device.type == "cuda", adapter_rank
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
        """End a micro-batch; return seconds by phase, ``flop_sum``, ``peak_flops`` (GPUs of the catalogue) and memory.

        ``peak_memory_gb``: on GPU the most that tensors took in it, on CPU that the process has ever had.
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
            flop = partial(training_flop, self._model, adapter_rank=self._adapter_rank)
            measured["flop_sum"] = sum(flop(row.lengths_S) for row in rows)
        if self._peak is not None:
            measured["peak_flops"] = self._peak
        return measured

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def training_flop(model: LanguageModel, length_S: np.ndarray, *, adapter_rank: int = 0) -> float:
    """Return the FLOP of training on sequences: 6 per active parameter and token, and of causal attention.

    Beside adapters 4: weights that are not trained have no gradient.

    Attention: 2 products of 2 FLOP over half of the squared length, forward, and twice that backward. Recomputation
    does not count, as is usual for model FLOP.
    """
    squares = float(np.square(length_S, dtype=np.float64).sum())
    weights = 6.0 * model.active_parameters
    if adapter_rank:
        weights = 4.0 * model.active_parameters + 2.0 * model.adapter_parameters(adapter_rank)
    return weights * float(length_S.sum()) + 6.0 * model.layers * model.attention_width * squares


def _known_model(model_path: str) -> LanguageModel | None:
    try:
        return find_model(str(Path(model_path) / "config.json"))
    except ConfigError:  # of a kind whose parameters the catalogue cannot count
        return None
