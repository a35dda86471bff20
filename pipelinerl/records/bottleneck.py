"""The side of a run that limits its throughput: one rule for simulation, training and planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pipelinerl.config.run import RunConfig
from pipelinerl.scheduler.events import OnStale

BALANCED_SHARE = 0.05
"""Share of the time up to which a wait limits nothing."""


class Bottleneck(StrEnum):
    """The side that limits the throughput."""

    GENERATION = "generation"
    """The trainer waits for data."""
    PREFILL = "prefill"
    """The trainer waits for data, and rollouts on an engine spend more time in prefill than in decode."""
    TRAINING = "training"
    """Data waits for the trainer."""
    LAG = "lag"
    """The trainer waits for data, and slots stay free to keep ``max_lag``."""
    REWARD = "reward"
    """The trainer waits for data, and slots stay free while rollouts are scored, or all ``reward_workers`` are busy."""
    ENVIRONMENT = "environment"
    """The trainer waits for data, and slots stay free while all environments are in use."""
    DISCARDS = "discards"
    """The trainer waits for data, slots are in use, and more rollouts are given up than trained on."""
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True)
class Admission:
    """What holds back admissions of a schedule that always generates."""

    slots: int
    """Rollouts that all engines can have in progress (count)."""
    lag_gate: bool
    """Whether ``max_lag`` is kept by waiting."""
    environments: int | None = None
    """Environments (count)."""

    @classmethod
    def of(cls, config: RunConfig) -> Admission | None:
        """Return the limits of a run. None: it generates in rounds, with free slots at the end of each."""
        scheduler = config.scheduler
        if scheduler.schedule.has_rl_steps:
            return None
        lag_gate = scheduler.max_lag is not None and scheduler.on_stale is OnStale.TRAIN
        environments = None if config.environment is None else config.environment.count
        return cls(config.num_engines * scheduler.generation_batch_size, lag_gate, environments)

    def limit(self, *, in_progress: float, scoring: float, in_use: float = 0.0, prefill: float = 0.0) -> Bottleneck:
        """Return the limit on generation while the trainer waits for data; the first that applies.

        At most ``BALANCED_SHARE`` of the slots free: prefill if it is more than half of the engines' work (``prefill``,
        a share of the rollouts' time on working engines), else generation. Rollouts being scored would fill more than
        half of the free slots: reward. At most ``BALANCED_SHARE`` of the environments free: environment. Else the lag
        gate if there is one, else generation. The other arguments are means at ends of steps (counts).
        """
        free = self.slots - in_progress
        if free <= BALANCED_SHARE * self.slots:
            return Bottleneck.PREFILL if prefill > 0.5 else Bottleneck.GENERATION
        if scoring > free / 2:
            return Bottleneck.REWARD
        if self.environments is not None and in_use >= (1 - BALANCED_SHARE) * self.environments:
            return Bottleneck.ENVIRONMENT
        return Bottleneck.LAG if self.lag_gate else Bottleneck.GENERATION


class QueueAtStep(Protocol):
    """The queue when an optimizer step ended (a row of a ledger)."""

    @property
    def samples(self) -> int:
        """Rollouts that the step trained on (count)."""

    @property
    def ready(self) -> int:
        """Rollouts finished and not yet trained on or discarded (count)."""

    @property
    def in_progress(self) -> int:
        """In progress (count)."""


def find_bottleneck(
    steps: Sequence[QueueAtStep],
    *,
    colocated: bool,
    duration_s: float,
    training_s: float,
    waiting_s: float,
    admission: Admission | None = None,
    scoring: float = 0.0,
    in_use: float = 0.0,
    prefill: float = 0.0,
    scorers_s: float = 0.0,
    given_up: int = 0,
) -> Bottleneck:
    """Return the side that limits the throughput of some optimizer steps.

    Colocated: the longer of the two phases, or neither if they differ by at most ``BALANCED_SHARE`` of the time.
    Otherwise: generation, prefill, lag, reward or environment, by ``Admission.limit``, if the trainer waits for more
    than ``BALANCED_SHARE`` of the time; training, if another whole batch was ready after more than half of the steps;
    else neither. The trainer waits while it neither trains nor publishes; if colocated, engines generate then.
    ``admission``, if known, takes the next three arguments.

    Reward comes before generation if all reward workers were busy, ``scorers_s``, but for ``BALANCED_SHARE`` of that
    time. Discards stand for generation or prefill if more rollouts were given up than trained on.
    """
    if colocated:
        if abs(waiting_s - training_s) <= BALANCED_SHARE * duration_s:
            return Bottleneck.BALANCED
        if waiting_s < training_s:
            return Bottleneck.TRAINING
    if waiting_s > BALANCED_SHARE * duration_s:
        if scorers_s >= (1 - BALANCED_SHARE) * (waiting_s if colocated else duration_s):
            return Bottleneck.REWARD
        limit = Bottleneck.GENERATION
        if admission is not None and steps:
            in_progress = sum(step.in_progress for step in steps) / len(steps)
            limit = admission.limit(in_progress=in_progress, scoring=scoring, in_use=in_use, prefill=prefill)
        many = given_up > sum(step.samples for step in steps)
        return Bottleneck.DISCARDS if many and limit in (Bottleneck.GENERATION, Bottleneck.PREFILL) else limit
    num_ahead = sum(step.ready >= step.samples for step in steps)
    return Bottleneck.TRAINING if 2 * num_ahead > len(steps) else Bottleneck.BALANCED
