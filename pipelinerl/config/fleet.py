"""The table ``[fleet]``: engines that fail, are reclaimed and come back, and failures of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelinerl.util.strict_model import Accelerators, PositiveSeconds, Seconds, StrictModel, Tokens

Hours = Annotated[float, Field(ge=0.01)]
ONLY = {"spot": ("reclaim_hours", "away_s", "notice_s", "capacity"), "lent": ("switch_s",)}
"""Keys that only groups of a kind have."""
NOT_LENT = ("gpu", "price_per_hour", "mtbf_hours", "slowdown")
"""Keys that lent groups do not have: they are the trainer's accelerators."""


class FleetGroupConfig(StrictModel):
    """Engines that come and go by the same laws."""

    name: str = Field(min_length=1)
    """Its name in tables and figures."""
    kind: Literal["reserved", "spot", "lent"] = "reserved"
    """``spot`` engines can be reclaimed; ``lent`` ones are on accelerators of the trainer while it waits for data."""
    engines: Accelerators
    """Engines of the group. The groups that are not lent add up to the engines of the run (count)."""
    gpu: str | None = None
    """GPU of the group, as ``hardware.gpu``. Its speeds are derived. None: the GPU of the run's engines."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Price of a GPU-hour (USD). None: the price in ``[price]``; with ``gpu`` no price is known."""
    mtbf_hours: Hours | None = None
    """Mean time between failures of an accelerator (hours). None: never."""
    repair_s: Seconds = 600.0
    """From a failure until the machine is back (s)."""
    reclaim_hours: Hours | None = None
    """spot: mean time until an engine is reclaimed, exponential (hours)."""
    away_s: Seconds | None = None
    """spot: mean time until it is offered again, exponential (s)."""
    notice_s: Seconds | None = None
    """spot: notice before a reclaim (s). None: none."""
    capacity: str | None = None
    """spot: CSV file ``second,engines`` of machines, in place of ``reclaim_hours`` and ``away_s``; or the folder of a
    run, its engines that had started and were not leaving, in place of ``notice_s``, too. The last number stays."""
    switch_s: Seconds | None = None
    """lent: from the end of training until the engines load weights, and from the next batch until it trains (s)."""
    stragglers: float = Field(default=0.0, ge=0, le=1)
    """Share of started engines that are slow (no unit)."""
    slowdown: float | None = Field(default=None, ge=1, le=1000)
    """Factor on their decode steps and prefills (no unit)."""

    @property
    def comes_started(self) -> bool:
        """Whether ``capacity`` counts engines that have started: those of a run."""
        return self.capacity is not None and Path(self.capacity).is_dir()

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        given = {name: value for name, value in self if value is not None}
        for kind, names in ONLY.items():
            for name in names:
                if self.kind != kind and name in given:
                    raise ValueError(f"{name} needs kind={kind!r}, got {name}={given[name]!r}, kind={self.kind!r}")
        if self.kind == "lent":
            if wrong := [name for name in NOT_LENT if name in given]:
                raise ValueError(f"{wrong[0]} must be left out with kind='lent', got {given[wrong[0]]!r}")
            if self.switch_s is None:
                raise ValueError("switch_s is missing; kind='lent' needs it")
        for name in ("reclaim_hours", "away_s", *["notice_s"] * self.comes_started):
            if self.capacity is not None and name in given:
                raise ValueError(f"{name} must be left out with capacity, which has these times, got {given[name]:g}")
            if self.kind == "spot" and self.capacity is None and name not in given:
                raise ValueError(f"{name} is missing; kind='spot' needs reclaim_hours and away_s, or capacity")
        if self.stragglers and self.slowdown is None:
            raise ValueError(f"slowdown is missing; stragglers={self.stragglers:g} needs it")
        return self


class SpotOffer(StrictModel):
    """Spot machines that can be had, for ``plan``."""

    price_per_hour: float = Field(gt=0)
    """Price of a GPU-hour (USD)."""
    reclaim_hours: Hours
    """Mean time until an engine is reclaimed, exponential (hours)."""
    away_s: Seconds = 1800.0
    """Mean time until it is offered again, exponential (s)."""
    notice_s: Seconds = 30.0
    """Notice before a reclaim (s)."""


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

    @property
    def lent(self) -> FleetGroupConfig | None:
        """The group of lent engines, if there is one."""
        return next((group for group in self.groups if group.kind == "lent"), None)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups must have different names, got {names}")
        if sum(group.kind == "lent" for group in self.groups) > 1:
            raise ValueError(f"groups must have one of kind='lent' at most, got {names}")
        return self
