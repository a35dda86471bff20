"""``pipelinerl drift``: how fast importance weights spread with lag."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import JsonOption
from pipelinerl.cli.output import print_json, print_line, status


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
    from analysis import drift_fit
    from analysis.read import read_runs

    with status("reading the runs"):
        model = drift_fit.fit(read_runs(folders))
        checks = [drift_fit.check(model, run) for run in read_runs(check)]
    if as_json:
        print_json({**model.model_dump(), "checks": [asdict(one) for one in checks]})
        return
    print_line(f"[drift]\nexponent = {model.exponent:g}\nrates = [{', '.join(f'{rate:.4g}' for rate in model.rates)}]")
    for one in checks:
        print_line(f"# {one.run}: ESS {one.modelled:.3f} modelled, {one.measured:.3f} measured")
