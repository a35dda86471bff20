"""A run of parts in memory inside a real Ray of our own: what Ray does is real, and a run starts in seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import backends.run
from backends.fake import FakeBackend, FakeEngine
from backends.interface import Parts
from pipelinerl.config.run import RunConfig


class OnRay(FakeBackend):
    """The parts do not use Ray, but need it, as real ones do."""

    @contextmanager
    def open(self, config: RunConfig, *, logs: Path | None = None) -> Iterator[Parts]:
        from backends.ray.cluster import ray_cluster

        bystander = None
        try:
            with ray_cluster(None) as lost, super().open(config) as parts:
                bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                slots = config.scheduler.generation_batch_size
                engines = {engine_id: FakeEngine(num_slots=slots, step_s=0.01) for engine_id in parts.engines}
                yield replace(parts, engines=engines, lost=lost)
        finally:
            if bystander is not None:
                assert bystander.poll() is None  # a child of this process that is not Ray's
                bystander.kill()
                bystander.wait()


def install() -> None:
    """Have ``pipelinerl train`` use them."""
    backends.run.backend_of = lambda _: OnRay()
