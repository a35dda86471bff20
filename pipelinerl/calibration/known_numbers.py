"""Fit the hardware model to three numbers that a user knows: train step, rollout batch, weight synchronisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipelinerl.calibration.coefficient_fit import is_inverse
from pipelinerl.calibration.hardware_fit import (
    DECODE_COEFFICIENTS,
    TRAINING_COEFFICIENTS,
    HardwareFit,
    fixed_coefficients,
    rounded,
)
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import coefficients
from pipelinerl.hardware.tables import HardwareConfig, TimedTable

Slower = Callable[[RunConfig, float], dict[str, Any]]

OPTIONS = {
    "train_step_s": "--train-step-s", "rollout_batch_s": "--rollout-batch-s", "weight_sync_s": "--weight-sync-s",
}  # fmt: skip
"""What messages call the numbers on the command line."""
TRIES = 12
"""Simulations to find a factor, at most (count)."""
CLOSE = 1e-3
"""Share of the measured time at which they end (no unit)."""
LEAST_SLOPE = 0.2
"""Least slope, of the log of the time over that of the factor, by which the next factor is chosen (no unit)."""
WITHIN = 0.01
"""Share by which the model may miss a number and count as giving it (no unit)."""
JUST_OUT = 0.05
"""Share by which a number may be out of the model's reach and is taken with a warning: so far are logs rounded, and so
far do steps differ (no unit)."""


def calibrate_numbers(
    run: RunConfig,
    *,
    train_step_s: float | None = None,
    rollout_batch_s: float | None = None,
    weight_sync_s: float | None = None,
    model_train_s: Callable[[RunConfig], float],
    model_rollout_s: Callable[[RunConfig], float],
    names: Mapping[str, str] = OPTIONS,
) -> HardwareFit:
    """Fit one speed factor of the trainer and one of generation to numbers that a user knows.

    Args:
        run: The configuration in which the numbers were seen.
        train_step_s: Seconds of an optimizer step: B sequences.
        rollout_batch_s: Seconds to generate what one RL step needs, from empty engines to the last token.
        weight_sync_s: Seconds from the end of an optimizer step to engines with its weights.
        model_train_s: Seconds of an optimizer step of a configuration in the simulator.
        model_rollout_s: Seconds of such a batch in the simulator.
        names: What messages call the numbers.

    Raises:
        ConfigError: If no number is given, one is not above 0, one is shorter than the hardware model allows, or one is
            so long that it must be in another unit.
    """
    numbers = {"train_step_s": train_step_s, "rollout_batch_s": rollout_batch_s, "weight_sync_s": weight_sync_s}
    if all(value is None for value in numbers.values()):
        raise ConfigError(f"calibrate needs SOURCE, or some of {', '.join(OPTIONS.values())} with --run RUN.toml")
    for name, value in numbers.items():
        if value is not None and not 0 < value < 1e7:
            raise ConfigError(f"{names[name]} must be above 0 and in seconds, got {value:g}")
    result = HardwareFit(run.hardware, fixed_coefficients(run))
    for name, goal_s, model_s, slower, what in (
        ("train_step_s", train_step_s, model_train_s, _slower_training, "training"),
        ("rollout_batch_s", rollout_batch_s, model_rollout_s, _slower_generation, "generation"),
    ):
        if goal_s is not None:
            now_s = model_s(run)
            result.check_number(names[name], goal_s, now_s)
            factor = _solve(run, goal_s, model_s, slower, now_s=now_s, name=names[name], warnings=result.warnings)
            _scale(result, slower(run, factor), factor, what)
    if weight_sync_s is not None:
        result.check_number(names["weight_sync_s"], weight_sync_s, resolved_hardware(run).weights.pause_s)
        result.table["weights"] = {"publish_s": weight_sync_s, "pause_s": weight_sync_s}
        result.notes.append(
            "weights: taken to stop trainer and engines all the time; one number does not say whether engines go on "
            "generating meanwhile (transfer_s)"
        )
    return result


def _slower_training(run: RunConfig, factor: float) -> dict[str, Any]:
    """Return the parts of ``[hardware]`` that make training last ``factor`` times as long."""
    if run.hardware.training is not None:
        return {"training": _dumped(run.hardware.training.with_slower_software(factor))}
    return {"coefficients": _slowed(run, TRAINING_COEFFICIENTS, factor)}


def _slower_generation(run: RunConfig, factor: float) -> dict[str, Any]:
    """Return the parts of ``[hardware]`` that make decode and prefill last ``factor`` times as long."""
    hardware = run.hardware
    parts: dict[str, Any] = {}
    if hardware.decode is not None:
        parts["decode"] = _dumped(hardware.decode.with_slower_software(factor))
    if hardware.prefill is not None:
        parts["prefill"] = _dumped(hardware.prefill.with_slower_software(factor))
    if hardware.by_name:
        parts["coefficients"] = _slowed(run, (*DECODE_COEFFICIENTS, "layer_overhead_s", "prefill_mfu"), factor)
    return parts


def _dumped(table: TimedTable) -> dict[str, Any]:
    return table.model_dump(exclude_none=True)


def _slowed(run: RunConfig, names: Iterable[str], factor: float) -> dict[str, float]:
    values = coefficients(run.hardware.level, run.hardware.coefficients)
    return {
        name: min(1.0, getattr(values, name) / factor) if is_inverse(name) else getattr(values, name) * factor
        for name in names
    }


def _merged(table: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table ``[hardware]`` with other parts; coefficients that are not among them stay."""
    merged = {**table, **parts}
    if "coefficients" in parts:
        merged["coefficients"] = {**table.get("coefficients", {}), **parts["coefficients"]}
    return merged


def _solve(
    run: RunConfig,
    goal_s: float,
    model_s: Callable[[RunConfig], float],
    slower: Slower,
    *,
    now_s: float,
    name: str,
    warnings: list[str],
) -> float:
    """Return the factor on the times of the model that gives a measured time; with a warning where it just misses.

    The model gives ``now_s`` as it is.
    """
    table = run.hardware.model_dump(mode="json", exclude_none=True)

    def slowed_s(factor: float) -> float:
        hardware = HardwareConfig.model_validate(_merged(table, slower(run, factor)))
        return model_s(run.model_copy(update={"hardware": hardware}))

    factor, slope = 1.0, 1.0
    for _ in range(TRIES):
        if abs(now_s / goal_s - 1) < CLOSE:
            break
        last, last_s = factor, now_s
        factor *= (goal_s / now_s) ** (1 / slope)
        now_s = slowed_s(factor)
        # Where other times stand beside these, a factor changes the sum by a smaller one.
        slope = min(1.0, max(LEAST_SLOPE, math.log(now_s / last_s) / math.log(factor / last)))
    missed = abs(now_s / goal_s - 1)
    if missed > JUST_OUT:
        raise ConfigError(
            f"{name}={goal_s:g} is out of reach: the nearest that the hardware model gives is {now_s:.3g} s; check "
            "the unit, and the batch, lengths, latencies and accelerators of --run"
        )
    if missed > WITHIN:
        warnings.append(
            f"{name}={goal_s:g} is just out of reach: the nearest that the hardware model gives is {now_s:.3g} s, taken"
        )
    return factor


def _scale(result: HardwareFit, parts: Mapping[str, Any], factor: float, what: str) -> None:
    short = {
        name: {key: rounded(one) if isinstance(one, float) else one for key, one in part.items()}
        for name, part in parts.items()
    }
    result.table = _merged(result.table, short)
    result.factors[what] = factor
    result.notes.append(
        f"{what}: one number gives one factor, {factor:.3g} on all its times; how they divide among their parts is not "
        "determined and stays as it was"
    )
