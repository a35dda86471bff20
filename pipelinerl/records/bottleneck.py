"""The side of a run that limits its throughput: one rule for simulation, training and planning."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

BALANCED_SHARE = 0.05
"""Share of the time up to which a wait limits nothing."""


class Bottleneck(StrEnum):
    """The side that limits the throughput."""

    GENERATION = "generation"
    """The trainer waits for data."""
    TRAINING = "training"
    """Data waits for the trainer."""
    BALANCED = "balanced"
    """Neither."""


class QueueAtStep(Protocol):
    """The queue when an optimizer step ended (a row of a ledger)."""

    @property
    def samples(self) -> int:
        """Rollouts that the step trained on (count)."""

    @property
    def ready(self) -> int:
        """Rollouts finished and not yet trained on or discarded (count)."""


def find_bottleneck(
    steps: Sequence[QueueAtStep], *, colocated: bool, duration_s: float, training_s: float, waiting_s: float
) -> Bottleneck:
    """Return the side that limits the throughput of some optimizer steps.

    Colocated: the longer of the two phases, or neither if they differ by at most ``BALANCED_SHARE`` of the time.
    Otherwise: generation, if the trainer waits for more than ``BALANCED_SHARE`` of the time; training, if another
    whole batch was ready after more than half of the steps; else neither.

    Args:
        steps: The optimizer steps.
        colocated: Whether the same accelerators generate and train in turn.
        duration_s: How long the steps took (s).
        training_s: How long the trainer trained (s).
        waiting_s: How long it neither trained nor published (s); if colocated, the accelerators generated then.
    """
    if colocated:
        if abs(waiting_s - training_s) <= BALANCED_SHARE * duration_s:
            return Bottleneck.BALANCED
        return Bottleneck.GENERATION if waiting_s > training_s else Bottleneck.TRAINING
    if waiting_s > BALANCED_SHARE * duration_s:
        return Bottleneck.GENERATION
    num_ahead = sum(step.ready >= step.samples for step in steps)
    return Bottleneck.TRAINING if 2 * num_ahead > len(steps) else Bottleneck.BALANCED
