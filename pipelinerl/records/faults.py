"""When the faults of a run come: one recorder for simulated and real runs.

Theory of operation. An event passes here before anything records it. The first report of an optimizer step has its
faults come: before the scheduler's answer if they are carried out at once, after it if that takes a task or an event.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pipelinerl.config.faults import FaultConfig
from pipelinerl.scheduler.events import Command, Event, TrainingFinished
from pipelinerl.util.explain import cannot_write


class FaultWatch:
    """Has faults come after steps; at seconds ``comes`` is called. ``path``: what a full disk refuses (mutable)."""

    def __init__(self, faults: Iterable[FaultConfig], come: Callable[[FaultConfig], None], *, path: Path) -> None:
        self._left, self._come, self._path = list(faults), come, path
        self._full = False

    def comes(self, fault: FaultConfig) -> None:
        """Have a fault come."""
        self._left.remove(fault)
        self._come(fault)
        self._full |= fault.kind == "disk_full"

    def event(self, time_s: float, event: Event) -> None:
        """Have the faults of a step come; RunFailedError if the disk is full."""
        self.command(time_s, event)
        if isinstance(event, TrainingFinished):
            for fault in [one for one in self._left if one.step == event.version]:
                self.comes(fault)

    def command(self, time_s: float, command: Command | Event) -> None:  # noqa: ARG002
        """Raise RunFailedError if the disk is full."""
        if self._full:
            raise cannot_write(self._path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
