"""Faults of a schedule in a real run: each comes once, over all restarts and resumes.

Theory of operation. ``FaultWatch`` says when a fault comes. It is noted in ``logs/faults.jsonl``, which no checkpoint
cuts back, then carried out by its engine or trainer in a task. Whoever goes on with the run reads the file, and leaves
these faults out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from backends.driver.engines import EnginePool
from backends.interface import Parts, Suffers, Trainer
from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, EngineLostError
from pipelinerl.records.faults import FaultWatch
from pipelinerl.records.run_folder import LOGS_FOLDER, TRACE_FILE
from pipelinerl.util.explain import writing

LOG = logging.getLogger("pipelinerl")
FAULTS_LOG = "faults.jsonl"


def check_faults(config: RunConfig, parts: Parts) -> None:
    """Check that faults can come to the parts of a run; ConfigError with the kind that knows none."""
    for fault in config.faults or ():
        for part in parts.engines.values() if fault.hits_engine else [parts.trainer] * (fault.rank is not None):
            if not isinstance(part, Suffers):
                raise ConfigError(f"faults need a backend that carries them out, got {type(part).__name__}")


class FaultInjector:
    """Carries out the faults that have not come yet (mutable). ``folder``: of the run."""

    def __init__(
        self,
        faults: list[FaultConfig],
        *,
        folder: Path,
        pool: EnginePool,
        trainer: Trainer,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._path, self._pool, self._trainer, self._spawn = folder / LOGS_FOLDER / FAULTS_LOG, pool, trainer, spawn
        came = Counter(self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ())
        left = []
        for fault in faults:
            came[_line(fault)] -= 1
            if came[_line(fault)] < 0:
                left.append(fault)
        self.watch = FaultWatch(left, self._comes, path=folder / TRACE_FILE)

    def start(self, now_s: float) -> None:
        """Wait for the faults that come at a second of the run, which has run for ``now_s``."""
        for fault in self.watch.timed():
            if fault.second is not None and fault.second >= now_s:
                self._spawn(self._after(fault.second - now_s, fault))

    async def _after(self, wait_s: float, fault: FaultConfig) -> None:
        await asyncio.sleep(wait_s)
        self.watch.comes(fault)

    def _comes(self, fault: FaultConfig) -> None:
        with writing(self._path):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(fault) + "\n")
        LOG.warning("a fault comes: %s", _line(fault))
        if fault.kind != "disk_full":
            self._spawn(self._carry_out(fault))

    async def _carry_out(self, fault: FaultConfig) -> None:
        if not fault.hits_engine:
            assert isinstance(self._trainer, Suffers)  # checked
            await self._trainer.suffer(fault)
            return
        for handle in self._pool:
            if handle.place == fault.engine:
                await handle.up.wait()
                if handle in list(self._pool):  # else its place has been given up
                    assert isinstance(handle.engine, Suffers)  # checked
                    await handle.engine.suffer(fault)
                    if fault.kind == "kill":  # calls in progress find it, too, if there are any
                        self._pool.lost(handle, EngineLostError("it was killed by a fault of the schedule"))


def _line(fault: FaultConfig) -> str:
    return fault.model_dump_json(exclude_none=True)
