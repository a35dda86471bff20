"""``pipelinerl measure``: step times. ``calibrate``: the model fitted to them. ``diagnose``: where GPU time goes."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelinerl.cli import options
from pipelinerl.cli.options import argument, option
from pipelinerl.cli.output import complain, print_json, print_line, print_report, stage_bars, status
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from pipelinerl.calibration.log import CalibratedLog
    from pipelinerl.calibration.solve import HardwareFit
    from pipelinerl.config.run import RunConfig


def calibrate(
    sources: Annotated[
        list[Path] | None,
        argument(
            "SOURCE",
            "Run with a trace, CSV table of step times, trace of requests, or with --from logs; without: numbers.",
        ),
    ] = None,
    format_: options.FromOption = None,
    runs: options.LogRunOption = [],  # noqa: B006 - typer copies it
    model: options.ModelOption = None,
    gpu: options.GpuOption = None,
    accelerators: options.AcceleratorsOption = None,
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    hardware: options.HardwareOption = None,
    train_step_s: Annotated[float | None, option("S", "Seconds of an optimizer step.")] = None,
    rollout_batch_s: Annotated[float | None, option("S", "Seconds to generate one batch of rollouts.")] = None,
    weight_sync_s: Annotated[float | None, option("S", "Seconds of one weight synchronization.")] = None,
    out: Annotated[
        Path | None,
        option(
            "DIR",
            "Write hardware.toml (of a log also run.toml) into this folder; or the hardware to NAME.toml.",
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Fit the hardware model to a trace, a log, a table of step times, or three numbers; print the [hardware] table."""
    from pipelinerl.calibration.calibrate import as_json as fit_as_json
    from pipelinerl.calibration.calibrate import doubts, hardware_toml, write_hardware
    from pipelinerl.config.run import load_run
    from sim.recorded import format_of

    numbers = {"train_step_s": train_step_s, "rollout_batch_s": rollout_batch_s, "weight_sync_s": weight_sync_s}
    given = {name: value for name, value in numbers.items() if value is not None}
    named = {"model": model, "gpu": gpu, "accelerators": accelerators}
    described = [name for name, value in named.items() if value is not None]
    run, number = run_and_number(runs, named)
    if number is not None and format_ is None:
        raise ConfigError(f"--run {number} is a run of a log: it needs --from FORMAT")
    if run is None and hardware is not None:
        raise ConfigError("--hardware takes the place of a table of --run RUN.toml, which is missing")
    if format_ is None and sources and format_of(str(sources[0])) is not None:
        if runs or given or described or overrides or hardware is not None or len(sources) > 1:
            raise ConfigError(f"{sources[0]} is a trace of requests: calibrate takes only --out and --json with it")
        _print_workload(sources[0], out, as_json=as_json)
        return
    if format_ is not None:
        if given:
            raise ConfigError("calibrate takes --from with logs, or numbers, got both")
    elif described:
        raise ConfigError(f"--{described[0]} describes the job of a log: it needs --from FORMAT")
    elif run is None and overrides:
        raise ConfigError("--set overrides keys of --run RUN.toml, which is missing")
    config, log, files = None if run is None else load_run(run, overrides, hardware=hardware), None, sources or []
    if format_ is None:
        fit, name = _fit_of(files, config, given)
    else:
        log = calibrated(files, format_, config, named, overrides, number)
        fit, name = log.fit, ", ".join(source.name for source in files)
    text = hardware_toml(fit, name)
    for doubt in doubts(fit):
        complain(f"warning: {doubt}")
    if out is not None:
        whole = None
        if log is not None and out.suffix != ".toml":
            whole = run_file(log, f"{name} by pipelinerl calibrate --from {format_}")
        write_hardware(out, text, run=whole)
    if as_json:
        print_json(fit_as_json(fit) | ({} if log is None else _log_as_json(log)))
    elif log is None:
        print_line(text, nl=False)
    else:
        _print_log(log, name, text, out)


def _print_workload(source: Path, out: Path | None, *, as_json: bool) -> None:
    """Print, and write, the tables of a run file that another system's trace of requests determines."""
    import tomli_w

    from pipelinerl.calibration.calibrate import write_hardware
    from sim.recorded import read_foreign, run_tables

    trace = read_foreign(str(source), key="SOURCE")
    tables, notes = run_tables(trace), [*trace.notes, "no times of decode steps: [hardware] is not fitted"]
    notes += ["environment.count is not in a trace: set it"] * trace.has_turns
    text = "".join(f"# {line}\n" for line in (f"From {source.name}, {len(trace.episodes)} rollouts.", *notes))
    text += "\n" + tomli_w.dumps(tables)
    if out is not None:
        write_hardware(out if out.suffix == ".toml" else out / "workload.toml", text)
    if as_json:
        print_json({**tables, "notes": notes})
    else:
        print_line(text, nl=False)


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
    from sim.run import rollout_batch_s, train_step_s

    fit = calibrate_numbers(config, **numbers, model_train_s=train_step_s, model_rollout_s=rollout_batch_s)
    return fit, ", ".join(f"{key}={value:g}" for key, value in numbers.items())


def run_and_number(runs: list[str], named: dict[str, Any]) -> tuple[Path | None, int | None]:
    """Return the run file among the values of ``--run``, and the number of a run in a log."""
    numbers, files = [one for one in runs if one.isdecimal()], [one for one in runs if not one.isdecimal()]
    if len(numbers) > 1 or len(files) > 1 or "0" in numbers:
        raise ConfigError(f"--run must be one run file, one number from 1, or one of each, got {', '.join(runs)}")
    if files and any(value is not None for value in named.values()):
        raise ConfigError("--model, --gpu and --accelerators describe a job without --run RUN.toml, got both")
    return Path(files[0]) if files else None, int(numbers[0]) if numbers else None


def calibrated(
    sources: list[Path],
    format_: str,
    config: RunConfig | None,
    named: dict[str, Any],
    overrides: list[str],
    number: int | None,
) -> CalibratedLog:
    """Return the calibration of one run of a log; ``number`` counts from 1, None: the last."""
    from pipelinerl.calibration.log import Models, calibrate_log, described_run, logged_run
    from pipelinerl.calibration.log_formats import read_log
    from sim.run import measured_steps, train_step_s

    if not sources:
        raise ConfigError(f"--from {format_} needs the log: --from {format_} FILE...")
    log = logged_run(read_log(sources, format_), number)
    described, assumed = described_run(log, run=config, named=named, overrides=overrides)
    with status("fitting"):
        return calibrate_log(log, described, assumed, Models(train_step_s, measured_steps))


def run_file(log: CalibratedLog, source: str) -> str:
    """Return the run file of a calibrated log, its assumptions as comments."""
    from pipelinerl.config.run import dump_run

    return "".join(f"# {line}\n" for line in (f"Made from {source}.", *log.assumed)) + "\n" + dump_run(log.run)


def _print_log(log: CalibratedLog, name: str, text: str, out: Path | None) -> None:
    from pipelinerl.pages.evidence import log_page
    from pipelinerl.pages.terminal import print_page

    print_page(log_page(log), name)
    if out is None:
        print_line(f"\n{text}", nl=False)
    elif out.suffix != ".toml":
        print_line(f"what would make it faster: {shlex.join(['pipelinerl', 'plan', str(out / 'run.toml')])}")


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


def diagnose(
    sources: Annotated[list[Path], argument("LOG", "Run folder with a trace, or with --from logs.")],
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


class Device(StrEnum):
    """The device that is measured."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


def measure(
    out: Annotated[Path, option("DIR", "Write the tables into this new folder.")],
    device: Annotated[Device, option(None, "auto: the GPU if there is one.")] = Device.AUTO,
    model: Annotated[
        Path | None, option("DIR", "Model in Hugging Face format; without it: a small random one.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure matrix products, decode, prefill and training steps of this machine, as input of calibrate."""
    with status("measuring"):
        with options.needs_extra("train-cpu"):
            from backends.measure.bench import measure as measure_times

        done = measure_times(
            out, device=device.value, model=model, on_progress=lambda text: print_line(f"pipelinerl: {text}", err=True)
        )
    if as_json:
        print_json(done)
    else:
        rows = ", ".join(f"{count} of {kind}" for kind, count in done["rows"].items())
        print_line(f"{done['device']}: {rows} in {done['seconds']:.0f} s; next: calibrate {out / 'step_times.csv'}")
    if not done["complete"]:
        complain("interrupted; what was measured is kept")
        raise typer.Exit(1)
