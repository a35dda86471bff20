"""The state of a run: with the trainer's own checkpoint, enough to resume it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.driver.metrics import StepMetrics
from backends.driver.rollouts import RolloutData, lag_of_tokens
from backends.interface import Sample, TrainResult
from pipelinerl.config.resolve import new_scheduler
from pipelinerl.config.run import RunConfig
from pipelinerl.rl.segments import turn_of_tokens
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
    acting: set[int] = field(default_factory=set)
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
    evaluation: dict[str, Any] = field(default_factory=dict)

    def count_trained(self, samples: list[Sample], result: TrainResult, version: int, *, turns: bool) -> None:
        """Count a micro-batch that has been trained on at a version: ratios and lags of its tokens, other metrics."""
        for sample, logprob_T in zip(samples, result.logprob_T, strict=True):
            lag_T = lag_of_tokens(self.rollouts[sample.rollout_id].spans, version)
            if np.isfinite(logprob_T).all():  # else the gradient is not finite either, and the step is skipped
                turn_T = turn_of_tokens(sample.segments) if turns else ()
                self.metrics.trained(logprob_T - sample.behaviour_logprob_T, lag_T, turn_T)
                if sample.reference_logprob_T is not None:
                    gap = float((logprob_T - sample.reference_logprob_T).sum(dtype=np.float64))
                    self.metrics.add_trainer_metrics({"reverse_kl_sum": gap})
        self.metrics.add_trainer_metrics(result.metrics)

    def take_trained(self) -> list[RolloutData]:
        """Forget the rollouts of the optimizer step that has ended, and return them."""
        ids = [one for done in self.micro_batches for one in done.rollout_ids]
        self.micro_batches.clear()
        return [self.rollouts.pop(one) for one in ids]


def fresh_state(config: RunConfig) -> DriverState:
    """Return the state of a run that begins."""
    return DriverState(new_scheduler(config), StepMetrics(config.train_table.loss))
