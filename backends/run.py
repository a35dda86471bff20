"""Train for real: check everything, start Ray, drive the run, keep what it gave."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from backends.checkpoint import Checkpoint, CheckpointKeeper, read_newest
from backends.driver import Driver
from backends.interface import Engine, Reference, Trainer
from backends.metrics_log import MetricsLog
from backends.preflight import check, check_evaluation
from backends.rollouts import Codec
from backends.transfer.group import WeightSyncGroup
from pipelinerl.config.run import RunConfig
from pipelinerl.records.ledger import StepRow
from pipelinerl.records.recording import Recording
from pipelinerl.records.run_folder import check_vacant
from pipelinerl.rl.tasks import Task, load_task

MODEL_FOLDER = "model"
"""Where a run folder keeps the trained model."""

Progress = Callable[[StepRow, dict[str, float]], None]


def drive(
    config: RunConfig,
    *,
    engines: Sequence[Engine],
    trainer: Trainer,
    reference: Reference | None = None,
    task: Task,
    codec: Codec,
    out: Path,
    checkpoint: Checkpoint | None = None,
    on_step: Progress | None = None,
    group: WeightSyncGroup | None = None,
) -> dict[str, Any]:
    """Run with these engines and this trainer, and keep the run in a folder.

    On Ctrl-C the run ends as soon as the trainer is done with what it does, a checkpoint is written, and what was
    finished is kept. A second Ctrl-C ends it at once.

    Args:
        config: What to run; ``config.train`` is there.
        engines: As many as ``config.num_engines``; started and shut down here.
        trainer: Started and shut down here.
        reference: The model at the start; there if ``loss.kl_coefficient`` is above 0. Started and shut down here.
        task: Problems and rewards.
        codec: Text to tokens and back.
        out: The run's folder; new, or that of ``checkpoint``.
        checkpoint: What to go on from; its trainer's part is loaded by ``trainer``.
        on_step: Called with the row and the metrics of each optimizer step.
        group: What weights are sent through; None: they lie where engines find them.

    Returns:
        The content of summary.json.

    Raises:
        ConfigError: If the folder holds a run already; nothing is written.
        RunFailedError: If the run could not reach its end; the folder holds what happened until then.
        BackendError: If the trainer, the reference model, or too many engines, were lost; the folder holds what
            happened until then.
    """

    def step_done(row: StepRow) -> None:
        metrics = driver.metrics.take(row, recording.accountant)
        log.write(row.step, metrics)
        if on_step is not None:
            on_step(row, metrics)

    mark = None if checkpoint is None else checkpoint.recording
    recording = Recording(config, out=out, trace=True, on_step=step_done, go_on_from=mark)
    log = MetricsLog(out, config, go_on_after=0 if mark is None else len(mark.accountant.steps))
    driver = Driver(
        config,
        engines=engines,
        trainer=trainer,
        reference=reference,
        task=task,
        codec=codec,
        recorder=recording.recorder,
        keeper=CheckpointKeeper(out, config, recording),
        state=None if checkpoint is None else checkpoint.state,
        resume_from=None if checkpoint is None else checkpoint.trainer_folder,
        export_to=out / MODEL_FOLDER,
        group=group,
    )
    with closing(log):
        try:
            asyncio.run(_driven(driver))
        finally:
            summary = recording.finish(driver.summary())
    return summary


def train(config: RunConfig, *, out: Path, resume: bool = False, on_step: Progress | None = None) -> dict[str, Any]:
    """Train with vLLM engines and a DeepSpeed trainer on Ray; see ``drive``.

    Args:
        config: What to run.
        out: The run's folder: new, or with ``resume`` that of a run that has left a checkpoint.
        resume: Whether to go on from the newest checkpoint.
        on_step: Called with the row and the metrics of each optimizer step.

    Returns:
        The content of summary.json.

    Raises:
        ConfigError: If the input is wrong; nothing has been started or written then.
        RunFailedError: If the run could not reach its end; the folder holds what happened until then.
        BackendError: If the trainer, the reference model, or too many engines, were lost; the folder holds what
            happened until then.
    """
    codec = check(config)
    assert config.train is not None
    task = load_task(config.train.task)
    check_evaluation(config, task)
    checkpoint = read_newest(out, config) if resume else None
    if not resume:
        check_vacant(out)
    from backends.placement import (
        make_engines,
        make_group,
        make_reference,
        make_trainer,
        ray_cluster,
        weights_folder,
    )

    with ray_cluster(config) as places, weights_folder(config) as folder:
        engines, trainer = make_engines(config, places), make_trainer(config, places, folder)
        return drive(
            config,
            engines=engines,
            trainer=trainer,
            reference=make_reference(config, places),
            task=task,
            codec=codec,
            out=out,
            checkpoint=checkpoint,
            on_step=on_step,
            group=make_group(config, engines, trainer),
        )


async def _driven(driver: Driver) -> None:
    with _interruptible(driver):
        await driver.run()


@contextmanager
def _interruptible(driver: Driver) -> Iterator[None]:
    """Turn the first Ctrl-C into a clean end of the run, where this thread may and the process does not ignore it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # the second one ends the process
        driver.interrupt()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
