"""Train for real: check the run file, make the parts of the run, drive it, keep its results."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, assert_never

from backends.checkpoint import Checkpoint, CheckpointKeeper, read_newest
from backends.driver import Driver
from backends.garbage import imports_left_alone
from backends.interface import Backend, Parts
from backends.metrics_log import MetricsLog
from backends.preflight import check_run, evaluation_task, task_of
from backends.samples_log import SamplesLog
from backends.vllm_deepspeed import VLLMDeepSpeed
from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import TrainConfig, VLLMConfig
from pipelinerl.errors import ConfigError, TrainerLostError
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import LOGS_FOLDER, check_vacant
from pipelinerl.records.steps import StepRow
from pipelinerl.rl.problems import Task

LOG = logging.getLogger("pipelinerl")
MODEL_FOLDER = "model"
"""Folder of a run's trained model."""

Progress = Callable[[StepRow, dict[str, float]], None]


def drive(
    config: RunConfig,
    *,
    parts: Parts,
    task: Task | None,
    out: Path,
    evaluation_task: Task | None = None,
    checkpoint: Checkpoint | None = None,
    on_step: Progress | None = None,
    trial: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> RunReport:
    """Run with these parts, and keep the run in a folder.

    If the trainer is lost, all parts are shut down and started again, and the run goes on from its newest checkpoint,
    as after ``--resume``: what was recorded since then is cut off.

    On Ctrl-C the run ends as soon as the trainer is done with what it does, a checkpoint is written, and what was
    finished is kept. A second Ctrl-C ends it at once.

    Args:
        config: What to run; ``config.train`` is there.
        parts: Engines, trainer and the rest; started and shut down here.
        task: Problems and rewards. None: these are the environments' of ``config.environment``.
        out: The run's folder; new, or that of ``checkpoint``.
        checkpoint: Checkpoint to resume; its trainer's part is loaded by the trainer.
        evaluation_task: Those of evaluations. None: the held-out ones of ``task``.
        on_step: Called with the row and the metrics of each optimizer step.
        trial: Awaited when all parts are up; no checkpoint and no model are kept then. None: the run is none.

    Returns:
        The numbers of the run, as summary.json has them.

    Raises:
        ConfigError: If the folder holds a run already; nothing is written.
        RunFailedError: If the run could not reach its end; the folder holds what happened until then.
        BackendError: If the trainer, the reference model, or too many engines, were lost; the folder holds what
            happened until then.
    """
    assert config.train is not None
    limit = config.train.trainer.restarts
    before = 0 if checkpoint is None else checkpoint.state.metrics.trainer_restarts
    for restarts in range(limit + 1):
        try:
            return _drive_on(
                config,
                parts=parts,
                task=task,
                out=out,
                evaluation_task=evaluation_task,
                checkpoint=checkpoint,
                on_step=on_step,
                trial=trial,
            )
        except TrainerLostError as error:
            lost = error
        if restarts < limit:
            try:
                checkpoint = read_newest(out, config)
            except ConfigError:  # there is none yet
                raise lost from None
            checkpoint.state.metrics.trainer_restarts = before + restarts + 1
            LOG.warning("%s; the run goes on from step %d", lost, checkpoint.state.version)
    raise TrainerLostError(f"{lost} (train.trainer.restarts={limit} are used up)")


def _drive_on(
    config: RunConfig,
    *,
    parts: Parts,
    task: Task | None,
    out: Path,
    evaluation_task: Task | None,
    checkpoint: Checkpoint | None,
    on_step: Progress | None,
    trial: Callable[[], Coroutine[Any, Any, None]] | None,
) -> RunReport:
    """Run from the start or a checkpoint, until the end or the loss of something; see ``drive``."""

    def step_done(row: StepRow) -> None:
        metrics = driver.metrics.take(row, recording.ledger)
        log.write(row.step, metrics)
        if on_step is not None:
            on_step(row, metrics)

    mark = None if checkpoint is None else checkpoint.recording
    recording = Recording(config, out=out, trace=True, on_step=step_done, go_on_from=mark)
    steps_done = 0 if mark is None else len(mark.ledger.steps)
    log = MetricsLog(out, config, go_on_after=steps_done)
    driver = Driver(
        config,
        parts=parts,
        task=task,
        evaluation_task=evaluation_task,
        logs=out / LOGS_FOLDER,
        samples=SamplesLog(out, parts.codec, go_on_after=steps_done),
        recorder=recording.recorder,
        keeper=None if trial else CheckpointKeeper(out, config, recording),
        state=None if checkpoint is None else checkpoint.state,
        resume_from=None if checkpoint is None else checkpoint.trainer_folder,
        export_to=None if trial else out / MODEL_FOLDER,
        when_up=trial,
    )
    with closing(log):
        try:
            asyncio.run(_driven(driver))
        finally:
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
    """Train for real; see ``drive``.

    Args:
        config: What to run.
        out: The run's folder: new, or with ``resume`` that of a run that has left a checkpoint.
        resume: Whether to resume from the newest checkpoint.
        on_step: Called with the row and the metrics of each optimizer step.
        backend: Makes engines, trainer and the rest; None: the one that the run file names.

    Returns:
        The numbers of the run, as summary.json has them.

    Raises:
        ConfigError: If the input is wrong; nothing has been started or written then.
        RunFailedError: If the run could not reach its end; the folder holds what happened until then.
        BackendError: If the trainer, the reference model, or too many engines, were lost; the folder holds what
            happened until then.
    """
    train = check_run(config)
    backend = backend or backend_of(train)
    backend.check(config)
    task = task_of(config)
    held_out = evaluation_task(config, task)
    checkpoint = read_newest(out, config) if resume else None
    if not resume:
        check_vacant(out)
    with backend.open(config, logs=out / LOGS_FOLDER) as parts, imports_left_alone():
        return drive(
            config,
            parts=parts,
            task=task,
            evaluation_task=held_out,
            out=out,
            checkpoint=checkpoint,
            on_step=on_step,
        )


def backend_of(train: TrainConfig) -> Backend:
    """Return the backend that a run file names: the kinds of its tables ``train.engine`` and ``train.trainer``."""
    match train.engine:
        case VLLMConfig():
            return VLLMDeepSpeed()
        case _:
            assert_never(train.engine)


async def _driven(driver: Driver) -> None:
    with _interruptible(driver):
        await driver.run()


ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run: Ctrl-C, and what job schedulers and ``timeout`` send."""


@contextmanager
def _interruptible(driver: Driver) -> Iterator[None]:
    """Turn the first of ``ENDING`` into a clean end, where this thread may and the process does not ignore it."""
    heard = [one for one in ENDING if signal.getsignal(one) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        heard = []
    loop = asyncio.get_running_loop()

    def listen_no_more() -> None:
        for one in heard:
            loop.remove_signal_handler(one)

    def interrupt() -> None:
        listen_no_more()  # the second one ends the process
        driver.interrupt()

    for one in heard:
        loop.add_signal_handler(one, interrupt)
    try:
        yield
    finally:
        listen_no_more()
