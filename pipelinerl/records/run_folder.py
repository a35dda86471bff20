"""The folder of a run: files that ``simulate`` and ``train`` write, and ``plot`` and ``replay`` read.

docs/concepts.md has their content. ``compare`` writes comparison.json instead, ``plan`` plan.json and
recommended.toml; ``environments`` adds environments.json, ``train --check`` check.json and a hardware.toml.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import shutil
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import dump_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.profile_report import FigureData
from pipelinerl.records.reports import RunReport
from pipelinerl.records.steps import COLUMNS, STEPS_FILE, StepRow
from pipelinerl.util.explain import writing

RUN_FILE = "run.toml"
SUMMARY_FILE = "summary.json"
PROFILE_FILE = "profile.json"
TRACE_FILE = "trace.jsonl.gz"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
LOGS_FOLDER = "logs"
COMPARISON_FILE = "comparison.json"
PLAN_FILE = "plan.json"
ENVIRONMENTS_FILE = "environments.json"
RECOMMENDED_FILE = "recommended.toml"
VALIDATION_FILE = "validation.json"
CHECK_FILE = "check.json"
FIGURES_FOLDER = "figures"

_FILES = (
    RUN_FILE,
    COMPARISON_FILE,
    PLAN_FILE,
    ENVIRONMENTS_FILE,
    RECOMMENDED_FILE,
    VALIDATION_FILE,
    CHECK_FILE,
    STEPS_FILE,
    SUMMARY_FILE,
    PROFILE_FILE,
    TRACE_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
)


def check_vacant(folder: Path) -> None:
    """Check that a run can be written to a folder, which need not exist; writes nothing.

    ConfigError if it is no folder, cannot be read, or holds a file of a run or a comparison already, or if its nearest
    parent is no folder or not writable.
    """
    try:
        is_file = folder.exists() and not folder.is_dir()
        held = [name for name in _FILES if (folder / name).exists()]
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    except OSError as error:
        raise unwritable(folder, error) from None
    if is_file:
        raise ConfigError(f"--out must be a folder, got the file {folder}")
    if held:
        raise ConfigError(f"--out must be a folder without a run, got {folder}, which holds {held[0]}")
    if not there.is_dir():
        raise unwritable(folder, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, if they do not exist; ConfigError if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """Return the error of a folder that cannot be written."""
    return ConfigError(f"--out must be a folder that can be written, got {folder}: {error.strerror}")


class RunFolder:
    """Writes the folder of one run, made if need be; ConfigError if it holds a run already or cannot be written.

    Rows of steps are on disk as soon as their step is done. ``kept``: it is this run's, and so many bytes of its files
    stay, but no report. What is not whole is in ``unfinished`` (None: the folder), and moved from there to its place:
    a driver that has lost it (``backends/owner.py``) changes nothing more.
    """

    def __init__(
        self, folder: Path, config: RunConfig, *, kept: Mapping[str, int] | None = None, unfinished: Path | None = None
    ) -> None:
        if kept is None:
            check_vacant(folder)
            make_folder(folder)
        self.folder, self._kept, self._unfinished = folder, kept or {}, unfinished or folder
        try:
            _write(folder / RUN_FILE, dump_run(config), self._unfinished)
            for report in (SUMMARY_FILE, PROFILE_FILE):  # of the part before
                with contextlib.suppress(FileNotFoundError):
                    (folder / report).rename(self._unfinished / report)
            self._steps = self.open(STEPS_FILE)
        except OSError as error:
            raise unwritable(folder, error) from None
        self._rows = csv.writer(self._steps, lineterminator="\n")
        if not self._steps.tell():
            self._rows.writerow(COLUMNS)

    def open(self, name: str) -> TextIOWrapper:
        """Open a file that grows, after the bytes that are kept; nobody else has it open. ``OSError`` if that fails."""
        path, partial, size = self.folder / name, self._unfinished / f"{name}.partial", self._kept.get(name, 0)
        if size:
            shutil.copyfile(path, partial)
            os.truncate(partial, size)
        file = partial.open("a" if size else "w", encoding="utf-8", newline="", buffering=1)
        if size:
            os.fsync(file.fileno())
        partial.rename(path)
        return file

    def write_step(self, row: StepRow) -> None:
        """Append a row to steps.csv."""
        with writing(self.folder / STEPS_FILE):
            self._rows.writerow([value for _, value in row])

    def close(self) -> None:
        """Finish steps.csv."""
        with writing(self.folder / STEPS_FILE):
            self._steps.close()

    def finish(self, report: RunReport, figures: FigureData) -> None:
        """Write the reports at the end of the run."""
        write_json(self.folder / PROFILE_FILE, figures.to_dict(), unfinished=self._unfinished)
        write_json(self.folder / SUMMARY_FILE, report.to_dict(), unfinished=self._unfinished)


def write_json(path: Path, data: Any, *, unfinished: Path | None = None) -> None:
    """Write plain values as JSON, whole or not at all; ``unfinished``: see ``RunFolder``."""
    with writing(path):
        _write(path, json_text(data) + "\n", unfinished or path.parent)


def _write(path: Path, text: str, unfinished: Path) -> None:
    partial = unfinished / f"{path.name}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def json_text(data: Any) -> str:
    """Return plain values as readable JSON; long lists of numbers stay on one line."""
    text = json.dumps(data)
    return json.dumps(data, indent=2) if len(text) < 20_000 else text
