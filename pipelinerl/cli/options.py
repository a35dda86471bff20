"""Options that several commands share, and what they do with results and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelinerl.errors import ConfigError, install

RunArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the run file, e.g. scheduler.max_lag=8; may be given again.",
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Replace the seed of the run file.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Keep the results in this new folder.")]
MeasuredOption = Annotated[
    list[Path],
    typer.Option(
        "--measured",
        metavar="PATH",
        help="Merge what measure, train --check or calibrate wrote; may be given several times.",
    ),
]
HardwareOption = Annotated[
    Path | None,
    typer.Option("--hardware", metavar="FILE.toml", help="Take its table [hardware] in place of the run file's."),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Simulate in so many processes; default: one per core.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


def complain(text: str) -> None:
    """Print each line on stderr, after the program's name."""
    for line in text.splitlines():
        typer.echo(f"pipelinerl: {line}", err=True)


def print_json(data: Any) -> None:
    """Print results for programs on stdout."""
    typer.echo(json.dumps(data, indent=2))


def refuse_no_file(out: Path) -> None:
    """Refuse an ``--out`` that can be no file, before anything is computed.

    Raises:
        ConfigError: If it is a folder, or in no folder.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out must be a file in a folder that exists, got {out}")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra inside this block.

    Raises:
        ConfigError: If one is not installed; the line names the package and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; install it with: {install(extra)}") from None
