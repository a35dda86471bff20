"""The table ``[fleet]``: engines that fail, are reclaimed and come back, and failures of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelinerl.util.strict_model import Accelerators, PositiveSeconds, Seconds, StrictModel, Tokens

Hours = Annotated[float, Field(ge=0.01)]
SPOT_ONLY = ("reclaim_hours", "away_s", "notice_s", "capacity")
"""Keys that only groups of ``kind='spot'`` have."""


class FleetGroupConfig(StrictModel):
    """Engines that come and go by the same laws."""

    name: str = Field(min_length=1)
    """Its name in tables and figures."""
    kind: Literal["reserved", "spot"] = "reserved"
    """``spot`` engines can be reclaimed."""
    engines: Accelerators
    """Engines; all groups together have those of the run (count)."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Price of a GPU-hour (USD). None: that of ``[price]``."""
    mtbf_hours: Hours | None = None
    """Mean time between failures of an accelerator, without notice (hours). None: never."""
    repair_s: Seconds = 600.0
    """From a failure until the machine is back (s)."""
    reclaim_hours: Hours | None = None
    """spot: mean time until an engine is reclaimed, exponential (hours)."""
    away_s: Seconds | None = None
    """spot: mean time until it is offered again, exponential (s)."""
    notice_s: Seconds | None = None
    """spot: notice before a reclaim (s). None: none."""
    capacity: str | None = None
    """spot: CSV file ``second,engines``, in place of ``reclaim_hours`` and ``away_s``; its last row stays."""
    stragglers: float = Field(default=0.0, ge=0, le=1)
    """Share of started engines that are slow (no unit)."""
    slowdown: float | None = Field(default=None, ge=1, le=1000)
    """Factor on their decode steps and prefills (no unit)."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        given = {name: getattr(self, name) for name in SPOT_ONLY if getattr(self, name) is not None}
        if self.kind != "spot" and given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{name} needs kind='spot', got {name}={value!r}, kind={self.kind!r}")
        for name in ("reclaim_hours", "away_s"):
            if self.capacity is not None and name in given:
                raise ValueError(f"{name} must be left out with capacity, which has these times, got {given[name]:g}")
            if self.kind == "spot" and self.capacity is None and name not in given:
                raise ValueError(f"{name} is missing; kind='spot' needs reclaim_hours and away_s, or capacity")
        if self.stragglers and self.slowdown is None:
            raise ValueError(f"slowdown is missing; stragglers={self.stragglers:g} needs it")
        return self


class TrainerFaultsConfig(StrictModel):
    """Failures and checkpoints of the trainer. Any failed accelerator stops it."""

    mtbf_hours: Hours | None = None
    """Mean time between failures of an accelerator (hours). None: never."""
    checkpoint_every_s: PositiveSeconds
    """From the first work after a checkpoint to the next one (s)."""
    checkpoint_s: Seconds = 0.0
    """Time of a checkpoint, in which the trainer stands still (s)."""
    restart_s: Seconds = 0.0
    """From a failure until the trainer goes on from its last checkpoint (s)."""


class FleetConfig(StrictModel):
    """Engines that come and go, and failures of the trainer."""

    start_s: Seconds = 60.0
    """From a machine's return until its engine can load weights (s)."""
    keep_tokens: bool = True
    """Rollouts of a lost engine keep the tokens known; false: their turn begins anew."""
    stream_tokens: Tokens = 64
    """Engines report tokens every so many; one that fails loses those since (tokens)."""
    groups: list[FleetGroupConfig] = []
    """Groups of engines. None: engines never fail."""
    trainer: TrainerFaultsConfig | None = None
    """Failures of the trainer. None: it never fails, and checkpoints take no time."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups must have different names, got {names}")
        return self
