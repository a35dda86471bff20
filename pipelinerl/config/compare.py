"""The table ``[compare]``: arms and scenarios."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from pipelinerl.util.strict_model import StrictModel


class Variant(StrictModel):
    """A named list of overrides, each as after ``--set``."""

    name: str = Field(min_length=1)
    """Its name in tables and figures."""
    set: list[str] = []
    """Overrides ``a.b=value``."""


class CompareConfig(StrictModel):
    """The runs of ``compare``: every arm in every scenario."""

    arms: list[Variant] = Field(min_length=1)
    """The schedulers to compare."""
    scenarios: list[Variant] = [Variant(name="as given")]
    """The circumstances to compare them in: hardware coefficients, length tails."""
    baseline: str
    """Name of the arm that speed-ups refer to."""
    seeds: list[Annotated[int, Field(ge=0)]] = []
    """Every arm runs once with each of these seeds, in every scenario. None: once, with the seed of the run file."""

    @model_validator(mode="after")
    def _names_are_unique_and_known(self) -> Self:
        for what, variants in (("arms", self.arms), ("scenarios", self.scenarios)):
            names = [variant.name for variant in variants]
            if len(set(names)) < len(names):
                raise ValueError(f"{what} must have different names, got {names}")
        names = [arm.name for arm in self.arms]
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different, got {self.seeds}")
        if self.baseline not in names:
            raise ValueError(f"baseline must be the name of an arm, got {self.baseline!r}; allowed: {names}")
        return self
