"""When engines of a fleet come and go, and how failures of the trainer lengthen its work.

Theory of operation
-------------------
Both are pure functions of configuration and seed; the cluster turns them into events. They draw from named streams
(``sim.workload``), so that a change of one law, group or place leaves the draws of the others as they are.

=======================  =====  ==============================================================================
stream                   block  decides
=======================  =====  ==============================================================================
``fleet engines NAME``   place  time to failure of each engine at this place of the group ``NAME``; who is slow
``fleet reclaims NAME``  place  when the place is taken away and offered again
``trainer failures``     0      times between failures of the trainer
=======================  =====  ==============================================================================

**Engines.** A place of a group is offered from time to time: a reserved one always; a spot one for exponential times,
or by a recorded capacity, place ``i`` while the capacity is above ``i``. While it is offered, an engine lives there
until it fails, then the next from the end of the repair on. Failures are exponential; those of k accelerators are k
times as frequent as those of one. After a reclaim another machine comes, so no repair goes on there.

**The trainer** works, waits, checkpoints, restarts, or does work again. Failures strike at any of these times. After
one it restarts (a failure begins the restart anew) and does all work since the last checkpoint again, without the waits
between. A checkpoint is due ``checkpoint_every_s`` after the first work that the last one lacks, also while the trainer
waits and inside an optimizer step. Versions published before a failure stay published.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field

from pipelinerl.config.fleet import FleetGroupConfig, TrainerFaultsConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records.profile_report import FigureData
from pipelinerl.records.run_folder import PROFILE_FILE
from pipelinerl.util.strict_model import MOST_ACCELERATORS, StrictModel
from pipelinerl.util.table import read_table
from sim.workload import named_stream

# ------------------------------------------------------------------------------------------------------------- engines


class LifeEnd(StrEnum):
    """Why an engine ends."""

    FAILED = "failed"
    """Its machine failed."""
    RECLAIMED = "reclaimed"
    """Its spot machine was taken away."""


@dataclass(frozen=True, slots=True)
class Life:
    """An engine at a place of a group, from the return of its machine on. Times are seconds of the run."""

    start_s: float
    """0: the engine is loaded when the run begins."""
    notice_at_s: float
    """When it is known that the machine will be taken away; ``end_s`` where there is no notice."""
    end_s: float
    """Infinite: it outlives every run."""
    cause: LifeEnd
    slowdown: float
    """Factor on its decode steps and prefills; 1 unless it is slow (no unit)."""


class CapacityRow(StrictModel):
    """A row of a recorded capacity."""

    second: float = Field(ge=0)
    """Seconds since the start of the run."""
    engines: int = Field(ge=0, le=MOST_ACCELERATORS)
    """Engines that can be had from then on (count)."""


def lives(group: FleetGroupConfig, *, seed: int, tensor_parallel: int) -> list[Iterator[Life]]:
    """Return, for each place of a group, the engines that live there, in order; most go on forever.

    ``tensor_parallel``: accelerators of an engine. Raises ConfigError if ``capacity`` is no such file.
    """
    capacity = None if group.capacity is None else read_capacity(Path(group.capacity))
    return [
        _lives(group, place, seed=seed, tensor_parallel=tensor_parallel, capacity=capacity)
        for place in range(group.engines)
    ]


def _lives(
    group: FleetGroupConfig, place: int, *, seed: int, tensor_parallel: int, capacity: list[CapacityRow] | None
) -> Iterator[Life]:
    def stream(what: str) -> np.random.Generator:
        return named_stream(seed, f"fleet {what} {group.name}", place)

    engines = stream("engines")
    mtbf_s = math.inf if group.mtbf_hours is None else 3600 * group.mtbf_hours / tensor_parallel
    offers = _offers(group, stream("reclaims")) if capacity is None else _recorded(capacity, place)
    for offered_s, until_s in offers:
        start_s = offered_s
        while start_s < until_s:
            failed_s = start_s + mtbf_s * engines.standard_exponential()
            end_s = min(failed_s, until_s)
            yield Life(
                start_s=start_s,
                notice_at_s=min(end_s, max(start_s, until_s - (group.notice_s or 0.0))),
                end_s=end_s,
                cause=LifeEnd.FAILED if failed_s <= until_s else LifeEnd.RECLAIMED,
                slowdown=group.slowdown or 1.0 if engines.random() < group.stragglers else 1.0,
            )
            start_s = end_s + group.repair_s


def _offers(group: FleetGroupConfig, stream: np.random.Generator) -> Iterator[tuple[float, float]]:
    """Yield from when until when a place is offered (seconds)."""
    start_s = 0.0
    while group.reclaim_hours is not None and group.away_s is not None:
        until_s = start_s + 3600 * group.reclaim_hours * stream.standard_exponential()
        yield start_s, until_s
        start_s = until_s + group.away_s * stream.standard_exponential()
    yield start_s, math.inf


def _recorded(capacity: list[CapacityRow], place: int) -> Iterator[tuple[float, float]]:
    """Yield from when until when a recorded capacity is above ``place``; its last value stays."""
    start_s = None
    for row in capacity:
        if row.engines > place and start_s is None:
            start_s = row.second
        elif row.engines <= place and start_s is not None:
            yield start_s, row.second
            start_s = None
    if start_s is not None:
        yield start_s, math.inf


def read_capacity(path: Path) -> list[CapacityRow]:
    """Return the rows of a recorded capacity: a CSV file with the columns ``second, engines``, or the folder of a run.

    Raises ConfigError at the first fault: file, line, column, rule, value; if no engine of the run has come or gone.
    """
    if path.is_dir():
        there = FigureData.read(path / PROFILE_FILE).fleet
        if there is None:
            raise ConfigError(f"fleet.groups.capacity must be a run whose engines came and went, got {path}")
        last = dict(zip(there.time_s, there.engines, strict=True))  # of several changes at one time
        return [CapacityRow(second=second, engines=engines) for second, engines in last.items()]
    rows: list[CapacityRow] = []
    for where, row in read_table(path, "fleet.groups.capacity").rows(CapacityRow, filled=True):
        if not rows and row.second:
            raise ConfigError(f"{where}: second must be 0 in the first row, got {row.second:g}")
        if rows and row.second <= rows[-1].second:
            raise ConfigError(f"{where}: second must be above the row before, {rows[-1].second:g}, got {row.second:g}")
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------------- trainer


class TrainerFaults:
    """Checkpoints and failures of a trainer; how long its work lasts with them. ``failures``: their times (seconds)."""

    def __init__(self, config: TrainerFaultsConfig, failures: Iterable[float]) -> None:
        self.checkpoint_s = 0.0
        """Time in checkpoints, failed ones included (seconds)."""
        self.restart_s = 0.0
        """Time in restarts, failed ones included (seconds)."""
        self.redone_s = 0.0
        """Time in which work was done again (seconds)."""
        self.num_failures = 0
        self._config = config
        self._failures = iter(failures)
        self._failure_at_s = next(self._failures, math.inf)
        self._now_s = 0.0
        self._due_s = math.inf  # of the next checkpoint
        self._unsaved_s = 0.0  # work that no checkpoint has
        self._lost_s = 0.0  # of this, to be done again
        self._down = False

    @classmethod
    def drawn(cls, config: TrainerFaultsConfig, *, accelerators: int, seed: int) -> Self:
        """Return those of a trainer of so many accelerators, of which the failure of any stops it."""
        if config.mtbf_hours is None:
            return cls(config, ())
        return cls(config, _failure_times(3600 * config.mtbf_hours / accelerators, seed))

    def strike(self, at_s: float) -> None:
        """Have a failure come at a second that no work has reached, beside the others."""
        self._failures = heapq.merge([max(at_s, self._now_s)], chain([self._failure_at_s], self._failures))
        self._failure_at_s = next(self._failures)

    def extend(self, begin_s: float, work_s: float) -> float:
        """Return the time from ``begin_s`` until ``work_s`` of work is done (seconds).

        Calls are in order of time: the trainer waits from the end of one's work until the next begins.
        """
        config, left_s = self._config, work_s
        while left_s > 0 or self._now_s < begin_s:
            if self._down:
                spent_s, done = self._spend(config.restart_s)
                self.restart_s += spent_s
                if done:
                    self._down, self._lost_s = False, self._unsaved_s
                    self._due_s = self._now_s + config.checkpoint_every_s if self._unsaved_s else math.inf
            elif self._lost_s:  # at most checkpoint_every_s, so no checkpoint comes due before
                spent_s, done = self._spend(self._lost_s)
                self.redone_s += spent_s
                if done:
                    self._lost_s = 0.0
            elif self._now_s >= self._due_s:
                spent_s, done = self._spend(config.checkpoint_s)
                self.checkpoint_s += spent_s
                if done:
                    self._unsaved_s, self._due_s = 0.0, math.inf
            elif self._now_s < begin_s:
                self._spend(min(begin_s, self._due_s) - self._now_s)
            else:
                if not self._unsaved_s:
                    self._due_s = self._now_s + config.checkpoint_every_s
                spent_s, _ = self._spend(min(left_s, self._due_s - self._now_s))
                self._unsaved_s += spent_s
                left_s -= spent_s
        return self._now_s - begin_s

    def _spend(self, seconds: float) -> tuple[float, bool]:
        """Let time pass until a failure at most; return the seconds and whether there was none."""
        if self._failure_at_s >= self._now_s + seconds:
            self._now_s += seconds
            return seconds, True
        spent_s = self._failure_at_s - self._now_s
        self._now_s, self._failure_at_s = self._failure_at_s, next(self._failures, math.inf)
        self._down = True
        self.num_failures += 1
        return spent_s, False


def _failure_times(mtbf_s: float, seed: int) -> Iterator[float]:
    stream, at_s = named_stream(seed, "trainer failures", 0), 0.0
    while True:
        at_s += mtbf_s * stream.standard_exponential()
        yield at_s
