"""``pipelinerl plan``: search for the best way to run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import pipelinerl
from pipelinerl.cli import options
from pipelinerl.cli.options import argument, option
from pipelinerl.cli.output import complain, draw_kept, print_json, print_line, stage_bars

if TYPE_CHECKING:
    from pipelinerl.records.plan_report import PlanReport
    from sim.planning.answer import PlannedCase

INTERRUPTED = "interrupted; the simulations that had ended are kept"


def plan(
    run: Annotated[Path | None, argument("RUN.toml", "The run file.")] = None,
    model: Annotated[str | None, option(None, "Model: name of the catalogue, or a file.")] = None,
    gpu: Annotated[str | None, option(None, "GPU: name of the catalogue, or a file; several: H100,H200.")] = None,
    accelerators: Annotated[str | None, option("N", "GPUs: 64,96, or H100=64,GB200=36.")] = None,
    engine: Annotated[str | None, option("NAME", "Engine: vllm-0.32, sglang-0.5; several.")] = None,
    software: Annotated[str | None, option("NAME", "Software of training: verl, verl-0.6, ours; several.")] = None,
    sync: Annotated[str | None, option("METHOD", "Weight synchronization method; several: refit,reshard.")] = None,
    train_batch_size: Annotated[str | None, option("N", "Answers per optimizer step.")] = None,
    group_size: Annotated[str | None, option("N", "Answers per prompt.")] = None,
    mean_length: Annotated[str | None, option("N", "Mean answer (tokens), or 2000..10000.")] = None,
    max_length: Annotated[str | None, option("N", "Longest answer (tokens).")] = None,
    max_lag: Annotated[str | None, option("N", "Largest lag allowed of any token (optimizer steps).")] = None,
    max_mean_lag: Annotated[str | None, option("X", "Largest mean lag allowed (optimizer steps).")] = None,
    price: Annotated[str | None, option("USD", "Price of a GPU-hour; per kind: H100=2.5,GB200=6.")] = None,
    risk: Annotated[str | None, option("KIND", "neutral: rank by mean throughput; averse: by the worst tenth.")] = None,
    spot_price: Annotated[str | None, option("USD", "Price of a spot GPU-hour: compare with spot engines.")] = None,
    spot_mtbf: Annotated[str | None, option("HOURS", "Mean time until a spot engine is reclaimed: 8h.")] = None,
    mtbf: Annotated[str | None, option("HOURS", "Mean time between failures of a GPU: 50000h.")] = None,
    lend: Annotated[
        str | None, option("SECONDS", "Lend the waiting trainer's GPUs; a switch takes so long: 20s.")
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(metavar="DRAFTER", help="Compare with speculative decoding: ngram:k=3,accept=0.6."),
    ] = None,
    against: Annotated[
        Path | None, option("OTHER", "Explain the differences to another run file, plan.json or folder.")
    ] = None,
    overrides: options.SetOption = [],  # noqa: B006 - typer copies it
    seed: options.SeedOption = None,
    out: options.OutOption = None,
    save: Annotated[Path | None, option("FILE", "Save the question as a run file, to change and ask again.")] = None,
    workers: options.WorkersOption = None,
    ray: Annotated[str | None, option("ADDRESS", "Simulate on this Ray cluster, or 'auto'.")] = None,
    hardware: options.HardwareOption = None,
    measured: options.MeasuredOption = [],  # noqa: B006 - typer copies it
    decode_table: Annotated[
        Path | None, option("FILE", "Decode steps by batch and context, as AIConfigurator exports them.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Recommend split, batch sizes, engines and scheduler, for a run file or for the options below."""
    from pipelinerl.config.question import ask, save_question
    from sim.planning.answer import compare_phases, plan_cases, with_phases
    from sim.planning.simulate import HowToPlan

    asked = {
        "model": model, "gpu": gpu, "accelerators": accelerators, "engine": engine,
        "software": software, "sync": sync, "train_batch_size": train_batch_size,
        "group_size": group_size, "mean_length": mean_length, "max_length": max_length, "max_lag": max_lag,
        "max_mean_lag": max_mean_lag, "price": price, "risk": risk,
        "spot_price": spot_price, "spot_mtbf": spot_mtbf, "mtbf": mtbf, "lend": lend,
        "speculate": speculate,
    }  # fmt: skip
    question = ask(asked, run, overrides, seed, hardware=hardware)
    file = run or save or (out or Path()) / "question.toml"
    if save is not None:
        save_question(question, save)
    with stage_bars() as on_progress:
        other = None if against is None else (str(against), _other(against, workers=workers, on_progress=on_progress))
        how = HowToPlan(
            out=out,
            workers=workers,
            ray_address=ray,
            on_progress=on_progress,
            measured=[*measured, *filter(None, [decode_table])],
            run_file=(str(file), *([] if run is None or hardware is None else ["--hardware", str(hardware)])),
            against=other,
            made=f"{date.today()}, pipelinerl {pipelinerl.__version__}: {shlex.join(['pipelinerl', *sys.argv[1:]])}",
        )
        cases = plan_cases(question, how)
        phases = compare_phases(question, cases, how)
    if phases is not None:
        cases = with_phases(cases, phases, out)
    elif question.growth is not None:
        complain("no plan is known to keep to the limits in every part of the run, as answers grow")
    status = _show(cases, file.name, out=out, as_json=as_json)
    if run is None and save is None and out is not None:
        save_question(question, file)
    if run is None and not as_json:
        kept = "keep the question with --save" if save is None and out is None else "the question is in"
        print_line(f"{kept} {file}; change it, and ask: pipelinerl plan {shlex.quote(str(file))}")
    raise typer.Exit(status)


def _show(cases: Sequence[PlannedCase], name: str, *, out: Path | None, as_json: bool) -> int:
    """Print and draw the plans of a question; return the exit status."""
    plans = {one.name: one.report for one in cases if one.report is not None}
    reports, several = [*plans.values()], len(cases) > 1
    if as_json:
        rows = [{"case": one.name, "plan": one.report and one.report.to_dict()} for one in cases]
        grown = next(({"phases": one.phases.to_dict()} for one in reports if one.phases), {})
        print_json({"cases": rows, **grown} if several else reports[0].to_dict())
    else:
        from pipelinerl.pages.plans import cases_page, plan_page
        from pipelinerl.pages.terminal import print_page

        failed = [f"{one.name}: {line}" for one in cases for line in (one.failure or "").splitlines()]
        print_page(cases_page(plans, failures=failed) if several else plan_page(reports[0]), name)
    failures = [one.failure for one in cases if one.report is not None and one.failure is not None]
    if out is not None and not failures:
        for folder in (one.folder for one in cases if one.report is not None):
            draw_kept(out / folder if several else out, quiet=as_json)
    failures += [line for one in reports if not one.search.complete for line in one.search.failures or [INTERRUPTED]]
    for failure in failures:
        complain(failure)
    return 1 if failures else 0


def _other(path: Path, *, workers: int | None, on_progress: Callable[[str, int, int], None]) -> PlanReport:
    """Return the plan in a folder or a JSON file, or that of another run file."""
    from pipelinerl.config.question import ask
    from pipelinerl.records.plan_report import PlanReport
    from pipelinerl.records.run_folder import PLAN_FILE
    from sim.planning.answer import plan_cases
    from sim.planning.simulate import HowToPlan

    if path.is_dir() or path.suffix == ".json":
        return PlanReport.read(path / PLAN_FILE if path.is_dir() else path)
    how = HowToPlan(workers=workers, on_progress=lambda stage, *numbers: on_progress(f"{path.name}: {stage}", *numbers))
    (case,) = plan_cases(ask({}, path), how)
    assert case.report is not None  # else an error has been raised
    return case.report
