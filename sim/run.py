"""Simulate one run."""

from __future__ import annotations

import gc
import importlib.util
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, RunInterruptedError, install
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import METRICS_FILE, check_vacant
from pipelinerl.records.step_ledger import Step, StepLedger
from pipelinerl.records.steps import StepRow
from pipelinerl.scheduler.kinds import check_lags
from sim.cluster import SimulatedCluster

LOG = logging.getLogger("pipelinerl")


def simulate(
    config: RunConfig, *, out: Path | None = None, trace: bool = False, on_step: Callable[[StepRow], None] | None = None
) -> RunReport:
    """Simulate a run; the same configuration gives the same numbers and the same bytes.

    On Ctrl-C the run ends at the next event, and its output until then is kept. ``out``: folder to keep the run in,
    with ``trace`` also every event and command; None keeps only the report returned. ``on_step`` gets each row as soon
    as its optimizer step is done.

    Raises:
        ConfigError: If a file of the configuration is wrong, or the folder holds a run; nothing is written.
        RunFailedError: If the run could not reach its end; the folder holds the events until then.
        SchedulerError: If its lags break the promise of its kind of schedule.
    """
    cluster = SimulatedCluster(
        config, warn=LOG.warning
    )  # before anything is written: it finds what is wrong with the input
    if config.policy is not None:
        return _simulate_learning(config, out=out, trace=trace, on_step=on_step)
    recording = Recording(config, out=out, trace=trace, on_step=on_step)
    try:
        with _interruptible(cluster), no_garbage_collection():
            cluster.run(recording.recorder)
    finally:
        report = recording.finish(cluster.measured())
    check_lags(config.scheduler, report.lag.max, optimizer_steps=report.optimizer_steps)
    return report


def simulate_steps(config: RunConfig, *, enough: Callable[[Sequence[Step]], bool] = lambda _: False) -> list[Step]:
    """Simulate a run to its end, or until its steps are ``enough``; return these. Raises as ``simulate``."""
    cluster = SimulatedCluster(config)

    def step_done(steps: Sequence[Step]) -> None:
        if enough(steps):
            cluster.interrupt()

    ledger = StepLedger(step_done)
    with no_garbage_collection(), suppress(RunInterruptedError):
        cluster.run(ledger)
    lag_max = max((step.lag_max for step in ledger.steps), default=0)
    check_lags(config.scheduler, lag_max, optimizer_steps=len(ledger.steps))
    return ledger.steps


def check_installed(config: RunConfig) -> None:
    """Raise ConfigError if the run needs a package that is not installed; imports nothing."""
    if config.policy is not None and importlib.util.find_spec("torch") is None:
        raise ConfigError(f"[policy] needs torch: {install('learn')}")


def _simulate_learning(
    config: RunConfig, *, out: Path | None, trace: bool, on_step: Callable[[StepRow], None] | None
) -> RunReport:
    """Simulate a run whose answers come from a policy that learns; as ``simulate``, and ``metrics.jsonl`` besides."""
    try:
        from sim.learning.loop import Learner, one_thread  # noqa: PLC0415 - torch only where a policy learns
    except ModuleNotFoundError as error:
        raise ConfigError(f"[policy] needs {error.name}: {install('learn')}") from None

    if out is not None:
        check_vacant(out)  # not after the base model has been made
    with one_thread():
        learner = Learner(config)
        cluster = SimulatedCluster(config, policy=learner, warn=LOG.warning)

        def step_done(row: StepRow) -> None:
            metrics = learner.take_metrics(row)
            if out is not None:
                recording.append(METRICS_FILE, {"step": row.step, **metrics})
            if on_step is not None:
                on_step(row)

        recording = Recording(config, out=out, trace=trace, on_step=step_done)
        try:
            with _interruptible(cluster):
                cluster.run(recording.recorder)
        finally:
            report = recording.finish(learner.summary())
    return report


@contextmanager
def _interruptible(cluster: SimulatedCluster) -> Iterator[None]:
    """Turn Ctrl-C into a clean end of the run, where this thread may and the process does not ignore it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda _signal, _frame: cluster.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the collector of reference cycles off: a run makes none, and looking for them costs a tenth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
