"""``pipelinerl diagnose``: where a job's GPU time goes, and what would change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli import options
from pipelinerl.cli.calibrate import calibrated, run_and_number, run_file
from pipelinerl.cli.output import complain, print_report, stage_bars
from pipelinerl.errors import ConfigError


def diagnose(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="LOG", help="Run folder with a trace, or with --from logs.", show_default=False),
    ],
    format_: options.FromOption = None,
    runs: options.LogRunOption = [],  # noqa: B006 - typer copies it
    model: options.ModelOption = None,
    gpu: options.GpuOption = None,
    accelerators: options.AcceleratorsOption = None,
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    out: options.OutOption = None,
    workers: options.WorkersOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show where the GPU time of a logged job goes, and the three changes that gain most."""
    from pipelinerl.calibration.calibrate import calibrate_run, doubts
    from pipelinerl.config.run import load_run
    from pipelinerl.pages.evidence import diagnosis_page
    from pipelinerl.records.run_folder import DIAGNOSIS_FILE, RUN_FILE, check_vacant, make_folder, write_json
    from sim.planning.diagnose import diagnose as find
    from sim.planning.simulate import HowToPlan
    from sim.run import measured_steps

    named = {"model": model, "gpu": gpu, "accelerators": accelerators}
    file, number = run_and_number(runs, named)
    if out is not None:
        check_vacant(out)
    if format_ is not None:
        config = None if file is None else load_run(file, overrides)
        job = calibrated(sources, format_, config, named, overrides, number)
    elif runs or overrides or any(named.values()) or len(sources) > 1:
        raise ConfigError("diagnose takes one run folder alone, or logs with --from FORMAT")
    else:
        job = calibrate_run(sources[0], measured_steps)
    for doubt in doubts(job.fit):
        complain(f"warning: {doubt}")
    with stage_bars() as on_progress:
        report = find(job, HowToPlan(workers=workers, on_progress=on_progress))
    name = ", ".join(source.name for source in sources)
    if out is not None:
        make_folder(out)
        write_json(out / DIAGNOSIS_FILE, report.to_dict())
        (out / RUN_FILE).write_text(run_file(job, f"{name} by pipelinerl diagnose"), encoding="utf-8")
    print_report(report, lambda: diagnosis_page(report), name, as_json=as_json)
