"""The state of a run, and its checkpoints: a folder per version, complete or not there at all.

``checkpoints/step_000050/`` holds ``trainer/`` (the trainer's own format), ``run.pickle`` (scheduler, ledger, rollouts
not yet trained on, place in the trace), the id of its ``driver`` and ``manifest.json``; at the end of a run also
``longer.pickle``, the same before the end, for more ``optimizer_steps``. It is copied in one instant and written while
the run goes on, in its driver's folder: fsynced, then moved here; only then is an older one of its version removed. A
resume warns of a broken checkpoint and takes the one before; it refuses another format before unpickling.
Pickles can run code: resume only from your own checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from backends.driver.metrics import StepMetrics
from backends.driver.rollouts import RolloutData, lag_of_tokens
from backends.interface import Sample, TrainResult
from backends.owner import DriverLock
from pipelinerl.config.resolve import new_scheduler
from pipelinerl.config.run import RunConfig, flat
from pipelinerl.errors import ConfigError
from pipelinerl.records.recording import GROWING_FILES, Recording, RecordingMark, check_reaches, sync
from pipelinerl.records.run_folder import writing
from pipelinerl.rl.segments import turn_of_tokens
from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.events import Event, StartTraining
from pipelinerl.util.read import read_json

LOG = logging.getLogger("pipelinerl")
FORMAT = 9
"""One more whenever a pickled class, or the trainer's part, changes."""


@dataclass(slots=True)
class DriverState:
    """With the trainer's own checkpoint, enough to resume a run (mutable, can be pickled)."""

    scheduler: Scheduler
    metrics: StepMetrics
    rollouts: dict[int, RolloutData] = field(default_factory=dict)
    """Started and neither trained on nor given up."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Engine of each rollout in progress."""
    aborting: set[int] = field(default_factory=set)
    acting: set[int] = field(default_factory=set)
    scoring: set[int] = field(default_factory=set)
    """Finished rollouts without a reward."""
    micro_batches: list[StartTraining] = field(default_factory=list)
    """Trained on in the optimizer step in progress."""
    pending: Event | None = None
    """Event that the trainer has not reported yet."""
    time_s: float = 0.0
    """Seconds since the start of the run, while it ran."""
    version: int = 0
    """Optimizer steps the trainer has done."""
    evaluation: dict[str, Any] = field(default_factory=dict)

    def count_trained(self, samples: list[Sample], result: TrainResult, version: int, *, turns: bool) -> None:
        """Count a micro-batch that has been trained on at a version: ratios and lags of its tokens, other metrics."""
        for sample, logprob_T in zip(samples, result.logprob_T, strict=True):
            lag_T = lag_of_tokens(self.rollouts[sample.rollout_id].spans, version)
            if np.isfinite(logprob_T).all():  # else the gradient is not finite either, and the step is skipped
                turn_T = turn_of_tokens(sample.segments) if turns else ()
                self.metrics.trained(logprob_T - sample.behaviour_logprob_T, lag_T, turn_T)
                if sample.reference_logprob_T is not None:
                    gap = float((logprob_T - sample.reference_logprob_T).sum(dtype=np.float64))
                    self.metrics.add_trainer_metrics({"reverse_kl_sum": gap})
        self.metrics.add_trainer_metrics(result.metrics)

    def take_trained(self) -> list[RolloutData]:
        """Forget the rollouts of the optimizer step that has ended, and return them."""
        ids = [one for done in self.micro_batches for one in done.rollout_ids]
        self.micro_batches.clear()
        return [self.rollouts.pop(one) for one in ids]


def fresh_state(config: RunConfig) -> DriverState:
    """Return the state of a run that begins."""
    return DriverState(new_scheduler(config), StepMetrics(config.train_table.loss))


# ------------------------------------------------------------------------------------- manifests
# A manifest holds the format and the SHA-256 of every file below its folder. It is written last, when all files are
# fsynced; then the folders are.

MANIFEST_FILE = "manifest.json"
NUM_THREADS = 8
"""Files read at a time, outside of Python's lock."""


class OtherFormatError(Exception):
    """A folder has another format."""


def seal(folder: Path, digests: dict[str, str]) -> None:
    """Fsync all files of a complete folder, write its manifest with their SHA-256, ``digests`` if known; or OSError."""
    files = _files(folder)
    for name in sorted(digests.keys() - files.keys()):
        raise OSError(0, "its rank has written it, but the driver does not see it: all must share --out", name)
    others = files.keys() - digests.keys()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(sync, files.values()))
        digests |= zip(others, pool.map(lambda name: _digest(files[name]), others), strict=True)
    manifest = folder / MANIFEST_FILE
    content = {"files": digests, "format": FORMAT}
    manifest.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sync(manifest)
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync(path)


def check_sealed(folder: Path) -> None:
    """Check that a folder is unchanged since ``seal``; ``ValueError`` if a file differs, or ``OtherFormatError``."""
    files = _files(folder)
    manifest = files.pop(MANIFEST_FILE, None)
    if manifest is None:
        raise ValueError(f"{MANIFEST_FILE} is missing, so it was never complete")
    listed, found = _read(manifest)
    if found != FORMAT:
        raise OtherFormatError(f"was written by another version of pipelinerl: format {found}, not {FORMAT}")
    for name in sorted(listed.keys() ^ files.keys()):
        raise ValueError(f"{name} is {'missing' if name in listed else 'not in its manifest'}")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for name, digest in zip(files, pool.map(_digest, files.values()), strict=True):
            if digest != listed[name]:
                raise ValueError(f"{name} is not as it was written (SHA-256)")


def _read(manifest: Path) -> tuple[dict[str, str], int]:
    try:
        content = read_json(manifest)
        if all(isinstance(value, str) for value in content.values()):  # from before there were numbers
            return content, 0
        return dict(content["files"]), int(content["format"])
    except (ValueError, TypeError, AttributeError, KeyError):
        raise ValueError(f"{MANIFEST_FILE} is broken") from None


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FOLDER = "checkpoints"
MAY_DIFFER = (
    *("hardware.", "compare.", "train.checkpoint.", "train.logging.", "train.engine.", "train.trainer."),
    *("train.ray_address.", "train.weights_folder.", "faults."),
)
"""Beginnings of keys that may differ when a run is resumed."""
TRAINER_FOLDER = "trainer"
_RUN, _LONGER, _DRIVER, _BEFORE = "run.pickle", "longer.pickle", "driver", ".before"


class Checkpoint(NamedTuple):
    """A checkpoint that has been read."""

    trainer_folder: Path
    state: DriverState
    recording: RecordingMark


class CheckpointKeeper:
    """Writes the checkpoints of a run; ``recording`` has its ledger and trace."""

    def __init__(self, lock: DriverLock, config: RunConfig, recording: Recording) -> None:
        self._lock, self._folder, self._config, self._recording = lock, lock.folder / FOLDER, config, recording
        self._partial = lock.unfinished / "checkpoint"
        self._num_kept = config.train_table.checkpoint.keep

    def trainer_folder(self) -> Path:
        """Return a new folder for the trainer's part of the next checkpoint."""
        shutil.rmtree(self._partial, ignore_errors=True)
        with writing(self._partial):
            self._partial.mkdir()
            (self._partial / _DRIVER).write_text(self._lock.id)  # whose weights will be here
        return self._partial / TRAINER_FOLDER

    def copy(self, state: DriverState) -> bytes:
        """Return a checkpoint without the trainer's part; the trace is on disk up to here."""
        content = {"config": _fixed(self._config), "state": state, "recording": self._recording.mark()}
        content[_DRIVER] = self._lock.id
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)  # copies arrays once

    def keep(self, version: int, content: bytes, digests: Mapping[str, str], longer: bytes | None) -> None:
        """Complete the checkpoint: ``copy`` now and before the end, the written trainer's part; remove the oldest."""
        partial, whole = self._partial, self._folder / f"step_{version:06d}"
        with writing(partial):
            (partial / _RUN).write_bytes(content)
            if longer is not None:
                (partial / _LONGER).write_bytes(longer)
            for path in filter(Path.exists, (self._lock.folder / name for name in GROWING_FILES)):
                sync(path)
            seal(partial, {f"{TRAINER_FOLDER}/{name}": digest for name, digest in digests.items()})
            self._folder.mkdir(exist_ok=True)
            sync(self._lock.folder)  # has the names of this folder, and of the files that grow
            self._lock.check()
            before = whole.with_suffix(_BEFORE)
            try:
                partial.rename(whole)
            except FileNotFoundError:
                raise  # another driver has moved it away
            except OSError:  # there is one of this version
                shutil.rmtree(before, ignore_errors=True)
                whole.rename(before)
                partial.rename(whole)
            sync(self._folder)
        shutil.rmtree(before, ignore_errors=True)
        for old in _whole(self._folder)[: -self._num_kept]:
            shutil.rmtree(old)


def read_newest(out: Path, config: RunConfig) -> Checkpoint:
    """Read the newest checkpoint that is not broken; warn of broken ones by name.

    Raises ConfigError if there is none, all are broken, it is one of another configuration or format, or the run's
    files do not reach up to it.
    """
    faults = []
    for folder in reversed(_whole(out / FOLDER)):
        try:
            check_sealed(folder)
            with (folder / _RUN).open("rb") as file:
                content = pickle.load(file)
            if len({content.get(_DRIVER, ""), *(one.read_text() for one in folder.glob(_DRIVER))}) > 1:
                raise ValueError(f"{_RUN} and {TRAINER_FOLDER}/ are of different drivers")
            was, now = content["config"], _fixed(config)
            longer = now["optimizer_steps"] > was["optimizer_steps"]
            if longer and (folder / _LONGER).exists():
                content = pickle.loads((folder / _LONGER).read_bytes())
            state, recording = content["state"], content["recording"]
        except OtherFormatError as error:  # before anything of it is unpickled
            raise ConfigError(f"--resume: {folder.name} {error}; go on with the version that wrote it") from None
        except Exception as error:
            faults.append(f"{folder.name} is broken: {error}")
            continue
        for fault in faults:
            LOG.warning("--resume: %s; going on from %s", fault, folder.name)
        if longer and (state.scheduler.stopped is not None or not state.scheduler.may_be_longer):
            raise ConfigError(f"--resume: optimizer_steps must stay {was['optimizer_steps']}: {folder.name} ends there")
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key) and not (longer and key == "optimizer_steps"):
                raise ConfigError(f"--resume: {folder.name} was written with {key}={was.get(key)}, got {now.get(key)}")
        check_reaches(out, recording, of=folder.name)
        if longer and config.train_table.optimizer.schedule != "constant":
            LOG.warning("--resume: the learning rate jumps to that of a run of %d steps", now["optimizer_steps"])
        return Checkpoint(folder / TRAINER_FOLDER, state, recording)
    if faults:
        raise ConfigError(*(f"--resume: {out / FOLDER}/{fault}" for fault in faults))
    raise ConfigError(f"--resume needs a checkpoint, got {out}, which holds none in {FOLDER}/")


def _whole(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*"), key=lambda path: (path.stem, path.suffix != _BEFORE))


def _fixed(config: RunConfig) -> dict[str, Any]:
    """Return the keys that must not differ: accelerators are the number of ranks, where engines have their own."""
    may = (*MAY_DIFFER, *(() if config.colocated else ("cluster.accelerators.",)))
    values = flat(config.model_dump(mode="json", exclude_none=True))
    return {key: value for key, value in values.items() if not f"{key}.".startswith(may)}
