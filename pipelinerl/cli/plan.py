"""``pipelinerl plan``: search for the best way to run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.kept_figures import draw_kept
from pipelinerl.cli.options import (
    HardwareOption,
    JsonOption,
    MeasuredOption,
    OutOption,
    RunArgument,
    SeedOption,
    SetOption,
    WorkersOption,
    complain,
    print_json,
)


def plan(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    workers: WorkersOption = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Simulate on this Ray cluster, or 'auto'.")
    ] = None,
    hardware: HardwareOption = None,
    measured: MeasuredOption = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Recommend split, batch sizes, engines and scheduler for a cluster: the [plan] table of the run file."""
    from pipelinerl.cli.progress import stage_bars
    from pipelinerl.config.run_file import load_run
    from sim.planning.search import plan as search_plan

    config = load_run(run, overrides, seed, hardware=hardware)
    with stage_bars() as on_progress:
        report = search_plan(
            config,
            out=out,
            workers=workers,
            ray_address=ray,
            on_progress=on_progress,
            measured=measured,
            run_file=_as_given(run, overrides),
        )
    if as_json:
        print_json(report.to_dict())
    else:
        from pipelinerl.cli.render_plan import print_plan

        print_plan(report, run.name)
    if out is not None:
        draw_kept(out, quiet=as_json)
    if not report.search.complete:
        for failure in report.search.failures or ["interrupted; the simulations that had ended are kept"]:
            complain(failure)
    raise typer.Exit(0 if report.search.complete else 1)


def _as_given(run: Path, overrides: list[str]) -> str:
    """Return the run file with its overrides as a command line has them, but for those of ``[plan]``."""
    sets = (word for one in overrides if not one.startswith("plan.") for word in ("--set", one))
    return shlex.join([str(run), *sets])
