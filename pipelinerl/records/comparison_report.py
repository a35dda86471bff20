"""The reports of a comparison and of numbers of environments: the content of comparison.json and environments.json."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from pipelinerl.records.reports import Bottleneck, RolloutSeconds, RunReport
from pipelinerl.util.strict_model import Report, data_frame


class RepeatReport(Report):
    """The run of an arm with one of several seeds."""

    model_config = ConfigDict(allow_inf_nan=True)

    seed: int
    """Seed of the run."""
    folder: str
    """Folder of the run, relative to that of the comparison."""
    speedup: float | None
    """Trained tokens/s over the baseline's with the same seed; null: that run has failed."""
    reward: float | None = None
    """Mean reward over the last tenth of the steps. Absent: the policy does not learn."""
    ess: float | None = None
    """Mean effective sample size (share of the tokens). Absent: the policy does not learn."""


class ArmReport(Report):
    """One arm in one scenario; with several seeds, the first one that ended stands for it."""

    name: str
    """Name of the arm."""
    folder: str
    """Folder of its run, relative to that of the comparison."""
    speedup: float | None
    """Trained tokens/s over the baseline's; null: the baseline has failed."""
    summary: RunReport
    """The numbers of its run."""
    repeats: list[RepeatReport] | None = None
    """Its runs with every seed. Absent: the comparison has no seeds."""
    too_short: list[str] | None = None
    """Reasons why it is too short to stand for a longer run. Absent: none."""

    @property
    def folders(self) -> list[str]:
        """The folders of all its runs."""
        return [self.folder] if self.repeats is None else [one.folder for one in self.repeats]


class ScenarioReport(Report):
    """The arms in one scenario."""

    name: str
    """Name of the scenario."""
    arms: list[ArmReport]
    """Arms whose run has ended, in the order of the run file."""


class ComparisonReport(Report):
    """The same workload under several schedules and circumstances: the content of comparison.json."""

    baseline: str
    """Name of the arm to which speed-ups refer."""
    scenarios: list[ScenarioReport]
    """The scenarios, in the order of the run file."""
    failures: list[str]
    """A line per run that has failed."""
    complete: bool
    """Whether every run has ended without a failure."""

    @property
    def arms(self) -> list[ArmReport]:
        """The arms of all scenarios."""
        return [arm for scenario in self.scenarios for arm in scenario.arms]

    @property
    def too_short(self) -> list[str]:
        """For which arms ``optimizer_steps`` are too few, and why, a line each."""
        found: dict[str, list[str]] = {}
        for arm in self.arms:
            if arm.too_short:
                found.setdefault(arm.name, []).append("; ".join(arm.too_short))
        return [
            f"too few optimizer steps for {name}: {first}" + (f" (and in {len(more)} more scenarios)" if more else "")
            for name, (first, *more) in found.items()
        ]

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per scenario and arm; ConfigError without pandas."""
        return data_frame(
            [
                {
                    "scenario": scenario.name,
                    "arm": arm.name,
                    "speedup": arm.speedup,
                    "tokens_per_s": arm.summary.tokens_per_s,
                    "duration_s": arm.summary.duration_s,
                    "lag_mean": arm.summary.lag.mean,
                    "lag_max": arm.summary.lag.max,
                    **{f"{what}_s": seconds for what, seconds in arm.summary.seconds},
                }
                for scenario in self.scenarios
                for arm in scenario.arms
            ]
        )

    @property
    def answer(self) -> str:
        """The result in a sentence: the fastest arm of the first scenario that has numbers, and its lag."""
        arms = next((one.arms for one in self.scenarios if one.arms), [])
        if not arms:
            return "No run has ended."
        fastest = max(arms, key=lambda arm: arm.summary.tokens_per_s)
        base = next((arm for arm in arms if arm.name == self.baseline), None)
        lag = f"Largest token lag: {fastest.summary.lag.max} optimizer steps"
        if base is None or fastest is base:
            return f"The fastest is {fastest.name}. {lag}."
        ratio = fastest.summary.tokens_per_s / base.summary.tokens_per_s
        gain = f"{ratio:.2f} times the trained tokens per second of {base.name}"
        return f"The fastest is {fastest.name}: {gain}. {lag} ({base.name}: {base.summary.lag.max})."


# ----------------------------------------------------------------------- the report of environments: environments.json


class EnvironmentsRow(Report):
    """The run with so many environments."""

    count: int
    """Environments (count)."""
    rollouts_per_hour: float
    """Rollouts trained on in an hour of the steady state (1/h): of the second half of the optimizer steps."""
    in_use_mean: float
    """Mean number in use (environments)."""
    generation: float
    """Share of the engines' time in which they are busy."""
    training: float
    """Share of the trainer's time in which it trains."""
    lag_mean: float
    """Mean lag of a token trained in that half (optimizer steps)."""
    seconds: RolloutSeconds
    """Where the time of a rollout goes."""
    bottleneck: Bottleneck
    """The side that limits the throughput."""
    usd_per_1000_rollouts: float | None
    """Cost of 1000 rollouts, accelerators and environments together (USD); null without a price of a GPU-hour."""
    folder: str
    """Folder of the run, relative to that of the report."""


class EnvironmentsReport(Report):
    """Throughput against the number of environments: the content of environments.json."""

    accelerators: int
    """Accelerators of the cluster (count)."""
    slots: int
    """Rollouts that all engines can have in progress (count)."""
    rows: list[EnvironmentsRow]
    """The runs that have ended, by rising number of environments."""
    knee: int
    """Fewest environments whose rate is within 5 % of the largest (count)."""
    verdict: str
    """The answer in words."""
    failures: list[str]
    """A line per run that has failed."""
    complete: bool
    """Whether every run has ended without a failure."""


# ----------------------------------------------------------------------------------- the report of jobs that share


class JobReport(Report):
    """A job with a trainer of its own, and with a shared one."""

    name: str
    """Name of its run file."""
    alone: RunReport
    """The run with its own accelerators."""
    together: RunReport
    """The run with shared ones."""
    waited_s: float
    """Time that its batches waited for other jobs and for switches (s)."""


class SharingReport(Report):
    """Jobs that share the accelerators that train."""

    jobs: list[JobReport]
    """In the order given."""
    switch_s: float
    """Time of a switch from one job to another (s)."""
    switches: int
    """Switches (count)."""
    gpu_hours_alone: float
    """GPU-hours of all jobs with their own accelerators."""
    gpu_hours_together: float
    """With shared ones, each job's engines until its end, the shared ones until the last end."""

    @property
    def answer(self) -> str:
        """What it saves, and who is slowed down most."""
        saved = 1 - self.gpu_hours_together / self.gpu_hours_alone
        what = f"saves {saved:.0%} of the GPU-hours" if saved >= 0 else f"takes {-saved:.0%} more GPU-hours"
        slowest = max(self.jobs, key=lambda job: job.together.duration_s / job.alone.duration_s)
        longer = slowest.together.duration_s / slowest.alone.duration_s - 1
        return (
            f"Sharing {what}; {slowest.name} takes {longer:.0%} longer, its batches wait "
            f"{slowest.waited_s / slowest.together.duration_s:.0%} of the time."
        )
