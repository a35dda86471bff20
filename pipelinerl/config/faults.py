"""The tables ``[[faults]]``: faults that come at given times, the same in simulated and real runs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelinerl.util.strict_model import Count, CountOrZero, PositiveSeconds, Seconds, StrictModel

NEEDED = {"stop": ("seconds",), "slow": ("seconds", "factor")}
"""Keys that faults of a kind need, and no others have."""


class FaultConfig(StrictModel):
    """A fault. It comes once in a run, over all its resumes."""

    kind: Literal["kill", "stop", "slow", "cut", "disk_full"]
    """``kill``: the processes end. ``stop``: an engine stands still. ``slow``: it is slower. ``cut``: its next transfer
    of weights fails, and it is lost. ``disk_full``: nothing can be written any more."""
    engine: CountOrZero | None = None
    """Place of the engine, from 0. None: drawn by ``seed``. An engine that is away gets it when it is back."""
    rank: CountOrZero | None = None
    """kill: rank of the trainer, in place of an engine."""
    step: Count | None = None
    """It comes after this optimizer step."""
    second: Seconds | None = None
    """It comes at this second of the run, in place of ``step``."""
    seconds: PositiveSeconds | None = None
    """stop, slow: how long (s)."""
    factor: Annotated[float, Field(gt=1, le=1000)] | None = None
    """slow: on decode steps and prefills (no unit)."""

    @property
    def hits_engine(self) -> bool:
        """Whether it is one of an engine, and not of a rank or of the disk."""
        return self.kind != "disk_full" and self.rank is None

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if (self.step is None) is (self.second is None):
            raise ValueError(f"step or second must be given, and one only, got step={self.step}, second={self.second}")
        for name in ("seconds", "factor"):
            value, needed = getattr(self, name), name in NEEDED.get(self.kind, ())
            if needed and value is None:
                raise ValueError(f"{name} is missing; kind={self.kind!r} needs it")
            if value is not None and not needed:
                raise ValueError(f"{name} must be left out with kind={self.kind!r}, got {value:g}")
        if self.rank is not None and self.kind != "kill":
            raise ValueError(f"rank needs kind='kill', got rank={self.rank}, kind={self.kind!r}")
        if self.engine is not None and not self.hits_engine:
            raise ValueError(f"engine must be left out with rank or kind='disk_full', got {self.engine}")
        return self
