"""The table ``[price]``: what an hour costs."""

from __future__ import annotations

from pydantic import Field

from pipelinerl.util.strict_model import StrictModel


class PriceConfig(StrictModel):
    """Prices. They move no schedule; ``pipelinerl.records.cost`` has the arithmetic."""

    gpu_hour: float | None = Field(default=None, gt=0)
    """Price of a GPU-hour (USD). None: the catalogue's, which has one only for GPUs of your own files."""
    generation_gpu_hour: float | None = Field(default=None, gt=0)
    """Price of an hour of a GPU that generates, where others train (USD). None: the catalogue's of
    ``hardware.generation_gpu``, or without one ``gpu_hour``."""
    environment_hour: float = Field(default=0.0, ge=0)
    """Price of an hour of one environment, in use or not (USD)."""
