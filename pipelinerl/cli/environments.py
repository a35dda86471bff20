"""``pipelinerl environments``: how many sandboxes?"""

from __future__ import annotations

import typer

from pipelinerl.cli.options import (
    JsonOption,
    MeasuredOption,
    OutOption,
    RunArgument,
    SeedOption,
    SetOption,
    WorkersOption,
)
from pipelinerl.cli.output import complain, draw_kept, print_json, progress_bar


def environments(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    workers: WorkersOption = None,
    measured: MeasuredOption = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Simulate a run with turns with several numbers of environments, and print the fewest that suffice (the knee)."""
    from pipelinerl.calibration.measured import merged
    from pipelinerl.config.run_file import load_run
    from sim.planning.environments import counts_to_try
    from sim.planning.environments import environments as try_environments

    config, found = merged(load_run(run, overrides, seed), measured)
    total = len(counts_to_try(config)) if config.environment else 0
    with progress_bar("runs", total) as advance:
        report = try_environments(config, out=out, workers=workers, on_done=advance, weights=found.weights)
    if as_json:
        print_json(report.to_dict())
    else:
        from pipelinerl.pages.runs import environments_page
        from pipelinerl.pages.terminal import print_page

        print_page(environments_page(report), run.name)
    if not report.complete:
        for failure in report.failures or ["interrupted; the runs that had ended are kept"]:
            complain(failure)
    if out is not None:
        draw_kept(out, quiet=as_json)
    raise typer.Exit(0 if report.complete else 1)
