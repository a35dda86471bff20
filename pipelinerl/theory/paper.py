"""The paper's analytic model (arXiv 2509.19128, appendix A) as plain functions.

``docs/analytic.md`` is its guide: the paper's letters, its equations by function, its errors that are not copied.
The unit of time is the flash: the least possible time per token on one accelerator (eq. 9). Rates are in
tokens per flash, lags in optimizer steps. Everything is a mean-field formula: no queue, no draw, no event.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipelinerl.hardware.utilisation import UtilisationCurve
from pipelinerl.theory.lengths import Lengths
from pipelinerl.util.arrays import check

# -------------------------------------------------------------------------------------------- rates


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting that both methods share; ValueError if a count is below 1 or the training time is not positive."""

    curve: UtilisationCurve
    """Cost of a decode step, U(h)."""
    lengths: Lengths
    """Lengths of the answers, h(l), L and L̄."""
    accelerators: int
    """Accelerators in all, N (count)."""
    train_batch_size: int
    """Sequences per optimizer step, B (count)."""
    training_flashes_per_token: float
    """Training time per token on one accelerator, τ (flashes)."""

    def __post_init__(self) -> None:
        check(self.accelerators >= 1, "accelerators must be at least 1", self.accelerators)
        check(self.train_batch_size >= 1, "train_batch_size must be at least 1", self.train_batch_size)
        tau = self.training_flashes_per_token
        check(0 < tau < math.inf, "training_flashes_per_token must be finite and above 0", tau)


class Rates(NamedTuple):
    """Throughputs in tokens per flash: r_gen, r_train and what both together reach."""

    generation: float
    training: float
    total: float


def conventional_rates(setting: Setting, *, optimizer_steps_per_rl_step: int) -> Rates:
    """Return the rates of conventional RL (eq. 10-15): all N generate B·G sequences, then all N train on them.

    t_gen is the sum over decode steps of h/U(h) at h(l)/N sequences per accelerator, K = B·G·L̄,
    r_gen = K/t_gen, r_train = N/τ, r = 1/(1/r_gen + 1/r_train). Raises ValueError if G is below 1.
    """
    steps = optimizer_steps_per_rl_step
    check(steps >= 1, "optimizer_steps_per_rl_step must be at least 1", steps)
    lengths, sequences = setting.lengths, setting.train_batch_size * steps
    per_accelerator = lengths.unfinished * (sequences / lengths.num_sequences / setting.accelerators)
    generating_flashes = float(setting.curve.step_flashes(per_accelerator).sum())
    generation = sequences * lengths.mean_tokens / generating_flashes
    training = setting.accelerators / setting.training_flashes_per_token
    return Rates(generation, training, 1 / (1 / generation + 1 / training))


def pipeline_rates(setting: Setting, *, generation_batch_size: int, generation_accelerators: int) -> Rates:
    """Return the rates of PipelineRL (eq. 16-18): U(H)·I, (N - I)/τ, the smaller; ValueError if H or I is wrong."""
    batch, generators = generation_batch_size, generation_accelerators
    check(batch >= 1, "generation_batch_size must be at least 1", batch)
    rule = f"generation_accelerators must be at least 1 and below accelerators={setting.accelerators}"
    check(1 <= generators < setting.accelerators, rule, generators)
    generation = float(setting.curve.utilisation(batch)) * generators
    training = (setting.accelerators - generators) / setting.training_flashes_per_token
    return Rates(generation, training, min(generation, training))


# --------------------------------------------------------------------------------------------- lags


def largest_lag(
    lengths: Lengths, *, train_batch_size: int, generation_batch_size: int, generation_accelerators: int
) -> int:
    """Return g_max = ceil(H·I·L/(L̄·B)): optimizer steps while one sequence of L tokens decodes, rounded up (A.3).

    It holds where generation is the bottleneck. It is an estimate, not a bound: fluctuations pass it by one or
    two steps, a trainer that is busy or has a queue adds more.
    """
    in_flight_tokens = generation_batch_size * generation_accelerators * lengths.max_tokens
    return -(-in_flight_tokens * lengths.num_sequences // (train_batch_size * lengths.num_tokens))


# ---------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """One way to split the accelerators and fill the generating ones."""

    generation_batch_size: int
    """H (sequences per generating accelerator)."""
    generation_accelerators: int
    """I (count)."""
    largest_lag: int
    """g_max (optimizer steps)."""
    rates: Rates


@dataclass(frozen=True, slots=True)
class LagPoint:
    """Both methods at the same largest lag: one abscissa of the paper's Fig. 9."""

    max_lag: int
    """Lag both keep to (optimizer steps)."""
    pipeline: PipelineChoice
    """The fastest PipelineRL within it."""
    conventional: Rates
    """Conventional RL at G = ``max_lag`` + 1 (tokens per flash)."""

    @property
    def speedup(self) -> float:
        """PipelineRL's rate over the conventional one (no unit)."""
        return self.pipeline.rates.total / self.conventional.total


def search_pipeline(setting: Setting, *, max_lag: int, generation_batch_limit: int = 1024) -> PipelineChoice:
    """Return the fastest (H, I) with g_max within a bound, by exhaustive search up to a largest H (A.4).

    Ties in the rate go to the least H·I (least lag), then to the least H. While generation is the bottleneck,
    many (H, I) with the same product are near-ties, so the pair says less than the rate. Raises ValueError if there
    are fewer than 2 accelerators, no H to try, or nothing within ``max_lag`` (optimizer steps).
    """
    lengths, accelerators = setting.lengths, setting.accelerators
    check(accelerators >= 2, "accelerators must be at least 2 to generate and train at once", accelerators)
    check(generation_batch_limit >= 1, "generation_batch_limit must be at least 1", generation_batch_limit)
    tokens_within = max_lag * setting.train_batch_size * lengths.num_tokens
    most_in_flight = tokens_within // (lengths.max_tokens * lengths.num_sequences)  # the bound on g_max, for H·I
    per_generator = setting.curve.utilisation(np.arange(1, generation_batch_limit + 1))
    candidates: list[tuple[float, int, int, int]] = []
    for generators in range(1, min(accelerators, most_in_flight + 1)):
        training = (accelerators - generators) / setting.training_flashes_per_token
        rate = np.minimum(per_generator[: most_in_flight // generators] * generators, training)
        best = int(rate.argmax())  # the first of equals: the least H
        candidates.append((-float(rate[best]), (best + 1) * generators, best + 1, generators))

    def lag(batch: int, generators: int) -> int:
        sizes = {"generation_batch_size": batch, "generation_accelerators": generators}
        return largest_lag(lengths, train_batch_size=setting.train_batch_size, **sizes)

    if not candidates:
        raise ValueError(f"max_lag must be at least {lag(1, 1)}, the g_max of H=1, I=1, got {max_lag}")
    _, _, batch, generators = min(candidates)
    rates = pipeline_rates(setting, generation_batch_size=batch, generation_accelerators=generators)
    return PipelineChoice(batch, generators, lag(batch, generators), rates)


def throughput_against_lag(setting: Setting, max_lags: Sequence[int]) -> list[LagPoint]:
    """Return both methods at each largest lag g: fastest (H, I), and G = g + 1 (A.4, Fig. 9); ValueError if none."""
    return [
        LagPoint(
            lag, search_pipeline(setting, max_lag=lag), conventional_rates(setting, optimizer_steps_per_rl_step=lag + 1)
        )
        for lag in max_lags
    ]


class Staleness(NamedTuple):
    """Mean versions between the start of a group and its training: while it generates, and in the queue."""

    pre_queue: float
    in_queue: float

    @property
    def total(self) -> float:
        """Sum (optimizer steps)."""
        return self.pre_queue + self.in_queue


def staleness_applied_compute(
    *, in_flight: float, train_batch_size: int, rate_ratio: float, queue_batches: float, tailness: float
) -> Staleness:
    """Return Applied Compute's closed form for the mean staleness of groups, PQS + IQS.

    PQS = C·M/(B·max(1, ρ)). IQS = ρ for ρ < 1, and (2q + ρ - 1)/(2ρ) for ρ > 1. The form jumps by q - 1 at
    ρ = 1, where it says nothing; the value of the lower side is returned there. For ρ < 1 groups that come evenly wait
    for ρ whatever q is; how much q adds by their fluctuations is in ``tests/support/ready_queue.py``.
    Source: appliedcompute.com/research/staleness-in-fully-async-rl (2026); see ``docs/analytic.md`` for its fit.

    Args:
        in_flight: C = H·I (sequences).
        train_batch_size: B (sequences).
        rate_ratio: ρ, sequences per second of generation over training, each running freely; above 0.
        queue_batches: q, capacity of the ready queue over B; the oldest is dropped when it is full.
        tailness: M, mean longest answer of a group over the mean answer, at least 1.

    Returns:
        Optimizer steps, counted from the start of the group: the lag of its first token.

    Raises:
        ValueError: If ``rate_ratio`` is not positive or ``tailness`` is below 1.
    """
    check(rate_ratio > 0, "rate_ratio must be above 0", rate_ratio)
    check(tailness >= 1, "tailness must be at least 1", tailness)
    pre_queue = in_flight * tailness / (train_batch_size * max(1.0, rate_ratio))
    if rate_ratio <= 1:
        return Staleness(pre_queue, rate_ratio)
    return Staleness(pre_queue, (2 * queue_batches + rate_ratio - 1) / (2 * rate_ratio))
