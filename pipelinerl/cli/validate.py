"""``pipelinerl validate``: predictions beside published runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import JsonOption, OutOption
from pipelinerl.cli.output import print_report, stage_bars, without_matplotlib_a_line


def validate(
    rows: Annotated[
        Path | None, typer.Argument(metavar="ROWS.csv", help="Published runs of your own; default: the shipped ones.")
    ] = None,
    shipped_only: Annotated[
        bool,
        typer.Option(
            "--shipped-only", help="Take the errors of other systems from the shipped rows alone, not from yours."
        ),
    ] = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict published runs, each from its own inputs and from other runs, and print the errors."""
    from pipelinerl.pages.evidence import TABLE_FILE, validation_markdown, validation_page
    from pipelinerl.records.run_folder import FIGURES_FOLDER, VALIDATION_FILE, check_vacant, make_folder, write_json
    from sim.validation.predict import shipped_runs
    from sim.validation.predict import validate as predict_runs
    from sim.validation.rows import read_published_runs

    if out is not None:
        check_vacant(out)
    shipped = shipped_runs()
    runs = shipped if rows is None else read_published_runs(rows)
    stage = "simulations" if rows is None else "simulations, of the shipped rows that yours are compared with, too"
    with stage_bars() as on_progress:
        report = predict_runs(
            runs,
            others=shipped,
            others_only=shipped_only or rows is None,
            on_progress=lambda done, total: on_progress(stage, done, total),
        )
    print_report(report, lambda: validation_page(report), "Published runs", as_json=as_json)
    if out is not None:
        make_folder(out)
        write_json(out / VALIDATION_FILE, report.to_dict())
        (out / TABLE_FILE).write_text(validation_markdown(report), encoding="utf-8")
        with without_matplotlib_a_line(out):
            from analysis.plot import save_validation

            save_validation(report, out / FIGURES_FOLDER)
