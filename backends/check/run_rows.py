"""A check of a run of a few optimizer steps: weight updates, agreement, what its rewards teach."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from backends.check.expected import Expected
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import loading_s
from pipelinerl.hardware.tables import WeightTransferConfig
from pipelinerl.records.check_report import CheckRow, wrong
from pipelinerl.records.reports import RunReport, UpdateReport
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import RolloutScored, StartRollout

MOST_LOST = 0.1
"""Share of the effective sample size that arithmetic may cost: more, and engine and trainer have different weights.

Weights w = pi/mu of log-normal spread have KL = s^2 / 2 and ESS = exp(-s^2), so ESS = exp(-2 KL).
"""


def run_rows(
    report: RunReport, folder: Path, expected: Expected, *, weights: dict[str, Any], weights_gb: float
) -> list[CheckRow]:
    """Judge a run.

    Args:
        report: Of the few steps.
        folder: Where they were recorded.
        expected: What the catalogue says.
        weights: The table ``hardware.weights`` that was fitted to them; empty: nothing was published.
        weights_gb: Of the model, in the type of the engines (GB).
    """
    text = f"{report.optimizer_steps}, {report.tokens_per_s:,.0f} tokens/s, {report.rollouts.failed} rollouts failed"
    rows = [CheckRow(what="optimizer steps", measured=text)]
    if weights and report.updates is not None:
        rows += _weight_rows(report.updates, expected, weights, weights_gb)
    rows += _agreement(report, expected.config)
    return [*rows, _signal_row(expected.config, folder)]


def _weight_rows(
    update: UpdateReport, expected: Expected, weights: dict[str, Any], weights_gb: float
) -> list[CheckRow]:
    way_s = loading_s(WeightTransferConfig.model_validate(weights))
    text = f"{weights_gb:.3g} GB in {way_s:.3g} s ({weights_gb / way_s if way_s else math.inf:.3g} GB/s)"
    advice = "look at the network that leads to rank 0's address, at train.transport, and at rank 0's log"

    times = {name: getattr(update, name) for name in ("pause_s", "transfer_s", "resume_s")}
    still = ", ".join(f"{name[:-2]} {seconds:.3g} s" for name, seconds in times.items())
    return [
        expected.seconds(
            "weights, trainer to all engines", text, way_s, lambda values: loading_s(expected.weights(values)), advice
        ),
        expected.seconds(
            "  an engine stands still",
            still,
            sum(times.values()),
            lambda values: expected.weights(values).pause_s,
            advice,
        ),
    ]


def _agreement(report: RunReport, config: RunConfig) -> list[CheckRow]:
    assert config.train is not None
    floor = None if report.mismatch is None else report.mismatch.kl_at_lag_0
    if floor is None:
        return []
    most = -math.log(1 - MOST_LOST) / 2
    text = f"{floor:.1e} nats per token between engine and trainer, of the same weights"
    if config.train.sampling.leaves_words_out:
        return [CheckRow(what="agreement", measured=text, expected="nothing: sampling leaves words out")]
    if not floor <= most:
        return [wrong("agreement", text, f"above {most:.2g} it is no rounding: engines have other weights or settings")]
    return [
        CheckRow(what="agreement", measured=text, expected=f"at most {most:.2g}: {MOST_LOST:.0%} of the samples' worth")
    ]


def _signal_row(config: RunConfig, folder: Path) -> CheckRow:
    """Say how many groups have equal rewards: they teach nothing."""
    prompts: dict[int, int] = {}
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for record in Trace(folder / TRACE_FILE).records():
        if isinstance(record.command, StartRollout):
            prompts[record.command.rollout_id] = record.command.prompt_id
        elif isinstance(record.event, RolloutScored):
            rewards[prompts[record.event.rollout_id]].append(record.event.reward)
    size = config.workload.group_size
    whole = [some for some in rewards.values() if len(some) == size]
    equal = sum(len(set(some)) == 1 for some in whole)
    text = f"{equal} of {len(whole)} groups have equal rewards"
    if size == 1 or not equal:
        return CheckRow(what="signal", measured=text)
    if equal == len(whole):
        return wrong("signal", text, "nothing can be learned: take other problems, or another model")
    filtered = config.scheduler.filter_no_signal
    advice = "" if filtered else "scheduler.filter_no_signal = true trains on the others only"
    return CheckRow(what="signal", measured=text, advice=advice)
