"""What things cost, in ticks: decode steps, prefill, training, weights. Built once from the run file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from pipelinerl.hardware.derive import step_seconds
from pipelinerl.hardware.tables import Decode, PrefillConfig, TrainingConfig
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
    """One micro-batch: ``micro_batch_s``, what its fullest rank works, and ``step_s`` if it completes the step.

    The fullest rank has at least the mean of all ranks, the longest sequence, and, of n sequences on R ranks, ceil(n/R)
    times the shortest one. Whole sequences can be spread so that it has no more than the mean and the longest together.
    """

    step_s: float
    micro_batch_s: float
    token_s: float
    """Per token, spread over all accelerators."""
    token_squared_s: float = 0.0
    """Per squared token, spread over all accelerators."""
    accelerators: int = 1
    """That train (count)."""
    sequence_accelerators: int | None = None
    """Of these, accelerators that share one sequence (count). None: all share all tokens."""

    def seconds(self, lengths: Sequence[int], *, completes_step: bool) -> float:
        """Return the seconds to train on whole sequences.

        Args:
            lengths: Tokens of each, prompts included.
            completes_step: Whether the optimizer steps afterwards.
        """
        fixed_s = self.micro_batch_s + (self.step_s if completes_step else 0.0)
        token_s, token_squared_s = self.token_s, self.token_squared_s
        squares = sum(map(mul, lengths, lengths)) if token_squared_s else 0
        seconds = fixed_s + token_s * sum(lengths) + token_squared_s * squares
        if self.sequence_accelerators is None or not lengths:
            return seconds
        on_rank = -(-len(lengths) * self.sequence_accelerators // self.accelerators)
        slower = self.accelerators / self.sequence_accelerators  # a rank than all of them
        longest, shortest = max(lengths), min(lengths)
        longest_s = (token_s + token_squared_s * longest) * longest * slower
        several_s = (token_s + token_squared_s * shortest) * shortest * slower * on_rank
        return max(seconds, fixed_s + longest_s, fixed_s + several_s)

    def ticks(self, lengths: Sequence[int], *, completes_step: bool) -> int:
        """Return the same in ticks."""
        return to_ticks(self.seconds(lengths, completes_step=completes_step))


def decode_cost(decode: Decode, *, tensor_parallel: int, num_slots: int) -> DecodeCost:
    """Return the decode cost of one engine of ``num_slots`` slots; the formulas are ``pipelinerl.hardware.derive``'s.

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
    """Return the cost of training: sequences are spread over the accelerators, the fixed parts are not."""
    shared = config.sequence_accelerators
    return TrainingCost(
        config.step_s,
        config.micro_batch_s,
        config.token_s / training_accelerators,
        config.token_squared_s / training_accelerators,
        training_accelerators,
        None if shared is None else min(shared, training_accelerators),
    )
