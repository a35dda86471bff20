"""Which side limits the throughput of a run."""

from __future__ import annotations

from enum import StrEnum


class Bottleneck(StrEnum):
    """The side that limits the throughput."""

    GENERATION = "generation"
    """The trainer waits for data."""
    TRAINING = "training"
    """Data waits for the trainer."""
    BALANCED = "balanced"
    """Neither."""
