"""Checkpoints: a folder per version, complete or not there at all.

``checkpoints/step_000050/`` holds ``trainer/`` (weights, optimizer, schedule: the trainer's own format),
``run.pickle`` (scheduler, ledger, rollouts that are finished and not trained on, place in the trace) and
``manifest.json`` (its format, and a checksum of every file). What it holds is copied in one instant, and written while
the run goes on: under another name, brought to disk, and renamed when it is complete; only then is an older one of the
same version removed. What is read is checked first. A checkpoint that is broken is passed over for the one before it,
and named. One of another format is refused before anything of it is unpickled.
Pickles can run code when they are read: resume only from checkpoints that you have written yourself.
"""

from __future__ import annotations

import logging
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from backends.manifest import OtherFormatError, check_sealed, seal, sync
from backends.state import DriverState
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records.recording import Recording, RecordingMark, check_reaches
from pipelinerl.records.run_folder import METRICS_FILE
from pipelinerl.records.steps import STEPS_FILE
from pipelinerl.util.files import writing

LOG = logging.getLogger("pipelinerl")
FOLDER = "checkpoints"
"""Folder of a run's checkpoints."""
FORMAT = 1
"""Number of what is written here: one more whenever a class that is pickled, or the trainer's part, changes."""
MAY_DIFFER = (
    ("hardware",),
    ("compare",),
    *(("train", one) for one in ("checkpoint", "logging", "engine", "trainer", "ray_address", "weights_folder")),
)
"""Keys of a run file that may differ when a run is resumed; where they have accelerators of their own, ranks, too."""
_TRAINER, _RUN, _PARTIAL, _BEFORE = "trainer", "run.pickle", "partial", ".before"


class Checkpoint(NamedTuple):
    """A checkpoint that has been read."""

    trainer_folder: Path
    state: DriverState
    recording: RecordingMark


class CheckpointKeeper:
    """Writes the checkpoints of a run.

    Args:
        out: The run's folder.
        config: The resolved configuration.
        recording: Ledger and trace of the run.
    """

    def __init__(self, out: Path, config: RunConfig, recording: Recording) -> None:
        assert config.train is not None
        self._out, self._folder, self._config, self._recording = out, out / FOLDER, config, recording
        self._num_kept = config.train.checkpoint.keep

    def trainer_folder(self) -> Path:
        """Return a new folder for the trainer's part of the next checkpoint."""
        partial = self._folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial / _TRAINER

    def copy(self, state: DriverState) -> bytes:
        """Return what a checkpoint holds besides the trainer's part; the trace is on disk up to here."""
        return pickle.dumps({"config": _fixed(self._config), "state": state, "recording": self._recording.mark()})

    def keep(self, version: int, content: bytes) -> None:
        """Complete the checkpoint of a version and forget the oldest; the trainer's part has been written.

        Args:
            version: Optimizer steps done.
            content: What ``copy`` has returned.
        """
        partial, whole = self._folder / _PARTIAL, self._folder / f"step_{version:06d}"
        with writing(partial):
            (partial / _RUN).write_bytes(content)
            for records in (STEPS_FILE, METRICS_FILE):
                sync(self._out / records)
            seal(partial, format_number=FORMAT)
        before = whole.with_suffix(_BEFORE)
        if whole.exists():
            shutil.rmtree(before, ignore_errors=True)
            whole.rename(before)
        partial.rename(whole)
        sync(self._folder)
        shutil.rmtree(before, ignore_errors=True)
        for old in _whole(self._folder)[: -self._num_kept]:
            shutil.rmtree(old)


def read_newest(out: Path, config: RunConfig) -> Checkpoint:
    """Read the newest checkpoint of a run that is not broken; those that are get a warning that names them.

    Args:
        out: The run's folder.
        config: The run file of the run that is resumed.

    Raises:
        ConfigError: If there is none, all are broken, it is one of another configuration or format, or the run's files
            do not reach up to it.
    """
    faults = []
    for folder in reversed(_whole(out / FOLDER)):
        try:
            check_sealed(folder, format_number=FORMAT)
            with (folder / _RUN).open("rb") as file:
                content = pickle.load(file)
            was, state, recording = content["config"], content["state"], content["recording"]
        except OtherFormatError as error:  # before anything of it is unpickled
            raise ConfigError(f"--resume: {folder.name} {error}; go on with the version that wrote it") from None
        except Exception as error:
            faults.append(f"{folder.name} is broken: {error}")
            continue
        for fault in faults:
            LOG.warning("--resume: %s; going on from %s", fault, folder.name)
        for key, before, now in _differences(was, _fixed(config)):
            raise ConfigError(f"--resume: {folder.name} was written with {key}={before}, got {now}")
        check_reaches(out, recording, of=folder.name)
        return Checkpoint(folder / _TRAINER, state, recording)
    if faults:
        raise ConfigError("\n".join(f"--resume: {out / FOLDER}/{fault}" for fault in faults))
    raise ConfigError(f"--resume needs a checkpoint, got {out}, which holds none in {FOLDER}/")


def _whole(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*"), key=lambda path: (path.stem, path.suffix != _BEFORE))


def _fixed(config: RunConfig) -> dict[str, Any]:
    """Return the settings that must be the same when a run is resumed."""
    data = config.model_dump(mode="json", exclude_none=True)
    for *tables, key in MAY_DIFFER:
        table = data
        for name in tables:
            table = table[name]
        table.pop(key, None)
    if not config.colocated:  # the engines remain as many
        del data["cluster"]["accelerators"]
    return data


def _differences(was: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found = []
    for key in sorted(was.keys() | now.keys()):
        before, after = was.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append((f"{prefix}{key}", before, after))
    return found
