"""``pipelinerl drift``: how fast importance weights spread with lag."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelinerl.cli.options import JsonOption
from pipelinerl.cli.output import print_json, print_line, status
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from analysis.read import Run


def drift(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="Folders of runs that learned, real or simulated.", show_default=False),
    ],
    check: Annotated[
        list[Path], typer.Option("--check", metavar="DIR", help="A run to compare the fit with; repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Fit how fast importance weights spread with lag, and print this as a [drift] table for a run file."""
    from analysis.read import read_runs
    from pipelinerl.rl.drift import LearnedRun, fit_drift, modelled_ess

    def tokens_by_lag(run: Run) -> list[int]:
        return run.figure_data.lag_histogram.total

    with status("reading the runs"):
        model = fit_drift([LearnedRun(run.metrics_by_step(), tokens_by_lag(run)) for run in read_runs(folders)])
        checks = []
        for run in read_runs(check):
            if not run.has_ess or run.report.ess is None:
                raise ConfigError(f"--check needs runs that learned, got {run.name}, whose metrics have no ESS")
            modelled, measured = modelled_ess(model, tokens_by_lag(run)).mean, run.report.ess.mean
            checks.append({"run": run.name, "modelled": modelled, "measured": measured, "error": modelled - measured})
    if as_json:
        print_json({**model.model_dump(), "checks": checks})
        return
    print_line(f"[drift]\nexponent = {model.exponent:g}\nrates = [{', '.join(f'{rate:.4g}' for rate in model.rates)}]")
    for one in checks:
        print_line(f"# {one['run']}: ESS {one['modelled']:.3f} modelled, {one['measured']:.3f} measured")
