"""``pipelinerl plot``: figures of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.output import print_line, status
from pipelinerl.errors import ConfigError


def plot(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Folders of runs or comparisons.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the figures go; default: DIR/figures of the first."),
    ] = None,
) -> None:
    """Draw the figures of runs, simulated or real, side by side."""
    from pipelinerl.records.run_folder import FIGURES_FOLDER

    figures = out if out is not None else folders[0] / FIGURES_FOLDER
    try:
        with status("drawing figures"):
            from analysis.plot import draw

            paths = draw(folders, figures)
    except OSError as error:
        raise ConfigError(f"--out must be a folder that can be written, got {figures}: {error.strerror}") from None
    for path in paths:
        print_line(path)
