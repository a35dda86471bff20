"""``pipelinerl compare``: the same workload under several schedulers."""

from __future__ import annotations

import typer

from pipelinerl.cli.options import (
    HardwareOption,
    JsonOption,
    MeasuredOption,
    OutOption,
    RunArgument,
    SeedOption,
    SetOption,
)
from pipelinerl.cli.output import complain, draw_kept, print_json, progress_bar


def compare(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    hardware: HardwareOption = None,
    measured: MeasuredOption = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Simulate the same workload under several schedulers and circumstances: the [compare] table of the run file."""
    from pipelinerl.calibration.measured import merged
    from pipelinerl.config.run_file import load_run
    from sim.compare import compare as compare_runs
    from sim.compare import plan_cells

    config, found = merged(load_run(run, overrides, seed, hardware=hardware), measured)
    with progress_bar("runs", len(plan_cells(config))) as advance:
        result = compare_runs(config, out=out, on_done=lambda _cell, _failure: advance(), weights=found.weights)
    if as_json:
        print_json(result.to_dict())
    else:
        from pipelinerl.pages.runs import comparison_page
        from pipelinerl.pages.terminal import print_page

        print_page(comparison_page(result), run.name)
    if not result.complete:
        for failure in result.failures or ["interrupted; the runs that had ended are kept"]:
            complain(failure)
    if out is not None and result.arms:
        draw_kept(out, quiet=as_json)
    raise typer.Exit(0 if result.complete else 1)
