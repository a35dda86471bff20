"""``pipelinerl simulate``, ``compare``, ``environments``: runs in simulated time. ``validate``: published ones."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli import options, output
from pipelinerl.cli.options import option
from pipelinerl.errors import ConfigError


class TraceLevel(StrEnum):
    """The events that are kept."""

    NONE = "none"
    FULL = "full"


def simulate(
    run: options.RunArgument,
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    seed: options.SeedOption = None,
    out: options.OutOption = None,
    trace: Annotated[TraceLevel, option(None, "full: keep every event, for replay.")] = TraceLevel.NONE,
    hardware: options.HardwareOption = None,
    faults: options.FaultsOption = None,
    workload: Annotated[Path | None, option("TRACE", "Play the requests of another system's trace.")] = None,
    measured: options.MeasuredOption = [],  # noqa: B006 - typer copies it
    as_json: options.JsonOption = False,
) -> None:
    """Simulate one run and print throughput, token lag and the trainer's time."""
    from pipelinerl.config.run import load_run
    from pipelinerl.pages.runs import run_page
    from sim.run import simulate as simulate_run

    keys: list[str] = []
    if workload is not None:
        from sim.recorded import read_foreign, run_keys

        foreign = read_foreign(str(workload.absolute()), key="--workload")
        before = [one for one in overrides if not one.lstrip().startswith("environment")]  # it may be the trace's
        keys = run_keys(foreign, load_run(run, before, hardware=hardware))
        for note in foreign.notes:
            output.complain(f"warning: {workload.name}: {note}")
        overrides = [*keys, *overrides]
    config = load_run(run, overrides, seed, hardware=hardware, faults=faults)
    if measured:
        from pipelinerl.calibration.measured import of_its_arm

        config = of_its_arm(config, measured)
    if trace is TraceLevel.FULL and out is None:
        raise ConfigError("--trace full needs --out DIR to write the trace to")
    with output.progress_bar("optimizer steps", config.optimizer_steps) as advance:
        report = simulate_run(config, out=out, trace=trace is TraceLevel.FULL, on_step=lambda _row: advance())
    output.print_report(report, lambda: run_page({run.stem: report}), run.name, as_json=as_json, only_table=True)
    for key in () if as_json else keys:
        output.print_line(f"of {workload}: {key}")
    if out is not None:
        output.draw_kept(out, quiet=as_json)


def share(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.toml...", help="Run files, two or more.")],
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    switch_s: Annotated[
        float, typer.Option("--switch-s", min=0.0, metavar="S", help="Seconds of a switch between jobs.")
    ] = 10.0,
    as_json: options.JsonOption = False,
) -> None:
    """Simulate jobs that train on the same accelerators in turn: who waits, and which GPU-hours that saves."""
    from pipelinerl.config.run import load_run
    from pipelinerl.pages.runs import sharing_page
    from sim.sharing import share as share_trainer

    stems = [run.stem for run in runs]
    names = [f"{one} {number}" if stems.count(one) > 1 else one for number, one in enumerate(stems, start=1)]
    report = share_trainer(
        {name: load_run(run, overrides) for name, run in zip(names, runs, strict=True)}, switch_s=switch_s
    )
    output.print_report(report, lambda: sharing_page(report), "jobs", as_json=as_json)


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
    with output.progress_bar("runs", len(plan_cells(config))) as advance:
        result = compare_runs(config, out=out, on_done=lambda _cell, _failure: advance(), weights=found.weights)
    output.end_of_runs(
        result, lambda: comparison_page(result), run.name, out=out if result.arms else None, as_json=as_json
    )


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
    with output.progress_bar("runs", total) as advance:
        report = try_environments(config, out=out, workers=workers, on_done=advance, weights=found.weights)
    output.end_of_runs(report, lambda: environments_page(report), run.name, out=out, as_json=as_json)


def validate(
    rows: Annotated[
        Path | None, typer.Argument(metavar="ROWS.csv", help="Published runs of your own; default: the shipped ones.")
    ] = None,
    shipped_only: Annotated[
        bool,
        option(None, "Take the errors of other systems from the shipped rows alone, not from yours.", "--shipped-only"),
    ] = False,
    out: options.OutOption = None,
    as_json: options.JsonOption = False,
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
    with output.stage_bars() as on_progress:
        report = predict_runs(
            runs,
            others=shipped,
            others_only=shipped_only or rows is None,
            on_progress=lambda done, total: on_progress(stage, done, total),
        )
    output.print_report(report, lambda: validation_page(report), "Published runs", as_json=as_json)
    if out is not None:
        make_folder(out)
        write_json(out / VALIDATION_FILE, report.to_dict())
        (out / TABLE_FILE).write_text(validation_markdown(report), encoding="utf-8")
        with output.without_matplotlib_a_line(out):
            from analysis.plot import save_validation

            save_validation(report, out / FIGURES_FOLDER)
