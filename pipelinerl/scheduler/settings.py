"""What a scheduler is made from: its part of the configuration, and the sizes of the run."""

from __future__ import annotations

from typing import NotRequired, Protocol, TypedDict

from pipelinerl.scheduler.events import OnFull, OnStale, WeightUpdate


class SchedulerSettings(Protocol):
    """The part of its configuration that a scheduler reads (``SchedulerConfig`` satisfies it)."""

    @property
    def train_batch_size(self) -> int:
        """Sequences per optimizer step (count). Paper symbol B."""

    @property
    def generation_batch_size(self) -> int:
        """Sequences in progress per engine, at most (count). Paper symbol H."""

    @property
    def optimizer_steps_per_rl_step(self) -> int:
        """Optimizer steps per RL step (count), not pipeline. Paper symbol G."""

    @property
    def publish_every(self) -> int:
        """Optimizer steps from one publication to the next (count), pipeline only."""

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch (count)."""

    @property
    def max_lag(self) -> int | None:
        """Largest lag of any trained token (optimizer steps)."""

    @property
    def weight_update(self) -> WeightUpdate:
        """What happens to rollouts in progress when weights arrive."""

    @property
    def on_stale(self) -> OnStale:
        """How ``max_lag`` is kept."""

    @property
    def ready_queue_limit(self) -> int:
        """Finished rollouts that may wait for the trainer (sequences)."""

    @property
    def on_full(self) -> OnFull:
        """What happens when the ready queue is full."""

    @property
    def filter_no_signal(self) -> bool:
        """Whether groups with equal rewards are discarded."""

    @property
    def discard_limit(self) -> int:
        """Rollouts given up between two optimizer steps before the run counts as stalled (count)."""


class Sizes(TypedDict):
    """The arguments of a scheduler beside its settings; ``Scheduler`` says what they are."""

    optimizer_steps: int
    num_engines: int
    group_size: int
    environments: NotRequired[int | None]
    kv_cache_tokens: NotRequired[int | None]
