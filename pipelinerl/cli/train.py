"""``pipelinerl train``: the real backend."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from pipelinerl.cli.interrupts import said_if_interrupted
from pipelinerl.cli.kept_figures import draw_kept
from pipelinerl.cli.options import (
    HardwareOption,
    JsonOption,
    OutOption,
    RunArgument,
    SeedOption,
    SetOption,
    needs_extra,
    print_json,
)
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from pipelinerl.config.run import RunConfig


@said_if_interrupted()
def train(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out DIR.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check task, machines and links, and make a few optimizer steps.")
    ] = False,
    hardware: HardwareOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train for real, with vLLM engines and a DeepSpeed trainer: the [train] table of the run file."""
    from pipelinerl.cli.progress import training_bar
    from pipelinerl.config.run_file import load_run

    config = load_run(run, overrides, seed, hardware=hardware)
    if check:
        if resume:
            raise ConfigError("--check begins a run of its own, got --resume, too")
        _check(config, run.name, out, as_json=as_json)
    if out is None:
        raise ConfigError("train needs --out DIR to keep checkpoints, metrics and the trained model in")
    with needs_extra("train-cpu"):
        from backends.run import train as train_run

    with training_bar(config.optimizer_steps) as on_step:
        report = train_run(config, out=out, resume=resume, on_step=on_step)
    if as_json:
        print_json(report.to_dict())
    else:
        from pipelinerl.cli.render_run import print_summary

        print_summary(report, run.name)
    draw_kept(out, quiet=as_json)


def _check(config: RunConfig, name: str, out: Path | None, *, as_json: bool) -> None:
    from backends.check.run_check import check as check_run
    from pipelinerl.cli.progress import training_bar
    from pipelinerl.config.check import CHECK_STEPS

    with TemporaryDirectory(prefix="pipelinerl-check-") as folder, training_bar(CHECK_STEPS) as on_step:
        report = check_run(config, out=Path(folder) if out is None else out, shared=out is not None, on_step=on_step)
    if as_json:
        print_json(report.to_dict())
    else:
        from pipelinerl.cli.render_check import print_check

        print_check(report, name)
    raise typer.Exit(int(report.wrong))
