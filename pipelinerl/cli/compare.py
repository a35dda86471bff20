"""``pipelinerl compare``: the same workload under several schedulers."""

from __future__ import annotations

from pipelinerl.cli import options
from pipelinerl.cli.output import end_of_runs, progress_bar


def compare(
    run: options.RunArgument,
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    seed: options.SeedOption = None,
    out: options.OutOption = None,
    hardware: options.HardwareOption = None,
    measured: options.MeasuredOption = [],  # noqa: B006 - typer copies it
    as_json: options.JsonOption = False,
) -> None:
    """Simulate several schedulers on the same workload, as in the [compare] table."""
    from pipelinerl.calibration.measured import merged
    from pipelinerl.config.run import load_run
    from pipelinerl.pages.runs import comparison_page
    from sim.compare import compare as compare_runs
    from sim.compare import plan_cells

    config, found = merged(load_run(run, overrides, seed, hardware=hardware), measured)
    with progress_bar("runs", len(plan_cells(config))) as advance:
        result = compare_runs(config, out=out, on_done=lambda _cell, _failure: advance(), weights=found.weights)
    end_of_runs(result, lambda: comparison_page(result), run.name, out=out if result.arms else None, as_json=as_json)
