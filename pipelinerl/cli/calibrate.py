"""``pipelinerl calibrate``: the hardware model fitted to measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.options import JsonOption, SetOption, complain, print_json
from pipelinerl.errors import ConfigError


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
    from pipelinerl.calibration.calibrate import calibrate_table, calibrate_trace
    from pipelinerl.calibration.hardware_file import as_json as result_as_json
    from pipelinerl.calibration.hardware_file import doubts, hardware_toml, write_hardware
    from pipelinerl.calibration.known_numbers import calibrate_numbers
    from pipelinerl.config.run_file import load_run

    config = None if run is None else load_run(run, overrides)
    numbers = {"train_step_s": train_step_s, "rollout_batch_s": rollout_batch_s, "weight_sync_s": weight_sync_s}
    if config is None and overrides:
        raise ConfigError("--set overrides keys of --run RUN.toml, which is missing")
    if source is None:
        if config is None:
            raise ConfigError("calibrate needs SOURCE, or --run RUN.toml with numbers such as --train-step-s")
        from sim.batch import rollout_batch_s as model_rollout_s
        from sim.batch import train_step_s as model_train_s

        result = calibrate_numbers(config, **numbers, model_train_s=model_train_s, model_rollout_s=model_rollout_s)
        name = ", ".join(f"{key}={value:g}" for key, value in numbers.items() if value is not None)
    elif any(value is not None for value in numbers.values()):
        raise ConfigError(f"calibrate takes SOURCE or numbers, got {source} and numbers")
    else:
        name = source.name
        is_table = source.suffix == ".csv"
        result = (calibrate_table if is_table else calibrate_trace)(source, config)
    text = hardware_toml(result, name)
    for doubt in doubts(result):
        complain(f"warning: {doubt}")
    if out is not None:
        write_hardware(out, text)
    if as_json:
        print_json(result_as_json(result))
    else:
        typer.echo(text, nl=False)
