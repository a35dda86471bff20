"""``pipelinerl fleet``: the engines of a real run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import JsonOption, needs_extra
from pipelinerl.cli.output import print_json, print_line, status

MOST_ADDED, LONGEST_NOTICE_S = 1000, 1e5
"""In a request."""


def fleet(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a real run.", show_default=False)],
    add: Annotated[
        int,
        typer.Option(
            "--add", metavar="N", min=0, max=MOST_ADDED, help="Add engines; they wait until Ray has accelerators."
        ),
    ] = 0,
    drain: Annotated[
        list[str],
        typer.Option("--drain", metavar="ENGINE|HOST", help="Remove an engine, or those of a machine; repeatable."),
    ] = [],  # noqa: B006 - typer copies it
    notice: Annotated[
        float,
        typer.Option(
            "--notice",
            metavar="SECONDS",
            min=0,
            max=LONGEST_NOTICE_S,
            help="Time for rollouts of removed engines to end there.",
        ),
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Show the engines of a real run in progress; add some, or have some leave.

    Rollouts of an engine that leaves go on elsewhere with all their tokens. Engines are restarted by themselves.
    """
    with needs_extra("train-cpu"):
        from backends.driver.fleet import EngineRow, FleetRequest, ask
    with status("waiting for the run"):
        engines = ask(folder, FleetRequest(add=add, drain=drain, notice_s=notice))
    if as_json:
        print_json([one.model_dump() for one in engines])
        return
    names = list(EngineRow.model_fields)
    lines = [names, *(["-" if cell is None else str(cell) for cell in row.model_dump().values()] for row in engines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
