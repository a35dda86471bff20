"""How many environments? The same run with several numbers of them, and the knee of its throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipelinerl.config.run import CompareConfig, PlanConfig, RunConfig, Variant
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.comparison_report import ArmReport, EnvironmentsReport, EnvironmentsRow
from pipelinerl.records.reports import Bottleneck, Prices, steady_part
from pipelinerl.records.run_folder import ENVIRONMENTS_FILE, write_json
from sim.compare import compare
from sim.planning.space import with_values

SHARES_OF_SLOTS = (0.25, 0.5, 0.75, 1.0, 1.125, 1.25, 1.5, 2.0)
"""Environments tried by default, over the slots of all engines (no unit)."""
KNEE = 0.05
"""Share of the largest rate that the knee may lack."""


def counts_to_try(config: RunConfig) -> list[int]:
    """Return the numbers of environments to try: ``plan.environments``, or shares of the slots and the run file's."""
    assert config.environment is not None  # the caller has seen to it
    listed = config.plan and config.plan.environments
    return sorted(
        set(listed or [config.environment.count, *(round(one * config.num_slots) for one in SHARES_OF_SLOTS)])
    )


def environments(
    config: RunConfig,
    *,
    out: Path | None = None,
    workers: int | None = None,
    on_done: Callable[[], None] = lambda: None,
    weights: Mapping[bool, WeightTransferConfig] | None = None,
) -> EnvironmentsReport:
    """Simulate a run with several numbers of environments; on Ctrl-C the runs that have ended are kept and compared.

    The ``plan`` table of ``config`` has numbers, prices, and the optimizer steps of each simulation. ``out``: folder of
    the runs and environments.json. ``on_done`` is called after each run. Others: as of ``sim.compare.compare``.

    Raises:
        ConfigError: If the input is wrong; nothing is written.
        RunFailedError: If no run has ended.
    """
    if config.environment is None:
        raise ConfigError("environments needs a table [environment]: with it rollouts have turns")
    plan = config.plan or PlanConfig()
    arms = [Variant(name=str(one), set=[f"environment.count={one}"]) for one in counts_to_try(config)]
    steps = min(plan.simulate_steps, config.optimizer_steps)
    table = CompareConfig(arms=arms, scenarios=[Variant(name="environments")], baseline=arms[0].name)
    compared = compare(
        config.model_copy(update={"optimizer_steps": steps, "compare": table}),
        out=out,
        workers=workers,
        on_done=lambda _cell, _failure: on_done(),
        weights=weights,
    )
    if not compared.arms:
        raise RunFailedError("; ".join(compared.failures) or "interrupted before the first run ended")
    rows = [_row(config, arm) for arm in compared.arms]
    most = max(row.rollouts_per_hour for row in rows)
    knee = next(row for row in rows if row.rollouts_per_hour >= (1 - KNEE) * most)
    report = EnvironmentsReport(
        accelerators=config.cluster.accelerators,
        slots=config.num_slots,
        rows=rows,
        knee=knee.count,
        verdict=_verdict(rows, knee),
        failures=compared.failures,
        complete=compared.complete,
    )
    if out is not None:
        write_json(out / ENVIRONMENTS_FILE, report.to_dict())
    return report


def _row(config: RunConfig, arm: ArmReport) -> EnvironmentsRow:
    report, count = arm.summary, int(arm.name)
    assert report.environments is not None
    steps, scheduler = report.steps, config.scheduler
    start, end = steady_part(
        len(steps), scheduler.optimizer_steps_per_rl_step if scheduler.schedule.has_rl_steps else 1
    )
    seconds = steps.time_s[end - 1] - (steps.time_s[start - 1] if start else 0.0)
    rate = 3600 * float(steps.samples[start:end].sum() / seconds)
    tokens_K = steps.tokens[start:end]
    usd_per_hour = Prices.of(config).rates(with_values(config, environment={"count": count})).usd_per_hour
    return EnvironmentsRow(
        count=count,
        rollouts_per_hour=rate,
        in_use_mean=report.environments.in_use_mean,
        generation=report.utilisation.generation,
        training=report.utilisation.training,
        lag_mean=float(steps.lag_mean[start:end] @ tokens_K / tokens_K.sum()),
        seconds=report.environments.seconds,
        bottleneck=report.bottleneck,
        usd_per_1000_rollouts=None if usd_per_hour is None else 1000 / rate * usd_per_hour,
        folder=arm.folder,
    )


def _verdict(rows: Sequence[EnvironmentsRow], knee: EnvironmentsRow) -> str:
    """Return the answer in words: the knee, the effect of fewer and of more, and the cheapest number."""
    fewest, last = rows[0], rows[-1]
    if knee is last:
        text = f"no knee up to {last.count} environments: {_rate(last)}, {last.bottleneck}-bound; try more"
    else:
        text = f"the knee is at {knee.count} environments: {_rate(knee)}"
    if knee is not fewest:
        text += f"; {fewest.count} give {fewest.rollouts_per_hour / knee.rollouts_per_hour:.0%} of that"
        text += ", as environments bind" if fewest.bottleneck is Bottleneck.ENVIRONMENT else f" ({fewest.bottleneck})"
    if knee is not last:
        worst = min(rows[rows.index(knee) + 1 :], key=lambda row: row.rollouts_per_hour)
        lost = 1 - worst.rollouts_per_hour / knee.rollouts_per_hour
        if lost > KNEE:
            longer = f"a rollout has an engine {worst.seconds.engine / knee.seconds.engine:.1f} times as long"
            text += f"; more do harm: {worst.count} give {lost:.0%} less, {longer}"
        else:
            text += f"; more give nothing: {last.count} give {_rate(last)} ({last.bottleneck}-bound)"
    priced = [(row.usd_per_1000_rollouts, row) for row in rows if row.usd_per_1000_rollouts is not None]
    if priced:
        cost, cheapest = min(priced, key=lambda pair: pair[0])
        text += f"; {cheapest.count} are the cheapest, {cost:,.0f} USD per 1000 rollouts"
    return text


def _rate(row: EnvironmentsRow) -> str:
    return f"{row.rollouts_per_hour:,.0f} rollouts/h"
