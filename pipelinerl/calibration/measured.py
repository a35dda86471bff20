"""Measurements merged into a run file: the results of ``measure``, ``train --check`` and ``calibrate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelinerl.calibration.calibrate import HARDWARE_FILE, calibrate_table, calibrate_trace, doubts
from pipelinerl.calibration.solve import TRAINING_COEFFICIENTS, merged_tables
from pipelinerl.config.engine import EngineConfig, as_measured
from pipelinerl.config.run import RunConfig, load_run, read_hardware
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import HardwareConfig
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.run_folder import RUN_FILE, TRACE_FILE
from pipelinerl.records.steps import STEPS_FILE, read_steps
from pipelinerl.util.explain import explaining
from pipelinerl.util.read import read_json
from pipelinerl.util.strict_model import StrictModel

STEP_TIMES_FILE = "step_times.csv"
CONDITIONS_FILE = "conditions.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements besides the table ``[hardware]``."""

    weights: Mapping[bool, WeightTransferConfig] = field(default_factory=dict)
    """Weight transfer by arm: True for colocated accelerators."""
    answers: bool = False
    """Whether the mean answer was measured in a run of the task."""
    doubts: tuple[str, ...] = ()
    """A line per poor fit."""


def merged(config: RunConfig, sources: Sequence[Path]) -> tuple[RunConfig, Measured]:
    """Return a run file with measurements merged into it; a later one replaces an earlier one of the same quantity.

    ``sources``: folders of ``measure`` or of runs with a trace, step-time tables, ``hardware.toml`` of ``calibrate``.
    Raises ConfigError if one is unknown or broken, or of another GPU or model.
    """
    measured = Measured()
    for source in sources:
        config, measured = _with_one(config, measured, source)
    return config, measured


def of_its_arm(config: RunConfig, sources: Sequence[Path]) -> RunConfig:
    """Return the run file of ``merged``, with the weight transfer of its own arm (colocated or not) if measured."""
    config, measured = merged(config, sources)
    weights = measured.weights.get(config.colocated)
    if weights is None:
        return config
    return config.model_copy(update={"hardware": config.hardware.model_copy(update={"weights": weights})})


def _with_one(config: RunConfig, measured: Measured, source: Path) -> tuple[RunConfig, Measured]:
    if source.is_dir() and (source / TRACE_FILE).exists():
        return _with_run(config, measured, source)
    table = source / STEP_TIMES_FILE if source.is_dir() else source
    if table.suffix == ".csv" and table.exists():
        result = calibrate_table(table, config)
        found = result.table if table is source else _of_an_engine(result.table, config, source)
        return _with_hardware(config, found, table), replace(measured, doubts=(*measured.doubts, *doubts(result)))
    file = source / HARDWARE_FILE if source.is_dir() else source
    if file.suffix != ".toml" or not file.exists():
        raise ConfigError(
            "--measured must be a folder of `measure` or `train --check`, a step_times.csv, or a hardware.toml, got "
            f"{source}"
        )
    hardware, acceptance = read_hardware(file, "--measured")
    return _with_acceptance(_with_hardware(config, hardware, file), acceptance), measured


def _of_an_engine(table: Mapping[str, Any], config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return a folder of ``measure`` without its training, which is plain torch; ConfigError if its engine was too."""
    file = folder / CONDITIONS_FILE
    conditions = read_json(file) if file.exists() else None
    decode_by = conditions.get("decode_by") if isinstance(conditions, dict) else None
    if decode_by != "vllm":
        raise ConfigError(
            f"--measured {folder} must be measured with vLLM, as `measure --model DIR` does where it is installed, got "
            f"decode_by={decode_by!r}; its step_times.csv alone is taken as it is"
        )
    given, found = config.hardware, {name: value for name, value in table.items() if name != "training"}
    if given.training is not None:
        found["training"] = given.training.model_dump(exclude_none=True)
    coefficients = {
        name: value
        for name, value in table.get("coefficients", {}).items()
        if name not in TRAINING_COEFFICIENTS or name in given.coefficients
    }
    kept = {name: value for name, value in given.coefficients.items() if name in TRAINING_COEFFICIENTS}
    return {**found, "coefficients": {**coefficients, **kept}} if given.by_name else found


def _with_run(config: RunConfig, measured: Measured, source: Path) -> tuple[RunConfig, Measured]:
    """Merge a run with a trace: its weights count for its own arm only, its answers if all were finished."""
    run = load_run(source / RUN_FILE)
    result = calibrate_trace(source, config)
    table = dict(result.table)
    weights = table.pop("weights", None)
    arms = dict(measured.weights)
    if weights is not None:
        arms[run.colocated] = WeightTransferConfig.model_validate(weights)
    if not run.colocated:
        table.pop("switch", None)
    config = _with_acceptance(_with_hardware(config, table, source), result.acceptance)
    measured = replace(measured, weights=arms, doubts=(*measured.doubts, *doubts(result)))
    length, rows = config.workload.length, read_steps(source / STEPS_FILE)
    all_finish = run.colocated and not run.scheduler.schedule.carries_over
    if all_finish and len(rows) and length.kind in ("lognormal", "empirical"):
        mean = float(rows.length_mean @ rows.samples / rows.samples.sum())
        length = length.model_copy(update={"mean": min(mean, length.max - 1.0)})
        workload = config.workload.model_copy(update={"length": length})
        return config.model_copy(update={"workload": workload}), replace(measured, answers=True)
    return config, measured


def _with_acceptance(config: RunConfig, acceptance: float | None) -> RunConfig:
    if acceptance is None or config.speculation is None:
        return config
    speculation = config.speculation.model_copy(update=as_measured(acceptance))
    return config.model_copy(update={"engine": EngineConfig(speculation=speculation)})


def _with_hardware(config: RunConfig, table: Mapping[str, Any], source: Path) -> RunConfig:
    given = config.hardware.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for key in ("gpu", "model"):
        if key in table and key in given and table[key] != given[key]:
            raise ConfigError(f"--measured {source} is of {key}={table[key]!r}, the run file has {given[key]!r}")
    with explaining(StrictModel, f"--measured {source}: hardware.", most=1):
        hardware = HardwareConfig.model_validate(merged_tables(given, table))
    return config.model_copy(update={"hardware": hardware})
