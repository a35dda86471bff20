"""The table ``[scheduler]``: settings of generation and training."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pipelinerl.scheduler.events import OnFull, OnStale, WeightUpdate
from pipelinerl.scheduler.kinds import CONVENTIONAL, KINDS, PARTIAL_ROLLOUTS, PIPELINE, ScheduleKind
from pipelinerl.util.strict_model import Count, CountOrZero, StrictModel
from pipelinerl.util.user_code import named_value


def find_schedule(name: str, *, key: str) -> ScheduleKind:
    """Return a kind by its name in ``KINDS``, or ``package.module:ATTRIBUTE``; ConfigError, naming ``key``, if none."""
    return named_value(name, {kind.name: kind for kind in KINDS}, ScheduleKind, key=key)


class SchedulerConfig(StrictModel):
    """Settings of the scheduler; no hardware, no paths."""

    kind: str = PIPELINE.name
    """The schedule: ``pipeline``, ``conventional``, ``one_step_off``, ``partial_rollouts``, or your own
    ``package.module:ATTRIBUTE`` of a ``ScheduleKind``."""
    train_batch_size: Count
    """Sequences per optimizer step (count). Paper symbol B."""
    generation_batch_size: Count
    """Sequences in progress per engine, at most (count). Paper symbol H."""
    optimizer_steps_per_rl_step: Count = 1
    """Optimizer steps per RL step (not pipeline). Paper symbol G (count)."""
    publish_every: Count = 1
    """Optimizer steps between publications (pipeline)."""
    partial_rollouts: bool = False
    """With ``conventional``: the same as ``partial_rollouts``."""
    micro_batch_size: Count | None = None
    """Sequences the trainer starts on at once (count). None: the whole batch."""
    max_lag: CountOrZero | None = None
    """Largest lag of any trained token (optimizer steps). None: unbounded."""
    weight_update: WeightUpdate = Field(default=WeightUpdate.KEEP, strict=False)
    """Rollouts in progress when new weights arrive."""
    on_stale: OnStale = Field(default=OnStale.TRAIN, strict=False)
    """How ``max_lag`` is kept: by waiting, or by discarding."""
    ready_queue_size: Count | None = None
    """Finished rollouts that may wait (sequences). None: 2 B."""
    on_full: OnFull = Field(default=OnFull.WAIT, strict=False)
    """What happens when the ready queue is full."""
    filter_no_signal: bool = False
    """Discard groups of equal rewards."""
    discard_limit: Count | None = None
    """Rollouts given up between two optimizer steps before the run counts as stalled (count). None: 1000 B."""

    @property
    def schedule(self) -> ScheduleKind:
        """The kind of schedule: the one source of facts about it."""
        return PARTIAL_ROLLOUTS if self.partial_rollouts else find_schedule(self.kind, key="kind")

    @property
    def ready_queue_limit(self) -> int:
        """Finished rollouts that may wait for the trainer (sequences)."""
        return self.ready_queue_size if self.ready_queue_size is not None else 2 * self.train_batch_size

    @property
    def stall_limit(self) -> int:
        """Rollouts given up between two optimizer steps before the run counts as stalled (count)."""
        return self.discard_limit if self.discard_limit is not None else 1000 * self.train_batch_size

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch (count)."""
        return self.micro_batch_size if self.micro_batch_size is not None else self.train_batch_size

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        schedule = find_schedule(self.kind, key="kind")
        if self.partial_rollouts and schedule not in (CONVENTIONAL, PARTIAL_ROLLOUTS):
            raise ValueError(
                f"partial_rollouts needs scheduler.kind='conventional', got partial_rollouts=true, kind={self.kind!r}"
            )
        if self.schedule.only_waits and self.max_lag is not None and self.on_stale is not OnStale.TRAIN:
            raise ValueError(
                f"on_stale must be 'train' with {self.schedule.name} and max_lag, got on_stale={self.on_stale.value!r}"
            )
        return self
