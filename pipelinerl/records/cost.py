"""Cost of a run: GPU-hours, money, electricity. All arithmetic of cost is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pipelinerl.config.run import PriceConfig, RunConfig
from pipelinerl.hardware.catalogue import find_gpu
from pipelinerl.util.strict_model import Report


class CostReport(Report):
    """Cost of a whole run, accelerators and environments, whether in use or not."""

    gpu_hours: float
    """GPU-hours of the run."""
    gpu_hours_per_million_tokens: float | None
    """GPU-hours per million trained tokens; null if none was trained."""
    usd: float | None = None
    """Money for the run (USD). Absent without a price."""
    usd_per_million_tokens: float | None = None
    """Money per million trained tokens (USD). Absent without a price."""
    kwh: float | None = None
    """Electricity of the accelerators at full board power all the time, an upper bound, without hosts and cooling
    (kWh). Absent where the catalogue has no ``watts``."""

    def scaled(self, factor: float) -> Self:
        """Return the cost of a run that lasts longer by a factor."""
        known = {name: value * factor for name, value in self.to_dict().items() if value is not None}
        return self.model_copy(update=known)


@dataclass(frozen=True, slots=True)
class Prices:
    """Price (USD per hour) and board power (W) of one of each kind; None: not known."""

    gpu_usd: float | None
    """Of a GPU that trains, or does both in turn."""
    gpu_watts: float | None
    generation_usd: float | None
    """Of a GPU that generates, where others train."""
    generation_watts: float | None
    environment_usd: float

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the prices of ``[price]`` or the catalogue; ConfigError if a GPU of ``[hardware]`` is unknown."""
        price, hardware = config.price or PriceConfig(), config.hardware
        gpu = None if hardware.gpu is None else find_gpu(hardware.gpu)
        own_usd, watts = (None, None) if gpu is None else (gpu.price_per_hour, gpu.watts)
        usd = price.gpu_hour or own_usd
        others_usd, others_watts = usd, watts
        if hardware.generation_gpu is not None:
            other = find_gpu(hardware.generation_gpu, key="hardware.generation_gpu")
            others_usd, others_watts = other.price_per_hour, other.watts
        return cls(usd, watts, price.generation_gpu_hour or others_usd, others_watts, price.environment_hour)

    def rates(self, config: RunConfig) -> Rates:
        """Return the resources of a run per hour: all accelerators and environments, in use or not."""
        number = config.cluster.accelerators
        generating = 0 if config.colocated else config.generation_accelerators
        training = number - generating
        environments = 0 if config.environment is None else config.environment.count * self.environment_usd
        usd = _together((training, self.gpu_usd), (generating, self.generation_usd))
        return Rates(
            number,
            usd_per_hour=None if usd is None else usd + environments,
            watts=_together((training, self.gpu_watts), (generating, self.generation_watts)),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Resources of a run per hour, with board power in W; None: not known."""

    gpus: int
    """Accelerators (count)."""
    usd_per_hour: float | None
    watts: float | None

    @property
    def usd_per_gpu_hour(self) -> float | None:
        """Price of a GPU-hour, environments included (USD). None: not known."""
        return None if self.usd_per_hour is None else self.usd_per_hour / self.gpus

    @property
    def known(self) -> bool:
        """Whether anything but GPU-hours is known."""
        return self.usd_per_hour is not None or self.watts is not None

    def cost(self, seconds: float, *, tokens: float) -> CostReport:
        """Return the cost of a run of so many seconds and trained tokens."""
        hours, millions = seconds / 3600, tokens / 1e6
        usd = None if self.usd_per_hour is None else hours * self.usd_per_hour
        return CostReport(
            gpu_hours=hours * self.gpus,
            gpu_hours_per_million_tokens=hours * self.gpus / millions if millions else None,
            usd=usd,
            usd_per_million_tokens=usd / millions if usd is not None and millions else None,
            kwh=None if self.watts is None else hours * self.watts / 1000,
        )


def _together(*parts: tuple[int, float | None]) -> float | None:
    """Return the sum of counts times values; None if the value of a count above 0 is not known."""
    there = [(number, each) for number, each in parts if number]
    figures = [number * each for number, each in there if each is not None]
    return sum(figures) if len(figures) == len(there) else None
