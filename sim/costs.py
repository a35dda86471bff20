"""What things cost, in ticks: decode steps, prefill, training, weights. Built once from the run file."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.config import Decode, PrefillConfig, TrainingConfig
from pipelinerl.hardware import step_seconds
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
    """One micro-batch: ``micro_batch_s``, per token, per squared token, and ``step_s`` if it completes the step."""

    step_s: float
    micro_batch_s: float
    token_s: float
    token_squared_s: float = 0.0

    def ticks(self, tokens: int, *, squared_tokens: int = 0, completes_step: bool) -> int:
        """Return the ticks to train on ``tokens`` tokens, prompts included.

        Args:
            tokens: Of all sequences together.
            squared_tokens: Sum over the sequences of their squared lengths.
            completes_step: Whether the optimizer steps afterwards.
        """
        fixed_s = self.micro_batch_s + (self.step_s if completes_step else 0.0)
        return to_ticks(fixed_s + self.token_s * tokens + self.token_squared_s * squared_tokens)


def decode_cost(decode: Decode, *, tensor_parallel: int, num_slots: int) -> DecodeCost:
    """Return the decode cost of one engine of ``num_slots`` slots; the formulas are ``pipelinerl.hardware``'s.

    Raises:
        ConfigError: If a table of utilisations cannot be read.
    """
    batch_s, context_s = step_seconds(decode, tensor_parallel)
    return DecodeCost(
        # A step lasts a tick at least: time must go on.
        batch_ticks=tuple(max(1, to_ticks(batch_s(batch))) if batch else 0 for batch in range(num_slots + 1)),
        context_ticks=to_ticks(context_s),
    )


def prefill_cost(config: PrefillConfig) -> PrefillCost:
    """Return the cost of filling the KV cache."""
    return PrefillCost(to_ticks(config.sequence_s), to_ticks(config.token_s), to_ticks(config.token_squared_s))


def training_cost(config: TrainingConfig, *, training_accelerators: int) -> TrainingCost:
    """Return the cost of training: tokens are spread over the accelerators, the fixed parts are not."""
    return TrainingCost(
        config.step_s,
        config.micro_batch_s,
        config.token_s / training_accelerators,
        config.token_squared_s / training_accelerators,
    )
