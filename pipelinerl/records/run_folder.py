"""The folder of a run: what ``simulate`` and ``train`` write, and ``plot`` and ``replay`` read.

=================  =====================================================================================
run.toml           the resolved configuration: the run can be made again from it
steps.csv          a row per optimizer step, written as the run goes on
summary.json       the numbers of the run
profile.json       what figures need beyond the rows
trace.jsonl.gz     every event and command, if wanted
figures/           the figures
metrics.jsonl      what only a real run can measure, a line per optimizer step
samples.jsonl      some answers of a real run, with their rewards and versions
tensorboard/       the same for TensorBoard
logs/              what every engine and rank of a real run has printed
checkpoints/       what ``train --resume`` goes on from
comparison.json    of ``compare`` instead: all its runs side by side
environments.json  of ``environments`` besides: all its runs side by side
plan.json          of ``plan`` instead: what it found, with
recommended.toml   the run file that it recommends
model/             the trained model in Hugging Face format
check.json         of ``train --check``: what it found, with a hardware.toml
=================  =====================================================================================
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import dump_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.profile_report import FigureData
from pipelinerl.records.reports import RunReport
from pipelinerl.records.steps import STEPS_FILE, StepRow, StepsWriter
from pipelinerl.util.files import writing

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
    """Check that a run can be written here; writes nothing.

    Args:
        folder: Need not exist.

    Raises:
        ConfigError: If it is no folder, cannot be read, holds a file of a run or a comparison already, or lies in what
            is no folder or may not be written to.
    """
    try:
        is_file = folder.exists() and not folder.is_dir()
        held = [name for name in _FILES if (folder / name).exists()]
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    except OSError as error:
        raise _unwritable(folder, error) from None
    if is_file:
        raise ConfigError(f"--out must be a folder, got the file {folder}")
    if held:
        raise ConfigError(f"--out must be a folder without a run, got {folder}, which holds {held[0]}")
    if not there.is_dir():
        raise _unwritable(folder, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def make_folder(folder: Path) -> None:
    """Make a folder, and those it lies in, if they do not exist.

    Raises:
        ConfigError: If that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out must be a folder that can be written, got {folder}: {error.strerror}")


class RunFolder:
    """Writes the folder of one run. Rows of steps are on disk as soon as their step is done.

    Args:
        folder: Created if it does not exist.
        config: The resolved configuration.
        go_on_after: Optimizer steps whose rows stay: the folder holds this run already. None: a new run.

    Raises:
        ConfigError: If the folder holds a run already or cannot be written.
    """

    def __init__(self, folder: Path, config: RunConfig, *, go_on_after: int | None = None) -> None:
        if go_on_after is None:
            check_vacant(folder)
            make_folder(folder)
        self.folder = folder
        steps = folder / STEPS_FILE
        try:
            (folder / RUN_FILE).write_text(dump_run(config), encoding="utf-8")
            kept = [] if go_on_after is None else keep_lines(steps, 1 + go_on_after)
            self._steps = steps.open("a" if kept else "w", encoding="utf-8", newline="", buffering=1)
        except OSError as error:
            raise _unwritable(folder, error) from None
        self._rows = StepsWriter(self._steps, header=not kept)

    def write_step(self, row: StepRow) -> None:
        """Append a row to steps.csv."""
        with writing(self.folder / STEPS_FILE):
            self._rows.write(row)

    def finish(self, report: RunReport, figures: FigureData) -> None:
        """Write the reports at the end of the run and close."""
        with writing(self.folder / STEPS_FILE):
            self._steps.close()
        write_json(self.folder / PROFILE_FILE, figures.to_dict())
        write_json(self.folder / SUMMARY_FILE, report.to_dict())


def keep_lines(path: Path, number: int) -> list[str]:
    """Cut a text file off after so many lines; return those that stay."""
    kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:number]
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        partial.write_text("".join(kept), encoding="utf-8", newline="")
        partial.replace(path)
    return kept


def write_json(path: Path, data: Any) -> None:
    """Write plain values as JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        partial.write_text(json_text(data) + "\n", encoding="utf-8")
        partial.replace(path)


def json_text(data: Any) -> str:
    """Return plain values as readable JSON; long lists of numbers stay on one line."""
    text = json.dumps(data)
    return json.dumps(data, indent=2) if len(text) < 20_000 else text
