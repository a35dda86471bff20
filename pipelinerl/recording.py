"""Everything that is kept of a run, in one place for both worlds: books, folder, trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.accounting import Accountant, StepRow
from pipelinerl.config import RunConfig, UtilisationDecode
from pipelinerl.events import Command, Event
from pipelinerl.runfolder import TRACE_FILE, RunFolder
from pipelinerl.trace import TraceWriter


class Recording:
    """Is told every event and command of a run.

    Args:
        config: The resolved configuration.
        on_step: Called with each row as soon as its step is done, for progress.
    """

    def __init__(self, config: RunConfig, *, on_step: Callable[[StepRow], None] | None = None) -> None:
        self._config = config
        self._on_step = on_step
        self._accountant = Accountant(
            num_engines=config.num_engines,
            colocated=config.colocated,
            longest=config.workload.length.max,
            on_step=self._step_done,
        )
        self._folder: RunFolder | None = None
        self._trace: TraceWriter | None = None

    def write_to(self, folder: Path, *, trace: bool) -> None:
        """Keep the run in a folder; call before it starts, and when nothing can be wrong with the input any more.

        Raises:
            ConfigError: If the folder holds a run already or cannot be written.
        """
        self._folder = RunFolder(folder, self._config)
        if trace:
            self._trace = TraceWriter(folder / TRACE_FILE, self._config)

    def event(self, time_s: float, event: Event) -> None:
        """Keep an event."""
        self._accountant.event(time_s, event)
        if self._trace is not None:
            self._trace.event(time_s, event)

    def command(self, time_s: float, command: Command) -> None:
        """Keep a command."""
        self._accountant.command(time_s, command)
        if self._trace is not None:
            self._trace.command(time_s, command)

    def finish(self) -> dict[str, Any]:
        """Write what is known, close the files, and return the summary; the run may be cut short."""
        if self._trace is not None:
            self._trace.close()
        summary = self.summary()
        if self._folder is not None:
            self._folder.finish(summary, self._accountant.profile_summary())
        return summary

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        config, summary = self._config, self._accountant.summary()
        scheduler = config.scheduler
        about: dict[str, Any] = {"scheduler": scheduler.kind, "seed": config.seed, "max_lag": scheduler.max_lag}
        if scheduler.kind == "conventional":
            about["optimizer_steps_per_rl_step"] = scheduler.optimizer_steps_per_rl_step
        decode = config.hardware.decode
        if isinstance(decode, UtilisationDecode):
            summary["tokens_per_flash"] = summary["tokens_per_s"] * decode.flash_s
        return about | summary

    def _step_done(self, row: StepRow) -> None:
        if self._folder is not None:
            self._folder.write_step(row)
        if self._on_step is not None:
            self._on_step(row)
