"""Costs of decode steps and prefill in whole ticks, tabulated once for each engine."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import DecodeStep
from pipelinerl.hardware.tables import Decode, PrefillConfig
from pipelinerl.util.limits import LONGEST_S
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
    """Filling the KV cache of one sequence: ``fixed + linear * n + square * n^2`` ticks for n tokens.

    The formula in seconds is in ``pipelinerl.hardware.costs``. It stands here again because its coefficients are
    rounded to ticks, not its results: the hot loop stays in whole numbers, and sums are exact in any order.
    """

    fixed_ticks: int
    linear_ticks: int
    square_ticks: int

    def ticks(self, tokens: int, cached: int = 0) -> int:
        """Return the ticks for one sequence of ``tokens`` tokens, the first ``cached`` of which are in the cache.

        The others attend to all before them: the square is that of all tokens less that of the cached ones. No token
        costs nothing.
        """
        if tokens == cached:
            return 0
        return self.fixed_ticks + self.more_ticks(tokens, cached)

    def more_ticks(self, tokens: int, cached: int) -> int:
        """Return the same without what a sequence takes at its beginning: those of a chunk that goes on with it."""
        return (self.linear_ticks + self.square_ticks * (tokens + cached)) * (tokens - cached)


def decode_cost(decode: Decode, *, tensor_parallel: int, num_slots: int) -> DecodeCost:
    """Return the decode cost of one engine of ``num_slots`` slots.

    Raises:
        ConfigError: If a table of utilisations cannot be read, or it makes steps too long.
    """
    step = DecodeStep(decode, tensor_parallel=tensor_parallel, most=num_slots)
    for sequences, seconds in enumerate(step.batch_s[1:], start=1):
        if not seconds <= LONGEST_S * (1 + sequences):  # as long as the largest coefficients of ``affine`` make it
            raise ConfigError(
                f"hardware.decode must give steps of at most {LONGEST_S:g} s and as much per sequence, "
                f"got {seconds:g} s for {sequences} sequences"
            )
    if not step.context_s <= LONGEST_S:
        raise ConfigError(
            f"hardware.decode must give steps of at most {LONGEST_S:g} s per token of context, got {step.context_s:g} s"
        )
    # A step lasts a tick at least: time must go on.
    batch_ticks = (max(1, to_ticks(seconds)) for seconds in step.batch_s[1 : num_slots + 1])
    return DecodeCost(batch_ticks=(0, *batch_ticks), context_ticks=to_ticks(step.context_s))


def prefill_cost(config: PrefillConfig) -> PrefillCost:
    """Return the cost of filling the KV cache."""
    return PrefillCost(to_ticks(config.sequence_s), to_ticks(config.token_s), to_ticks(config.token_squared_s))
