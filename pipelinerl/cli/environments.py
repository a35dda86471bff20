"""``pipelinerl environments``: how many sandboxes?"""

from __future__ import annotations

from pipelinerl.cli import options
from pipelinerl.cli.output import end_of_runs, progress_bar


def environments(
    run: options.RunArgument,
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    seed: options.SeedOption = None,
    out: options.OutOption = None,
    workers: options.WorkersOption = None,
    measured: options.MeasuredOption = [],  # noqa: B006 - typer copies it
    as_json: options.JsonOption = False,
) -> None:
    """Simulate several numbers of environments and print the smallest sufficient one (the knee)."""
    from pipelinerl.calibration.measured import merged
    from pipelinerl.config.run import load_run
    from pipelinerl.pages.runs import environments_page
    from sim.planning.environments import counts_to_try
    from sim.planning.environments import environments as try_environments

    config, found = merged(load_run(run, overrides, seed), measured)
    total = len(counts_to_try(config)) if config.environment else 0
    with progress_bar("runs", total) as advance:
        report = try_environments(config, out=out, workers=workers, on_done=advance, weights=found.weights)
    end_of_runs(report, lambda: environments_page(report), run.name, out=out, as_json=as_json)
