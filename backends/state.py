"""The state of a run: all that is needed to resume it, besides the trainer's own checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from backends.rollouts import RolloutData
from backends.step_metrics import StepMetrics
from pipelinerl.config.run import RunConfig
from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.events import Event, StartTraining


@dataclass(slots=True)
class DriverState:
    """The state of a run (mutable, can be pickled)."""

    scheduler: Scheduler
    metrics: StepMetrics
    rollouts: dict[int, RolloutData] = field(default_factory=dict)
    """Started and neither trained on nor given up."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Engine of each rollout in progress."""
    aborting: set[int] = field(default_factory=set)
    """Rollouts in progress that are being aborted."""
    scoring: set[int] = field(default_factory=set)
    """Finished rollouts without a reward."""
    micro_batches: list[StartTraining] = field(default_factory=list)
    """Trained on in the optimizer step in progress."""
    pending: Event | None = None
    """Event that the trainer has not reported yet."""
    time_s: float = 0.0
    """Seconds since the start of the run, while it ran."""
    version: int = 0
    """Optimizer steps the trainer has done."""
    published: int = 0
    """Version last handed to the engines."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Success on held-out problems, by when: ``evaluation`` of summary.json."""


class Keeper(Protocol):
    """Where checkpoints go."""

    def trainer_folder(self) -> Path:
        """Return a new folder for the trainer's part of the next checkpoint."""

    def copy(self, state: DriverState) -> bytes:
        """Return what the next checkpoint holds besides it, as it is now."""

    def keep(self, version: int, content: bytes) -> None:
        """Complete the checkpoint, whose trainer's part has been written; blocks, and may be called in a thread."""


def fresh_state(config: RunConfig) -> DriverState:
    """Return the state of a run that begins; ``config.train`` must be there."""
    assert config.train is not None
    return DriverState(config.new_scheduler(), StepMetrics(truncation=config.train.loss.truncation))
