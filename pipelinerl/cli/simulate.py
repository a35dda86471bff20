"""``pipelinerl simulate``: one run in simulated time."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from pipelinerl.cli import options
from pipelinerl.cli.output import draw_kept, print_report, progress_bar
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
    trace: Annotated[TraceLevel, typer.Option(help="full: keep every event, for replay.")] = TraceLevel.NONE,
    hardware: options.HardwareOption = None,
    faults: options.FaultsOption = None,
    measured: options.MeasuredOption = [],  # noqa: B006 - typer copies it
    as_json: options.JsonOption = False,
) -> None:
    """Simulate one run and print throughput, token lag and the trainer's time."""
    from pipelinerl.config.run import load_run
    from pipelinerl.pages.runs import run_page
    from sim.run import simulate as simulate_run

    config = load_run(run, overrides, seed, hardware=hardware, faults=faults)
    if measured:
        from pipelinerl.calibration.measured import of_its_arm

        config = of_its_arm(config, measured)
    if trace is TraceLevel.FULL and out is None:
        raise ConfigError("--trace full needs --out DIR to write the trace to")
    with progress_bar("optimizer steps", config.optimizer_steps) as advance:
        report = simulate_run(config, out=out, trace=trace is TraceLevel.FULL, on_step=lambda _row: advance())
    print_report(report, lambda: run_page({run.stem: report}), run.name, as_json=as_json, only_table=True)
    if out is not None:
        draw_kept(out, quiet=as_json)
