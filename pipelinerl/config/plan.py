"""The ``[plan]`` table of a run file: what ``plan`` tries, and what it has to keep to."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from pipelinerl.config.scheduler import find_schedule
from pipelinerl.scheduler.kinds import CONVENTIONAL, PIPELINE, ScheduleKind
from pipelinerl.util.limits import Count, CountOrZero
from pipelinerl.util.strict_model import StrictModel

Values = Annotated[list[Count], Field(min_length=1)]


class PlanConfig(StrictModel):
    """The search space of ``plan``. Each list holds the values tried; the rest of the run file stays as it is.

    A listed value that no candidate can have is refused by ``plan``; what a list left out would hold is what fits.
    """

    schedulers: list[str] = Field(default=[PIPELINE.name, CONVENTIONAL.name], min_length=1)
    """Kinds of schedule to try, each as ``scheduler.kind``."""
    generation_accelerators: Values | None = None
    """Accelerators that generate, where others train. None: about 32 even splits."""
    tensor_parallel: Values | None = None
    """Accelerators of one engine. None: 1, 2, 4, 8, or if none of these holds the model, the two smallest of 16, 32,
    64, ... that do; the run file's alone where it gives ``decode`` or ``kv_cache_tokens`` as numbers, which hold for
    one size of engine."""
    generation_batch_size: Values | None = None
    """Sequences in progress per engine. None: 16, 24, 32, 48, ... 1024, as far as the KV cache holds them."""
    optimizer_steps_per_rl_step: Values | None = None
    """Optimizer steps per RL step, of the schedulers that have them. None: 1, 2, 4, 8, 16, 32, 64, and the run
    file's, as far as ``optimizer_steps`` goes."""
    train_batch_size: Values | None = None
    """Sequences per optimizer step. None: the run file's."""
    ready_queue_size: Values | None = None
    """Finished rollouts that may wait for the trainer, pipeline only. None: the run file's, or 2 B."""
    publish_every: Values | None = None
    """Optimizer steps from one publication to the next, pipeline only. None: 1, 2, 3, 4, 8, and the run file's."""
    environments: Values | None = None
    """Environments to try, of rollouts with turns; ``environments`` tries the same. None: the run file's; for
    ``environments`` from a quarter to twice the slots of all engines (count)."""
    max_lag: list[CountOrZero] | None = Field(default=None, min_length=1)
    """Bounds on the lag that the pipeline is to keep by waiting (optimizer steps). None: ``lag_limit``."""
    lag_limit: CountOrZero | None = None
    """Largest lag allowed of any trained token (optimizer steps). None: ``scheduler.max_lag``."""
    mean_lag_limit: float | None = Field(default=None, ge=0)
    """Largest mean lag allowed (optimizer steps)."""
    min_ess: float | None = Field(default=None, gt=0, lt=1)
    """Least effective sample size allowed, as the drift model of ``[drift]`` has it."""
    gpu_hours: float | None = Field(default=None, gt=0)
    """GPU-hours that ``optimizer_steps`` may take."""
    budget: float | None = Field(default=None, gt=0)
    """Money that ``optimizer_steps`` may cost (USD), by the prices of ``[price]``."""
    simulate: Count = 20
    """Survivors of the screening that are simulated (count)."""
    simulate_steps: Count = 200
    """Optimizer steps of each simulation, at most: it ends before where throughput and lag are steady (count)."""

    @property
    def schedules(self) -> tuple[ScheduleKind, ...]:
        """The kinds of schedule that ``schedulers`` names."""
        return tuple(find_schedule(name, key=f"schedulers.{index}") for index, name in enumerate(self.schedulers))

    @model_validator(mode="after")
    def _schedulers_exist(self) -> Self:
        assert self.schedules
        return self
