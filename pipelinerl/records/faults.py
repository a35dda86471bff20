"""When the faults of a run come: one recorder for simulated and real runs.

Theory of operation. An event or command passes here before anything records it. The first report of an optimizer step
has its faults come: before the scheduler has answered the report, so whoever carries a fault out at once precedes the
answer, and whoever starts a task or an event follows the report. A full disk is here, too: no later event or command
can be recorded.
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
    """A recorder that has faults come after their steps (mutable). ``path``: the file that cannot be written then."""

    def __init__(self, faults: Iterable[FaultConfig], come: Callable[[FaultConfig], None], *, path: Path) -> None:
        self._left, self._come, self._path = list(faults), come, path
        self._full = False

    def timed(self) -> list[FaultConfig]:
        """Return the faults that come at a second: ``comes`` is to be called then."""
        return [one for one in self._left if one.second is not None]

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
