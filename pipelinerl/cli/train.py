"""``pipelinerl train``: the real backend."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from pipelinerl.cli import options
from pipelinerl.cli.options import option
from pipelinerl.cli.output import draw_kept, print_report, training_bar
from pipelinerl.errors import ConfigError, PipelineRLError, RunInterruptedError

if TYPE_CHECKING:
    from pipelinerl.config.run import RunConfig


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise RunInterruptedError for any other error after Ctrl-C or SIGTERM: imports turn it into their own."""
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    heeded = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, press) for one in heeded}
    try:
        yield
    except PipelineRLError:
        raise
    except BaseException as error:
        if pressed or isinstance(error, KeyboardInterrupt):
            raise RunInterruptedError(
                "interrupted; --resume goes on from the last checkpoint if there is one"
            ) from None
        raise
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@interruptible()
def train(
    run: options.RunArgument,
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    seed: options.SeedOption = None,
    out: options.OutOption = None,
    resume: Annotated[bool, option(None, "Resume from the newest checkpoint in --out DIR.", "--resume")] = False,
    check: Annotated[
        bool, option(None, "Check task, machines and links, and make a few optimizer steps.", "--check")
    ] = False,
    hardware: options.HardwareOption = None,
    faults: options.FaultsOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Train for real, with vLLM engines and a DeepSpeed trainer: the [train] table of the run file."""
    from pipelinerl.config.run import load_run
    from pipelinerl.pages.runs import run_page

    config = load_run(run, overrides, seed, hardware=hardware, faults=faults)
    if check:
        if resume:
            raise ConfigError("--check begins a run of its own, got --resume, too")
        _check(config, run.name, out, as_json=as_json)
    if out is None:
        raise ConfigError("train needs --out DIR to keep checkpoints, metrics and the trained model in")
    with options.needs_extra("train-cpu"):
        from backends.run import train as train_run

    with training_bar(config.optimizer_steps) as on_step:
        report = train_run(config, out=out, resume=resume, on_step=on_step)
    print_report(report, lambda: run_page({run.stem: report}), run.name, as_json=as_json, only_table=True)
    draw_kept(out, quiet=as_json)


def _check(config: RunConfig, name: str, out: Path | None, *, as_json: bool) -> None:
    from backends.check.run_check import check as check_run
    from pipelinerl.config.run import CHECK_STEPS
    from pipelinerl.pages.runs import check_page

    with TemporaryDirectory(prefix="pipelinerl-check-") as folder, training_bar(CHECK_STEPS) as on_step:
        report = check_run(config, out=Path(folder) if out is None else out, shared=out is not None, on_step=on_step)
    print_report(report, lambda: check_page(report), name, as_json=as_json)
    raise typer.Exit(int(report.wrong))
