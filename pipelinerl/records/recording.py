"""Everything that is kept of a run, in one place for both worlds: books, folder, trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.tables import UtilisationDecode
from pipelinerl.records.ledger import RunLedger, StepRow
from pipelinerl.records.run_folder import TRACE_FILE, RunFolder
from pipelinerl.records.trace import TraceWriter
from pipelinerl.rl.drift import modelled_ess
from pipelinerl.scheduler.events import Command, Event


class Recorder(Protocol):
    """What a run is told to, in either world: the books, or the books and the trace."""

    def event(self, time_s: float, event: Event) -> None:
        """An event was reported to the scheduler."""

    def command(self, time_s: float, command: Command) -> None:
        """The scheduler gave a command."""


class Tee:
    """Tells the books and the trace."""

    def __init__(self, accountant: RunLedger, trace: TraceWriter) -> None:
        self._accountant = accountant
        self._trace = trace

    def event(self, time_s: float, event: Event) -> None:
        """Keep an event."""
        self._accountant.event(time_s, event)
        self._trace.event(time_s, event)

    def command(self, time_s: float, command: Command) -> None:
        """Keep a command."""
        self._accountant.command(time_s, command)
        self._trace.command(time_s, command)


class RecordingMark(NamedTuple):
    """A place in a recording."""

    accountant: RunLedger
    trace_at: int | None


class Recording:
    """Keeps a run: its books, and its folder and trace if wanted.

    Args:
        config: The resolved configuration.
        out: Folder to keep the run in, or None.
        trace: Whether the folder gets a trace.
        on_step: Called with each row as soon as its step is done, for progress.
        go_on_from: A ``mark`` of this run to go on from; what came after it is forgotten. None: a new run.

    Raises:
        ConfigError: If the folder holds a run already or cannot be written.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        out: Path | None = None,
        trace: bool = False,
        on_step: Callable[[StepRow], None] | None = None,
        go_on_from: RecordingMark | None = None,
    ) -> None:
        self._config = config
        self._on_step = on_step
        steps_done = trace_at = None
        if go_on_from is not None:
            self._accountant, trace_at = go_on_from
            steps_done = len(self._accountant.steps)
        else:
            self._accountant = RunLedger(
                num_engines=config.num_engines, colocated=config.colocated, longest=config.workload.length.max
            )
        self._accountant.on_step = self._step_done
        self._folder = None if out is None else RunFolder(out, config, go_on_after=steps_done)
        self._trace = TraceWriter(out / TRACE_FILE, config, go_on_at=trace_at) if out is not None and trace else None

    @property
    def recorder(self) -> Recorder:
        """Who is to be told of every event and command."""
        return self._accountant if self._trace is None else Tee(self._accountant, self._trace)

    @property
    def accountant(self) -> RunLedger:
        """The books."""
        return self._accountant

    def mark(self) -> RecordingMark:
        """Return what is needed to go on from here; it can be pickled."""
        accountant = copy.copy(self._accountant)
        accountant.on_step = None
        return RecordingMark(accountant, None if self._trace is None else self._trace.mark())

    def finish(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write what is known, close the files, and return the summary; the run may be cut short.

        Args:
            extra: What else the summary is to hold.
        """
        if self._trace is not None:
            self._trace.close()
        summary = self.summary() | (extra or {})
        if self._folder is not None:
            self._folder.finish(summary, self._accountant.profile_summary())
        return summary

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        config, summary = self._config, self._accountant.summary()
        scheduler = config.scheduler
        about: dict[str, Any] = {"scheduler": scheduler.kind, "seed": config.seed, "max_lag": scheduler.max_lag}
        if scheduler.schedule.has_rl_steps:
            about["optimizer_steps_per_rl_step"] = scheduler.optimizer_steps_per_rl_step
        decode = config.hardware.decode
        if isinstance(decode, UtilisationDecode):
            summary["tokens_per_flash"] = summary["tokens_per_s"] * decode.flash_s
        lags = self._accountant.profile_summary()["lag_histogram"]["total"] if config.drift is not None else [0]
        if config.drift is not None and any(lags):
            summary["ess_modelled"] = asdict(modelled_ess(config.drift, lags))
        return about | summary

    def _step_done(self, row: StepRow) -> None:
        if self._folder is not None:
            self._folder.write_step(row)
        if self._on_step is not None:
            self._on_step(row)
