"""Checkpoints: a folder per version, complete or not there at all.

``checkpoints/step_000050/`` holds ``trainer/`` (weights, optimizer, schedule: the trainer's own format) and
``run.pickle`` (scheduler, ledger, rollouts that are finished and not trained on, place in the trace). It is written
under another name and renamed when it is complete; only then is an older one of the same version removed. Pickles can
run code when they are read: resume only from checkpoints that you have written yourself.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from backends.state import DriverState
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records.recording import Recording, RecordingMark

FOLDER = "checkpoints"
"""Folder of a run's checkpoints."""
MAY_DIFFER = (
    ("hardware",),
    ("compare",),
    *(("train", one) for one in ("checkpoint", "logging", "engine", "ray_address", "weights_folder")),
)
"""Keys of a run file that may differ when a run is resumed."""
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
        self._folder, self._config, self._recording = out / FOLDER, config, recording
        self._num_kept = config.train.checkpoint.keep

    def trainer_folder(self) -> Path:
        """Return a new folder for the trainer's part of the next checkpoint."""
        partial = self._folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial / _TRAINER

    def keep(self, state: DriverState) -> None:
        """Complete the checkpoint of ``state.version`` and forget the oldest; the trainer's part has been written."""
        partial, whole = self._folder / _PARTIAL, self._folder / f"step_{state.version:06d}"
        content = {"config": _fixed(self._config), "state": state, "recording": self._recording.mark()}
        with (partial / _RUN).open("wb") as file:
            pickle.dump(content, file)
        before = whole.with_suffix(_BEFORE)
        if whole.exists():
            shutil.rmtree(before, ignore_errors=True)
            whole.rename(before)
        partial.rename(whole)
        shutil.rmtree(before, ignore_errors=True)
        for old in _whole(self._folder)[: -self._num_kept]:
            shutil.rmtree(old)


def read_newest(out: Path, config: RunConfig) -> Checkpoint:
    """Read the newest checkpoint of a run.

    Args:
        out: The run's folder.
        config: The run file of the run that is resumed.

    Raises:
        ConfigError: If there is none, it cannot be read, or it is one of another configuration.
    """
    folders = _whole(out / FOLDER)
    if not folders:
        raise ConfigError(f"--resume needs a checkpoint, got {out}, which holds none in {FOLDER}/")
    newest = folders[-1]
    try:
        with (newest / _RUN).open("rb") as file:
            content = pickle.load(file)
        was, state, recording = content["config"], content["state"], content["recording"]
    except Exception as error:
        raise ConfigError(f"--resume: {newest / _RUN} cannot be read: {error}") from None
    for key, before, now in _differences(was, _fixed(config)):
        raise ConfigError(f"--resume: {newest.name} was written with {key}={before}, got {now}")
    return Checkpoint(newest / _TRAINER, state, recording)


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
