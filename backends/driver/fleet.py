"""Requests to a run in progress: engines to add and to remove.

Theory of operation. ``ask`` moves a request into the folder of the run's driver and waits until the answer stands
beside it. The driver looks once a second. Files are moved when they are whole, so neither side reads a half.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Literal

from backends.driver.engines import EngineHandle, EnginePool
from backends.interface import OnHost
from backends.owner import DriverLock, driver_folder
from pipelinerl.errors import ConfigError
from pipelinerl.util.strict_model import CountOrZero, Seconds, StrictModel
from pipelinerl.util.user_code import first_line

ANSWER_LIMIT_S = 120.0
"""For the answer to a request. A run answers within a second or two, but not while it starts or ends."""
POLL_S = 0.1
REQUEST, ANSWER = "request-", "answer-"


class FleetRequest(StrictModel):
    """Engines to add and to remove."""

    add: CountOrZero = 0
    """Engines to add (count)."""
    drain: list[str] = []
    """Engines to remove, by id; or machines, whose engines are removed, by name."""
    notice_s: Seconds = 30.0
    """Time in which rollouts of removed engines may end; then they go on elsewhere (s)."""


class EngineRow(StrictModel):
    """An engine of a run in progress."""

    engine: int | None
    """Its id in the trace. None: it has not joined."""
    place: int
    """Its number in messages."""
    machine: str
    """Name of its machine; empty: not known."""
    state: Literal["up", "starts", "is leaving", "not started"]
    """``starts``: again, after a loss; ``not started``: its accelerators, or others, are waited for."""
    version: int | None
    """Version of its weights. None: none of this run."""
    requests: int
    """In progress, of rollouts and evaluations (count)."""


class FleetAnswer(StrictModel):
    """What a run answers."""

    fault: str = ""
    """The reason of a refusal, which changes nothing. Empty: the run carries the request out."""
    engines: list[EngineRow] = []


def ask(out: Path, request: FleetRequest) -> list[EngineRow]:
    """Ask the run that is kept in a folder; return its engines. ``ConfigError`` if it does not do it, or not answer."""
    folder = driver_folder(out)
    if folder is None:
        raise ConfigError(f"DIR must be the folder of a run in progress, got {out}: no driver has it")
    name = f"{time.time_ns()}.json"
    question, answer = folder / f"{REQUEST}{name}", folder / f"{ANSWER}{name}"
    try:
        _write(question, request)
        over_s = time.monotonic() + ANSWER_LIMIT_S
        while not answer.exists():
            if time.monotonic() >= over_s or not folder.exists():
                raise ConfigError(
                    f"DIR must be the folder of a run in progress, got {out}, which gives no answer: it starts, ends, "
                    "or cannot write; it may do what it is asked for"
                )
            time.sleep(POLL_S)
        answered = FleetAnswer.model_validate_json(answer.read_bytes())
    except OSError as error:
        raise ConfigError(f"DIR must be a folder that can be written, got {out}: {error.strerror}") from None
    finally:
        for path in (question, answer):
            path.unlink(missing_ok=True)
    if answered.fault:
        raise ConfigError(answered.fault)
    return answered.engines


def _write(path: Path, content: StrictModel) -> None:
    unfinished = path.with_name(f"unfinished-{path.name}")
    unfinished.write_text(content.model_dump_json(), encoding="utf-8")
    unfinished.rename(path)


class FleetRequests:
    """Carries out the requests to a run."""

    def __init__(self, lock: DriverLock, pool: EnginePool) -> None:
        self._folder, self._pool = lock.own, pool

    def look(self) -> None:
        """Answer the requests that are there."""
        with contextlib.suppress(OSError):  # the disk is full: nobody gets an answer
            for path in sorted(self._folder.glob(f"{REQUEST}*")):
                content = path.read_bytes()
                path.unlink()
                try:
                    fault = self._carry_out(FleetRequest.model_validate_json(content))
                except ValueError as error:
                    fault = f"the run cannot read the request, of another version? {first_line(error)}"
                engines = [] if fault else [_row(*one) for one in self._pool.states()]
                _write(path.with_name(path.name.replace(REQUEST, ANSWER)), FleetAnswer(fault=fault, engines=engines))

    def _carry_out(self, request: FleetRequest) -> str:
        """Add and remove engines; return why not, if not."""
        if not self._pool.can_change and (request.add or request.drain):
            return (
                "engines of this run cannot be added or removed: they share accelerators with the trainer, or their "
                "weights are files in one machine's memory (train.weights_folder) where train.ray_address may have more"
            )
        there = {handle.engine_id: handle for handle in self._pool if handle.engine_id is not None}
        leaving: dict[int, None] = {}
        for name in request.drain:
            named = [one for one, handle in there.items() if name in (str(one), _host(handle))]
            if starting := [one for one in self._pool if one.engine_id is None and name == _host(one)]:
                return f"--drain {name}: an engine starts there, place {starting[0].place}; ask again when it is up"
            if not named:
                known = ", ".join(map(str, there))
                return f"--drain must be one of the engines {known}, or the machine of one, got {name}"
            leaving |= dict.fromkeys(named)
        if len(leaving) == len(there) and leaving:
            return f"--drain must leave an engine, got all {len(there)}"
        for _ in range(request.add):
            self._pool.add()
        for engine in leaving:
            self._pool.remove(engine, notice_s=request.notice_s)
        return ""


def _host(handle: EngineHandle) -> str:
    return handle.engine.host if isinstance(handle.engine, OnHost) else ""


def _row(handle: EngineHandle, state: Any) -> EngineRow:
    return EngineRow(
        engine=handle.engine_id,
        place=handle.place,
        machine=_host(handle),
        state=state,
        version=None if handle.version < 0 else handle.version,
        requests=len(handle.asked),
    )
