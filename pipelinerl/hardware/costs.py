"""Seconds of decode steps, prefill, training and weight transfers: the only formulas of these.

Simulator, steady state and calibration all call them, with numbers or with arrays; docs/hardware.md has the reasons.
The order of the operations is fixed: another order changes last digits, and with them the bytes of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeVar, assert_never

import numpy as np

from pipelinerl.hardware.tables import (
    AffineDecode,
    Decode,
    PrefillConfig,
    RooflineDecode,
    TrainingConfig,
    UtilisationDecode,
)
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.hardware.utilisation import fitted_utilisation, read_utilisation
from pipelinerl.util.arrays import FloatArray

Number = TypeVar("Number", float, FloatArray)


class DecodeStep:
    """Seconds of a decode step, tabulated up to ``most`` sequences; ConfigError for an unreadable utilisation table."""

    def __init__(self, decode: Decode, *, tensor_parallel: int, most: int) -> None:
        self._batch_N = np.arange(most + 2)
        self._seconds_N = _whole_batch_s(decode, tensor_parallel, np.maximum(self._batch_N, 1.0))
        self.batch_s: list[float] = self._seconds_N.tolist()
        """Seconds without context by number of sequences, 0 .. ``most`` + 1; 0 as 1, a step holds a sequence."""
        self.context_s = context_token_s(decode, tensor_parallel)
        """Seconds per token of context of all sequences together."""

    def of(self, batch: float, context_tokens: float) -> float:
        """Return the seconds of a step by sequences, at most ``most`` (a fraction is a mean), and all their context."""
        below = int(batch)
        low, high = self.batch_s[below : below + 2]
        return low + (high - low) * (batch - below) + self.context_s * context_tokens

    def of_all(self, batch: FloatArray, context_tokens: FloatArray) -> FloatArray:
        """Return ``of``, elementwise."""
        seconds: FloatArray = np.interp(batch, self._batch_N, self._seconds_N) + self.context_s * context_tokens
        return seconds


def batch_s(decode: Decode, tensor_parallel: int, batch: FloatArray) -> FloatArray:
    """Return the seconds of decode steps without their context, by sequences in each, any shape.

    The formulas hold for whole numbers of sequences; a mean between two of them is interpolated.
    Raises ConfigError if a table of utilisations cannot be read.
    """
    below = np.floor(batch)
    low_s, high_s = _whole_batch_s(decode, tensor_parallel, np.stack([below, below + 1]))
    seconds: FloatArray = low_s + (high_s - low_s) * (batch - below)
    return seconds


def _whole_batch_s(decode: Decode, tensor_parallel: int, batch: FloatArray) -> FloatArray:
    """Return the seconds of steps of whole numbers of sequences without their context.

    ``utilisation``: h/U(h) flashes (paper, appendix A). ``affine``: as given, for the engine as a whole. ``roofline``:
    max(read weights, multiply) + overhead, the first two spread over the accelerators of the engine; of E routed
    experts a batch of b reads 1 - (1 - k/E)^b.
    """
    seconds: FloatArray
    match decode:
        case UtilisationDecode():
            curve = fitted_utilisation() if decode.table is None else read_utilisation(decode.table)
            seconds = curve.step_flashes(batch) * decode.flash_s
        case AffineDecode():
            seconds = decode.step_s + decode.sequence_s * batch
        case RooflineDecode():
            rate = tensor_parallel * decode.bandwidth * decode.weight_efficiency
            read_s = np.asarray(decode.parameters_read * decode.bytes_per_parameter / rate)
            if decode.experts is not None and decode.experts_per_token is not None and decode.expert_parameters:
                experts_s = decode.expert_parameters * decode.bytes_per_parameter / rate
                missed = 1 - decode.experts_per_token / decode.experts
                # float_power is the same on every processor; ``**`` of an array is not.
                read_s = read_s + experts_s * (1 - np.float_power(missed, batch))
            flops_s = 2 * decode.parameters_active / (tensor_parallel * decode.peak_flops * decode.flops_efficiency)
            seconds = np.maximum(read_s, flops_s * batch) + decode.step_overhead_s + decode.sequence_overhead_s * batch
        case _:
            assert_never(decode)
    return seconds


def context_token_s(decode: Decode, tensor_parallel: int) -> float:
    """Return the seconds of a decode step per token of context: reading the KV cache."""
    match decode:
        case UtilisationDecode():
            return 0.0
        case AffineDecode():
            return decode.context_token_s
        case RooflineDecode():
            return decode.kv_bytes_per_token / (tensor_parallel * decode.bandwidth * decode.kv_efficiency)
        case _:
            assert_never(decode)


def prefill_s(prefill: PrefillConfig, *, sequences: Number, tokens: Number, squares: Number) -> Number:
    """Return the seconds to fill the KV cache of sequences; ``squares``: sum of their squared tokens filled in."""
    return prefill.sequence_s * sequences + prefill.token_s * tokens + prefill.token_squared_s * squares


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """One micro-batch: ``micro_batch_s``, the work of its fullest rank, and ``step_s`` if it completes the step.

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
    sequence_accelerators: int | None = None
    """Accelerators that share one sequence: a rank (count). None: all share all tokens."""

    def seconds(self, lengths: Sequence[int], *, completes_step: bool) -> float:
        """Return the seconds to train on whole sequences, one or more, of ``lengths`` >= 1 tokens, prompts included."""
        squares = sum(map(mul, lengths, lengths)) if self.token_squared_s else 0
        longest, shortest = max(lengths), min(lengths)
        bounds_s = self.bounds_s(
            (sum(lengths), squares),
            longest=(longest, longest**2),
            shortest=(shortest, shortest**2),
            sequences=len(lengths),
            fixed_s=self.micro_batch_s + (self.step_s if completes_step else 0.0),
        )
        return max(bounds_s)

    def bounds_s(
        self,
        batch: tuple[Number, Number],
        *,
        longest: tuple[Number, Number],
        shortest: tuple[Number, Number],
        sequences: Number,
        fixed_s: Number,
    ) -> tuple[Number, ...]:
        """Return the least seconds of a micro-batch by each bound on its fullest rank; the largest holds.

        ``batch``, ``longest`` and ``shortest`` are tokens and squared tokens, which may be means.
        """
        mean_s = fixed_s + self.token_s * batch[0] + self.token_squared_s * batch[1]
        if self.sequence_accelerators is None:
            return (mean_s,)
        on_rank = -(-sequences * self.sequence_accelerators // self.accelerators)
        return mean_s, fixed_s + self._rank_s(*longest), fixed_s + self._rank_s(*shortest) * on_rank

    def _rank_s(self, tokens: Number, squares: Number) -> Number:
        assert self.sequence_accelerators is not None
        slower = self.accelerators / self.sequence_accelerators  # a rank than all of them
        return (self.token_s + self.token_squared_s * (squares / tokens)) * tokens * slower


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


def loading_s(weights: WeightTransferConfig) -> float:
    """Return the seconds of a publication for which trainer and engines both wait."""
    return max(weights.publish_s, weights.transfer_s + weights.pause_s)
