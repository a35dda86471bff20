"""Simulate one run, or one batch alone."""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, SchedulerConfig
from pipelinerl.errors import ConfigError, RunInterruptedError, install
from pipelinerl.hardware.costs import PhaseSwitchConfig, TrainingConfig, training_cost
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import METRICS_FILE, check_vacant
from pipelinerl.records.step_ledger import Step, StepLedger
from pipelinerl.records.steps import StepRow
from pipelinerl.scheduler.kinds import check_lags
from sim.cluster import SimulatedCluster
from sim.parallel import on_interrupt
from sim.workload import Workload

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
    cluster = SimulatedCluster(config, warn=LOG.warning)  # first: it finds what is wrong with the input
    if config.policy is not None:
        return _simulate_learning(config, out=out, trace=trace, on_step=on_step)
    recording = Recording(config, out=out, trace=trace, on_step=on_step)
    try:
        with on_interrupt(lambda *_: cluster.interrupt()), no_garbage_collection():
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
            with on_interrupt(lambda *_: cluster.interrupt()):
                cluster.run(recording.recorder)
        finally:
            drafted = {"tokens_per_step": cluster.measured().tokens_per_step}
            report = recording.finish(learner.summary().model_copy(update=drafted))
    return report


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


# --------------------------------------------------------- one batch alone: seconds to generate it and to train on it

BATCHES = 4
"""Batches averaged over (count)."""
STEADY_FROM, STEADY = 6, 16
"""RL steps, or optimizer steps, at the start of a short run that are left out, and those averaged over (count)."""
MOST_ROLLOUTS = 50_000
"""Rollouts of a short run from which on it has fewer steps: steps of many rollouts differ less (count)."""


def rollout_batch_s(config: RunConfig) -> float:
    """Return the seconds in which empty engines generate one batch, from the first command to the last score.

    A batch: sequences of one RL step, B, or B·G if conventional. Raises ConfigError as ``simulate``.
    """
    hardware = resolved_hardware(config).model_copy(
        update={
            "training": TrainingConfig(token_s=0.0),
            "weights": WeightTransferConfig(),
            "switch": PhaseSwitchConfig(),
        }
    )
    scheduler = config.scheduler
    steps = scheduler.optimizer_steps_per_rl_step if config.colocated else 1
    alone = config.model_copy(
        update={
            "fleet": None,
            "faults": None,
            "optimizer_steps": BATCHES * steps,
            "cluster": config.cluster.model_copy(update={"accelerators": config.generation_accelerators}),
            "scheduler": SchedulerConfig(
                kind="conventional",
                train_batch_size=scheduler.train_batch_size,
                generation_batch_size=scheduler.generation_batch_size,
                optimizer_steps_per_rl_step=steps,
            ),
            "hardware": hardware,
        }
    )
    return float(simulate(alone).duration_s) / BATCHES


def train_step_s(config: RunConfig) -> float:
    """Return the seconds of an optimizer step on a batch of the run's lengths; ConfigError as ``simulate``."""
    cost = training_cost(resolved_hardware(config).training, training_accelerators=config.training_accelerators)
    workload = Workload(config.workload, seed=config.seed)
    batch, micro_batch = config.scheduler.train_batch_size, config.scheduler.micro_batch
    groups = [workload.group(one, one) for one in range(BATCHES * batch // config.workload.group_size)]
    lengths = [group.prompt_tokens + length for group in groups for length in group.lengths]
    starts = range(0, len(lengths), micro_batch)
    work_s = sum(cost.seconds(lengths[start : start + micro_batch], completes_step=False) for start in starts)
    return cost.step_s + work_s / BATCHES


def measured_steps(config: RunConfig) -> list[StepRow]:
    """Return the steps of a short run without its start; the first only dates the second. Raises as ``simulate``."""
    rows: list[StepRow] = []
    start = _short_run(config, rows)[1]
    return rows[start - 1 :]


def busy_engines(config: RunConfig) -> float:
    """Return the share of a short run in which an engine generates, mean over engines; raises as ``simulate``."""
    return _short_run(config, [])[0].utilisation.generation


def _short_run(config: RunConfig, rows: list[StepRow]) -> tuple[RunReport, int]:
    """Simulate a short run, adding its steps to ``rows``; return its report, and the steps of its start (count)."""
    scheduler = config.scheduler
    rl_step = scheduler.optimizer_steps_per_rl_step if scheduler.schedule.has_rl_steps else 1
    start, steady, rollouts = STEADY_FROM, STEADY, rl_step * scheduler.train_batch_size
    if (start + steady) * rollouts > MOST_ROLLOUTS:
        in_flight = 0 if config.colocated else config.num_engines * scheduler.generation_batch_size
        start = min(start, 1 + -(-2 * in_flight // rollouts))
        steady = min(steady, max(4 if in_flight else 1, MOST_ROLLOUTS // rollouts - start))
    short = config.model_copy(update={"optimizer_steps": (start + steady) * rl_step})
    return simulate(short, on_step=rows.append), start * rl_step
