"""Short books for who needs throughput and lag only: an eighth of the time of a simulation less than the full ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipelinerl.config.run import RunConfig
from pipelinerl.records.rollout_buffer import FinishedRollouts
from pipelinerl.scheduler.events import (
    Command,
    DiscardRollouts,
    Event,
    RolloutFinished,
    RolloutScored,
    StartTraining,
    TrainingFinished,
    WeightsPublished,
)
from sim.cluster import SimulatedCluster
from sim.run import no_garbage_collection


class Step(NamedTuple):
    """One optimizer step: the columns of ``StepRow`` that say how fast it was and how old its tokens."""

    time_s: float
    train_s: float
    publish_s: float
    wait_s: float
    tokens: int
    lag_mean: float
    lag_max: int
    tokens_by_lag: tuple[int, ...] = ()
    """Tokens of lag 0, 1, 2, ... (count)."""


class StepBooks:
    """Keeps a row per optimizer step of one run; ``pipelinerl.records.ledger`` has the meaning of each number."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._version = 0
        self._finished = FinishedRollouts()
        self._start_s = self._train_s = self._publish_s = 0.0
        self._by_lag = np.zeros(1, dtype=np.int64)  # trained tokens of this step by lag

    def event(self, time_s: float, event: Event) -> None:
        """Book an event reported at ``time_s``."""
        if isinstance(event, RolloutFinished):
            self._finished.add(event.rollout_id, event.spans, self._version, event.reward)
        elif isinstance(event, RolloutScored):
            pass  # comes as often as the one above
        elif isinstance(event, TrainingFinished):
            self._train_s += event.train_s
            if event.version != self._version:
                self._version = event.version
                self._step_done(time_s)
        elif isinstance(event, WeightsPublished):
            self._publish_s += event.publish_s

    def command(self, time_s: float, command: Command) -> None:  # noqa: ARG002 - as every recorder
        """Book a command."""
        if isinstance(command, StartTraining):
            self._training_started(command)
        elif isinstance(command, DiscardRollouts):
            for rollout_id in command.rollout_ids:
                if rollout_id in self._finished:  # not one that a weight update had aborted
                    self._finished.remove(rollout_id)

    def _training_started(self, command: StartTraining) -> None:
        taken = self._finished.take(command.rollout_ids)
        tokens_N, lag_N = taken.ends_N - taken.starts_N, command.version - taken.versions_N
        added = np.bincount(lag_N, tokens_N, len(self._by_lag)).astype(np.int64)  # exact: counts below 2^53
        added[: len(self._by_lag)] += self._by_lag
        self._by_lag = added

    def _step_done(self, time_s: float) -> None:
        wait_s = max(0.0, time_s - self._start_s - self._train_s - self._publish_s)
        by_lag = self._by_lag
        tokens, lag_tokens = int(by_lag.sum()), int(by_lag @ np.arange(len(by_lag)))
        lag_max = int(by_lag.nonzero()[0][-1])
        self.steps.append(
            Step(
                time_s,
                self._train_s,
                self._publish_s,
                wait_s,
                tokens,
                lag_tokens / tokens,
                lag_max,
                tuple(by_lag[: lag_max + 1].tolist()),
            )
        )
        self._start_s, self._train_s, self._publish_s = time_s, 0.0, 0.0
        self._by_lag = np.zeros(1, dtype=np.int64)


def simulate_steps(config: RunConfig) -> list[Step]:
    """Simulate a run and return a row per optimizer step; nothing else is kept.

    Raises:
        ConfigError: If a file of the configuration is wrong.
        RunFailedError: If the run could not reach its end.
    """
    world, books = SimulatedCluster(config), StepBooks()
    with no_garbage_collection():
        world.run(books)
    return books.steps
