"""The kinds of schedule: the facts that other packages need, besides the scheduler, and checks of a run by them.

A *schedule* decides when rollouts are generated and trained on. To add one, write a ``Scheduler`` and a
``ScheduleKind`` that makes it. No other module compares the name of a kind: each reads the fact that it depends on. A
kind of your own needs no change here either: ``scheduler.kind = "package.module:ATTRIBUTE"`` in a run file names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Unpack

from pipelinerl.errors import RunFailedError, SchedulerError
from pipelinerl.scheduler.base import Scheduler, SchedulerSettings, Sizes
from pipelinerl.scheduler.events import DiscardReason
from pipelinerl.scheduler.pipeline import PipelineScheduler
from pipelinerl.scheduler.rounds import ConventionalScheduler, OneStepOffScheduler, PartialRolloutScheduler


class SchedulerFactory(Protocol):
    """A ``Scheduler`` class, or a function with the arguments of one."""

    def __call__(self, settings: SchedulerSettings, **sizes: Unpack[Sizes]) -> Scheduler:
        """Return a fresh scheduler."""


class StepTimes(Protocol):
    """Seconds of a candidate of a plan, from which its steady state is computed."""

    @property
    def settings(self) -> SchedulerSettings:
        """The ``scheduler`` table."""

    @property
    def training_s(self) -> float:
        """One optimizer step (seconds)."""

    @property
    def loading_s(self) -> float:
        """From the start of a publication until idle engines have loaded it (seconds)."""

    def generation_s(self, sequences: int) -> float:
        """Return the seconds from empty engines to the last reward of so many sequences, begun together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """Steady state of a kind of schedule."""

    step_s: float
    lag_mean: float
    """Mean lag of a trained token (optimizer steps)."""
    lag_max: float
    """Largest lag of a trained token (optimizer steps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """One kind of schedule: the facts that planning, simulation and training depend on."""

    name: str
    """Its name in tables; ``scheduler.kind`` of a run file, if it is one of ``KINDS``."""
    description: str
    scheduler: SchedulerFactory
    colocated: bool
    """Whether the same accelerators generate and train in turn; else some generate and the others train."""
    has_rl_steps: bool
    """Whether it generates for ``optimizer_steps_per_rl_step`` optimizer steps at once."""
    least_lag: Callable[[SchedulerSettings], int]
    """Returns the lag that some batch reaches in any run (optimizer steps); ``max_lag`` cannot be below it."""
    least_lag_reason: str
    """Why, as the start of a sentence that ends in ``= LAG``."""
    axes: tuple[str, ...]
    """Planner axes specific to this kind."""
    carries_over: bool = False
    """Whether unfinished rollouts stand still on their engines during an RL step and go on after it."""
    only_waits: bool = False
    """Whether it keeps ``max_lag`` by waiting only, that is with ``on_stale = "train"``."""
    steady_state: Callable[[StepTimes], SteadyState] | None = None
    """Returns the steady state for the screening of ``plan``. None: that of the shipped kind with the same
    ``colocated`` and ``has_rl_steps``, which is too fast for a kind that waits more."""
    publishes_each_step: Callable[[SchedulerSettings], bool] = lambda _: False
    """Returns whether a publication follows every optimizer step, before anything has to be generated."""


PIPELINE = ScheduleKind(
    name="pipeline",
    description="Algorithm 2: engines always generate, the trainer always trains, weights are updated in flight",
    scheduler=PipelineScheduler,
    colocated=False,
    has_rl_steps=False,
    least_lag=lambda settings: settings.publish_every - 1,
    least_lag_reason="the last batch before a publication is trained at a lag of at least publish_every - 1",
    axes=("generation_accelerators", "ready_queue_size", "publish_every", "max_lag"),
    publishes_each_step=lambda settings: settings.publish_every == 1,
)
CONVENTIONAL = ScheduleKind(
    name="conventional",
    description="Algorithm 1: generate what an RL step needs, make its optimizer steps, publish, and again",
    scheduler=ConventionalScheduler,
    colocated=True,
    has_rl_steps=True,
    least_lag=lambda settings: settings.optimizer_steps_per_rl_step - 1,
    least_lag_reason="a conventional RL step trains its last batch at lag optimizer_steps_per_rl_step - 1",
    axes=("optimizer_steps_per_rl_step",),
)
ONE_STEP_OFF = ScheduleKind(
    name="one_step_off",
    description="generate the rollouts of the next RL step while this one trains",
    scheduler=OneStepOffScheduler,
    colocated=False,
    has_rl_steps=True,
    least_lag=lambda settings: 2 * settings.optimizer_steps_per_rl_step - 1,
    least_lag_reason="a one_step_off RL step trains its last batch at lag 2 * optimizer_steps_per_rl_step - 1",
    axes=("generation_accelerators", "optimizer_steps_per_rl_step"),
)
PARTIAL_ROLLOUTS = ScheduleKind(
    name="partial_rollouts",
    description="conventional, but an RL step begins as soon as enough rollouts are ready; the others go on after it",
    scheduler=PartialRolloutScheduler,
    colocated=True,
    has_rl_steps=True,
    least_lag=CONVENTIONAL.least_lag,
    least_lag_reason=CONVENTIONAL.least_lag_reason,
    axes=CONVENTIONAL.axes,
    carries_over=True,
    only_waits=True,
)
KINDS = (PIPELINE, CONVENTIONAL, ONE_STEP_OFF, PARTIAL_ROLLOUTS)
"""Kinds that run files name without a module."""


class ScheduledSettings(SchedulerSettings, Protocol):
    """Settings with the name of their schedule (``SchedulerConfig`` satisfies it)."""

    @property
    def schedule(self) -> ScheduleKind:
        """The kind of schedule."""


def check_lags(settings: ScheduledSettings, lag_max: int, *, optimizer_steps: int) -> None:
    """Raise SchedulerError if a run's largest lag breaks the promises of its kind of schedule.

    It may not be above ``max_lag``, nor, in a run long enough to reach that, below ``least_lag``.
    """
    kind, least = settings.schedule, settings.schedule.least_lag(settings)
    if lag_max < least < optimizer_steps:
        raise SchedulerError(
            f"least_lag of schedule {kind.name!r} must be at most the largest lag of any run, got {least}, and "
            f"{optimizer_steps} optimizer steps had a lag of at most {lag_max}"
        )
    if settings.max_lag is not None and lag_max > settings.max_lag:
        raise SchedulerError(
            f"schedule {kind.name!r} must keep max_lag={settings.max_lag}, got a lag of {lag_max}: its least_lag or "
            "may_admit is wrong"
        )


def make_scheduler(
    settings: ScheduledSettings,
    *,
    optimizer_steps: int,
    num_engines: int,
    group_size: int,
    environments: int | None = None,
    kv_cache_tokens: int | None = None,
) -> Scheduler:
    """Return a fresh ``Scheduler``, with its arguments; call ``start`` once, then ``handle`` with every event.

    ``settings``: the ``scheduler`` table of a run file, or anything with the same attributes.
    """
    return settings.schedule.scheduler(
        settings,
        optimizer_steps=optimizer_steps,
        num_engines=num_engines,
        group_size=group_size,
        environments=environments,
        kv_cache_tokens=kv_cache_tokens,
    )


# ------------------------------------------------------------------------------------------ stalls

MANY_ROLLOUTS, MANY_BATCHES = 4000, 10
"""Rollouts given up without a step, and their train batches, above which a run says so (counts)."""
_CAUSES = {
    DiscardReason.STALE: "they break scheduler.max_lag; raise it, or set scheduler.on_stale = 'train'",
    DiscardReason.NO_SIGNAL: "rewards of a group are equal; change the task or scheduler.filter_no_signal",
    DiscardReason.QUEUE_FULL: "the ready queue is full; raise scheduler.ready_queue_size or change scheduler.on_full",
    DiscardReason.SIBLING_FAILED: "a rollout of the group fails; mend train.task, or raise its time-outs",
}


class StallWatch:
    """Says once that many rollouts have been given up without an optimizer step (mutable)."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._warned = warn, False
        self._version, self._since_s, self._before = -1, 0.0, 0  # at the first look after a step or a resume

    def look(self, time_s: float, scheduler: Scheduler) -> None:
        """Look at a scheduler that has given rollouts up at ``time_s``."""
        number = scheduler.num_given_up
        if scheduler.version != self._version:
            self._version, self._since_s, self._before = scheduler.version, time_s, number
        many = max(MANY_ROLLOUTS, MANY_BATCHES * scheduler.settings.train_batch_size)
        if number > many and time_s > self._since_s and not self._warned:
            self._warned = True
            rate = f"{(number - self._before) / (time_s - self._since_s):,.1f} per second"
            self._warn(f"{number:,} rollouts given up without an optimizer step, {rate}: {_cause(scheduler)}")


def stalled(scheduler: Scheduler) -> RunFailedError:
    """Return the error of a run that its scheduler has stopped as stalled."""
    limit = f"stalled: more than scheduler.discard_limit = {scheduler.settings.stall_limit} rollouts were given up"
    return RunFailedError(f"{limit} without an optimizer step in between: {_cause(scheduler)}")


def _cause(scheduler: Scheduler) -> str:
    return _CAUSES[scheduler.given_up.most_common(1)[0][0]]
