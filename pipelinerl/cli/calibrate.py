"""``pipelinerl calibrate``: the hardware model fitted to measured times."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelinerl.cli.options import HardwareOption, JsonOption, SetOption
from pipelinerl.cli.output import complain, print_json, print_line, status
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from pipelinerl.calibration.log import CalibratedLog
    from pipelinerl.calibration.solve import HardwareFit
    from pipelinerl.config.run import RunConfig


def calibrate(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Run folder with a trace, CSV table of step times, or with --from logs; without: the numbers below.",
            show_default=False,
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="Read SOURCE as logs of verl, nemo-rl, prime-rl, slime or areal, or as csv: a table of logged steps.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="RUN.toml", help="Run file; if it names gpu and model: fit coefficients, else tables."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Model of the logged job.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="GPU of the logged job.")] = None,
    accelerators: Annotated[
        int | None,
        typer.Option("--accelerators", metavar="N", min=1, help="Number of GPUs of the logged job, if not in the log."),
    ] = None,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    hardware: HardwareOption = None,
    train_step_s: Annotated[
        float | None, typer.Option("--train-step-s", metavar="S", help="Seconds of an optimizer step.")
    ] = None,
    rollout_batch_s: Annotated[
        float | None, typer.Option("--rollout-batch-s", metavar="S", help="Seconds to generate one batch of rollouts.")
    ] = None,
    weight_sync_s: Annotated[
        float | None, typer.Option("--weight-sync-s", metavar="S", help="Seconds of one weight synchronization.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write hardware.toml (of a log also run.toml) into this folder; or the hardware to NAME.toml.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the hardware model to a trace, a log, a table of step times, or three numbers; print the [hardware] table."""
    from pipelinerl.calibration.calibrate import as_json as fit_as_json
    from pipelinerl.calibration.calibrate import doubts, hardware_toml, write_hardware
    from pipelinerl.config.run import load_run

    numbers = {"train_step_s": train_step_s, "rollout_batch_s": rollout_batch_s, "weight_sync_s": weight_sync_s}
    given = {name: value for name, value in numbers.items() if value is not None}
    named = {"model": model, "gpu": gpu, "accelerators": accelerators}
    described = [name for name, value in named.items() if value is not None]
    if run is None and hardware is not None:
        raise ConfigError("--hardware takes the place of a table of --run RUN.toml, which is missing")
    if format_ is not None:
        if given:
            raise ConfigError("calibrate takes --from with logs, or numbers, got both")
        if run is not None and described:
            raise ConfigError("--model, --gpu and --accelerators describe a job without --run RUN.toml, got both")
    elif described:
        raise ConfigError(f"--{described[0]} describes the job of a log: it needs --from FORMAT")
    elif run is None and overrides:
        raise ConfigError("--set overrides keys of --run RUN.toml, which is missing")
    config, log, files = None if run is None else load_run(run, overrides, hardware=hardware), None, sources or []
    if format_ is None:
        fit, name = _fit_of(files, config, given)
    else:
        log = _log_of(files, format_, config, named, overrides)
        fit, name = log.fit, ", ".join(source.name for source in files)
    text = hardware_toml(fit, name)
    for doubt in doubts(fit):
        complain(f"warning: {doubt}")
    if out is not None:
        whole = None
        if log is not None and out.suffix != ".toml":
            whole = _run_file(log, f"{name} by pipelinerl calibrate --from {format_}")
        write_hardware(out, text, run=whole)
    if as_json:
        print_json(fit_as_json(fit) | ({} if log is None else _log_as_json(log)))
    elif log is None:
        print_line(text, nl=False)
    else:
        _print_log(log, name, text, out)


def _fit_of(sources: list[Path], config: RunConfig | None, numbers: dict[str, float]) -> tuple[HardwareFit, str]:
    """Return the hardware fitted to a trace, a table of step times, or numbers, and the name of its source."""
    from pipelinerl.calibration.calibrate import calibrate_table, calibrate_trace
    from pipelinerl.calibration.solve import calibrate_numbers

    if len(sources) > 1:
        raise ConfigError("calibrate takes one SOURCE, or several logs with --from FORMAT")
    if sources:
        if numbers:
            raise ConfigError(f"calibrate takes SOURCE or numbers, got {sources[0]} and numbers")
        with status("fitting"):
            fit = (calibrate_table if sources[0].suffix == ".csv" else calibrate_trace)(sources[0], config)
        return fit, sources[0].name
    if config is None:
        raise ConfigError("calibrate needs SOURCE, or --run RUN.toml with numbers such as --train-step-s")
    from sim.batch import rollout_batch_s, train_step_s

    fit = calibrate_numbers(
        config,
        train_step_s=numbers.get("train_step_s"),
        rollout_batch_s=numbers.get("rollout_batch_s"),
        weight_sync_s=numbers.get("weight_sync_s"),
        model_train_s=train_step_s,
        model_rollout_s=rollout_batch_s,
    )
    return fit, ", ".join(f"{key}={value:g}" for key, value in numbers.items())


def _log_of(
    sources: list[Path], format_: str, config: RunConfig | None, named: dict[str, Any], overrides: list[str]
) -> CalibratedLog:
    from pipelinerl.calibration.log import Models, calibrate_log, described_run, logged_run
    from pipelinerl.calibration.log_formats import read_log
    from sim.batch import measured_steps, train_step_s

    if not sources:
        raise ConfigError(f"--from {format_} needs the log: calibrate --from {format_} FILE...")
    log = logged_run(read_log(sources, format_))
    described, assumed = described_run(log, run=config, named=named, overrides=overrides)
    with status("fitting"):
        return calibrate_log(log, described, assumed, Models(train_step_s, measured_steps))


def _run_file(log: CalibratedLog, source: str) -> str:
    from pipelinerl.config.run import dump_run

    return "".join(f"# {line}\n" for line in (f"Made from {source}.", *log.assumed)) + "\n" + dump_run(log.run)


def _print_log(log: CalibratedLog, name: str, text: str, out: Path | None) -> None:
    from pipelinerl.pages.evidence import log_page
    from pipelinerl.pages.terminal import print_page

    print_page(log_page(log), name)
    if out is None:
        print_line(f"\n{text}", nl=False)
    elif out.suffix != ".toml" and not log.log.asynchronous:
        print_line(f"what if asynchronous: {_asynchronous(log.run, out / 'run.toml')}")


def _log_as_json(result: CalibratedLog) -> dict[str, Any]:
    columns = {"log": result.log.mean, "simulated": result.simulated, "before": result.predicted}
    return {
        "steps": result.log.num_steps,
        "asynchronous": result.log.asynchronous,
        "beside": {name: step.model_dump(exclude_none=True, exclude={"step"}) for name, step in columns.items()},
        "factors": result.fit.factors,
        "assumed": list(result.assumed),
        "run": result.run.model_dump(mode="json", exclude_none=True, exclude_unset=True),
    }


def _asynchronous(run: RunConfig, path: Path) -> str:
    """Return the command that simulates a synchronous job with staleness 2, half of its accelerators generating."""
    size = run.cluster.tensor_parallel
    generating = max(size, run.cluster.accelerators // (2 * size) * size)
    sets = ("scheduler.kind=pipeline", "scheduler.max_lag=2", f"cluster.generation_accelerators={generating}")
    return shlex.join(["pipelinerl", "simulate", str(path), *(word for one in sets for word in ("--set", one))])
