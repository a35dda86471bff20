"""The table ``[scheduler]``: when what is generated and trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelinerl.scheduler.events import OnFull, OnStale, WeightUpdate
from pipelinerl.util.strict_model import StrictModel


class SchedulerConfig(StrictModel):
    """What the scheduler needs; no hardware, no paths."""

    kind: Literal["pipeline", "conventional", "one_step_off"] = "pipeline"
    """``pipeline`` (Algorithm 2: in-flight updates), ``conventional`` (Algorithm 1: generate, then train) or
    ``one_step_off`` (generate the rollouts of the next RL step while this one trains)."""
    train_batch_size: int = Field(ge=1)
    """Sequences per optimizer step (count). Paper symbol B."""
    generation_batch_size: int = Field(ge=1)
    """Sequences in progress per engine, at most (count). Paper symbol H."""
    optimizer_steps_per_rl_step: int = Field(default=1, ge=1)
    """Optimizer steps per RL step (count), conventional and one_step_off only. Paper symbol G."""
    publish_every: int = Field(default=1, ge=1)
    """Optimizer steps from one publication to the next (count), pipeline only."""
    partial_rollouts: bool = False
    """Conventional only: an RL step begins as soon as enough rollouts are ready; the unfinished ones stand still,
    go on after it on a KV cache computed again, and are trained on later. ``weight_update`` is not read."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences the trainer starts on as soon as they are ready (count). None: the whole batch at once."""
    max_lag: int | None = Field(default=None, ge=0)
    """Largest lag of any trained token, in optimizer steps. None: unbounded."""
    weight_update: WeightUpdate = Field(default=WeightUpdate.KEEP, strict=False)
    """What happens to rollouts in progress when new weights arrive."""
    on_stale: OnStale = Field(default=OnStale.TRAIN, strict=False)
    """How ``max_lag`` is kept: by waiting (train), or by discarding (drop, requeue)."""
    ready_queue_size: int | None = Field(default=None, ge=1)
    """Finished rollouts that may wait for the trainer (sequences). None: 2 B."""
    on_full: OnFull = Field(default=OnFull.WAIT, strict=False)
    """What happens when the ready queue is full."""
    filter_no_signal: bool = False
    """Discard groups whose rewards are all equal, and start others in their place."""
    discard_limit: int = Field(default=1_000_000, ge=1)
    """Rollouts discarded, aborted or failed between two optimizer steps before the run counts as stalled (count)."""

    @property
    def ready_queue_limit(self) -> int:
        """Finished rollouts that may wait for the trainer (sequences)."""
        return self.ready_queue_size if self.ready_queue_size is not None else 2 * self.train_batch_size

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch (count)."""
        return self.micro_batch_size if self.micro_batch_size is not None else self.train_batch_size
