"""``pipelinerl replay``: recorded events into a fresh scheduler."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import needs_extra
from pipelinerl.cli.output import status


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run made with --trace full.", show_default=False)
    ],
) -> None:
    """Check that a new scheduler, given the recorded events of a run, gives the recorded commands.

    For a simulated run with [policy] also check that its trace gives the learned weights, bit for bit.
    """
    from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
    from pipelinerl.records.trace import Trace
    from pipelinerl.records.trace import replay as replay_trace

    trace = Trace(folder / TRACE_FILE if os.path.isdir(folder) else folder)
    if next(trace.records(), None) is None:
        typer.echo("nothing to compare: the run ended before it began")
        return
    with status("replaying"):
        result = replay_trace(trace)
    if result.difference is not None:
        typer.echo(f"different: {result.difference}")
        raise typer.Exit(1)
    typer.echo(f"identical: {result.num_commands} commands from {result.num_events} events")
    if trace.config.policy is not None and (folder / SUMMARY_FILE).is_file():
        recorded = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")).get("weights_sha256")
        with status("learning again"):
            with needs_extra("learn"):
                from sim.learning.relearn import relearn

            now = relearn(trace).fingerprint()
        if now != recorded:
            typer.echo(f"different: learned weights {now}, recorded {recorded}")
            raise typer.Exit(1)
        typer.echo(f"identical: learned weights, SHA-256 {now[:16]}...")
