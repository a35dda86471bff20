"""``pipelinerl timeline``: a run for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import refuse_no_file
from pipelinerl.cli.output import status
from pipelinerl.errors import ConfigError


def timeline(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run made with --trace full.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The JSON file to write.", show_default=False)],
    begin_s: Annotated[
        float, typer.Option("--begin", metavar="S", min=0.0, help="Start of the written part (s).")
    ] = 0.0,
    end_s: Annotated[
        float, typer.Option("--end", metavar="S", help="End of the written part (s).", show_default="all")
    ] = math.inf,
) -> None:
    """Write a timeline of a run; open the file at ui.perfetto.dev or in chrome://tracing."""
    from analysis.timeline import read_timeline, write_timeline

    if not begin_s < end_s:
        raise ConfigError(f"--end must be after --begin, got {begin_s:g} and {end_s:g}")
    refuse_no_file(out)
    with status("reading the trace"):
        made = read_timeline(folder, begin_s=begin_s, end_s=end_s)
        write_timeline(made, out)
    counts = made.counts
    typer.echo(
        f"{out}: {counts.optimizer_steps} optimizer steps, {counts.rollouts_finished} rollouts finished, "
        f"{counts.weights_loaded} weight loads"
    )
    if counts.stays_left_out:
        typer.echo(f"left out: {counts.stays_left_out} rollouts on an engine or environment without a free track")
    if counts.cut_at_s is not None:
        typer.echo(f"cut at {counts.cut_at_s:.6g} s, where the file is full: go on with --begin {counts.cut_at_s:.6g}")
