"""One batch alone: seconds to generate it and to train on it."""

from __future__ import annotations

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, SchedulerConfig
from pipelinerl.hardware.costs import PhaseSwitchConfig, TrainingConfig, training_cost
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.reports import RunReport
from pipelinerl.records.steps import StepRow
from sim.run import simulate
from sim.workload import Workload

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
