"""The command ``pipelinerl``: parse, call one library function, render what it returns.

Exit status 0: done. 1: the run failed. 2: the input is wrong (one line per fault, on stderr). Tables and
``--json`` go to stdout, progress and errors to stderr. Heavy packages are imported inside the commands.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
from typing import Annotated, Any

import typer

import pipelinerl
from pipelinerl.cli.calibrate import calibrate, diagnose, measure
from pipelinerl.cli.folders import drift, export, fleet, plot, replay, report, timeline
from pipelinerl.cli.output import complain, print_line
from pipelinerl.cli.plan import plan
from pipelinerl.cli.simulate import compare, environments, share, simulate, validate
from pipelinerl.cli.train import train
from pipelinerl.errors import ConfigError, PipelineRLError

app = typer.Typer(
    help="Plan and run asynchronous reinforcement learning of language models.\n\n"
    "Start with: pipelinerl plan --model Qwen3-8B --accelerators 64",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


UsageFault: type[Exception] = typer.BadParameter.__mro__[2]
"""``ClickException``. Typer has click inside itself or beside it, by version, and does not name this class."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"pipelinerl {pipelinerl.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


COMMANDS = (
    simulate, compare, plan, environments, share, train, fleet, export, plot, report, timeline, replay, drift, validate,
    calibrate, diagnose, measure,
)  # fmt: skip
for command in COMMANDS:
    app.command(short_help=(inspect.getdoc(command) or "").partition("\n\n")[0])(command)  # else it is cut


def main() -> None:
    """Run the command line; wrong input is one line per fault and status 2."""
    # A task or schedule of the user's, beside the run file; last, so that it hides nothing.
    sys.path.append(os.getcwd())
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="pipelinerl", standalone_mode=False))
    except UsageFault as fault:
        complain(usage_line(fault))
        sys.exit(2)
    except PipelineRLError as error:
        complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # a path that no file can have, or the disk is full
        complain(str(ConfigError(error)))
        sys.exit(2 if error.errno == errno.ENAMETOOLONG else 1)


def usage_line(fault: Any) -> str:
    """Return one line for a ``UsageFault``, whose class and fields give the kind."""
    from pydantic import ValidationError

    from pipelinerl.util.explain import did_you_mean, fault_line

    context, cause = fault.ctx, fault.__cause__
    parameter: Any = getattr(fault, "param", None)
    message = " ".join(fault.format_message().split()).rstrip(".")
    if isinstance(cause, ValidationError):
        key, (first, *_) = parameter.opts[0], cause.errors()
        line = fault_line(first, key).rstrip(".")
        return line if line.startswith(key) else f"{key}: {line}"
    if parameter is not None:
        return f"{message}: {parameter.help}"
    if context is None:
        return message
    if wrong := getattr(fault, "option_name", None):
        names = [name for one in context.command.get_params(context) for name in one.opts if name.startswith("--")]
        return f"{message.partition(' (')[0]}; {did_you_mean(wrong, names)}allowed: {', '.join(names)}"
    if commands := getattr(context.command, "commands", None):
        return f"{message}{'' if message.endswith('?') else ';'} allowed: {', '.join(commands)}"
    return f"{message}; usage: {context.command_path} {' '.join(context.command.collect_usage_pieces(context))}"
