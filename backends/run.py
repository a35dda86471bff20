"""Train for real: check the run file, make the parts of the run, drive it, keep its results."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from backends.driver.checkpoint import Checkpoint, read_newest
from backends.driver.faults import check_faults
from backends.driver.lifecycle import Driver
from backends.driver.metrics import MetricsLog
from backends.driver.tasks import DriverLoop
from backends.interface import Backend, Parts
from backends.kinds import backend_of, with_local_model
from backends.owner import DriverLock, driving
from backends.preflight import check_run, evaluation_task, task_of
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, TrainerLostError, TrainerUnplacedError
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import LOGS_FOLDER, check_vacant
from pipelinerl.records.steps import StepRow
from pipelinerl.rl.problems import Task

LOG = logging.getLogger("pipelinerl")
NO_WORD = (
    "pipelinerl: the run's process has ended without a word: killed, out of memory, or by a reward, which "
    "train.task.reward_workers keeps apart; --resume goes on from the last checkpoint, if there is one"
)

Progress = Callable[[StepRow, dict[str, float]], None]


@contextmanager
def _frozen_imports() -> Iterator[None]:
    """Keep garbage collections off torch and transformers: they stopped the driver 0.3 s every few seconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _last_word() -> Iterator[None]:
    """Have another process print ``NO_WORD`` if this one ends before this block, as by ``os._exit`` in a reward."""
    words = ["sh", "-c", 'read -r end || echo "$0" >&2', NO_WORD]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as listener:
        try:
            yield
        finally:
            listener.communicate(b"end\n")


def drive(
    config: RunConfig,
    *,
    parts: Parts,
    task: Task | None,
    lock: DriverLock,
    evaluation_task: Task | None = None,
    checkpoint: Checkpoint | None = None,
    on_step: Progress | None = None,
    trial: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> RunReport:
    """Run with these parts, which are started and shut down here, and keep the run in the folder of ``lock``.

    If the trainer is lost, all parts are started again, and the run goes on from its newest checkpoint, as after
    ``--resume``: later records are cut off. On Ctrl-C the run ends after the trainer's present call, and a checkpoint
    is written; a second one ends it at once. ``lock`` holds a new folder, or that of ``checkpoint``. ``on_step`` gets
    the row and the metrics of each optimizer step. For the others see ``Driver``.

    Raises:
        ConfigError: If the folder holds a run already; nothing is written.
        RunFailedError: If the run could not reach its end; the folder holds all until then. Or if another driver has
            taken over.
        BackendError: If the trainer, the reference model, or too many engines, were lost; likewise.
    """
    if config.faults:
        check_faults(config, parts)
    limit = config.train_table.trainer.restarts
    before = 0 if checkpoint is None else checkpoint.state.metrics.trainer_restarts
    new = partial(Driver, config, parts=parts, task=task, evaluation_task=evaluation_task, lock=lock, trial=trial)
    for restarts in range(limit + 1):
        try:
            return _attempt(config, new, lock=lock, checkpoint=checkpoint, on_step=on_step)
        except TrainerUnplacedError:
            raise  # nor would it start the next time
        except TrainerLostError as error:
            lost = error
        if restarts < limit:
            try:
                checkpoint = read_newest(lock.folder, config)
            except ConfigError:  # there is none yet
                raise lost from None
            checkpoint.state.metrics.trainer_restarts = before + restarts + 1
            LOG.warning("%s; the run goes on from step %d", lost, checkpoint.state.version)
    raise TrainerLostError(f"{lost} (train.trainer.restarts={limit} are used up)")


def _attempt(
    config: RunConfig,
    new: Callable[..., Driver],
    *,
    lock: DriverLock,
    checkpoint: Checkpoint | None,
    on_step: Progress | None,
) -> RunReport:
    def step_done(row: StepRow) -> None:
        lock.check()
        metrics = driver.metrics.take(row, recording.ledger)
        log.write(row.step, metrics)
        if on_step is not None:
            on_step(row, metrics)

    mark, out = None if checkpoint is None else checkpoint.recording, lock.folder
    recording = Recording(config, out=out, trace=True, on_step=step_done, go_on_from=mark, unfinished=lock.unfinished)
    go_on_after = len(recording.ledger.steps)
    with closing(recording), closing(MetricsLog(out, config, recording, go_on_after=go_on_after)) as log:
        driver = new(recording=recording, checkpoint=checkpoint)
        try:
            with asyncio.Runner(loop_factory=DriverLoop) as runner:
                runner.run(_driven(driver))
        finally:
            lock.check()
            summary = recording.finish(driver.summary())
    return summary


def train(
    config: RunConfig,
    *,
    out: Path,
    resume: bool = False,
    on_step: Progress | None = None,
    backend: Backend | None = None,
) -> RunReport:
    """Train for real into a new folder, or with ``resume`` one with a checkpoint; see ``drive`` for further errors.

    If machines are gone, the run goes on with as many ranks as there are accelerators for, unless engines share them.
    ``backend`` None: of the run file. ``ConfigError`` if the input is wrong; nothing has been started or written then.
    """
    train = check_run(config)
    backend = backend or backend_of(train)
    located = with_local_model(config)
    backend.check(located)
    task = task_of(config)
    held = evaluation_task(config, task)
    if not resume:
        check_vacant(out)
    with driving(out) as lock:
        checkpoint = read_newest(out, config) if resume else None
        with _frozen_imports(), _last_word():
            while True:
                with backend.open(located, logs=out / LOGS_FOLDER) as parts:
                    try:
                        return drive(
                            config, parts=parts, task=task, evaluation_task=held, lock=lock, checkpoint=checkpoint,
                            on_step=on_step,
                        )  # fmt: skip
                    except TrainerUnplacedError as lost:
                        located, checkpoint = _with_fewer_ranks(located, parts, lost, out=out, check=backend.check)
                config = config.model_copy(update={"cluster": located.cluster})


def _with_fewer_ranks(
    config: RunConfig, parts: Parts, lost: TrainerLostError, *, out: Path, check: Callable[[RunConfig], None]
) -> tuple[RunConfig, Checkpoint]:
    """Return a run with as many ranks as there are accelerators for; raise ``lost`` if that would not help."""
    engines, before = config.generation_accelerators, config.cluster.accelerators
    there = engines if parts.accelerators is None or config.colocated else parts.accelerators()
    if len(parts.engines) > config.num_engines:  # those that were added give their accelerators back
        there = min(there, before)
    elif there >= before:
        raise lost
    for number in range(there, engines, -1):
        fewer = config.model_copy(update={"cluster": config.cluster.model_copy(update={"accelerators": number})})
        with contextlib.suppress(ConfigError):  # the trainer cannot be split over them, or there is no checkpoint
            check(fewer)
            checkpoint = read_newest(out, fewer)
            checkpoint.state.metrics.trainer_restarts += 1
            what = f"step {checkpoint.state.version} with {number - engines} of {before - engines} ranks"
            LOG.warning("%s; %d of %d accelerators are there; the run goes on from %s", lost, there, before, what)
            return fewer, checkpoint
    raise lost


ENDING = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and the signal of job schedulers and ``timeout``."""


async def _driven(driver: Driver) -> None:
    """Run; the first signal of ``ENDING`` ends cleanly, on the main thread and unless the process ignores it."""
    signals = [one for one in ENDING if signal.getsignal(one) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        signals = []
    loop = asyncio.get_running_loop()

    def listen_no_more() -> None:
        for one in signals:
            loop.remove_signal_handler(one)

    def interrupt() -> None:
        listen_no_more()  # the second one ends the process
        driver.interrupt()

    for one in signals:
        loop.add_signal_handler(one, interrupt)
    try:
        await driver.run()
    finally:
        listen_no_more()
