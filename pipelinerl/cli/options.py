"""Options that several commands share, and checks of their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelinerl.errors import ConfigError, install


def option(metavar: str | None, text: str, *names: str, **others: Any) -> Any:
    """Return typer's option with a help text; without ``names`` it has its parameter's."""
    return typer.Option(*names, metavar=metavar, help=text, **others)


def argument(metavar: str, text: str) -> Any:
    """Return typer's argument, with a help text without its default."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


RunArgument = Annotated[Path, argument("RUN.toml", "The run file.")]
SetOption = Annotated[
    list[str], option("KEY=VALUE", "Override a key of the run file, e.g. scheduler.max_lag=8; repeatable.", "--set")
]
SeedOption = Annotated[int | None, option(None, "Replace the seed of the run file.", "--seed")]
OutOption = Annotated[Path | None, option("DIR", "Keep the results in this new folder.", "--out")]
MeasuredOption = Annotated[
    list[Path], option("PATH", "Merge results of measure, train --check or calibrate; repeatable.", "--measured")
]
HardwareOption = Annotated[Path | None, option("FILE.toml", "Use the [hardware] table of this file.", "--hardware")]
FaultsOption = Annotated[Path | None, option("FILE.toml", "Use the [[faults]] of this file.", "--faults")]
WorkersOption = Annotated[int | None, option(None, "Number of processes; default: one per core.", "--workers", min=1)]
JsonOption = Annotated[bool, option(None, "Print the results as JSON.", "--json")]

FromOption = Annotated[
    str | None,
    option(
        "FORMAT",
        "Read SOURCE as logs of verl, nemo-rl, prime-rl, slime or areal, or as csv: a table of logged steps.",
        "--from",
    ),
]
LogRunOption = Annotated[
    list[str],
    option(
        "RUN.toml|N",
        "Run file; if it names gpu and model: fit coefficients, else tables. N: Nth run of a log; else the last.",
        "--run",
        "--run-file",
    ),
]
ModelOption = Annotated[str | None, option("NAME", "Model of the logged job.", "--model")]
GpuOption = Annotated[str | None, option("NAME", "GPU of the logged job.", "--gpu")]
AcceleratorsOption = Annotated[
    int | None, option("N", "Number of GPUs of the logged job, if not in the log.", "--accelerators", min=1)
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
