"""``pipelinerl measure``: step times of this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import JsonOption, needs_extra
from pipelinerl.cli.output import complain, print_json, status


class Device(StrEnum):
    """The device that is measured."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


def measure(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the tables into this new folder.")],
    device: Annotated[Device, typer.Option(help="auto: the GPU if there is one.")] = Device.AUTO,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Model in Hugging Face format; without it: a small random one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure matrix products, decode, prefill and training steps of this machine, as input of calibrate."""
    with status("measuring"):
        with needs_extra("train-cpu"):
            from backends.measure.bench import measure as measure_times

        done = measure_times(
            out, device=device.value, model=model, on_progress=lambda text: typer.echo(f"pipelinerl: {text}", err=True)
        )
    if as_json:
        print_json(done)
    else:
        rows = ", ".join(f"{count} of {kind}" for kind, count in done["rows"].items())
        typer.echo(f"{done['device']}: {rows} in {done['seconds']:.0f} s; next: calibrate {out / 'step_times.csv'}")
    if not done["complete"]:
        complain("interrupted; what was measured is kept")
        raise typer.Exit(1)
