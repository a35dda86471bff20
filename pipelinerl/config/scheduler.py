"""The table ``[scheduler]``: when what is generated and trained."""

from __future__ import annotations

import difflib
from typing import Self

from pydantic import Field, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.scheduler.events import OnFull, OnStale, WeightUpdate
from pipelinerl.scheduler.kinds import CONVENTIONAL, KINDS, PARTIAL_ROLLOUTS, PIPELINE, ScheduleKind
from pipelinerl.util.limits import Count, CountOrZero
from pipelinerl.util.strict_model import StrictModel
from pipelinerl.util.user_code import named_attribute


def find_schedule(name: str, *, key: str) -> ScheduleKind:
    """Return the kind of schedule that a run file names.

    Args:
        name: The name of one of ``KINDS``, or ``package.module:ATTRIBUTE`` of a ``ScheduleKind``.
        key: What messages call the setting that holds the name.

    Raises:
        ConfigError: One line: there is no such kind.
    """
    names = [kind.name for kind in KINDS]
    if name in names:
        return KINDS[names.index(name)]
    allowed = f"{', '.join(names)} or package.module:ATTRIBUTE"
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        raise ConfigError(f"{key} must be {allowed}, got {name!r}; did you mean {near[0]}?")
    found = named_attribute(name, key=key, allowed=allowed)
    if not isinstance(found, ScheduleKind):
        raise ConfigError(f"{key} must name a ScheduleKind, got {name!r}")
    return found


class SchedulerConfig(StrictModel):
    """Settings of the scheduler; no hardware, no paths."""

    kind: str = PIPELINE.name
    """The schedule: ``pipeline`` (Algorithm 2: in-flight updates), ``conventional`` (Algorithm 1: generate, then
    train), ``one_step_off`` (generate the rollouts of the next RL step while this one trains), ``partial_rollouts``
    (conventional, but an RL step begins as soon as enough rollouts are ready; the unfinished ones stand still, go on
    after it on a KV cache computed again, and are trained on later; ``weight_update`` is not read), or your own,
    ``package.module:ATTRIBUTE`` of a ``ScheduleKind``."""
    train_batch_size: Count
    """Sequences per optimizer step (count). Paper symbol B."""
    generation_batch_size: Count
    """Sequences in progress per engine, at most (count). Paper symbol H."""
    optimizer_steps_per_rl_step: Count = 1
    """Optimizer steps per RL step (count), not pipeline. Paper symbol G."""
    publish_every: Count = 1
    """Optimizer steps from one publication to the next (count), pipeline only."""
    partial_rollouts: bool = False
    """With ``kind = "conventional"``: the same as ``kind = "partial_rollouts"``."""
    micro_batch_size: Count | None = None
    """Sequences the trainer starts on as soon as they are ready (count). None: the whole batch at once."""
    max_lag: CountOrZero | None = None
    """Largest lag of any trained token, in optimizer steps. None: unbounded."""
    weight_update: WeightUpdate = Field(default=WeightUpdate.KEEP, strict=False)
    """What happens to rollouts in progress when new weights arrive."""
    on_stale: OnStale = Field(default=OnStale.TRAIN, strict=False)
    """How ``max_lag`` is kept: by waiting (train), or by discarding (drop, requeue)."""
    ready_queue_size: Count | None = None
    """Finished rollouts that may wait for the trainer (sequences). None: 2 B."""
    on_full: OnFull = Field(default=OnFull.WAIT, strict=False)
    """What happens when the ready queue is full."""
    filter_no_signal: bool = False
    """Discard groups whose rewards are all equal, and start others in their place."""
    discard_limit: Count = 1_000_000
    """Rollouts discarded, aborted or failed between two optimizer steps before the run counts as stalled (count)."""

    @property
    def schedule(self) -> ScheduleKind:
        """The kind of schedule: all that depends on it asks this."""
        return PARTIAL_ROLLOUTS if self.partial_rollouts else find_schedule(self.kind, key="kind")

    @property
    def ready_queue_limit(self) -> int:
        """Finished rollouts that may wait for the trainer (sequences)."""
        return self.ready_queue_size if self.ready_queue_size is not None else 2 * self.train_batch_size

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
