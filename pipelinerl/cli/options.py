"""Options that several commands share, and checks of their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.errors import ConfigError, install

RunArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the run file, e.g. scheduler.max_lag=8; repeatable."
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Replace the seed of the run file.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Keep the results in this new folder.")]
MeasuredOption = Annotated[
    list[Path],
    typer.Option(
        "--measured", metavar="PATH", help="Merge results of measure, train --check or calibrate; repeatable."
    ),
]
HardwareOption = Annotated[
    Path | None, typer.Option("--hardware", metavar="FILE.toml", help="Use the [hardware] table of this file.")
]
FaultsOption = Annotated[
    Path | None, typer.Option("--faults", metavar="FILE.toml", help="Use the [[faults]] of this file.")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Number of processes; default: one per core.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FORMAT",
        help="Read SOURCE as logs of verl, nemo-rl, prime-rl, slime or areal, or as csv: a table of logged steps.",
    ),
]
LogRunOption = Annotated[
    list[str],
    typer.Option(
        "--run",
        "--run-file",
        metavar="RUN.toml|N",
        help="Run file; if it names gpu and model: fit coefficients, else tables. N: Nth run of a log; else the last.",
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Model of the logged job.")]
GpuOption = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="GPU of the logged job.")]
AcceleratorsOption = Annotated[
    int | None,
    typer.Option("--accelerators", metavar="N", min=1, help="Number of GPUs of the logged job, if not in the log."),
]


def refuse_no_file(out: Path) -> None:
    """Check ``--out FILE`` before anything is computed; ConfigError if it is a folder, or in no folder."""
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out must be a file in a folder that exists, got {out}")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra inside this block; ConfigError, with package and extra, if one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; install it with: {install(extra)}") from None
