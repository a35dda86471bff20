"""The report of a run, and of ``train --check``: the content of summary.json and check.json.

A key that is optional and absent is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import ConfigDict, PrivateAttr

from pipelinerl.config.run import PriceConfig, RunConfig
from pipelinerl.hardware.catalogue import Gpu, find_gpu
from pipelinerl.records.steps import STEPS_FILE, as_records, read_steps
from pipelinerl.rl.drift import EssBand
from pipelinerl.rl.ess import EssReport, MismatchReport
from pipelinerl.scheduler.events import DiscardReason
from pipelinerl.util.strict_model import Report, data_frame


class LagReport(Report):
    """Lag of the trained tokens (optimizer steps), every token counted once."""

    mean: float
    """Mean lag of the trained tokens (optimizer steps)."""
    p50: int
    """Median lag (optimizer steps)."""
    p95: int
    """95th percentile (optimizer steps)."""
    p99: int
    """99th percentile (optimizer steps)."""
    max: int
    """Largest lag (optimizer steps)."""
    in_flight_mean: float
    """Part of ``lag.mean`` in flight (optimizer steps)."""
    in_queue_mean: float
    """Part of ``lag.mean`` in queue (optimizer steps)."""


class RolloutCounts(Report):
    """Rollouts by outcome (counts)."""

    started: int
    """Started for the first time (rollouts)."""
    finished: int
    """Generated to the end (rollouts)."""
    trained: int
    """As ``samples_trained`` (rollouts)."""
    discarded: int
    """Finished, never trained on (rollouts)."""
    aborted: int
    """Ended by the scheduler before they finished (rollouts)."""
    failed: int
    """Failed; simulated: by their environments only (rollouts)."""
    unfinished: int
    """The rest when the run stopped (rollouts)."""
    interruptions: int
    """Restarts of rollouts that a weight update of kind ``abort``, or the loss of their engine, ended (times)."""
    preemptions: int | None = None
    """Preemptions for want of KV cache; simulated only (times)."""


class TokenCounts(Report):
    """Generated tokens by outcome of their rollouts (counts), prompts not counted."""

    generated: int
    """Generated, kept tokens counted once (tokens)."""
    trained: int
    """As ``tokens_trained`` (tokens)."""
    discarded: int
    """Of discarded rollouts (tokens)."""
    aborted: int
    """Of aborted rollouts (tokens)."""
    failed: int
    """Of rollouts that failed after they had finished; others are unknown (tokens)."""
    unfinished: int
    """The rest of ``generated`` (tokens)."""


class LengthReport(Report):
    """Mean length of answers (tokens)."""

    finished_mean: float
    """Mean of the finished rollouts (tokens)."""
    trained_mean: float
    """Mean of the trained rollouts (tokens)."""


class Utilisation(Report):
    """Shares of the time in which each side is at work (0 to 1)."""

    generation: float
    """Busy engine-seconds / those that engines are there; busy: a rollout in progress, not paused (share)."""
    training: float
    """``seconds.training`` / ``duration_s`` (share)."""


class TrainerSeconds(Report):
    """The parts of the trainer's wall time (s)."""

    generating: float
    """Conventional: neither training nor publishing; pipeline: 0 (s)."""
    training: float
    """Working on micro-batches (s)."""
    publishing: float
    """Standing still to publish (s)."""
    waiting_for_data: float
    """Pipeline: the rest, waits for ``max_lag`` included; conventional: 0 (s)."""


class RolloutSeconds(Report):
    """Where the time of rollouts with turns goes, per finished rollout (s)."""

    environment: float
    """Reset and steps of its environment (s)."""
    waiting: float
    """Waiting for a slot (s)."""
    engine: float
    """Holding a slot: ``queue`` + ``prefill`` + ``decode`` (s)."""
    scoring: float
    """Being scored (s)."""
    queue: float | None = None
    """Of ``engine``: on its way, queued, or weights being loaded (s)."""
    prefill: float | None = None
    """Of ``engine``: its own prefill; simulated: that of others in its batch, too (s). Absent where unknown."""
    decode: float | None = None
    """Of ``engine``: decode steps (s). Absent where unknown."""

    @property
    def prefill_share(self) -> float:
        """Prefill over prefill and decode; 0 where they are not known."""
        return (self.prefill or 0.0) / max(1e-300, (self.prefill or 0.0) + (self.decode or 0.0))

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by place in the order of a turn; on an engine by part where known."""
        names = ["environment", "waiting", *(["engine"] if self.decode is None else ["queue", "prefill", "decode"])]
        return {name: getattr(self, name) for name in (*names, "scoring")}


class EnvironmentReport(Report):
    """Environments, and rollouts with turns."""

    count: int
    """``environment.count`` (environments)."""
    in_use_mean: float
    """Mean number in use (environments)."""
    turns_mean: float
    """Turns per finished rollout (turns)."""
    timeouts: int
    """Resets and steps that timed out (count)."""
    errors: int
    """Resets and steps that failed otherwise (count)."""
    retries: int
    """Resets and steps made again after a failure (count)."""
    expired: int
    """Rollouts that outlived ``lifetime_s`` (rollouts)."""
    seconds: RolloutSeconds
    """Time of all rollouts, unfinished ones included, over rollouts finished."""


class FleetReport(Report):
    """Engines that have joined and left, and what became of their rollouts."""

    engines_mean: float
    """Mean number of engines that are there (count)."""
    joined: int
    """Engines that joined after the start (count)."""
    left: int
    """Engines that left: failed, reclaimed, drained (count)."""
    moved: int
    """Times that a rollout had to leave such an engine before its end (count)."""
    moved_tokens: int
    """Tokens that these rollouts kept, and that another engine prefills again (tokens)."""
    lost_tokens: int | None = None
    """Tokens generated and lost, not in ``tokens.generated`` (tokens). Absent where not known."""
    step_s_p95: float | None = None
    """95th percentile of the time from one optimizer step to the next (s)."""


class FleetGroupReport(Report):
    """A group of simulated engines."""

    name: str
    """Name of the group."""
    engines: int
    """Its places (count)."""
    there_mean: float
    """Engines that are there, mean over the run (count)."""
    starting_mean: float
    """Engines that start, or load weights, before they join (count)."""
    training_mean: float
    """Lent engines whose accelerators are the trainer's (count)."""
    failed_mean: float
    """Places whose engine failed and is not back (count)."""
    reclaimed_mean: float
    """Places whose machine is not offered (count)."""
    failures: int
    """Engines that failed (count)."""
    reclaims: int
    """Engines that were reclaimed (count)."""
    gpus_paid: float
    """GPUs paid for, mean over the run: reserved ones always, spot ones while offered and not in repair, lent ones as
    part of the trainer (count)."""
    usd_per_gpu_hour: float | None = None
    """Their price (USD). Absent where it is not known."""
    usd: float | None = None
    """Money for them (USD). Absent without a price."""


class TrainerFaultsReport(Report):
    """Failures and checkpoints of a simulated trainer: in ``seconds.training``, or while it waits."""

    failures: int
    """Failures (count)."""
    checkpoint_s: float
    """Time in checkpoints (s)."""
    restart_s: float
    """Time in restarts (s)."""
    redone_s: float
    """Time in which work was done again (s)."""


class CapacityReport(Report):
    """What a simulated fleet offers."""

    groups: list[FleetGroupReport]
    """Groups of engines; empty if only the trainer fails."""
    trainer: TrainerFaultsReport | None = None
    """Failures of the trainer. Absent if it never fails and makes no checkpoints."""


class Reached(Report):
    """The time at which the mean reward reached a level."""

    time_s: float
    """Seconds since the start."""
    samples: float
    """Rollouts trained on until then (count)."""


class RewardReport(Report):
    """Mean reward of an optimizer step."""

    model_config = ConfigDict(allow_inf_nan=True)

    first: float
    """Mean reward of the first optimizer step."""
    last: float
    """Mean over the last tenth of the optimizer steps."""
    max: float
    """Largest of any optimizer step."""
    reached: dict[str, Reached]
    """For each of the levels 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95 that was reached: ``time_s`` and ``samples`` at which
    the mean of 8 optimizer steps first was there (s, rollouts)."""


class UpdateReport(Report):
    """Weight updates of engines; means over updates (s)."""

    count: int
    """Weight updates, one per engine and publication (times)."""
    pause_s: float
    """Mean: until the running decode step had ended (s)."""
    transfer_s: float
    """Mean: from then until the weights were loaded (s)."""
    resume_s: float
    """Mean: from then until the engine generated again (s)."""


class EvaluationPoint(Report):
    """An evaluation beside the run."""

    step: int
    """Optimizer steps after which it was due (count)."""
    success: float
    """Held-out problems that were solved (share)."""
    version_min: int
    """Oldest version that sampled an answer (optimizer steps)."""
    version_max: int
    """Newest version that sampled an answer: weights may arrive meanwhile (optimizer steps)."""
    seconds: float
    """How long it took, beside the rollouts (s)."""


class EvaluationReport(Report):
    """Share of held-out problems that are solved (0 to 1)."""

    success_before: float | None = None
    """Held-out problems solved at the start; absent if resumed (share)."""
    success_after: float | None = None
    """The same at the end; absent if the run ended early (share)."""
    during: list[EvaluationPoint] | None = None
    """Evaluations every ``train.evaluation.every`` optimizer steps. Absent without them."""


class Bottleneck(StrEnum):
    """The side that limits the throughput."""

    GENERATION = "generation"
    """The trainer waits for data."""
    PREFILL = "prefill"
    """The trainer waits for data, and rollouts on an engine spend more time in prefill than in decode."""
    TRAINING = "training"
    """Data waits for the trainer."""
    LAG = "lag"
    """The trainer waits for data, and slots stay free to keep ``max_lag``."""
    REWARD = "reward"
    """The trainer waits for data, and slots stay free while rollouts are scored, or all ``reward_workers`` are busy."""
    ENVIRONMENT = "environment"
    """The trainer waits for data, and slots stay free while all environments are in use."""
    DISCARDS = "discards"
    """The trainer waits for data, slots are in use, and more rollouts are given up than trained on."""
    BALANCED = "balanced"


class CostReport(Report):
    """Cost of a whole run, accelerators and environments, whether in use or not."""

    gpu_hours: float
    """GPU-hours of the run."""
    gpu_hours_per_million_tokens: float | None
    """GPU-hours per million trained tokens; null if none was trained."""
    usd: float | None = None
    """Money for the run (USD). Absent without a price."""
    usd_per_million_tokens: float | None = None
    """Money per million trained tokens (USD). Absent without a price."""
    kwh: float | None = None
    """Electricity of the accelerators at full board power all the time, an upper bound, without hosts and cooling
    (kWh). Absent where the catalogue has no ``watts``."""

    def scaled(self, factor: float) -> Self:
        """Return the cost of a run that lasts longer by a factor."""
        known = {name: value * factor for name, value in self.to_dict().items() if value is not None}
        return self.model_copy(update=known)


@dataclass(frozen=True, slots=True)
class Prices:
    """Price (USD per hour) and board power (W) of one of each kind; None: not known."""

    gpu_usd: float | None
    """Of a GPU that trains, or does both in turn."""
    gpu_watts: float | None
    generation_usd: float | None
    """Of a GPU that generates, where others train."""
    generation_watts: float | None
    environment_usd: float
    notes: tuple[str, ...] = ()
    """Prices that nobody gave, with their source, and kinds of GPU without any."""

    @classmethod
    def of(cls, config: RunConfig, *, assume: bool = False) -> Self:
        """Return the prices of ``[price]`` or your own GPU's file; ConfigError if a GPU of ``[hardware]`` is unknown.

        ``assume``: else the public price in the catalogue. A run's records have none, as it changes.
        """
        price, hardware = config.price or PriceConfig(), config.hardware
        gpu = None if hardware.gpu is None else find_gpu(hardware.gpu)
        second = hardware.generation_gpu
        other = gpu if second is None else find_gpu(second, key="hardware.generation_gpu")
        notes = list[str]()

        def usd(kind: Gpu | None, given: float | None) -> float | None:
            if given is not None or kind is None:
                return given
            if kind.price_per_hour is None:
                notes.append(f"no price of {kind.name} is known")
            elif kind.price_source and assume:
                notes.append(f"{kind.price_per_hour:.2f} USD per {kind.name}-hour ({kind.price_source})")
            return kind.price_per_hour if assume or not kind.price_source else None

        own = usd(gpu, price.gpu_hour)
        others = price.generation_gpu_hour or (own if other is gpu else usd(other, None))
        watts, others_watts = (None if one is None else one.watts for one in (gpu, other))
        return cls(own, watts, others, others_watts, price.environment_hour, tuple(notes))

    def rates(self, config: RunConfig, groups: Sequence[FleetGroupReport] = ()) -> Rates:
        """Return the resources of a run per hour: all accelerators and environments, in use or not.

        ``groups``: those of a fleet, which are in place of the engines of the run.
        """
        training = config.training_accelerators
        environments = 0 if config.environment is None else config.environment.count * self.environment_usd
        engines = [(one.gpus_paid, one.usd_per_gpu_hour) for one in groups]
        if not groups and not config.colocated:
            engines = [(config.generation_accelerators, self.generation_usd)]
        generating = sum(number for number, _ in engines)
        usd = _together((training, self.gpu_usd), *engines)
        return Rates(
            training + generating,
            usd_per_hour=None if usd is None else usd + environments,
            watts=_together((training, self.gpu_watts), (generating, self.generation_watts)),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Resources of a run per hour, with board power in W; None: not known."""

    gpus: float
    """Accelerators; of a fleet the mean (count)."""
    usd_per_hour: float | None
    watts: float | None

    @property
    def usd_per_gpu_hour(self) -> float | None:
        """Price of a GPU-hour, environments included (USD). None: not known."""
        return None if self.usd_per_hour is None else self.usd_per_hour / self.gpus

    @property
    def known(self) -> bool:
        """Whether anything but GPU-hours is known."""
        return self.usd_per_hour is not None or self.watts is not None

    def cost(self, seconds: float, *, tokens: float) -> CostReport:
        """Return the cost of a run of so many seconds and trained tokens."""
        hours, millions = seconds / 3600, tokens / 1e6
        usd = None if self.usd_per_hour is None else hours * self.usd_per_hour
        return CostReport(
            gpu_hours=hours * self.gpus,
            gpu_hours_per_million_tokens=hours * self.gpus / millions if millions else None,
            usd=usd,
            usd_per_million_tokens=usd / millions if usd is not None and millions else None,
            kwh=None if self.watts is None else hours * self.watts / 1000,
        )


def _together(*parts: tuple[float, float | None]) -> float | None:
    """Return the sum of counts times values; None if the value of a count above 0 is not known."""
    there = [(number, each) for number, each in parts if number]
    figures = [number * each for number, each in there if each is not None]
    return sum(figures) if len(figures) == len(there) else None


class RunIdentity(Report):
    """Identity of the run."""

    scheduler: str
    """Kind of schedule, ``scheduler.kind``."""
    seed: int
    """Seed of the run."""
    max_lag: int | None
    """``scheduler.max_lag``, null if unbounded (optimizer steps)."""
    optimizer_steps_per_rl_step: int | None = None
    """G; only of schedules with RL steps (optimizer steps)."""


class RunTotals(Report):
    """The numbers that follow from the trace of a run, and from nothing else but its configuration."""

    optimizer_steps: int
    """Optimizer steps made (count)."""
    duration_s: float
    """From the start to the last event (s)."""
    samples_trained: int
    """Rollouts of finished optimizer steps (rollouts)."""
    tokens_trained: int
    """Their tokens, without prompts (tokens)."""
    samples_per_s: float
    """``samples_trained`` / ``duration_s`` (1/s)."""
    tokens_per_s: float
    """``tokens_trained`` / ``duration_s`` (1/s)."""
    lag: LagReport
    """Token lag."""
    rollouts: RolloutCounts
    """Rollouts."""
    tokens: TokenCounts
    """Generated tokens."""
    discarded_by_reason: dict[DiscardReason, int]
    """Discarded rollouts by reason: ``stale``, ``no_signal``, ``queue_full``, ``sibling_failed`` (rollouts)."""
    length: LengthReport
    """Length of answers."""
    utilisation: Utilisation
    """Shares of the time at work."""
    seconds: TrainerSeconds
    """The trainer's wall time."""
    bottleneck: Bottleneck
    """Pipeline: ``generation`` if the trainer waited more than 5 % of the time (``prefill`` if that outlasts decode;
    with over 5 % of the slots free ``reward``, ``environment`` or ``lag``, by what holds rollouts back), else
    ``training`` if a whole batch was usually ready, else ``balanced``. Conventional: the longer phase, ``balanced``
    within 5 %. Before ``generation`` come ``reward`` if all ``hardware.latency.reward_workers`` were busy, and
    ``discards`` if more rollouts were given up than trained on."""
    environments: EnvironmentReport | None = None
    """Environments. Absent where rollouts have one turn."""
    fleet: FleetReport | None = None
    """Engines that come and go. Absent where all stay."""
    complete: bool
    """Whether all optimizer steps were made."""
    tokens_per_flash: float | None = None
    """``tokens_per_s`` · ``flash_s``, only with decode kind ``utilisation`` (1/flash)."""
    cost: CostReport | None = None
    """Cost of the run. Absent where neither prices nor the GPU's power are known."""
    ess_modelled: EssBand | None = None
    """Modelled effective sample size. Absent without a drift model."""


class DecodeSteps(Report):
    """Sums over decode steps of engines, measured by the engines."""

    steps: int = 0
    """How many (count)."""
    sequences: int = 0
    """Sequences in them (count)."""
    tokens: int = 0
    """Tokens that these got, one each without ``engine.speculation`` (count)."""
    context: int = 0
    """Tokens of context of all of these."""
    started: int = 0
    """Sequences whose prompts were read in them (count)."""
    read_tokens: int = 0
    """Tokens of these prompts."""
    seconds: float = 0.0
    """Duration (s)."""

    def __add__(self, other: DecodeSteps) -> DecodeSteps:
        return DecodeSteps(**{name: value + getattr(other, name) for name, value in self})


class RunMeasurements(Report):
    """The numbers that only a run with a real or learning policy, or with real engines, has."""

    updates: UpdateReport | None = None
    """Weight updates. Absent in a simulation."""
    engine_restarts: int | None = None
    """Engines lost and started again (times)."""
    trainer_restarts: int | None = None
    """Trainers lost: the run went on from a checkpoint (times)."""
    skipped_steps: int | None = None
    """Optimizer steps skipped for a gradient that was not finite (count)."""
    driver_s_per_rollout: float | None = None
    """Time of scheduler and driver per finished rollout (s)."""
    driver_busy_s_per_rollout: float | None = None
    """Time that the driver worked or waited for a processor, per rollout (s). Absent in a simulation."""
    front_end_busy_s_per_rollout: float | None = None
    """Time that an engine's front end worked per rollout of that engine, without decode outputs (s)."""
    decode_steps: list[DecodeSteps] | None = None
    """Decode steps of all engines, binned by number of sequences. Absent in a simulation."""
    tokens_per_step: float | None = None
    """Tokens of a sequence per decode step, mean (count). Absent without speculative decoding."""
    prefill_utilisation: float | None = None
    """Time that engines which only prefill do so, or load weights / time (share). Absent without ``[generation]``."""
    capacity: CapacityReport | None = None
    """What a simulated fleet offers. Absent without ``[fleet]``."""
    cached_share: float | None = None
    """Of the tokens of context at the starts of turns, those in a KV cache there (share). Absent without turns."""
    ess: EssReport | None = None
    """Effective sample size. Absent without importance weights."""
    mismatch: MismatchReport | None = None
    """Difference between engines and trainer. Absent without importance weights."""
    reward: RewardReport | None = None
    """Mean reward. Only of a simulation with a policy that learns."""
    weights_sha256: str | None = None
    """SHA-256 of the learned weights; ``pipelinerl replay`` learns them again from the trace alone."""
    evaluation: EvaluationReport | None = None
    """Held-out problems. Absent without them."""


START_UP_SHARE = 0.1
"""Share by which the second half of a run may be faster, or have more lag, than the whole; beyond it the start-up has
not faded. The whole lacks start-up time / duration of it: with twice as many steps the share would be about half."""
LAG_STEPS = 0.25
"""Difference in mean lag that nobody would notice (optimizer steps)."""


def steady_part(num_rows: int, unit: int) -> tuple[int, int]:
    """Return the first and the last but one index of the rows that stand for the rest of a run, in whole units."""
    end = num_rows // unit * unit
    return end // 2 // unit * unit, end


def too_short(steps: np.recarray[Any, Any], *, rl_step: int | None) -> list[str]:
    """Return the reasons why a run, by its steps.csv, is too short to stand for a longer one.

    Its throughput and mean lag are compared with its second half's, in whole RL steps (of ``rl_step`` optimizer
    steps, if any). A throughput that falls and a lag that shrinks are not judged: no start-up does that.
    """
    start, end = steady_part(len(steps), rl_step or 1)
    if rl_step is not None and len(steps) and not start:
        return [f"{len(steps):,} are fewer than two RL steps of {rl_step}"]
    if not start or not steps.time_s[end - 1] > steps.time_s[start - 1]:
        return []
    lines = []
    later = _rate(steps, start, end)
    if later > (1 + START_UP_SHARE) * _rate(steps, 0, len(steps)):
        lines.append(f"the second half alone gives {later:,.0f} tokens/s")
    lag, later = _mean_lag(steps, 0, len(steps)), _mean_lag(steps, start, end)
    if later - lag > max(LAG_STEPS, START_UP_SHARE * lag):
        lines.append(f"the second half alone has a mean lag of {later:.2f}")
    return lines


def _rate(steps: np.recarray[Any, Any], start: int, end: int) -> float:
    seconds = steps.time_s[end - 1] - (steps.time_s[start - 1] if start else 0.0)
    return float(steps.tokens[start:end].sum() / seconds)


def _mean_lag(steps: np.recarray[Any, Any], start: int, end: int) -> float:
    tokens = steps.tokens[start:end]
    return float(steps.lag_mean[start:end] @ tokens / max(1, tokens.sum()))


class RunReport(RunMeasurements, RunTotals, RunIdentity):  # pydantic orders fields from the last base to the first
    """The numbers of a run: the content of summary.json, and its steps for Python."""

    _steps: np.recarray[Any, Any] = PrivateAttr(default_factory=lambda: as_records(()))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the report in a summary.json, with the steps of the steps.csv beside it, if there is one.

        ConfigError if one of the files is broken; one line that names file and key.
        """
        report, steps = super().read(path), path.with_name(STEPS_FILE)
        return report.with_steps(read_steps(steps)) if steps.exists() else report

    __hash__ = None  # type: ignore[assignment] # it compares arrays

    def __eq__(self, other: object) -> bool:
        """Compare the numbers of the report and of its steps."""
        if not isinstance(other, RunReport):
            return NotImplemented
        return dict(self) == dict(other) and self._steps.tobytes() == other._steps.tobytes()

    def with_steps(self, rows: np.recarray[Any, Any]) -> Self:
        """Return this report with these steps."""
        report = self.model_copy()
        report._steps = rows
        return report

    @property
    def steps(self) -> np.recarray[Any, Any]:
        """A record per optimizer step with the columns of steps.csv: ``report.steps.lag_mean`` is an array."""
        return self._steps

    @property
    def too_short(self) -> list[str]:
        """Reasons why it is too short to stand for a longer run; empty without its steps."""
        return too_short(self.steps, rl_step=self.optimizer_steps_per_rl_step)

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per optimizer step; ConfigError without pandas."""
        return data_frame(self.steps)


class Finding(StrEnum):
    """Meaning of a measurement."""

    OK = "ok"
    """As it should be, or there is nothing to compare it with."""
    SLOW = "slow"
    """It works, and is slower than the pessimistic level of the hardware catalogue."""
    WRONG = "wrong"
    """A run would fail or learn nothing."""
    UNCHECKED = "not checked"


class CheckRow(Report):
    """One measurement."""

    what: str
    """Name of the measurement."""
    measured: str
    """Value with its unit; where nothing could be measured, why."""
    expected: str = ""
    """Expected value and its source. Empty: none."""
    finding: Finding = Finding.OK
    """Meaning."""
    advice: str = ""
    """What to do. Empty: nothing."""


class CheckReport(Report):
    """All measurements, in the order in which they were made."""

    rows: list[CheckRow]
    """The measurements."""

    @property
    def wrong(self) -> bool:
        """Whether any row is *wrong*."""
        return any(row.finding is Finding.WRONG for row in self.rows)


def unchecked(what: str, why: str, advice: str = "") -> CheckRow:
    """Return a row of the check for something not measured."""
    return CheckRow(what=what, measured=why, finding=Finding.UNCHECKED, advice=advice)


def compared(what: str, measured: str, expected: str, *, slow: bool, advice: str) -> CheckRow:
    """Return a row of the check with the finding *slow*, and the advice, or *ok*."""
    finding = Finding.SLOW if slow else Finding.OK
    return CheckRow(what=what, measured=measured, expected=expected, finding=finding, advice=advice if slow else "")


def wrong(what: str, measured: str, advice: str) -> CheckRow:
    """Return a row of the check with the finding *wrong*."""
    return CheckRow(what=what, measured=measured, finding=Finding.WRONG, advice=advice)
