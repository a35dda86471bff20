"""The command ``pipelinerl``: parse, call one library function, render what it returns.

Exit status 0: done. 1: the run failed. 2: the input is wrong (one line per fault, on stderr). Tables and
``--json`` go to stdout, progress and errors to stderr. One module per command; heavy packages are imported inside
the commands.
"""

from __future__ import annotations

import sys

import typer

from pipelinerl.cli.calibrate import calibrate
from pipelinerl.cli.compare import compare
from pipelinerl.cli.drift import drift
from pipelinerl.cli.environments import environments
from pipelinerl.cli.measure import measure
from pipelinerl.cli.options import complain
from pipelinerl.cli.plan import plan
from pipelinerl.cli.plot import plot
from pipelinerl.cli.replay import replay
from pipelinerl.cli.simulate import simulate
from pipelinerl.cli.timeline import timeline
from pipelinerl.cli.train import train
from pipelinerl.cli.validate import validate
from pipelinerl.errors import ConfigError, PipelineRLError, TraceError

app = typer.Typer(
    help="Plan and run asynchronous reinforcement learning of language models.\n\n"
    "Start with: pipelinerl simulate examples/quickstart.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    simulate,
    compare,
    plan,
    environments,
    train,
    plot,
    timeline,
    replay,
    drift,
    validate,
    calibrate,
    measure,
):
    app.command()(command)


def main() -> None:
    """Run the command line. Wrong input is reported in one line per fault and ends with status 2."""
    try:
        app()
    except (ConfigError, TraceError) as error:
        complain(str(error))
        sys.exit(2)
    except (PipelineRLError, OSError) as error:  # the run failed, or the disk is full
        complain(str(error))
        sys.exit(1)
