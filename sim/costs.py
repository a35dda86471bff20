"""What things cost, in ticks: decode steps, prefill, training, weights. Built once from the run file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from pipelinerl.analytic import fitted_utilisation, read_utilisation
from pipelinerl.config import (
    AffineDecode,
    PrefillConfig,
    RooflineDecode,
    RunConfig,
    TrainingConfig,
    UtilisationDecode,
)
from sim.clock import to_ticks


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One decode step of b sequences with C tokens of context in all: ``batch_ticks[b] + context_ticks * C``."""

    batch_ticks: tuple[int, ...]
    """Ticks that depend on the number of sequences, for 0 .. H sequences."""
    context_ticks: int
    """Ticks per token of context."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Filling the KV cache of one sequence: ``fixed + linear * n + square * n^2`` ticks for n tokens."""

    fixed_ticks: int
    linear_ticks: int
    square_ticks: int

    def ticks(self, tokens: int) -> int:
        """Return the ticks for one sequence of ``tokens`` tokens; 0 tokens cost nothing."""
        if not tokens:
            return 0
        return self.fixed_ticks + (self.linear_ticks + self.square_ticks * tokens) * tokens


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """One micro-batch: ``micro_batch_s + token_s * tokens``, and ``step_s`` more if it completes the step."""

    step_s: float
    micro_batch_s: float
    token_s: float

    def ticks(self, tokens: int, *, completes_step: bool) -> int:
        """Return the ticks to train on ``tokens`` tokens, prompts included."""
        fixed_s = self.micro_batch_s + (self.step_s if completes_step else 0.0)
        return to_ticks(fixed_s + self.token_s * tokens)


def decode_cost(config: RunConfig) -> DecodeCost:
    """Return the decode cost of one engine.

    ``utilisation``: h/U(h) flashes (paper, appendix A), context free. ``affine``: as given, for the engine as a
    whole. ``roofline``: max(read weights, multiply) + overhead, and the KV cache read per token of context, both
    spread over the accelerators of the engine.

    Raises:
        ConfigError: If a table of utilisations cannot be read.
    """
    decode = config.hardware.decode
    batch_s, context_s = _step_seconds(decode, config.cluster.tensor_parallel)
    num_slots = config.scheduler.generation_batch_size
    return DecodeCost(
        # A step lasts a tick at least: time must go on.
        batch_ticks=tuple(max(1, to_ticks(batch_s(batch))) if batch else 0 for batch in range(num_slots + 1)),
        context_ticks=to_ticks(context_s),
    )


def _step_seconds(
    decode: UtilisationDecode | AffineDecode | RooflineDecode, tensor_parallel: int
) -> tuple[Callable[[int], float], float]:
    """Return seconds by number of sequences, and seconds per token of context."""
    match decode:
        case UtilisationDecode():
            curve = fitted_utilisation() if decode.table is None else read_utilisation(decode.table)
            flash_s = decode.flash_s
            return lambda batch: float(curve.step_flashes(batch)) * flash_s, 0.0
        case AffineDecode():
            step_s, sequence_s = decode.step_s, decode.sequence_s
            return lambda batch: step_s + sequence_s * batch, decode.context_token_s
        case RooflineDecode():
            read = decode.parameters_read * decode.bytes_per_parameter
            weights_s = read / (tensor_parallel * decode.bandwidth * decode.weight_efficiency)
            flops_s = 2 * decode.parameters_active / (tensor_parallel * decode.peak_flops * decode.flops_efficiency)
            step_s, sequence_s = decode.step_overhead_s, decode.sequence_overhead_s
            context_s = decode.kv_bytes_per_token / (tensor_parallel * decode.bandwidth * decode.kv_efficiency)
            return lambda batch: max(weights_s, flops_s * batch) + step_s + sequence_s * batch, context_s
        case _:
            assert_never(decode)


def prefill_cost(config: PrefillConfig) -> PrefillCost:
    """Return the cost of filling the KV cache."""
    return PrefillCost(to_ticks(config.sequence_s), to_ticks(config.token_s), to_ticks(config.token_squared_s))


def training_cost(config: TrainingConfig, *, training_accelerators: int) -> TrainingCost:
    """Return the cost of training: tokens are spread over the accelerators, the fixed parts are not."""
    return TrainingCost(config.step_s, config.micro_batch_s, config.token_s / training_accelerators)
