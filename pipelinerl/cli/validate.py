"""``pipelinerl validate``: predictions beside published runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.kept_figures import where_matplotlib_is
from pipelinerl.cli.options import JsonOption, OutOption, print_json


def validate(
    rows: Annotated[
        Path | None,
        typer.Argument(metavar="ROWS.csv", help="Published runs of your own; default: the shipped ones."),
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict published runs, each from its published inputs and from other rows, and print the errors."""
    from pipelinerl.cli.progress import stage_bars
    from pipelinerl.records.run_folder import FIGURES_FOLDER, VALIDATION_FILE, check_vacant, make_folder, write_json
    from pipelinerl.records.validation_table import TABLE_FILE, validation_markdown
    from sim.validation.predict import shipped_runs
    from sim.validation.predict import validate as predict_runs
    from sim.validation.runs_file import read_published_runs

    if out is not None:
        check_vacant(out)
    shipped = shipped_runs()
    runs = shipped if rows is None else read_published_runs(rows)
    stage = "simulations" if rows is None else "simulations, of the shipped rows that yours are compared with, too"
    with stage_bars() as on_progress:
        report = predict_runs(runs, others=shipped, on_progress=lambda done, total: on_progress(stage, done, total))
    if as_json:
        print_json(report.to_dict())
    else:
        from pipelinerl.cli.render_validation import print_validation

        print_validation(report)
    if out is not None:
        make_folder(out)
        write_json(out / VALIDATION_FILE, report.to_dict())
        (out / TABLE_FILE).write_text(validation_markdown(report), encoding="utf-8")
        with where_matplotlib_is(out):
            from analysis.validation import save_validation_figure

            save_validation_figure(report, out / FIGURES_FOLDER)
