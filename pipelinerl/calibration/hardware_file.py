"""The result of a calibration: the table ``[hardware]`` as a file, its errors and doubts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from pipelinerl.calibration.least_squares import Fit
from pipelinerl.calibration.solve import HardwareFit
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import SHARES_OF_PEAK
from pipelinerl.records.run_folder import RUN_FILE

HARDWARE_FILE = "hardware.toml"
AT_PEAK = 1e-6
"""Distance from 1 within which a fitted share of the peak counts as at its bound (no unit)."""
POOR = 0.2
"""Mean error from which on a fit is called poor (no unit): a good fit is 2 %, one on a noisy machine 10 %."""
FAR = 2.0
"""Factor on the hardware model's times, or its inverse, beyond which a warning asks to check the input."""


def hardware_toml(result: HardwareFit, source: str) -> str:
    """Return the table ``[hardware]`` as TOML, its notes as comments."""
    lines = [f"# Calibrated from {source}. Replaces the table [hardware] of a run file."]
    for part in result.parts:
        lines.append(f"# {part.what}: fitted to {part.data}; {error_text(part.fit)}")
        lines += [f"#   {name} is not determined: {reason}" for name, reason in part.fit.undetermined.items()]
    lines += [f"# {note}" for note in result.notes]
    return "\n".join(lines) + "\n\n" + tomli_w.dumps({"hardware": result.table})


def write_hardware(out: Path, text: str, *, run: str | None = None) -> None:
    """Write the table as ``hardware.toml`` into a folder, beside a whole ``run`` as ``run.toml``, or into a ``.toml``.

    Raises ConfigError if that cannot be done, or there is such a file.
    """
    path = out if out.suffix == ".toml" else out / HARDWARE_FILE
    files = {path: text} if run is None else {path: text, out / RUN_FILE: run}
    for one in files:
        if one.exists():
            raise ConfigError(f"--out must be a new file or a folder without one, got {one}, which exists")
    try:
        for one, content in files.items():
            one.parent.mkdir(parents=True, exist_ok=True)
            with one.open("x", encoding="utf-8") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"--out must be a folder or file that can be written, got {out}: {error.strerror}") from None


def error_text(one: Fit) -> str:
    """Return the errors of a fit in words."""
    held_out = "" if one.held_out_error is None else f", {one.held_out_error:.1%} in the mean on a row left out"
    return f"error {one.mean_error:.1%} in the mean, {one.max_error:.1%} at most{held_out}"


def doubts(result: HardwareFit) -> list[str]:
    """Return a line per number just out of reach, factor far from 1, poor fit, and share of a peak at its bound."""
    lines = list(result.warnings)
    lines += [
        f"{what} lasts {factor:.2g} times as long as the hardware model says: check GPU, model, tensor_parallel and "
        "batch, and what the seconds hold besides"
        for what, factor in result.factors.items()
        if not 1 / FAR <= factor <= FAR
    ]
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
            if name in SHARES_OF_PEAK and value >= 1 - AT_PEAK
        ]
    return lines


def as_json(result: HardwareFit) -> dict[str, Any]:
    """Return plain values: table, fits, notes, warnings."""
    fits = [{"what": part.what, "data": part.data, **asdict(part.fit)} for part in result.parts]
    return {"hardware": result.table, "fits": fits, "notes": result.notes, "warnings": doubts(result)}
