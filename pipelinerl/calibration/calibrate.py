"""Fit the hardware model to what is known of a real system: a trace, a table of step times, or three numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from pipelinerl.calibration.hardware_fit import (
    DECODE_COEFFICIENTS,
    TRAINING_COEFFICIENTS,
    HardwareFit,
    fixed_coefficients,
    is_inverse,
    rounded,
)
from pipelinerl.calibration.least_squares import Fit
from pipelinerl.calibration.step_times import Rows, read_step_times
from pipelinerl.calibration.trace_times import DecodeTimes, TraceTimes, TrainingTimes, read_times
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import coefficients
from pipelinerl.hardware.tables import HardwareConfig, TimedTable
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace

FloatArray = NDArray[np.float64]

HARDWARE_FILE = "hardware.toml"
"""What the result is called in a folder."""

QUIET = 0.02
"""Mean error up to which single lives of rollouts count as free of noise (no unit)."""

AT_PEAK = 1e-6
"""How near a fitted share of the peak must be to 1 to count as at its bound (no unit)."""
POOR = 0.2
"""Mean error from which on a fit is called poor (no unit).

The hardware model without any measurement is 20 to 35 % off where it could be checked; a good fit is 2 %, one on a
noisy machine 10 %.
"""

# ------------------------------------------------------------------------------------------ sources


def calibrate_trace(source: Path, run: RunConfig | None = None) -> HardwareFit:
    """Fit the hardware to the trace of a run.

    Args:
        source: Folder of a run, or its trace.
        run: Its ``hardware`` says what to fit: GPU and model, or tables. None: that of the trace.

    Raises:
        TraceError: If the trace is missing or broken.
        ConfigError: If it holds no optimizer step or no finished rollout, or GPU or model are unknown.
    """
    times = read_times(Trace(source / TRACE_FILE if source.is_dir() else source))
    num_batches = len(times.training.seconds)
    if not num_batches or not any(log.lived for log in times.engines):
        raise ConfigError(f"{source} must hold an optimizer step and a finished rollout, got a run that ended before")
    run = times.config if run is None else run
    result = HardwareFit(run.hardware, fixed_coefficients(run))
    _fit_decode(result, times)
    accelerators = np.full(num_batches, float(times.config.training_accelerators))
    result.training(times.training, accelerators, f"{num_batches} micro-batches")
    _take_waits(result, times)
    return result


def _fit_decode(result: HardwareFit, times: TraceTimes) -> None:
    """Fit the decode step, prefill and the way to the engine."""
    size = float(times.config.cluster.tensor_parallel)

    def step_s(batch: FloatArray, context: FloatArray) -> FloatArray:
        one = DecodeTimes(np.ones_like(batch), batch, context, *np.zeros((6, len(batch))))
        return result.decode_s(one, np.full(len(batch), size))

    if times.windows is not None:
        num_windows = len(times.windows.seconds)
        data = f"{num_windows} stretches of engines with known steps"
        result.decode(times.windows, np.full(num_windows, size), data)
        if not times.windows.prefills.any():
            result.notes.append("prefill is not determined: no stretch holds one")
        way_s = 0.0
        for _ in range(4):
            lives = times.lives(max(0.0, way_s), step_s)
            rest_s = lives.seconds - result.decode_s(lives, np.full(len(lives.seconds), size))
            way_s = float(rest_s.sum() / lives.lives.sum())
    else:
        table = dict(result.table)
        for together in (False, True):
            way_s, speed = 0.0, None
            for _ in range(4):
                lives = times.lives(max(0.0, way_s), speed, together=together)
                result.table, result.parts = dict(table), []
                data = f"{lives.lives.sum():.0f} lives of rollouts"
                way_s = result.decode(lives, np.full(len(lives.seconds), size), data, with_dispatch=True)
                speed = step_s
            if result.parts[-1].fit.mean_error < QUIET:
                break
    # A rollout that meets a busy engine waits for the running step to end: half a step in the mean.
    half_step_s = float((lives.seconds / lives.steps * lives.waits).sum() / lives.lives.sum()) / 2
    latency = result.given.latency.model_dump(exclude={"dispatch_jitter_s"}, exclude_defaults=True)
    result.table["latency"] = {**latency, "dispatch_s": rounded(max(0.0, way_s - half_step_s))}


def _take_waits(result: HardwareFit, times: TraceTimes) -> None:
    """Keep what a trace tells directly: publication, pause, transfer, phase switch, scoring."""
    if times.publish_s and times.pause_s:
        weights = {"publish_s": _mean(times.publish_s), "pause_s": _mean(times.pause_s)}
        if times.transfer_s:
            # The wait for the running step is in it, and is nothing in the luckiest of all updates.
            weights["transfer_s"] = rounded(max(0.0, min(times.transfer_s)))
        result.table["weights"] = weights
    else:
        result.notes.append("weights: no publication in the trace")
    if times.to_training_s and times.to_generation_s:
        switch = {"to_training_s": _mean(times.to_training_s), "to_generation_s": _mean(times.to_generation_s)}
        result.table["switch"] = {name: max(0.0, value) for name, value in switch.items()}
    if times.score_s:
        result.table["latency"].pop("preprocess_s", None)
        result.table["latency"]["reward_s"] = rounded(float(np.median(times.score_s)))
        result.notes.append("latency.reward_s holds reward and preprocessing, which a trace does not tell apart")


def _mean(values: Iterable[float]) -> float:
    return rounded(float(np.mean(list(values))))


def calibrate_table(source: Path, run: RunConfig | None = None) -> HardwareFit:
    """Fit the hardware to a table of step times.

    Args:
        source: The CSV file (see ``steptimes``).
        run: Its ``hardware`` says what to fit: GPU and model, or tables. None: tables.

    Raises:
        ConfigError: If the table cannot be used, or GPU or model are unknown.
    """
    result = HardwareFit(HardwareConfig.model_construct())
    if run is not None:
        result = HardwareFit(run.hardware, fixed_coefficients(run))
    series = None
    if result.gpu is not None and result.model is not None:
        series = (_names(result.model), _names(result.gpu))
    table = read_step_times(source, series=series)
    if table.series is not None:
        result.notes.append("series: {} on {}".format(*table.series))
    for kind, rows in table.kinds.items():
        data = f"{len(rows.batch)} rows of {source.name}"
        nothing, ones = np.zeros(len(rows.batch)), np.ones(len(rows.batch))
        if kind == "matmul":
            best = int(rows.utilisation.argmax())
            result.notes.append(
                f"matmul: utilisation {rows.utilisation[best]:.2f} at most, with {rows.batch[best]:g} rows; for "
                'hardware.decode of kind "utilisation" give utilisation.csv as its table'
            )
        elif kind == "train":
            each = rows.tokens / rows.batch
            times = TrainingTimes(rows.tokens, rows.tokens * each, rows.batch, each, each, ones, rows.seconds)
            result.training(times, rows.accelerators, data)
        else:
            sizes = _engine_sizes(source, rows, result)
            if kind == "decode":
                context = rows.batch * rows.ctx
                result.decode(
                    DecodeTimes(ones, rows.batch, context, nothing, nothing, nothing, rows.seconds, nothing, nothing),
                    sizes,
                    data,
                )
            else:
                squares = rows.tokens**2 / rows.batch
                passes = DecodeTimes(
                    nothing, nothing, nothing, rows.batch, rows.tokens, squares, rows.seconds, nothing, nothing
                )
                result.prefill(passes, sizes, data)
    if result.model is None:
        for name in ("decode", "training"):
            if name not in result.table:
                result.notes.append(f"{name} was not measured: a run file needs hardware.{name} from elsewhere")
    return result


def _engine_sizes(source: Path, rows: Rows, result: HardwareFit) -> FloatArray:
    """Return the accelerators of each row's engine; tables of a run file can hold one number of them only."""
    if result.model is None and len(np.unique(rows.accelerators)) > 1:
        sizes = ", ".join(f"{size:g}" for size in np.unique(rows.accelerators))
        raise ConfigError(
            f"{source} holds engines of {sizes} accelerators: give --run RUN.toml with hardware.gpu and hardware.model"
        )
    return rows.accelerators


def _names(one: Gpu | LanguageModel) -> list[str]:
    return [one.name, *one.aliases]


# ------------------------------------------------------------------------------------ three numbers

Slower = Callable[[RunConfig, float], dict[str, Any]]


def calibrate_numbers(
    run: RunConfig,
    *,
    train_step_s: float | None = None,
    rollout_batch_s: float | None = None,
    weight_sync_s: float | None = None,
    model_train_s: Callable[[RunConfig], float],
    model_rollout_s: Callable[[RunConfig], float],
) -> HardwareFit:
    """Fit one speed factor of the trainer and one of generation to numbers that a user knows.

    Args:
        run: The configuration in which the numbers were seen.
        train_step_s: Seconds of an optimizer step: B sequences.
        rollout_batch_s: Seconds to generate what one RL step needs, from empty engines to the last token.
        weight_sync_s: Seconds from the end of an optimizer step to engines with its weights.
        model_train_s: Seconds of an optimizer step of a configuration in the simulator.
        model_rollout_s: Seconds of such a batch in the simulator.

    Raises:
        ConfigError: If no number is given, one is not above 0, one is shorter than the hardware model allows, or one is
            so long that it must be in another unit.
    """
    numbers = {"train-step-s": train_step_s, "rollout-batch-s": rollout_batch_s, "weight-sync-s": weight_sync_s}
    if all(value is None for value in numbers.values()):
        raise ConfigError(f"calibrate needs SOURCE, or some of --{', --'.join(numbers)} with --run RUN.toml")
    for name, value in numbers.items():
        if value is not None and not 0 < value < 1e7:
            raise ConfigError(f"--{name} must be above 0 and in seconds, got {value:g}")
    result = HardwareFit(run.hardware, fixed_coefficients(run))
    if train_step_s is not None:
        result.check_number("train-step-s", train_step_s, model_train_s(run))
        factor = _solve(run, train_step_s, model_train_s, _slower_training, "--train-step-s")
        _scale(result, _slower_training(run, factor), factor, "training")
    if rollout_batch_s is not None:
        result.check_number("rollout-batch-s", rollout_batch_s, model_rollout_s(run))
        factor = _solve(run, rollout_batch_s, model_rollout_s, _slower_generation, "--rollout-batch-s")
        _scale(result, _slower_generation(run, factor), factor, "generation")
    if weight_sync_s is not None:
        result.check_number("weight-sync-s", weight_sync_s, resolved_hardware(run).weights.pause_s)
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


def _solve(run: RunConfig, goal_s: float, model_s: Callable[[RunConfig], float], slower: Slower, option: str) -> float:
    """Return the factor on the times of the model that gives a measured time."""
    table = run.hardware.model_dump(mode="json", exclude_none=True)

    def slowed_s(factor: float) -> float:
        hardware = HardwareConfig.model_validate(_merged(table, slower(run, factor)))
        return model_s(run.model_copy(update={"hardware": hardware}))

    factor = 1.0
    now_s = slowed_s(factor)
    for _ in range(12):
        if abs(now_s / goal_s - 1) < 1e-4:
            break
        factor *= goal_s / now_s
        now_s = slowed_s(factor)
    if abs(now_s / goal_s - 1) > 0.01:
        raise ConfigError(
            f"{option}={goal_s:g} is out of reach: the nearest that the hardware model gives is {now_s:.3g} s; check "
            "the unit, and the batch, lengths, latencies and accelerators of --run"
        )
    return factor


def _scale(result: HardwareFit, parts: Mapping[str, Any], factor: float, what: str) -> None:
    short = {
        name: {key: rounded(one) if isinstance(one, float) else one for key, one in part.items()}
        for name, part in parts.items()
    }
    result.table = _merged(result.table, short)
    result.notes.append(
        f"{what}: one number gives one factor, {factor:.3g} on all its times; how they divide among their parts is not "
        "determined and stays as it was"
    )


# ------------------------------------------------------------------------------------------ results


def hardware_toml(result: HardwareFit, source: str) -> str:
    """Return the table ``[hardware]`` as TOML, with what is to know about it as comments."""
    lines = [f"# Calibrated from {source}. Replaces the table [hardware] of a run file."]
    for part in result.parts:
        lines.append(f"# {part.what}: fitted to {part.data}; {error_text(part.fit)}")
        lines += [f"#   {name} is not determined: {reason}" for name, reason in part.fit.undetermined.items()]
    lines += [f"# {note}" for note in result.notes]
    return "\n".join(lines) + "\n\n" + tomli_w.dumps({"hardware": result.table})


def write_hardware(out: Path, text: str) -> None:
    """Write the table into a folder as ``hardware.toml``, or into a file whose name ends in ``.toml``.

    Raises:
        ConfigError: If that cannot be done, or there is such a file.
    """
    path = out if out.suffix == ".toml" else out / HARDWARE_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--out must be a new file or a folder without one, got {path}, which exists") from None
    except OSError as error:
        raise ConfigError(f"--out must be a folder or file that can be written, got {out}: {error.strerror}") from None


def error_text(one: Fit) -> str:
    """Return the errors of a fit in words."""
    held_out = "" if one.held_out_error is None else f", {one.held_out_error:.1%} in the mean on a row left out"
    return f"error {one.mean_error:.1%} in the mean, {one.max_error:.1%} at most{held_out}"


def doubts(result: HardwareFit) -> list[str]:
    """Return a line for each fit that is poor, and for each share of a peak that came out at all of it.

    A time that comes out at its bound, 0, is no reason to doubt: there are systems without it.
    """
    lines = []
    for part in result.parts:
        one = part.fit
        if max(one.mean_error, one.held_out_error or 0.0) > POOR:
            lines.append(
                f"{part.what} is a poor fit to {part.data}: {error_text(one)}; above {POOR:.0%} it says "
                "no more than no calibration: check that the rows are of one system, and their units"
            )
        fitted = {name: value for name, value in one.values.items() if name not in one.undetermined}
        lines += [
            f"{name} came out at its bound, {value:g}: {part.what} is as fast as the accelerator can be, or faster; "
            "check units, GPU and model"
            for name, value in fitted.items()
            if is_inverse(name) and value >= 1 - AT_PEAK
        ]
    return lines


def as_json(result: HardwareFit) -> dict[str, Any]:
    """Return plain values: table, fits, notes, warnings."""
    fits = [
        {
            "what": part.what,
            "data": part.data,
            "rows": part.fit.rows,
            "values": part.fit.values,
            "undetermined": part.fit.undetermined,
            "mean_error": part.fit.mean_error,
            "max_error": part.fit.max_error,
            "held_out_error": part.fit.held_out_error,
        }
        for part in result.parts
    ]
    return {"hardware": result.table, "fits": fits, "notes": result.notes, "warnings": doubts(result)}
