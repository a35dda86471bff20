"""The folder of a run: files that ``simulate`` and ``train`` write, and ``plot`` and ``replay`` read.

docs/concepts.md has their content. ``compare`` writes comparison.json instead, ``plan`` plan.json and
recommended.toml; ``environments`` adds environments.json, ``train --check`` check.json and a hardware.toml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.steps import STEPS_FILE

RUN_FILE = "run.toml"
SUMMARY_FILE = "summary.json"
PROFILE_FILE = "profile.json"
TRACE_FILE = "trace.jsonl.gz"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
LOGS_FOLDER = "logs"
COMPARISON_FILE = "comparison.json"
PLAN_FILE = "plan.json"
DIAGNOSIS_FILE = "diagnosis.json"
ENVIRONMENTS_FILE = "environments.json"
RECOMMENDED_FILE = "recommended.toml"
FLEET_FILE = "fleet.toml"
VALIDATION_FILE = "validation.json"
CHECK_FILE = "check.json"
FIGURES_FOLDER = "figures"

_FILES = (
    RUN_FILE, COMPARISON_FILE, PLAN_FILE, DIAGNOSIS_FILE, ENVIRONMENTS_FILE, RECOMMENDED_FILE, FLEET_FILE,
    VALIDATION_FILE, CHECK_FILE, STEPS_FILE, SUMMARY_FILE, PROFILE_FILE, TRACE_FILE, METRICS_FILE, SAMPLES_FILE,
)  # fmt: skip


def check_vacant(folder: Path) -> None:
    """Check that a run can be written to a folder, which need not exist; leaves nothing there.

    ConfigError if it is no folder, cannot be read, or holds a file of a run or a comparison already, or if its nearest
    parent is no folder or not writable.
    """
    with writable(folder):
        is_file = folder.exists() and not folder.is_dir()
        held = [name for name in _FILES if (folder / name).exists()]
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if is_file:
        raise ConfigError(f"--out must be a folder, got the file {folder}")
    if held:
        raise ConfigError(f"--out must be a folder without a run, got {folder}, which holds {held[0]}")
    with writable(folder):
        TemporaryDirectory(dir=there).cleanup()  # permissions alone do not tell: root, quotas, read-only disks


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, if they do not exist; ConfigError if that cannot be done."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def writable(path: Path, what: str = "folder") -> Iterator[None]:
    """Raise ConfigError if ``--out`` cannot be written inside this block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out must be a {what} that can be written, got {path}: {error.strerror}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write below this path inside the block; RunFailedError, a line with the path, if that cannot be done."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> RunFailedError:
    """Return the error of a file that cannot be written."""
    return RunFailedError(f"cannot write {error.filename or path}: {error.strerror or error}")


def write_json(path: Path, data: Any, *, unfinished: Path | None = None) -> None:
    """Write plain values as JSON; see ``write_whole``."""
    write_whole(path, json_text(data) + "\n", unfinished=unfinished)


def write_whole(path: Path, text: str, *, unfinished: Path | None = None) -> None:
    """Write a text, whole or not at all: moved from the folder ``unfinished`` (None: its own)."""
    partial = (unfinished or path.parent) / f"{path.name}.partial"
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def json_text(data: Any) -> str:
    """Return plain values as readable JSON; long lists of numbers stay on one line."""
    text = json.dumps(data)
    return json.dumps(data, indent=2) if len(text) < 20_000 else text
