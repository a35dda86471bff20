"""Everything that is kept of a run, simulated or real: ledger, folder, trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.tables import UtilisationDecode
from pipelinerl.records.bottleneck import Admission
from pipelinerl.records.cost import Prices
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.reports import RunIdentity, RunMeasurements, RunReport
from pipelinerl.records.run_folder import METRICS_FILE, TRACE_FILE, RunFolder
from pipelinerl.records.steps import STEPS_FILE, StepRow
from pipelinerl.records.trace import TraceWriter
from pipelinerl.rl.drift import modelled_ess
from pipelinerl.scheduler.events import Command, Event
from pipelinerl.util.read import parse_json, read_lines


class Recorder(Protocol):
    """Observes every event and command of a run."""

    def event(self, time_s: float, event: Event) -> None:
        """Record an event that was reported to the scheduler."""

    def command(self, time_s: float, command: Command) -> None:
        """Record a command of the scheduler."""


class FanOut:
    """Passes events and commands on to several recorders, in their order."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def event(self, time_s: float, event: Event) -> None:
        """Record an event."""
        for one in self._recorders:
            one.event(time_s, event)

    def command(self, time_s: float, command: Command) -> None:
        """Record a command."""
        for one in self._recorders:
            one.command(time_s, command)


class RecordingMark(NamedTuple):
    """A place in a recording that it can go on from; can be pickled."""

    ledger: RunLedger
    trace_at: int | None
    """Bytes of the trace, if there is one."""


def check_reaches(out: Path, mark: RecordingMark, *, of: str) -> None:
    """Check that the files of a real run hold all up to a mark; ``of`` is the checkpoint's name in messages.

    ConfigError if the trace is shorter, or a step is missing in steps.csv or metrics.jsonl.
    """
    trace, steps = out / TRACE_FILE, len(mark.ledger.steps)
    size = trace.stat().st_size if trace.is_file() else 0
    if mark.trace_at is not None and size < mark.trace_at:
        raise ConfigError(f"--resume: {trace} must have the {mark.trace_at} bytes that {of} goes on from, got {size}")
    for path, names, step_of in ((out / STEPS_FILE, 1, _step_of_row), (out / METRICS_FILE, 0, step_of_metrics)):
        there = 0
        for number, line in islice(read_lines(path) if path.is_file() else (), names, names + steps):
            if step_of(line) != number - names or not line.endswith("\n"):
                break
            there += 1
        if there < steps:
            raise ConfigError(
                f"--resume: {path} must have the {steps} steps that {of} goes on from, got {there}: "
                f"step {there + 1} is missing"
            )


def _step_of_row(line: str) -> int | None:
    number = line.partition(",")[0]
    return int(number) if number.isdecimal() and len(number) < 20 else None


def step_of_metrics(line: str) -> Any:
    """Return the step of a line of metrics or samples; of one that was cut, None."""
    try:
        return parse_json(line, "line")["step"]
    except (ConfigError, TypeError, KeyError):
        return None


class Recording:
    """Records a run: its ledger, and its folder and trace if wanted; ConfigError as ``RunFolder``.

    Without ``out`` no file is written. ``on_step`` gets each row as soon as its step is done. ``go_on_from`` is a
    ``mark`` of this run to go on from; later records are forgotten.
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
            self.ledger, trace_at = go_on_from
            steps_done = len(self.ledger.steps)
        else:
            self.ledger = RunLedger(
                num_engines=config.num_engines,
                colocated=config.colocated,
                longest=config.longest_answer_tokens,
                admission=Admission.of(config),
                environments=None if config.environment is None else config.environment.count,
            )
        self.ledger.on_step = self._step_done
        self._folder = None if out is None else RunFolder(out, config, go_on_after=steps_done)
        self._trace = TraceWriter(out / TRACE_FILE, config, go_on_at=trace_at) if out is not None and trace else None

    @property
    def recorder(self) -> Recorder:
        """Observes every event and command of the run."""
        used = [one for one in (self.ledger, self.ledger.turns, self._trace) if one is not None]
        return used[0] if len(used) == 1 else FanOut(*used)

    def mark(self) -> RecordingMark:
        """Return the place that the recording can go on from."""
        ledger = copy.copy(self.ledger)
        ledger.on_step = None
        return RecordingMark(ledger, None if self._trace is None else self._trace.mark())

    def finish(self, measured: RunMeasurements | None = None) -> RunReport:
        """Write and close the files and return ``report(measured)``; the run may be cut short."""
        if self._trace is not None:
            self._trace.close()
        report = self.report(measured)
        if self._folder is not None:
            self._folder.finish(report, self.ledger.figure_data(self._config.drift))
        return report

    def report(self, measured: RunMeasurements | None = None) -> RunReport:
        """Return the numbers of the run so far; ``measured`` are those that the ledger cannot know."""
        config, totals = self._config, self.ledger.summary()
        scheduler, decode = config.scheduler, config.hardware.decode
        identity = RunIdentity(
            scheduler=scheduler.kind,
            seed=config.seed,
            max_lag=scheduler.max_lag,
            optimizer_steps_per_rl_step=scheduler.optimizer_steps_per_rl_step
            if scheduler.schedule.has_rl_steps
            else None,
        )
        about = {**dict(identity), **dict(totals), **dict(measured or RunMeasurements())}
        if isinstance(decode, UtilisationDecode):
            about["tokens_per_flash"] = totals.tokens_per_s * decode.flash_s
        if (rates := Prices.of(config).rates(config)).known:
            about["cost"] = rates.cost(totals.duration_s, tokens=totals.tokens_trained)
        lags = self.ledger.tokens_by_lag()
        if config.drift is not None and any(lags):
            about["ess_modelled"] = modelled_ess(config.drift, lags)
        return RunReport(**about).with_steps(self.ledger.steps)

    def _step_done(self, row: StepRow) -> None:
        if self._folder is not None:
            self._folder.write_step(row)
        if self._on_step is not None:
            self._on_step(row)
