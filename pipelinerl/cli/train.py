"""``pipelinerl train``: the real backend."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelinerl.cli.interrupts import said_if_interrupted
from pipelinerl.cli.options import JsonOption, OutOption, RunArgument, SeedOption, SetOption, needs_extra, print_json
from pipelinerl.errors import ConfigError


@said_if_interrupted()
def train(
    run: RunArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    seed: SeedOption = None,
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out DIR.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only a few optimizer steps, to measure; plan --measured DIR reads them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train for real, with vLLM engines and a DeepSpeed trainer: the [train] table of the run file."""
    from analysis.plot import draw
    from pipelinerl.cli.progress import training_bar
    from pipelinerl.config.check import check_config
    from pipelinerl.config.run_file import load_run

    config = load_run(run, overrides, seed)
    if out is None:
        raise ConfigError("train needs --out DIR to keep checkpoints, metrics and the trained model in")
    if check:
        config = check_config(config)
    with needs_extra("train-cpu"):
        from backends.run import train as train_run

    with training_bar(config.optimizer_steps) as on_step:
        report = train_run(config, out=out, resume=resume, on_step=on_step)
    if as_json:
        print_json(report.to_dict())
    else:
        from pipelinerl.cli.render_run import print_summary

        print_summary(report, run.name)
    draw([out])
