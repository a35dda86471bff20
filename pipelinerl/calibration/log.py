"""A step of a job in any log; the columns of a plain CSV file of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from pydantic import Field

from pipelinerl.calibration.solve import HardwareFit, fit_factor, fixed_coefficients, rounded, take_weight_sync
from pipelinerl.config.question import MEAN_LAG_LIMIT
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import LengthConfig, RunConfig, make_paths_absolute, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.hardware import prior
from pipelinerl.hardware.costs import HardwareConfig
from pipelinerl.hardware.transport import PUBLISHED
from pipelinerl.records.steps import StepRow
from pipelinerl.util.lognormal import argument_nearest, location_of_mean, log_sd_of
from pipelinerl.util.strict_model import StrictModel

WARM_UP_FROM = 4
"""Steps from which on the first is left out: it compiles and fills (count)."""
OUTLIER = 3.0
"""Times the median from which on a step is left out: it held an evaluation or a checkpoint (no unit)."""
MOST_LOGGED = 1e15
"""Largest number of a step (any unit)."""
OVERLAP = 1.02
"""Times the step that its parts last together from which on they ran side by side (no unit)."""


class LoggedStep(StrictModel):
    """One step of a log: from one weight update of the engines to the next. Fields absent in the log are None."""

    step: int = Field(ge=0)
    """Number of the step."""
    step_s: float | None = Field(default=None, gt=0)
    """Seconds of the step, from its start to the next one's."""
    generation_s: float | None = Field(default=None, ge=0)
    """Seconds of generation, from the first request to the last token."""
    training_s: float | None = Field(default=None, ge=0)
    """Seconds in which the trainer worked: its update, log-probabilities, values, advantages."""
    logprob_s: float | None = Field(default=None, ge=0)
    """Log-probabilities' part of ``training_s``."""
    sync_s: float | None = Field(default=None, ge=0)
    """Seconds of the weight synchronization."""
    switch_s: float | None = Field(default=None, ge=0)
    """Seconds between the phases of a synchronous job."""
    reward_s: float | None = Field(default=None, ge=0)
    """Seconds of rewards and environments alone."""
    wait_s: float | None = Field(default=None, ge=0)
    """Asynchronous jobs: seconds in which the trainer waited."""
    tokens: float | None = Field(default=None, gt=0)
    """Tokens of the step's answers, prompts not counted."""
    total_tokens: float | None = Field(default=None, gt=0)
    """Tokens of the step's prompts and answers."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Tokens of answers per second of the step."""
    samples: float | None = Field(default=None, gt=0)
    """Answers trained on (count)."""
    samples_per_s: float | None = Field(default=None, gt=0)
    """Answers per second of the step."""
    length_mean: float | None = Field(default=None, gt=0)
    """Mean answer (tokens)."""
    length_p90: float | None = Field(default=None, gt=0)
    """90 % of the answers are no longer (tokens)."""
    length_p95: float | None = Field(default=None, gt=0)
    """95 % of the answers are no longer (tokens)."""
    length_max: float | None = Field(default=None, gt=0)
    """Longest answer (tokens)."""
    clipped_share: float | None = Field(default=None, ge=0, le=1)
    """Share of answers cut at the longest allowed length."""
    prompt_mean: float | None = Field(default=None, ge=0)
    """Mean prompt (tokens)."""
    sequence_mean: float | None = Field(default=None, gt=0)
    """Mean of prompt and answer together (tokens)."""
    sequence_max: float | None = Field(default=None, gt=0)
    """Longest prompt and answer together (tokens)."""
    lag_mean: float | None = Field(default=None, ge=0)
    """Mean staleness of trained rollouts (optimizer steps)."""
    lag_max: float | None = Field(default=None, ge=0)
    """Largest staleness (optimizer steps)."""
    accelerators: float | None = Field(default=None, gt=0)
    """Accelerators in all (count)."""
    generation_accelerators: float | None = Field(default=None, gt=0)
    """Accelerators that generate (count)."""
    training_accelerators: float | None = Field(default=None, gt=0)
    """Accelerators that train (count)."""

    @property
    def side_by_side(self) -> bool:
        """Whether generation and training overlapped: the trainer waited for answers, or the parts exceed the step."""
        parts_s = (self.generation_s or 0.0) + (self.training_s or 0.0) + (self.sync_s or 0.0)
        return self.wait_s is not None or (self.step_s is not None and parts_s > OVERLAP * self.step_s)

    def completed(self) -> LoggedStep:
        """Return the step with all values that follow from its own numbers."""
        now = {name: value for name, value in self if value is not None}
        for name, value in now.items():
            if value > MOST_LOGGED:
                raise ConfigError(f"step {self.step} of the log: {name} must be at most {MOST_LOGGED:g}, got {value:g}")

        def of(name: str) -> float:
            return float(now.get(name, math.nan))

        def known(name: str, value: float) -> None:
            if name not in now and 0 < value <= MOST_LOGGED:  # NaN, from an unknown number, is not
                now[name] = value

        known("prompt_mean", of("sequence_mean") - of("length_mean"))
        known("length_mean", of("sequence_mean") - of("prompt_mean"))
        known("length_max", of("sequence_max") - of("prompt_mean"))
        known("samples", of("samples_per_s") * of("step_s"))
        known("tokens", of("tokens_per_s") * of("step_s"))
        known("samples", of("tokens") / of("length_mean"))
        known("samples", of("total_tokens") / now.get("sequence_mean", of("length_mean") + of("prompt_mean")))
        known("tokens", of("samples") * of("length_mean"))
        known("length_mean", of("tokens") / of("samples"))
        known("tokens_per_s", of("tokens") / of("step_s"))
        if self.side_by_side and "training_s" in now and "wait_s" not in now:
            now["wait_s"] = max(0.0, now["step_s"] - (now["training_s"] + now.get("sync_s", 0.0)))
        return LoggedStep(**now)


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The steps of a log that count, and their mean."""

    num_steps: int
    num_left_out: int
    """The first, and steps with other work (count)."""
    mean: LoggedStep
    """Means over the steps; ``step`` is the last one, ``lag_max`` the largest."""
    longest: float | None
    """Of all steps (tokens)."""
    number: int = 1
    """Which run of its log it is, counted from 1."""
    num_runs: int = 1
    """Runs in its log (count)."""

    @property
    def asynchronous(self) -> bool:
        """Whether generation and training ran side by side."""
        return self.mean.wait_s is not None or (self.mean.lag_max or 0.0) >= 1


def logged_run(steps: Sequence[LoggedStep], number: int | None = None) -> LoggedRun:
    """Return one run of these steps, at least one, in order; ConfigError if it is not there, or has no seconds.

    Where the steps begin anew, another run begins. ``number`` counts runs from 1; None: the last.
    """
    runs = [[steps[0]]]
    for step in steps[1:]:
        if step.step <= runs[-1][0].step < runs[-1][-1].step:
            runs.append([])
        runs[-1].append(step)
    number = number or len(runs)
    if number > len(runs):
        raise ConfigError(f"--run must be at most {len(runs)}, the runs in the log, got {number}")
    steps = runs[number - 1]
    whole = [step.completed() for step in steps]
    timed = [step for step in whole if step.step_s is not None]
    if not timed:
        raise ConfigError("the log must tell the seconds of a step (step_s), got none")
    kept = timed[1:] if len(timed) >= WARM_UP_FROM else timed
    median_s = float(np.median([step.step_s for step in kept if step.step_s is not None]))
    kept = [step for step in kept if step.step_s is not None and step.step_s <= OUTLIER * median_s]
    values = {
        name: [value for step in kept if (value := getattr(step, name)) is not None]
        for name in LoggedStep.model_fields
        if name != "step"
    }
    means = {name: float(np.mean(some)) for name, some in values.items() if some}
    if "length_mean" not in means and "sequence_mean" in means:
        means["length_mean"] = means["sequence_mean"]
    if values["lag_max"]:
        means["lag_max"] = max(values["lag_max"])
    if "tokens" in means:
        means["tokens_per_s"] = means["tokens"] / means["step_s"]
    mean = LoggedStep(step=kept[-1].step, **means)
    left_out, longest = len(steps) - len(kept), max(values["length_max"], default=None)
    return LoggedRun(len(kept), left_out, mean, longest, number, len(runs))


# Distribution of answer lengths: from mean, a quantile or the share cut, and the longest.

USUAL_CV = 0.8
"""Standard deviation over mean where a log lacks the spread (no unit)."""
SPREADS = tuple(0.02 * 1.02**step for step in range(260))
"""Standard deviations of log X that are tried, 0.02 to 3.4 (no unit)."""
LONGER = 4.0
"""Longest over mean answer, where a log lacks the longest (no unit)."""


def logged_lengths(log: LoggedRun) -> tuple[LengthConfig, str]:
    """Return log-normal lengths for a log, and the values fitted.

    Of the 95 % quantile, the 90 % quantile, the share of answers that were cut and the mean longest answer of a step,
    the first that is known decides the spread; the cut distribution has the log's mean. The longest of n
    answers is taken to be the quantile (n - 0.375) / (n + 0.25) (Blom 1958).
    """
    mean, longest = log.mean.length_mean, log.longest
    assert mean is not None  # a log without it is refused
    most = math.ceil(max(longest or LONGER * mean, mean + 1.0))
    length = LengthConfig(kind="lognormal", mean=rounded(mean, 4), cv=USUAL_CV, max=most)
    for what, share, target in _points(log):
        log_sd, reached = _log_sd(mean, most, share, target)
        missed = "" if reached else ", which no log-normal of this mean reaches: the nearest is taken"
        cv = math.sqrt(math.expm1(log_sd**2))
        return length.model_copy(update={"cv": rounded(cv, 4)}), f"{what}{missed}"
    return length, "the mean alone; the spread is assumed"


def quantile(length: LengthConfig, share: float) -> float:
    """Return the length that a share of log-normal answers does not exceed (tokens)."""
    assert length.mean is not None
    assert length.cv is not None
    return min(float(length.max), _uncut(length.mean, length.max, log_sd_of(length.cv), share))


def _points(log: LoggedRun) -> Iterator[tuple[str, float, float]]:
    """Return the known quantile of the spread: its name, the share of answers below, and the length."""
    mean = log.mean
    if mean.length_p95 is not None:
        yield "mean and 95 % quantile", 0.95, mean.length_p95
    if mean.length_p90 is not None:
        yield "mean and 90 % quantile", 0.90, mean.length_p90
    if mean.clipped_share and log.longest is not None:
        yield "mean and share of answers that were cut", 1.0 - mean.clipped_share, log.longest
    if mean.samples is not None and mean.samples > 1 and mean.length_max is not None:
        yield "mean and longest", (mean.samples - 0.375) / (mean.samples + 0.25), mean.length_max


def _uncut(mean: float, longest: int, log_sd: float, share: float) -> float:
    location = location_of_mean(mean, log_sd=log_sd, longest=longest)
    return math.exp(location + NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9)) * log_sd)


def _log_sd(mean: float, longest: int, share: float, target: float) -> tuple[float, bool]:
    """Return the least spread whose quantile is the target, and whether there is one; else the nearest."""
    below = SPREADS[0]
    misses: dict[float, float] = {}
    for spread in SPREADS:
        missing = target - _uncut(mean, longest, spread, share)
        if missing <= 0 and spread > SPREADS[0]:
            return argument_nearest(lambda one: _uncut(mean, longest, one, share), target, low=below, high=spread), True
        misses[spread] = abs(missing)
        below = spread
    return min(misses, key=misses.__getitem__), False


# Run file of a log, and its hardware solved from the log's seconds.

MOST_IN_FLIGHT = 256
"""Sequences of an engine at a time where a log lacks them: vLLM's own limit (count)."""
WAITS = 0.05
"""Share of the step that the trainer waits from which on generation, and not training, sets the pace (no unit)."""
MOST_ANSWERS = 100_000
"""Answers of a step that is simulated (count)."""
ALIKE = 0.05
"""Share by which a batch of the log may differ from that of the run file (no unit)."""


@dataclass(frozen=True, slots=True)
class Models:
    """Predictions of the simulator, which calibration may not import."""

    train_step_s: Callable[[RunConfig], float]
    steps: Callable[[RunConfig], Sequence[StepRow]]
    """Optimizer steps of a short run, without its start; the first one marks the time at which the others begin."""


@dataclass(frozen=True, slots=True)
class CalibratedLog:
    """Result of a log."""

    log: LoggedRun
    run: RunConfig
    fit: HardwareFit
    predicted: LoggedStep
    """By the hardware model before calibration."""
    simulated: LoggedStep
    """After calibration."""
    assumed: tuple[str, ...]
    """Values missing in the log, and their replacements."""


def described_run(
    log: LoggedRun, *, run: RunConfig | None, named: Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[RunConfig, list[str]]:
    """Return the run that a log describes, and the assumptions.

    ``run``: the run file of the job; None: made from the log, with ``overrides`` (``a.b=value``). ``named``: ``gpu``,
    ``model`` and ``accelerators`` as the user names them; None where not.
    Raises ConfigError if GPU, model, accelerators, lengths or batch are known from nowhere, or a key is wrong.
    """
    mean, workload = log.mean, dict[str, Any]()
    assumed = list[str]()
    if log.num_runs > 1:
        last = ", the last" if log.number == log.num_runs else ""
        assumed.append(f"the log holds {log.num_runs} runs: run {log.number}{last}; --run N takes another")
    if mean.length_mean is None:
        assumed.append("lengths: not in the log, those that were given")
    else:
        length, fitted = logged_lengths(log)
        workload["length"] = length.model_dump(mode="json", exclude_defaults=True)
        assumed.append(f"lengths: log-normal, fitted to {fitted}")
    if mean.prompt_mean is not None:
        workload["prompt_tokens"] = round(mean.prompt_mean)
    if run is not None:
        data = run.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        data["workload"] = {**data["workload"], **workload}
        return parse_run(data, "run file with the lengths of the log"), assumed
    data = {
        "optimizer_steps": 100,
        "cluster": {},
        "scheduler": {},
        "workload": {**workload, "group_size": 1},
        "hardware": {"gpu": named.get("gpu"), "model": named.get("model")},
    }
    data = with_overrides(data, overrides)
    if "length" not in data["workload"]:
        raise ConfigError(
            "--set 'workload.length={...}' is missing: the log must tell the mean length of the answers (length_mean), "
            "got none"
        )
    if "prompt_tokens" not in data["workload"]:
        assumed.append("workload.prompt_tokens: not in the log, 0 taken; where it knows but sums, answers hold prompts")
    _add_cluster(data, log, named, assumed)
    _add_scheduler(data, log, assumed)
    if not any(one.startswith("workload.group_size") for one in overrides):
        slower = "a group waits for its last answer, so lag is longer with more"
        assumed.append(f"workload.group_size: not in the log, 1 taken; {slower}")
    data["hardware"] = {name: value for name, value in data["hardware"].items() if value is not None}
    if not data["hardware"]:
        raise ConfigError("calibrate --from needs --run RUN.toml, or --model NAME and --gpu NAME")
    make_paths_absolute(data, Path())  # the run file is kept in another folder
    return parse_run(data, "run of the log"), assumed


def _add_cluster(data: dict[str, Any], log: LoggedRun, named: Mapping[str, Any], assumed: list[str]) -> None:
    cluster, mean = data["cluster"], log.mean
    logged = mean.accelerators
    if logged is None and mean.generation_accelerators is not None and mean.training_accelerators is not None:
        logged = mean.generation_accelerators + mean.training_accelerators
    total = named.get("accelerators") or (None if logged is None else round(logged))
    if "accelerators" not in cluster and total is None:
        raise ConfigError("--accelerators N is missing: the log does not tell how many there were")
    total = cluster.setdefault("accelerators", total)
    if log.asynchronous and "generation_accelerators" not in cluster:
        generating = mean.generation_accelerators
        if generating is None and mean.training_accelerators is not None:
            generating = total - mean.training_accelerators
        cluster["generation_accelerators"] = round(generating or total / 2)
        if generating is None:
            assumed.append(
                f"cluster.generation_accelerators: not in the log, half of {total} taken (--set to change it)"
            )


def _add_scheduler(data: dict[str, Any], log: LoggedRun, assumed: list[str]) -> None:
    scheduler, cluster, mean = data["scheduler"], data["cluster"], log.mean
    scheduler.setdefault("kind", "pipeline" if log.asynchronous else "conventional")
    if "train_batch_size" not in scheduler:
        if mean.samples is None:
            raise ConfigError(
                "--set scheduler.train_batch_size=N is missing: the log does not tell its answers per step"
            )
        group = data["workload"]["group_size"]
        scheduler["train_batch_size"] = max(1, round(mean.samples / group)) * group
    if "generation_batch_size" not in scheduler:
        accelerators = cluster["generation_accelerators" if log.asynchronous else "accelerators"]
        engines = max(1, accelerators // cluster.get("tensor_parallel", 1))
        batch = scheduler["train_batch_size"] * scheduler.get("optimizer_steps_per_rl_step", 1)
        scheduler["generation_batch_size"] = min(MOST_IN_FLIGHT, math.ceil(batch / engines))
        assumed.append(
            f"scheduler.generation_batch_size: not in the log, {scheduler['generation_batch_size']} taken: the batch "
            f"on all engines, {MOST_IN_FLIGHT} at most"
        )
    if "tensor_parallel" not in cluster:
        assumed.append("cluster.tensor_parallel: not in the log, 1 taken")
    if log.asynchronous and mean.lag_max is not None and "max_lag" not in scheduler:
        scheduler["max_lag"] = max(1, math.ceil(mean.lag_max))
        assumed.append(f"scheduler.max_lag: {scheduler['max_lag']}, the largest staleness in the log")
    elif "max_lag" not in scheduler and "plan" not in data:
        data["plan"] = {"mean_lag_limit": MEAN_LAG_LIMIT}
        assumed.append(
            f"plan.mean_lag_limit: {MEAN_LAG_LIMIT:g} optimizer steps, as where plan is asked without a file"
        )


def calibrate_log(log: LoggedRun, run: RunConfig, assumed: Sequence[str], models: Models) -> CalibratedLog:
    """Solve the hardware of a run from the seconds of its log.

    One factor makes training as long as in the log. Another does so for the generation of a step's answers, or, in an
    asynchronous job that waits for answers, for the whole step. The weight synchronization is that of the log; the rest
    of a synchronous step is the phase switch.
    Raises ConfigError if a number is out of reach.
    """
    if log.mean.generation_s and not log.asynchronous and not run.colocated:
        raise ConfigError("--run must be of a colocated job, as the log is: its generation and training take turns")
    mean, per = log.mean, _optimizer_steps(log, run)
    if (answers := per * run.scheduler.train_batch_size) > MOST_ANSWERS:
        raise ConfigError(f"a step of the job must have at most {MOST_ANSWERS:,} answers, got {answers:,}")

    known: dict[str, LoggedStep] = {}

    def simulated(config: RunConfig) -> LoggedStep:
        key = config.model_dump_json()
        if key not in known:
            known[key] = simulated_step(config, models.steps(config), per)
        return known[key]

    notes = list(assumed)
    predicted = simulated(run)
    training_s = mean.training_s
    if log.asynchronous and mean.step_s is not None and mean.wait_s is not None:
        training_s = max(training_s or 0.0, mean.step_s - mean.wait_s - (mean.sync_s or 0.0))
    fit = HardwareFit(run.hardware, fixed_coefficients(run))
    if training_s:
        fit_factor(fit, run, "training", training_s / per, models.train_step_s, name="training_s of the log")
    else:
        notes.append(f"training: not in the log; the hardware model gives it{_known_to(prior.TRAINING_SD)}")
    if mean.sync_s:
        take_weight_sync(fit, run, mean.sync_s, name="sync_s of the log")
    else:
        within = _known_to(math.hypot(prior.SYNC_SD, prior.SYNC_ARM_SD)) if run.hardware.weight_sync is None else ""
        notes.append(f"weight synchronization: not in the log; the hardware model gives it{within}")
    if not log.asynchronous:
        _take_rest(fit, log, notes)
    _fit_generation(fit, log, _with_hardware(run, fit.table), simulated, notes)
    now = _with_hardware(run, fit.table)
    if mean.samples is not None and abs(mean.samples / (per * run.scheduler.train_batch_size) - 1) > ALIKE:
        fit.warnings.append(
            f"a step of the log has {mean.samples:.0f} answers, {per} optimizer steps of the run file have "
            f"{per * run.scheduler.train_batch_size}: check scheduler.train_batch_size"
        )
    fit.notes += _sync_methods(run, mean)
    return CalibratedLog(log, now, fit, predicted, simulated(now), tuple(notes))


def _optimizer_steps(log: LoggedRun, run: RunConfig) -> int:
    scheduler = run.scheduler
    if scheduler.schedule.has_rl_steps:
        return scheduler.optimizer_steps_per_rl_step
    return max(1, round((log.mean.samples or scheduler.train_batch_size) / scheduler.train_batch_size))


def _with_hardware(run: RunConfig, table: Mapping[str, Any]) -> RunConfig:
    return run.model_copy(update={"hardware": HardwareConfig.model_validate(dict(table))})


def _take_rest(fit: HardwareFit, log: LoggedRun, assumed: list[str]) -> None:
    mean = log.mean
    if mean.step_s is None or mean.generation_s is None or mean.training_s is None:
        assumed.append("phase switch: a part of the step is not in the log, that of the hardware model is taken")
        return
    rest_s = max(0.0, mean.step_s - mean.generation_s - mean.training_s - (mean.sync_s or 0.0))
    fit.table["switch"] = {"to_training_s": rounded(rest_s), "to_generation_s": 0.0}
    fit.notes.append(f"switch: all that a step lasts besides its parts, {rest_s:.3g} s: rewards, offloading, logging")


def _fit_generation(
    fit: HardwareFit, log: LoggedRun, run: RunConfig, simulated: Callable[[RunConfig], LoggedStep], notes: list[str]
) -> None:
    """Add the factor of generation, or a note why the log does not determine it."""
    column = "step_s" if log.asynchronous else "generation_s"
    goal_s = getattr(log.mean, column)
    if not goal_s:
        notes.append(f"generation: not in the log; the hardware model gives it{_known_to(prior.GENERATION_SD)}")
    elif log.asynchronous and not _waits(log.mean) and not _waits(simulated(run)):
        notes.append(
            "generation: the trainer hardly ever waits, so the log says only that generation keeps up; that of the "
            f"hardware model is taken{_known_to(prior.GENERATION_SD)}"
        )
    else:
        name = f"{column} of the log"
        fit_factor(fit, run, "generation", goal_s, lambda config: getattr(simulated(config), column), name=name)


def _known_to(sd: float) -> str:
    """Return the factor within which 80 % of the systems are, from the standard deviation of the log."""
    return f", which holds to a factor of {math.exp(prior.END_SDS * sd):.2g} (80 %)"


def _waits(step: LoggedStep) -> bool:
    return step.step_s is not None and (step.wait_s or 0.0) > WAITS * step.step_s


def _sync_methods(run: RunConfig, mean: LoggedStep) -> list[str]:
    """Return a note: the hardware model's seconds of each synchronization method beside the log's."""
    if not run.hardware.by_name or mean.sync_s is None:
        return []
    seconds = {}
    for method in PUBLISHED:
        hardware = run.hardware.model_copy(update={"weight_sync": method.name, "weights": None})
        seconds[method.name] = resolved_hardware(run.model_copy(update={"hardware": hardware})).weights.publish_s
    nearest = min(seconds, key=lambda name: abs(math.log((seconds[name] or 1e-9) / (mean.sync_s or 1e-9))))
    by_method = ", ".join(f"{name} {value:.2g}" for name, value in seconds.items())
    return [
        f"sync by method (seconds, hardware model): {by_method}; the log has {mean.sync_s:.2g}, nearest is {nearest}"
    ]


def simulated_step(run: RunConfig, rows: Sequence[StepRow], per: int = 1) -> LoggedStep:
    """Return the mean simulated step, ``per`` optimizer steps; the first row marks the start of the second."""
    counted, num = rows[1:], len(rows) - 1
    step_s = per * (rows[-1].time_s - rows[0].time_s) / num

    def total(name: str) -> float:
        return per * sum(float(getattr(row, name)) for row in counted) / num

    tokens, samples, waits_s = total("tokens"), total("samples"), total("wait_s")
    switch = resolved_hardware(run).switch
    idle = {"wait_s": waits_s}
    if run.colocated:
        idle = {"generation_s": max(0.0, waits_s - switch.to_training_s - switch.to_generation_s)}
    return LoggedStep(
        step=rows[-1].step,
        step_s=step_s,
        training_s=total("train_s"),
        switch_s=switch.to_training_s + switch.to_generation_s if run.colocated else None,
        sync_s=total("publish_s"),
        tokens=tokens,
        samples=samples,
        tokens_per_s=tokens / step_s,
        length_mean=tokens / samples,
        lag_mean=sum(row.lag_mean * row.tokens for row in counted) / sum(row.tokens for row in counted),
        lag_max=float(max(row.lag_max for row in counted)),
        **idle,
    )
