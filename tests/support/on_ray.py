"""A run of parts in memory inside a real Ray of our own: what Ray does is real, and a run starts in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import backends.run
from backends.fake import FakeBackend, FakeEngine
from backends.interface import Parts
from pipelinerl.config.run import RunConfig


class OnRay(FakeBackend):
    """The parts do not use Ray, but need it, as real ones do."""

    @contextmanager
    def open(self, config: RunConfig) -> Iterator[Parts]:
        from backends.ray_cluster import lost, ray_cluster

        with ray_cluster(None), super().open(config) as parts:
            slots = config.scheduler.generation_batch_size
            engines = {engine_id: FakeEngine(num_slots=slots, step_s=0.01) for engine_id in parts.engines}
            yield replace(parts, engines=engines, lost=lost)


def install() -> None:
    """Have ``pipelinerl train`` use them."""
    backends.run.backend_of = lambda _: OnRay()
