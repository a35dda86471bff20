"""The run file that a log describes, and its hardware solved from the log's seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.calibration.hardware_fit import HardwareFit, rounded
from pipelinerl.calibration.known_numbers import calibrate_numbers
from pipelinerl.calibration.logs.lengths import logged_lengths
from pipelinerl.calibration.logs.record import LoggedRun, LoggedStep
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import make_paths_absolute, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import WeightSync
from pipelinerl.hardware.tables import HardwareConfig
from pipelinerl.records.steps import StepRow

MOST_IN_FLIGHT = 256
"""Sequences of an engine at a time where a log does not say it: vLLM's own limit (count)."""
WAITS = 0.05
"""Share of the step that the trainer waits from which on generation, and not training, sets the pace (no unit)."""
ALIKE = 0.05
"""Share by which a batch of the log may differ from that of the run file (no unit)."""
LOGGED = {"train_step_s": "training_s of the log", "rollout_batch_s": "generation_s of the log",
          "weight_sync_s": "sync_s of the log"}  # fmt: skip
"""What messages call the numbers."""
PACED = {**LOGGED, "rollout_batch_s": "step_s of the log"}
"""The same of an asynchronous job."""


@dataclass(frozen=True, slots=True)
class Models:
    """What the simulator gives; calibration may not import it."""

    train_step_s: Callable[[RunConfig], float]
    """Seconds of an optimizer step."""
    steps: Callable[[RunConfig], Sequence[StepRow]]
    """Optimizer steps of a short run, without its start; the first only tells when they begin."""


@dataclass(frozen=True, slots=True)
class CalibratedLog:
    """What a log gave."""

    log: LoggedRun
    run: RunConfig
    """The run of the log, with its hardware."""
    fit: HardwareFit
    """The hardware: table, factors, notes, warnings."""
    predicted: LoggedStep
    """What the hardware model said before the calibration."""
    simulated: LoggedStep
    """What the simulator says after it."""
    assumed: tuple[str, ...]
    """What the log did not tell, and what was taken instead."""


def described_run(
    log: LoggedRun, *, run: RunConfig | None, named: Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[RunConfig, list[str]]:
    """Return the run that a log describes, and what was assumed.

    Args:
        log: The log.
        run: The run file of the job. None: it is made from the log.
        named: ``gpu``, ``model`` and ``accelerators`` as the user names them; None where not.
        overrides: Keys of the run that is made, ``a.b=value``.

    Raises:
        ConfigError: If GPU, model, accelerators, lengths or batch are known from nowhere, or a key is wrong.
    """
    mean, workload = log.mean, dict[str, Any]()
    assumed = list[str]()
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
        assumed.append(
            "workload.group_size: not in the log, 1 taken; a group waits for its last answer, so lag is longer with "
            "more"
        )
    data["hardware"] = {name: value for name, value in data["hardware"].items() if value is not None}
    if not data["hardware"]:
        raise ConfigError("calibrate --from needs --run RUN.toml, or --model NAME and --gpu NAME")
    make_paths_absolute(data, Path())  # the run file is kept in another folder
    return parse_run(data, "run of the log"), assumed


def _add_cluster(data: dict[str, Any], log: LoggedRun, named: Mapping[str, Any], assumed: list[str]) -> None:
    cluster, mean = data["cluster"], log.mean
    told = mean.accelerators
    if told is None and mean.generation_accelerators is not None and mean.training_accelerators is not None:
        told = mean.generation_accelerators + mean.training_accelerators
    total = named.get("accelerators") or (None if told is None else round(told))
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


def calibrate_log(log: LoggedRun, run: RunConfig, assumed: Sequence[str], models: Models) -> CalibratedLog:
    """Solve the hardware of a run from the seconds of its log.

    Training by one factor, so that it lasts as long as in the log; the weight synchronization as it is; what a
    synchronous step lasts besides is the phase switch. Generation by one factor: so that the answers of a step take the
    log's seconds, or, in an asynchronous job that waits for answers, so that a step does.

    Raises:
        ConfigError: If a number is out of reach.
    """
    mean, per = log.mean, _optimizer_steps(log, run)

    def simulated(config: RunConfig) -> LoggedStep:
        return simulated_step(config, models.steps(config), per)

    notes = list(assumed)
    predicted = simulated(run)
    training_s = mean.training_s
    if log.asynchronous and mean.step_s is not None and mean.wait_s is not None:
        training_s = max(training_s or 0.0, mean.step_s - mean.wait_s - (mean.sync_s or 0.0))
    fit = HardwareFit(run.hardware)
    if training_s or mean.sync_s:
        fit = calibrate_numbers(
            run,
            train_step_s=training_s / per if training_s else None,
            weight_sync_s=mean.sync_s or None,
            model_train_s=models.train_step_s,
            model_rollout_s=models.train_step_s,
            names=LOGGED,
        )
    for name, known in (("training", training_s), ("weight synchronization", mean.sync_s)):
        if not known:
            notes.append(f"{name}: not in the log, that of the hardware model")
    if not log.asynchronous:
        _take_rest(fit, log, notes)
    now = _with_hardware(run, fit.table)
    generation = _generation(log, now, simulated, notes)
    if generation is not None:
        before, fit = fit, generation
        fit.notes, fit.warnings = before.notes + fit.notes, before.warnings + fit.warnings
        fit.factors = before.factors | fit.factors
        now = _with_hardware(run, fit.table)
    if mean.samples is not None and abs(mean.samples / (per * run.scheduler.train_batch_size) - 1) > ALIKE:
        fit.warnings.append(
            f"a step of the log has {mean.samples:.0f} answers, {per} optimizer steps of the run file have "
            f"{per * run.scheduler.train_batch_size}: check scheduler.train_batch_size"
        )
    fit.notes += _sync_methods(run, mean)
    return CalibratedLog(log, now, fit, predicted, simulated(now), tuple(notes))


def _optimizer_steps(log: LoggedRun, run: RunConfig) -> int:
    """Return the optimizer steps that a step of the log holds: an RL step of the run file, or what the batch says."""
    scheduler = run.scheduler
    if scheduler.schedule.has_rl_steps:
        return scheduler.optimizer_steps_per_rl_step
    return max(1, round((log.mean.samples or scheduler.train_batch_size) / scheduler.train_batch_size))


def _with_hardware(run: RunConfig, table: Mapping[str, Any]) -> RunConfig:
    return run.model_copy(update={"hardware": HardwareConfig.model_validate(dict(table))})


def _take_rest(fit: HardwareFit, log: LoggedRun, assumed: list[str]) -> None:
    """Keep what a synchronous step lasts besides its parts as the phase switch."""
    mean = log.mean
    if mean.step_s is None or mean.generation_s is None or mean.training_s is None:
        assumed.append("phase switch: a part of the step is not in the log, that of the hardware model is taken")
        return
    rest_s = max(0.0, mean.step_s - mean.generation_s - mean.training_s - (mean.sync_s or 0.0))
    fit.table["switch"] = {"to_training_s": rounded(rest_s), "to_generation_s": 0.0}
    fit.notes.append(f"switch: all that a step lasts besides its parts, {rest_s:.3g} s: rewards, offloading, logging")


def _generation(
    log: LoggedRun, run: RunConfig, simulated: Callable[[RunConfig], LoggedStep], notes: list[str]
) -> HardwareFit | None:
    """Return the hardware with generation solved; None where the log does not determine it."""
    mean = log.mean
    goal_s, column, names = mean.generation_s, "generation_s", LOGGED
    if log.asynchronous:
        goal_s, column, names = mean.step_s, "step_s", PACED

    def model_s(config: RunConfig) -> float:
        return float(getattr(simulated(config), column))

    if not goal_s:
        notes.append("generation: not in the log, that of the hardware model")
        return None
    if log.asynchronous and not _waits(mean) and not _waits(simulated(run)):
        notes.append(
            "generation: the trainer hardly ever waits, so the log says only that generation keeps up; that of the "
            "hardware model is taken"
        )
        return None
    return calibrate_numbers(run, rollout_batch_s=goal_s, model_train_s=model_s, model_rollout_s=model_s, names=names)


def _waits(step: LoggedStep) -> bool:
    """Return whether the trainer waits for answers long enough that they set the pace."""
    return step.step_s is not None and (step.wait_s or 0.0) > WAITS * step.step_s


def _sync_methods(run: RunConfig, mean: LoggedStep) -> list[str]:
    """Return a note: what the hardware model says of each method of synchronization, beside the log."""
    if not run.hardware.by_name or mean.sync_s is None:
        return []
    seconds = {}
    for method in WeightSync:
        hardware = run.hardware.model_copy(update={"weight_sync": method, "weights": None})
        seconds[method.value] = resolved_hardware(run.model_copy(update={"hardware": hardware})).weights.publish_s
    nearest = min(seconds, key=lambda name: abs(math.log((seconds[name] or 1e-9) / (mean.sync_s or 1e-9))))
    said = ", ".join(f"{name} {value:.2g}" for name, value in seconds.items())
    return [f"sync by method (seconds, hardware model): {said}; the log has {mean.sync_s:.2g}, nearest is {nearest}"]


def simulated_step(run: RunConfig, rows: Sequence[StepRow], per: int = 1) -> LoggedStep:
    """Return the mean step of a simulated run as a log of it would have it.

    Args:
        run: The run.
        rows: Its optimizer steps, in order; the first one only tells when the second began.
        per: Optimizer steps of a step of the log (count).
    """
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
        sync_s=total("publish_s"),
        tokens=tokens,
        samples=samples,
        tokens_per_s=tokens / step_s,
        length_mean=tokens / samples,
        lag_mean=sum(row.lag_mean * row.tokens for row in counted) / sum(row.tokens for row in counted),
        lag_max=float(max(row.lag_max for row in counted)),
        **idle,
    )
