"""Everything that is kept of a run, simulated or real: ledger, folder, trace."""

from __future__ import annotations

import contextlib
import copy
import csv
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pipelinerl.config.run import RunConfig, dump_run
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import UtilisationDecode
from pipelinerl.records import run_folder
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.reports import Prices, RunIdentity, RunMeasurements, RunReport, RunTotals
from pipelinerl.records.step_ledger import Admission
from pipelinerl.records.steps import COLUMNS, STEPS_FILE, StepRow, as_records, read_steps
from pipelinerl.records.trace import FanOut, Recorder, ReplayResult, Trace, TraceWriter, replay
from pipelinerl.rl.drift import modelled_ess

GROWING_FILES = (run_folder.TRACE_FILE, STEPS_FILE, run_folder.METRICS_FILE, run_folder.SAMPLES_FILE)
READ_BYTES = 2**20
"""Bytes of a file that are read at once."""


class RecordingMark(NamedTuple):
    """A place in a recording that it can go on from; can be pickled."""

    ledger: RunLedger
    files: dict[str, tuple[int, str]]
    """Of ``GROWING_FILES`` bytes so far and their SHA-256."""


class _Digest:
    """The SHA-256 of a file that grows (mutable)."""

    def __init__(self, path: Path) -> None:
        self.path, self._size, self._sum = path, 0, hashlib.sha256()

    def up_to(self, size: int) -> tuple[int, str]:
        """Return the size, or all there is if that is less, and the digest up to there; read only new bytes."""
        with self.path.open("rb") as file:
            file.seek(self._size)
            while piece := file.read(min(READ_BYTES, size - self._size)):
                self._size += len(piece)
                self._sum.update(piece)
        return self._size, self._sum.hexdigest()


def check_reaches(out: Path, mark: RecordingMark, *, of: str) -> None:
    """Check that a real run's files hold all up to a mark, unchanged; else ConfigError. ``of`` names the checkpoint."""
    for name, (size, digest) in mark.files.items():
        path = out / name
        there, found = _Digest(path).up_to(size) if path.is_file() else (0, "")
        rule = f"--resume: {path} must have the {size} bytes that {of} goes on from"
        if there < size:
            raise ConfigError(f"{rule}, got {there}")
        if found != digest:
            raise ConfigError(f"{rule} as they were, but it was changed (SHA-256)")


def sync(path: Path) -> None:
    """Fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Recording:
    """Records a run: its ledger, and its folder and trace if wanted.

    Without ``out`` no file is written. ``on_step`` gets each row as soon as its step is done, and is on disk.
    ``go_on_from`` is a ``mark`` of this run to go on from; later records are forgotten. What is not whole is in the
    folder ``unfinished`` (None: ``out``), and moved from there to its place: a driver that has lost it
    (``backends/owner.py``) changes nothing more. ``ConfigError`` if ``out`` holds a run that is not gone on with.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        out: Path | None = None,
        trace: bool = False,
        on_step: Callable[[StepRow], None] | None = None,
        go_on_from: RecordingMark | None = None,
        unfinished: Path | None = None,
    ) -> None:
        self._config, self._on_step, self._out, self._unfinished = config, on_step, out, unfinished or out
        self._digests = {} if out is None else {name: _Digest(out / name) for name in GROWING_FILES}
        self._files: dict[str, TextIO] = {}
        self._kept: dict[str, int] = {}
        if go_on_from is not None:
            self.ledger = go_on_from.ledger
            self._kept = {name: self._digests[name].up_to(size)[0] for name, (size, _) in go_on_from.files.items()}
        else:
            self.ledger = RunLedger(
                num_engines=config.num_engines,
                colocated=config.colocated,
                longest=config.longest_answer_tokens,
                admission=Admission.of(config),
                environments=None if config.environment is None else config.environment.count,
                scorers_s=config.hardware.latency.rewards_s(1),
            )
        self.ledger.on_step = self._step_done
        self._trace: TraceWriter | None = None
        if out is not None:
            try:
                self._begin(out, new=go_on_from is None)
                self._trace = (
                    TraceWriter(out / run_folder.TRACE_FILE, config, self._opened(run_folder.TRACE_FILE))
                    if trace
                    else None
                )
            except BaseException:
                self.close()
                raise

    def _begin(self, out: Path, *, new: bool) -> None:
        if new:
            run_folder.check_vacant(out)
            run_folder.make_folder(out)
        partial = self._partial(run_folder.RUN_FILE)
        with run_folder.writable(out):
            partial.write_text(dump_run(self._config), encoding="utf-8")
            partial.rename(out / run_folder.RUN_FILE)
            for report in (run_folder.SUMMARY_FILE, run_folder.PROFILE_FILE):  # of the part before
                with contextlib.suppress(FileNotFoundError):
                    (out / report).rename(self._partial(report))
        for name in self._kept:
            self._opened(name)
        steps = self._opened(STEPS_FILE)
        self._rows = csv.writer(steps, lineterminator="\n")
        if not steps.tell():
            self._rows.writerow(COLUMNS)

    def _partial(self, name: str) -> Path:
        assert self._unfinished is not None
        return self._unfinished / f"{name}.partial"

    def append(self, name: str, values: dict[str, Any]) -> None:
        """Add a line of JSON to one of ``GROWING_FILES``."""
        with run_folder.writing(self._digests[name].path):
            self._opened(name).write(json.dumps(values) + "\n")

    def _opened(self, name: str) -> TextIO:
        """Return a file to write to, after what is kept of it; no other driver has it open."""
        if name in self._files:
            return self._files[name]
        path, partial, size = self._digests[name].path, self._partial(name), self._kept.get(name, 0)
        with run_folder.writing(path):
            if size:
                shutil.copyfile(path, partial)
                os.truncate(partial, size)
            self._files[name] = file = partial.open("a" if size else "w", encoding="utf-8", newline="", buffering=1)
            if size:
                os.fsync(file.fileno())
            partial.rename(path)
            if size:
                sync(path.parent)
        return file

    @property
    def recorder(self) -> Recorder:
        """Observes every event and command of the run."""
        used = [one for one in (self.ledger, self.ledger.turns, self._trace) if one is not None]
        return used[0] if len(used) == 1 else FanOut(*used)

    def mark(self) -> RecordingMark:
        """Return the place that the recording can go on from; the trace is on disk up to here."""
        ledger = copy.copy(self.ledger)
        ledger.on_step = None
        if self._trace is not None:
            self._trace.mark()
        files = {name: self._digests[name].up_to(sys.maxsize) for name in GROWING_FILES if name in self._files}
        return RecordingMark(ledger, files)

    def finish(self, measured: RunMeasurements | None = None) -> RunReport:
        """Write and close the files and return ``report(measured)``; the run may be cut short."""
        self.close()
        report = self.report(measured)
        if self._out is not None:
            figures = self.ledger.figure_data(self._config.drift)
            run_folder.write_json(self._out / run_folder.PROFILE_FILE, figures.to_dict(), unfinished=self._unfinished)
            run_folder.write_json(self._out / run_folder.SUMMARY_FILE, report.to_dict(), unfinished=self._unfinished)
        return report

    def close(self) -> None:
        """Close the files."""
        with contextlib.ExitStack() as files:  # all are closed, also where one cannot be
            for name, file in self._files.items():
                files.enter_context(run_folder.writing(self._digests[name].path))
                files.callback(file.close)
            if self._trace is not None:
                files.callback(self._trace.close)

    def report(self, measured: RunMeasurements | None = None) -> RunReport:
        """Return the numbers of the run so far; ``measured`` are those that the ledger cannot know."""
        config, totals = self._config, self.ledger.summary()
        scheduler, decode = config.scheduler, config.hardware.decode
        per = scheduler.optimizer_steps_per_rl_step if scheduler.schedule.has_rl_steps else None
        identity = RunIdentity(
            scheduler=scheduler.kind, seed=config.seed, max_lag=scheduler.max_lag, optimizer_steps_per_rl_step=per
        )
        about = {**dict(identity), **dict(totals), **dict(measured or RunMeasurements())}
        if isinstance(decode, UtilisationDecode):
            about["tokens_per_flash"] = totals.tokens_per_s * decode.flash_s
        groups = () if measured is None or measured.capacity is None else measured.capacity.groups
        if (rates := Prices.of(config).rates(config, groups)).known:
            about["cost"] = rates.cost(totals.duration_s, tokens=totals.tokens_trained)
        lags = self.ledger.tokens_by_lag()
        if config.drift is not None and any(lags):
            about["ess_modelled"] = modelled_ess(config.drift, lags)
        return RunReport(**about).with_steps(as_records(self.ledger.steps))

    def _step_done(self, row: StepRow) -> None:
        if self._out is not None:
            with run_folder.writing(self._out / STEPS_FILE):
                self._rows.writerow([value for _, value in row])
        if self._on_step is not None:
            self._on_step(row)


# ------------------------------------------------------------------------------------------------- replay


def replay_run(trace: Trace) -> ReplayResult:
    """Replay a trace; then compare the numbers that follow from it with summary.json and steps.csv beside it, if any.

    TraceError if the trace is broken, ConfigError if one of these files is.
    """
    recording = Recording(trace.config)
    result = replay(trace, recording.recorder)
    if result.difference is not None:
        return result
    folder = trace.path.parent
    compared = tuple(name for name in (run_folder.SUMMARY_FILE, STEPS_FILE) if (folder / name).is_file())
    return replace(result, difference=next(_disagreements(folder, compared, recording), None), compared=compared)


def _disagreements(folder: Path, compared: tuple[str, ...], recording: Recording) -> Iterator[str]:
    """Yield what a trace gives otherwise than the files; without a summary the run was killed, maybe after more steps.

    The last digits of a modelled ESS, which follows from the lags, depend on the machine.
    """
    if STEPS_FILE in compared:
        rows, steps = read_steps(folder / STEPS_FILE), as_records(recording.ledger.steps)
        if len(rows) < len(steps) or (run_folder.SUMMARY_FILE in compared and len(rows) > len(steps)):
            yield f"{STEPS_FILE} has {len(rows)} steps, the trace {len(steps)}"
        for was, now in zip(rows.tolist(), steps.tolist(), strict=False):
            for key, before, after in zip(COLUMNS, was, now, strict=True):
                if repr(before) != repr(after):  # nan is nan
                    yield f"{STEPS_FILE}, step {now[0]}: {key} is {before}, by the trace {after}"
    if run_folder.SUMMARY_FILE in compared:
        kept = RunReport.read(folder / run_folder.SUMMARY_FILE)
        found = recording.report(RunMeasurements(capacity=kept.capacity))  # its cost follows from that, too
        for key in (*RunIdentity.model_fields, *RunTotals.model_fields):
            before, after = getattr(kept, key), getattr(found, key)
            if before != after and key != "ess_modelled":
                yield f"{run_folder.SUMMARY_FILE}: {key} is {before}, by the trace {after}"
