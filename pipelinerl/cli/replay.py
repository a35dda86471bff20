"""``pipelinerl replay``: recorded events into a fresh scheduler and a fresh ledger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import needs_extra
from pipelinerl.cli.output import print_line, status


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run made with --trace full.", show_default=False)
    ],
) -> None:
    """Check that a fresh scheduler gives the recorded commands of a run, and a fresh ledger its recorded numbers.

    For a simulated run with [policy] also check that its trace gives the learned weights, bit for bit.
    """
    from pipelinerl.records.recording import replay_run
    from pipelinerl.records.reports import RunReport
    from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
    from pipelinerl.records.steps import STEPS_FILE
    from pipelinerl.records.trace import Trace

    trace = Trace(folder / TRACE_FILE if os.path.isdir(folder) else folder)
    if next(trace.records(), None) is None:
        print_line("nothing to compare: the run ended before it began")
        return
    with status("replaying"):
        result = replay_run(trace)
    if result.difference is not None:
        print_line(f"different: {result.difference}")
        raise typer.Exit(1)
    print_line(f"identical: {result.num_commands} commands from {result.num_events} events")
    for name in (SUMMARY_FILE, STEPS_FILE):
        print_line(f"identical: {name}" if name in result.compared else f"not compared: {name} is not beside the trace")
    summary = trace.path.with_name(SUMMARY_FILE)
    if trace.config.policy is not None and summary.is_file():
        recorded = RunReport.read(summary).weights_sha256
        with status("learning again"):
            with needs_extra("learn"):
                from sim.learning.loop import relearn

            now = relearn(trace).fingerprint()
        if now != recorded:
            print_line(f"different: learned weights {now}, recorded {recorded}")
            raise typer.Exit(1)
        print_line(f"identical: learned weights, SHA-256 {now[:16]}...")
