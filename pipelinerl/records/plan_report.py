"""The reports of a plan and of a diagnosis: the content of plan.json and diagnosis.json."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.fleet import FleetConfig
from pipelinerl.config.run import ClusterConfig, SchedulerConfig
from pipelinerl.records.reports import CostReport
from pipelinerl.util.strict_model import Report, data_frame, equally_long

# --------------------------------------------------------------------------------------------------- how sure a plan is


class Band(Report):
    """The range of 80 % of the draws."""

    low: float
    """10th percentile."""
    high: float
    """90th percentile."""


class Threshold(Report):
    """The value of an unknown at which asynchronous and synchronous RL are as fast."""

    unknown: str
    """The unknown."""
    value: float
    """The threshold, in ``unit``."""
    unit: str
    """Its unit and meaning in words."""
    asynchronous_below: bool
    """Whether asynchronous RL is faster below it."""
    expected: float
    """Median of the value here, in that unit."""
    band: Band
    """Range of the value here."""


class AsynchronousOdds(Report):
    """Asynchronous against synchronous RL on these GPUs, each at its best in every draw."""

    faster: float
    """Probability that asynchronous RL is faster."""
    certain: bool
    """Whether this or the contrary has a probability of at least 0.95."""
    ratio: float
    """Asynchronous over synchronous throughput (median)."""
    ratio_band: Band
    """Its range."""
    decided_by: str
    """The unknown that explains most of the difference between the two."""
    share: float
    """Share of the variance of the difference that it explains."""
    threshold: Threshold | None
    """Value of the most decisive unknown at which the order changes; null: none within its range."""


class Safest(Report):
    """The candidate with the highest 10th percentile of throughput, the recommendation unless that gains a tie."""

    label: str
    """Its name in tables."""
    slower: float
    """Expected throughput that it loses against the recommendation (relative)."""
    low: float
    """10th percentile of its throughput (tokens/s)."""


class MeasurementValue(Report):
    """Value of a measurement before the decision."""

    measured: list[str]
    """The times or tokens that become known."""
    right: float
    """Probability that the choice after it is the fastest, within a tie."""
    regret: float
    """Throughput that it loses against the fastest (mean, relative)."""
    gain: float
    """Throughput that the measurement gains (mean, relative): the regret before it, less that after it."""
    settles: bool
    """Whether the gain is large enough to count."""
    commands: list[str]
    """Commands that measure it; ``plan --measured`` reads their results. Empty: no command measures it."""
    minutes: float | None
    """Estimated time of all commands; null: not known."""
    gpus: int | None
    """GPUs of the largest command; null: not known."""


class CertaintyReport(Report):
    """Confidence in the recommendation, over draws of every unknown value."""

    draws: int
    """Draws (count)."""
    compared: int
    """Candidates compared in them (count)."""
    tie: float
    """Difference in throughput up to which two are as fast (relative)."""
    right: float
    """Probability that the recommendation is the fastest within the limits, ties included."""
    regret: float
    """Expected throughput that it loses against the fastest of each draw (relative)."""
    safest: Safest
    """The way with the least risk."""
    keeps_limits: float | None
    """Probability that the recommendation keeps to the limits on mean lag, hours and money; null without any."""
    asynchronous: AsynchronousOdds | None
    """Asynchronous against synchronous RL; null if only one of them fits."""
    fits: float | None
    """Probability that the recommendation's memory suffices; null if GPU and model are not known."""
    unknown: dict[str, float]
    """Uncertainty: the standard deviation of the log of each factor."""
    measurements: list[MeasurementValue]
    """Value of measurements: each alone, the best first; the best two; all of a command; all."""


Value = float | int | str | bool | list[Any] | None


class Instead(Report):
    """Best screened candidate of the recommended kind of scheduler if one key had another value."""

    value: Value
    """The value; null: the key is left out."""
    throughput: float | None
    """Throughput over that with the value as it is (ratio); null: nothing would keep to the limits, or the key cannot
    change alone."""
    fastest: str | None
    """The kind of scheduler that turns the fastest if all else is as expected; null: the same, or this kind."""


class Assumed(Report):
    """A key that nobody gave a value."""

    key: str
    """Table and key of the run file."""
    value: Value
    """Assumed value; null: the key is left out."""
    instead: list[Instead]
    """Equally plausible values; of several cases only the first has them for keys that no draw moves."""

    @property
    def largest(self) -> float:
        """The largest effect (log of the ratio)."""
        return max((abs(math.log(one.throughput)) for one in self.instead if one.throughput), default=0.0)


class Changed(Report):
    """A key that has another value than in the plan compared with."""

    key: str
    """Table and key of the run file."""
    before: Value
    """Its value there; null: left out."""
    alone: Instead
    """Effect of the new value on the other plan, changed alone."""


class Against(Report):
    """Another plan, and the reasons for the difference."""

    name: str
    """Its file or folder."""
    label: str
    """The recommendation."""
    family: str
    """Its kind of scheduler."""
    tokens_per_s: float
    """Its throughput: trained tokens per second over the whole run."""
    lag_mean: float
    """Its mean lag (optimizer steps)."""
    cost: CostReport
    """Its cost."""
    verdict: str
    """Its bottleneck."""
    complete: bool
    """Whether it simulated all its candidates; else it may have missed the best."""
    changed: list[Changed]
    """The keys that differ, the largest effect first."""


class PlannedRun(Report):
    """The part of the run file and its limits that the numbers refer to."""

    accelerators: int
    """Accelerators of the cluster (count)."""
    optimizer_steps: int
    """Optimizer steps of the whole run (count)."""
    price_per_gpu_hour: float | None
    """Price of a GPU-hour (USD), where known."""
    price_notes: list[str] = Field(default_factory=list)
    """Prices that nobody gave, on which all costs rest, with their source, and kinds of GPU without any."""
    lag_limit: int | None
    """Largest lag allowed of any trained token (optimizer steps). None: unbounded."""
    mean_lag_limit: float | None = None
    """Mean lag allowed (optimizer steps). None: unbounded."""
    risk_averse: bool = False
    """Whether the 10th percentile of the throughput decides, and not the expected one."""


class NotTried(Report):
    """A value listed in ``[plan]`` of which no candidate was left."""

    key: str
    """Key of the list."""
    value: int | str | list[int]
    """The value; the whole list if no kind of scheduler tried reads it."""
    why: str
    """The reason in words."""


class SearchReport(Report):
    """The search in numbers."""

    candidates: int
    """Combinations of the listed values (count)."""
    kept: int
    """Candidates that the screening kept (count)."""
    simulated: int
    """Candidates whose simulation ended (count)."""
    simulated_steps: int
    """Optimizer steps of each simulation, at most (count)."""
    within_limits: int
    """Of these, within the limits of ``[plan]`` (count)."""
    lag_ratios: dict[str, float]
    """Simulated over screened mean lag by kind of scheduler (median)."""
    complete: bool
    """Whether every simulation ended."""
    failures: list[str]
    """Simulations that failed, a line each."""
    not_tried: list[NotTried]
    """Listed values of which no candidate was left."""


class CandidateNumbers(Report):
    """The whole run of one candidate, by simulation."""

    label: str
    """Name of the candidate in tables."""
    family: str
    """Its kind of scheduler."""
    tokens_per_s: float
    """Trained tokens per second over the whole run."""
    step_s: float
    """Seconds per optimizer step in the steady state."""
    hours: float
    """Hours of the whole run."""
    cost: CostReport
    """Cost of the whole run."""
    lag_mean: float
    """Mean lag of a trained token in the steady state (optimizer steps)."""
    lag_max: int
    """Largest lag of any trained token (optimizer steps)."""
    ess: float | None
    """Modelled effective sample size, with a drift model."""
    training: float
    """Share of the trainer's time in which it trains."""
    publishing: float
    """Share in which it publishes weights."""
    waiting: float
    """Share in which it does neither."""


class PlannedCandidate(CandidateNumbers):
    """A candidate with its choices, its band and its bottleneck; throughput, seconds and cost are means over draws."""

    simulated_tokens_per_s: float
    """Throughput if every unknown has its central value (tokens/s)."""
    cluster: ClusterConfig
    """Its table ``[cluster]``."""
    scheduler: SchedulerConfig
    """Its table ``[scheduler]``."""
    environments: int | None = None
    """Its ``environment.count`` (environments). Absent where rollouts have one turn."""
    idle: int | None = None
    """Accelerators that are paid for and stand idle, as they make no whole engine (count). Absent where none does."""
    band: Band
    """Its throughput in the draws (tokens/s)."""
    over_own: Band | None = None
    """Its throughput over that of the unchanged run file in the draws (ratio). Absent where that cannot run."""
    verdict: str
    """Its bottleneck, and the gain of more GPUs."""

    @property
    def band_tokens_per_s(self) -> tuple[float, float]:
        """Both ends of the band (tokens/s)."""
        return self.band.low, self.band.high

    @property
    def band_costs(self) -> list[CostReport]:
        """Its cost at both ends of the band."""
        return [self.cost.scaled(self.tokens_per_s / rate) for rate in (self.band.low, self.band.high)]


class RunnerUp(PlannedCandidate):
    """The best candidate that differs from the recommendation in kind, split, size of engine or G."""

    why: str
    """Why it is not recommended."""


class OwnRun(PlannedCandidate):
    """The unchanged run file."""

    keeps_to_limits: bool
    """Whether it keeps to the limits of ``[plan]``."""
    among_schedulers: bool
    """Whether its kind of scheduler is in ``plan.schedulers``."""
    recommended_over_own: float
    """Throughput of the recommendation over its own (ratio of tokens/s)."""


class ScreenedColumns(Report):
    """The candidates that the screening kept, a column per number."""

    label: list[str]
    """Name of each candidate in tables."""
    family: list[str]
    """Kinds of scheduler."""
    tokens_per_s: list[float]
    """Screened throughput (tokens/s), to 4 digits."""
    lag_mean: list[float]
    """Screened mean lag (optimizer steps), to 4 digits."""
    lag_max: list[int]
    """Screened largest lag (optimizer steps)."""

    _equally_long = equally_long("label", "family", "tokens_per_s", "lag_mean", "lag_max")


class UnknownEffect(Report):
    """Effect of one unknown, all others as likely as they are."""

    unknown: str
    """Factor on a time or on the answers, or a coefficient."""
    low: float
    """Throughput of the recommendation at the 10th percentile of the unknown, over that at its median (ratio)."""
    high: float
    """The same at the 90th percentile."""
    instead_low: str | None
    """Candidate that loses least in the fifth of the draws where the unknown is lowest, if that is another decision."""
    instead_high: str | None
    """The same where it is highest."""

    @property
    def largest(self) -> float:
        """Largest relative change of the throughput."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def changes_decision(self) -> bool:
        """Whether another candidate loses less at one end."""
        return self.instead_low is not None or self.instead_high is not None


class SplitCurve(Report):
    """Throughput of the recommendation at every split, with its band (tokens/s); empty if it is colocated."""

    generation_accelerators: list[int] = Field(default_factory=list)
    """Accelerators that generate (count)."""
    tokens_per_s: list[float] = Field(default_factory=list)
    """Screened throughput as expected."""
    low: list[float] = Field(default_factory=list)
    """10th percentile of the draws."""
    high: list[float] = Field(default_factory=list)
    """90th percentile of the draws."""

    _equally_long = equally_long("generation_accelerators", "tokens_per_s", "low", "high")


class FleetRow(Report):
    """The long run of a fleet of reserved and spot engines, by the screening."""

    reserved: int
    """Reserved engines (count)."""
    spot: int
    """Places for spot engines (count)."""
    there_mean: float
    """Engines that take rollouts, mean (count)."""
    tokens_per_s: float
    """Trained tokens per second, mean."""
    usd_per_hour: float
    """Money for engines and trainer (USD per hour)."""
    usd_per_million_tokens: float
    """Money per million trained tokens (USD)."""
    band: Band
    """The same over the draws (USD)."""


class FleetPlan(Report):
    """Reserved engines against fleets with spot engines that are as fast."""

    rows: list[FleetRow] = Field(min_length=1)
    """The fleets: all reserved, then fewer and fewer reserved ones."""
    best: int
    """Place of the cheapest per token."""
    fleet: FleetConfig
    """The table ``[fleet]`` of that fleet."""
    spot_price: float | None = None
    """Price of a spot GPU-hour (USD). Absent without spot engines."""
    flip_price: float | None = None
    """Largest spot price that pays (USD per hour). Absent if none does."""
    reclaim_hours: float | None = None
    """Mean time until a spot engine is reclaimed (hours). Absent without spot engines."""
    flip_hours: float | None = None
    """Shortest mean time until a reclaim that pays (hours). Absent if none makes a difference."""
    checkpoint_every_s: float | None = None
    """Best time between two checkpoints of the trainer (s). Absent if it never fails."""
    trainer_share: float
    """Share of its time in which the trainer makes progress."""
    lend_switch_s: float | None = None
    """Time of a switch if the trainer lends its accelerators (s). Absent unless asked for."""
    lend_gain: float | None = None
    """Throughput if it does, over that if not, both simulated (ratio)."""


class SpeculationPlan(Report):
    """The recommendation with speculative decoding against the same without."""

    speculation: SpeculationConfig
    """The drafter, as ``engine.speculation``."""
    gain: float
    """Throughput with it, over that without, both simulated (ratio)."""
    tokens_per_step: float
    """Tokens of a sequence per step that drafts, mean over the versions of the policy (count)."""
    loses_from: int | None = None
    """Sequences per engine from which a step that drafts costs more than its tokens gain (count). Absent if none do."""
    tail_gain: float
    """Speed of an engine's last sequence, over that without (ratio)."""
    refresh_every: int | None = None
    """Optimizer steps between refreshes with the best screened throughput. Absent without ``decay``."""
    refresh_gain: float | None = None
    """Screened throughput with that, over that of ``speculation`` (ratio)."""


class PhasesReport(Report):
    """Plans of a run whose answers grow linearly, by the screening."""

    restart_s: float
    """Assumed time of a switch (seconds)."""
    plans: list[tuple[str, int, float]]
    """The plans in order: label, last optimizer step, and mean answer then (tokens)."""
    hours: float
    """Hours of the run, restarts included."""
    hours_without_restarts: float
    """Hours if a switch took no time."""
    single: str
    """The best plan for the whole run."""
    single_hours: float
    """Hours with it."""


class PlanReport(Report):
    """The content of plan.json."""

    run: PlannedRun
    """The part of the run file that the numbers refer to."""
    asked: dict[str, Any]
    """The run file with overrides and measurements, without the keys that were left for the plan to find."""
    assumed: list[Assumed]
    """Assumed values, the most influential first; empty for a run file."""
    against: Against | None = None
    """The plan that this one is compared with. Absent without ``--against``."""
    search: SearchReport
    """The search in numbers."""
    warnings: list[str]
    """What speaks against the recommended kind of scheduler, a line each."""
    recommended: PlannedCandidate
    """The recommendation."""
    certainty: CertaintyReport
    """How sure that is, and which measurement would settle it."""
    runner_up: RunnerUp | None
    """The best candidate that differs from it in kind, split, size of engine or G."""
    families: dict[str, PlannedCandidate | None]
    """The best candidate by kind of scheduler; null if none of a kind keeps to the limits."""
    own: OwnRun | None
    """The run file as it is, if it can run."""
    simulated: list[CandidateNumbers]
    """Every simulated candidate, the fastest first."""
    front: list[str]
    """Labels of the Pareto front of throughput against mean lag, by rising lag."""
    screened: ScreenedColumns
    """Every candidate that the screening kept."""
    sensitivity: list[UnknownEffect]
    """Effect of each unknown, the largest first."""
    splits: SplitCurve
    """Throughput of the recommendation at every split."""
    stages: dict[str, float]
    """Seconds charged for the recommendation, by stage, at central values: of a decode step, an optimizer step, a
    weight update, an RL step."""
    phases: PhasesReport | None = None
    """When to switch plans as answers grow. Absent if they do not, or no plan keeps to the limits in the whole run."""
    fleet: FleetPlan | None = None
    """Fleets compared. Absent unless ``plan.spot``, ``plan.mtbf_hours`` or ``plan.lend_switch_s`` asks."""
    speculation: SpeculationPlan | None = None
    """Speculative decoding against none. Absent unless ``plan.speculate`` asks."""
    made: str | None = None
    """Date, version and command. Absent if no command made it."""

    def to_frame(self) -> Any:
        """Return a pandas data frame: a row per simulated candidate, the fastest first; ConfigError without pandas."""
        return data_frame([one.to_dict() for one in self.simulated])

    @field_validator("front")
    @classmethod
    def _check_front(cls, front: list[str], info: ValidationInfo) -> list[str]:
        known = [one.label for one in info.data.get("simulated", [])]
        if not set(front) <= set(known):
            raise ValueError(f"labels must be those of simulated candidates, got {front}")
        return front


# ------------------------------------------------------------------------------ the report of diagnose: diagnosis.json


class GpuTime(Report):
    """One part of the GPU-seconds of a step."""

    part: str
    gpu_s: float
    share: float
    """Share of all GPU-seconds; those of all parts make 1."""
    source: str
    """``log``, ``simulation`` of the calibrated job, or ``rest``: all that the other parts leave."""


class Gain(Report):
    """One change, made alone, against the job as it is."""

    change: str
    set: list[str]
    """Keys of the run file, ``key=value`` each."""
    times: float
    """Throughput over that of the job, each as ``plan`` gives it (ratio of tokens/s)."""
    band: Band
    """Its range over draws of all that is not measured, the same draws for both (ratio)."""
    lag_mean: float
    """Mean lag of a trained token (optimizer steps)."""


class DiagnosisReport(Report):
    """Where a job spends its GPU time, and what would change it."""

    num_steps: int
    """Steps of the log that are averaged (count)."""
    num_left_out: int
    """The first, and steps with other work (count)."""
    step_s: float
    """Seconds of a step, by the log."""
    accelerators: int
    gpu_time: list[GpuTime]
    asynchronous: Gain | None
    """The best asynchronous RL within the limits, of ``plan`` of the calibrated run file; null: none but the job."""
    gains: list[Gain]
    """At most three, the largest first; none that is a tie with the job."""
    notes: list[str]
    """What the log does not tell, and what is taken instead."""
