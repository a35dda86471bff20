"""The trainer's part of a run's ledger: its seconds, a row per optimizer step, the lag of all that was trained on."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.records.figure_data import FigureRecorder
from pipelinerl.records.lag_counts import LagCounts
from pipelinerl.records.rollout_buffer import Gathered
from pipelinerl.records.step_ledger import OpenStep
from pipelinerl.records.steps import StepRow
from pipelinerl.scheduler.events import TrainingFinished


class _MicroBatch(NamedTuple):
    """The rewards and version spans of a micro-batch, kept until its optimizer step is done."""

    reward: float  # sum
    starts: NDArray[np.int64]  # first position of each span
    ends: NDArray[np.int64]  # position after it
    lags: NDArray[np.int64]
    queue_lags: NDArray[np.int64]  # the part of the lag from after the rollout finished


class TrainingLedger:
    """Keeps the trainer's part (mutable, can be pickled)."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.lag = LagCounts()
        self.training_s = self.publishing_s = 0.0
        self.open_step = OpenStep()
        self._scoring_sum = 0  # rollouts being scored at the ends of steps, added up
        self._micro_batches: list[_MicroBatch] = []  # of the optimizer step that is under way

    @property
    def scoring_mean(self) -> float:
        """Rollouts being scored at the end of a step, in the mean (count)."""
        return self._scoring_sum / max(1, len(self.rows))

    def begin(self, taken: Gathered, version: int) -> None:
        """Record a micro-batch that is trained on at a version."""
        self.open_step.add(taken, version)
        self._micro_batches.append(
            _MicroBatch(
                reward=math.fsum(taken.rewards_M),
                starts=taken.starts_N,
                ends=taken.ends_N,
                lags=version - taken.versions_N,
                queue_lags=version - taken.finish_versions_N,
            )
        )

    def trained(self, time_s: float, event: TrainingFinished, profile: FigureRecorder) -> None:
        """Record the seconds of a micro-batch."""
        self.training_s += event.train_s
        self.open_step.train_s += event.train_s
        profile.trainer_worked(time_s - event.train_s, time_s, "training")

    def published(self, time_s: float, publish_s: float, profile: FigureRecorder) -> None:
        """Record the seconds of a publication."""
        self.publishing_s += publish_s
        self.open_step.publish_s += publish_s
        profile.trainer_worked(time_s - publish_s, time_s, "publishing")

    def end_step(
        self, time_s: float, version: int, profile: FigureRecorder, *, in_progress: int, ready: int
    ) -> StepRow:
        """End the optimizer step that is under way; the arguments are those of ``OpenStep.close``."""
        step = self.open_step.close(time_s, in_progress=in_progress, ready=ready)
        self._scoring_sum += step.scoring
        rewards, *spans = zip(*self._micro_batches, strict=True)
        self._micro_batches.clear()
        start_N, end_N, lag_N, queue_N = (np.concatenate(one) for one in spans)
        tokens_N = end_N - start_N
        self.lag.add(lag_N, queue_N, tokens_N)
        profile.trained(start_N, end_N, lag_N)
        lag_tokens, queue_tokens = int((lag_N * tokens_N).sum()), int((queue_N * tokens_N).sum())
        row = StepRow(
            step=version,
            time_s=step.time_s,
            train_s=step.train_s,
            publish_s=step.publish_s,
            wait_s=step.wait_s,
            samples=step.samples,
            tokens=step.tokens,
            lag_mean=step.lag_mean,
            lag_max=step.lag_max,
            lag_in_flight_mean=(lag_tokens - queue_tokens) / step.tokens,
            lag_in_queue_mean=queue_tokens / step.tokens,
            in_progress=step.in_progress,
            ready=step.ready,
            reward_mean=sum(rewards) / step.samples,
            length_mean=step.tokens / step.samples,
        )
        self.rows.append(row)
        return row
