"""Faults of a schedule in a real run: each comes once, over all restarts and resumes.

Theory of operation. ``FaultWatch`` says when a fault comes. It is noted in ``logs/faults.jsonl``, which no checkpoint
cuts back, then its engine or the trainer carries it out in a task. Whoever goes on with the run leaves these out.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from backends.driver.engines import EngineHandle, EnginePool
from backends.driver.tasks import RunTasks
from backends.interface import Parts, Suffers, Trainer
from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, EngineLostError
from pipelinerl.records.run_folder import LOGS_FOLDER, TRACE_FILE, writing
from pipelinerl.records.trace import FaultWatch

LOG = logging.getLogger("pipelinerl")
FAULTS_LOG = "faults.jsonl"
POLL_S = 0.1
"""Between two looks whether an engine is back."""


def check_faults(config: RunConfig, parts: Parts) -> None:
    """Check that faults can come to the parts of a run; ConfigError with the kind that knows none."""
    for fault in config.drawn_faults:
        part = parts.trainer if fault.engine is None else parts.engines[fault.engine]
        if fault.kind != "disk_full" and not isinstance(part, Suffers):
            raise ConfigError(f"faults need a backend that carries them out, got {type(part).__name__}")


class FaultInjector:
    """Carries out the faults of a run that have not come yet (mutable). ``folder``: of the run."""

    def __init__(self, config: RunConfig, *, folder: Path, pool: EnginePool, trainer: Trainer, tasks: RunTasks) -> None:
        self._path, self._pool, self._trainer, self._tasks = folder / LOGS_FOLDER / FAULTS_LOG, pool, trainer, tasks
        self._left, came = [], self._path.read_text().splitlines() if self._path.exists() else []
        for fault in config.drawn_faults:
            if (line := _line(fault)) in came:
                came.remove(line)
            else:
                self._left.append(fault)
        self.watch = FaultWatch(self._left, self._comes, path=folder / TRACE_FILE)

    def start(self, now_s: float) -> None:
        """Wait for the faults that come at a second of the run, which has run for ``now_s``."""
        for fault in self._left:
            if fault.second is not None and fault.second >= now_s:
                self._tasks.spawn(self._after(fault.second - now_s, fault))

    async def _after(self, wait_s: float, fault: FaultConfig) -> None:
        await asyncio.sleep(wait_s)
        self.watch.comes(fault)

    def _comes(self, fault: FaultConfig) -> None:
        LOG.warning("a fault comes: %s", _line(fault))
        with writing(self._path):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"{_line(fault)}\n")
        if fault.kind != "disk_full":
            self._tasks.spawn(self._carry_out(fault))

    async def _carry_out(self, fault: FaultConfig) -> None:
        if fault.engine is None:
            assert isinstance(self._trainer, Suffers)  # checked
            await self._trainer.suffer(fault)
            return
        while (handle := self._there(fault.engine)) is None:
            await asyncio.sleep(POLL_S)
        assert isinstance(handle.engine, Suffers)  # checked
        await handle.engine.suffer(fault)
        if fault.kind == "kill":  # calls in progress find it, too, if there are any
            self._pool.lost(handle, EngineLostError("killed by a fault of the schedule"))

    def _there(self, place: int) -> EngineHandle | None:
        return next((one for one in self._pool if one.place == place and one.up.is_set()), None)


def _line(fault: FaultConfig) -> str:
    return fault.model_dump_json(exclude_none=True)
