"""The command ``pipelinerl``: parse, call one library function, render what it returns.

Exit status 0: done. 1: the run failed. 2: the input is wrong (one line per fault, on stderr). Tables and
``--json`` go to stdout, progress and errors to stderr. Heavy packages are imported inside the commands.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelinerl.errors import ConfigError, PipelineRLError, TraceError

app = typer.Typer(
    help="Plan and run asynchronous reinforcement learning of language models.\n\n"
    "Start with: pipelinerl simulate examples/quickstart.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file, e.g. scheduler.max_lag=8."),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Replace the seed of the run file.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Keep the results in this new folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


class Device(StrEnum):
    """What is measured."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


class TraceLevel(StrEnum):
    """What is kept of single events."""

    NONE = "none"
    FULL = "full"


@app.command()
def simulate(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    trace: Annotated[TraceLevel, typer.Option(help="full: keep every event, for replay.")] = TraceLevel.NONE,
    as_json: JsonOption = False,
) -> None:
    """Simulate one run and print what it would give: throughput, token lag, where the time goes."""
    from pipelinerl.cli.progress import progress_bar
    from pipelinerl.config.run_file import load_run

    config = load_run(run, overrides, seed)
    if trace is TraceLevel.FULL and out is None:
        raise ConfigError("--trace full needs --out DIR to write the trace to")
    simulator = _load("sim.run", extra="sim")
    if out is not None:
        _load("analysis.plot", extra="plot")  # missing, it is missed before the run and not after it
    with progress_bar("optimizer steps", config.optimizer_steps) as advance:
        summary = simulator.simulate(config, out=out, trace=trace is TraceLevel.FULL, on_step=lambda _row: advance())
    if as_json:
        _print_json(summary)
    else:
        from pipelinerl.cli.render_run import print_summary

        print_summary(summary, run.name)
    if out is not None:
        _draw([out])


@app.command()
def compare(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the same workload under several schedulers and circumstances: the [compare] table of the run file."""
    from pipelinerl.cli.progress import progress_bar
    from pipelinerl.config.run_file import load_run

    config = load_run(run, overrides, seed)
    comparer = _load("sim.compare", extra="sim")
    if out is not None:
        _load("analysis.plot", extra="plot")
    with progress_bar("runs", len(comparer.plan_cells(config))) as advance:
        result = comparer.compare(config, out=out, on_done=lambda _cell, _failure: advance())
    if as_json:
        _print_json(result)
    else:
        from pipelinerl.cli.render_comparison import print_comparison

        print_comparison(result, run.name)
    if not result["complete"]:
        for failure in result["failures"] or ["interrupted; the runs that had ended are kept"]:
            _complain(failure)
    if out is not None and any(scenario["arms"] for scenario in result["scenarios"]):
        _draw([out])
    raise typer.Exit(0 if result["complete"] else 1)


@app.command()
def plan(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Simulate in so many processes; default: one per core.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Simulate on this Ray cluster, or 'auto'.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend split, batch sizes, engines and scheduler for a cluster: the [plan] table of the run file."""
    from pipelinerl.cli.progress import stage_bars
    from pipelinerl.config.run_file import load_run

    config = load_run(run, overrides, seed)
    planner = _load("sim.planning.search", extra="sim")
    if out is not None:
        _load("analysis.plot", extra="plot")
    with stage_bars() as on_progress:
        result = planner.plan(config, out=out, workers=workers, ray_address=ray, on_progress=on_progress)
    if as_json:
        _print_json(result)
    else:
        from pipelinerl.cli.render_plan import print_plan

        print_plan(result, run.name)
    if out is not None:
        _draw([out])
    search = result["search"]
    if not search["complete"]:
        for failure in search["failures"] or ["interrupted; the simulations that had ended are kept"]:
            _complain(failure)
    raise typer.Exit(0 if search["complete"] else 1)


@app.command()
def train(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out DIR.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train for real, with vLLM engines and a DeepSpeed trainer: the [train] table of the run file."""
    from pipelinerl.cli.progress import training_bar
    from pipelinerl.config.run_file import load_run

    config = load_run(run, overrides, seed)
    if out is None:
        raise ConfigError("train needs --out DIR to keep checkpoints, metrics and the trained model in")
    trainer = _load("backends.run", extra="train-cpu")
    _load("analysis.plot", extra="plot")

    with training_bar(config.optimizer_steps) as on_step:
        summary = trainer.train(config, out=out, resume=resume, on_step=on_step)
    if as_json:
        _print_json(summary)
    else:
        from pipelinerl.cli.render_run import print_summary

        print_summary(summary, run.name)
    _draw([out])


@app.command()
def plot(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or comparisons.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the figures go; default: DIR/figures of the first."),
    ] = None,
) -> None:
    """Draw the figures of runs, simulated or real, side by side."""
    from pipelinerl.records.run_folder import FIGURES_FOLDER

    figures = out if out is not None else folders[0] / FIGURES_FOLDER
    try:
        paths = _draw(folders, figures)
    except OSError as error:
        raise ConfigError(f"--out must be a folder that can be written, got {figures}: {error.strerror}") from None
    for path in paths:
        typer.echo(path)


@app.command()
def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run made with --trace full.", show_default=False)
    ],
) -> None:
    """Feed a run's recorded events to a fresh scheduler: does it give the recorded commands?

    Of a run that learned, also: does its trace give the learned weights, to the last bit?
    """
    from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
    from pipelinerl.records.trace import Trace
    from pipelinerl.records.trace import replay as replay_trace

    trace = Trace(folder / TRACE_FILE if os.path.isdir(folder) else folder)
    result = replay_trace(trace)
    if result.difference is not None:
        typer.echo(f"different: {result.difference}")
        raise typer.Exit(1)
    typer.echo(f"identical: {result.num_commands} commands from {result.num_events} events")
    if trace.config.policy is not None and (folder / SUMMARY_FILE).is_file():
        recorded = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")).get("weights_sha256")
        now = _load("sim.learning.relearn", extra="learn").relearn(trace).fingerprint()
        if now != recorded:
            typer.echo(f"different: learned weights {now}, recorded {recorded}")
            raise typer.Exit(1)
        typer.echo(f"identical: learned weights, SHA-256 {now[:16]}...")


@app.command()
def drift(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of runs that learned, real or simulated.", show_default=False),
    ],
    check: Annotated[
        list[Path],
        typer.Option("--check", metavar="DIR", help="A run to compare the fit with; may be given several times."),
    ] = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Fit how fast importance weights spread with lag: prints the [drift] table for the run file of a larger run."""
    from pipelinerl.rl.drift import fit_drift

    readers, learning = _load("analysis.read", extra="plot"), _load("analysis.drift", extra="plot")
    model = fit_drift([learning.learned_run(run) for run in readers.read_runs(folders)])
    checks = [learning.checked(model, run) for run in (readers.read_runs(check) if check else [])]
    if as_json:
        _print_json({**model.model_dump(), "checks": checks})
        return
    typer.echo(f"[drift]\nexponent = {model.exponent:g}\nrates = [{', '.join(f'{rate:.4g}' for rate in model.rates)}]")
    for one in checks:
        typer.echo(f"# {one['run']}: ESS {one['modelled']:.3f} modelled, {one['measured']:.3f} measured")


@app.command()
def validate(
    rows: Annotated[
        Path | None,
        typer.Argument(metavar="[ROWS.csv]", help="Published runs of your own; default: the shipped ones."),
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict published runs, each from its published inputs and from other rows, and print the errors."""
    from pipelinerl.cli.progress import stage_bars
    from pipelinerl.records.run_folder import check_vacant

    validator = _load("sim.validation.predict", extra="sim")
    if out is not None:
        _load("analysis.validation", extra="plot")
        check_vacant(out)
    shipped = validator.shipped_runs()
    runs = shipped if rows is None else _load("sim.validation.records", extra="sim").read_published_runs(rows)
    with stage_bars() as on_progress:
        predictions = validator.validate(
            runs, others=shipped, on_progress=lambda done, total: on_progress("simulations", done, total)
        )
    report = validator.report(predictions)
    if as_json:
        _print_json(report)
    else:
        from pipelinerl.cli.render_validation import print_validation

        print_validation(report)
    if out is not None:
        _load("analysis.validation", extra="plot").save_validation(report, out)


@app.command()
def calibrate(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="Folder of a run with a trace, or a CSV table of step times. None: the numbers below.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.toml", help="Its [hardware] says what is fitted: gpu and model, or tables."),
    ] = None,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    train_step_s: Annotated[
        float | None, typer.Option("--train-step-s", metavar="S", help="Seconds of an optimizer step.")
    ] = None,
    rollout_batch_s: Annotated[
        float | None, typer.Option("--rollout-batch-s", metavar="S", help="Seconds to generate one batch of rollouts.")
    ] = None,
    weight_sync_s: Annotated[
        float | None, typer.Option("--weight-sync-s", metavar="S", help="Seconds of one weight synchronisation.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write hardware.toml into this folder, or this file NAME.toml."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the hardware model to a trace, a table of step times, or three numbers; print the [hardware] table."""
    from pipelinerl.calibration import calibrate as calibration
    from pipelinerl.config.run_file import load_run

    config = None if run is None else load_run(run, overrides)
    numbers = {"train_step_s": train_step_s, "rollout_batch_s": rollout_batch_s, "weight_sync_s": weight_sync_s}
    if config is None and overrides:
        raise ConfigError("--set overrides keys of --run RUN.toml, which is missing")
    if source is None:
        if config is None:
            raise ConfigError("calibrate needs SOURCE, or --run RUN.toml with numbers such as --train-step-s")
        batch = _load("sim.batch", extra="sim")
        result = calibration.calibrate_numbers(
            config, **numbers, model_train_s=batch.train_step_s, model_rollout_s=batch.rollout_batch_s
        )
        name = ", ".join(f"{key}={value:g}" for key, value in numbers.items() if value is not None)
    elif any(value is not None for value in numbers.values()):
        raise ConfigError(f"calibrate takes SOURCE or numbers, got {source} and numbers")
    else:
        name = source.name
        is_table = source.suffix == ".csv"
        result = (calibration.calibrate_table if is_table else calibration.calibrate_trace)(source, config)
    text = calibration.hardware_toml(result, name)
    for doubt in calibration.doubts(result):
        _complain(f"warning: {doubt}")
    if out is not None:
        calibration.write_hardware(out, text)
    if as_json:
        _print_json(calibration.as_json(result))
    else:
        typer.echo(text, nl=False)


@app.command()
def measure(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the tables into this new folder.")],
    device: Annotated[Device, typer.Option(help="auto: the GPU if there is one.")] = Device.AUTO,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="A model in Hugging Face format; None: a small one, made here."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure matrix products, decode, prefill and training steps of the GPU or CPU at hand, for calibrate."""
    measuring = _load("backends.measure.bench", extra="train-cpu")
    done = measuring.measure(
        out, device=device.value, model=model, say=lambda text: typer.echo(f"pipelinerl: {text}", err=True)
    )
    if as_json:
        _print_json(done)
    else:
        rows = ", ".join(f"{count} of {kind}" for kind, count in done["rows"].items())
        typer.echo(f"{done['device']}: {rows} in {done['seconds']:.0f} s; next: calibrate {out / 'step_times.csv'}")
    if not done["complete"]:
        _complain("interrupted; what was measured is kept")
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; wrong input is told in one line per fault and ends with status 2."""
    try:
        app()
    except (ConfigError, TraceError) as error:
        _complain(str(error))
        sys.exit(2)
    except (PipelineRLError, OSError) as error:  # the run failed, or the disk is full
        _complain(str(error))
        sys.exit(1)


def _complain(text: str) -> None:
    for line in text.splitlines():
        typer.echo(f"pipelinerl: {line}", err=True)


def _load(module: str, *, extra: str) -> Any:
    """Import a module of another package, or say which extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; install it with: pip install 'pipelinerl[{extra}]'"
        ) from None


def _draw(folders: list[Path], figures: Path | None = None) -> list[Path]:
    paths: list[Path] = _load("analysis.plot", extra="plot").draw(folders, figures)
    return paths


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))
