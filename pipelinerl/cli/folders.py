"""Commands on folders: ``replay``, ``plot``, ``report``, ``timeline``, ``drift``, ``fleet``, ``export``."""

from __future__ import annotations

import math
import os
import webbrowser
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from pipelinerl.cli import options
from pipelinerl.cli.options import argument, option
from pipelinerl.cli.output import print_json, print_line, status
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from analysis.chart import Chart
    from analysis.read import Run
    from pipelinerl.pages.page import Page

MOST_ADDED, LONGEST_NOTICE_S = 1000, 1e5
"""In a request."""
LEAST_MB = 100_000
"""Size from which on it is in MB, and below in kB (bytes)."""


def replay(
    folder: Annotated[Path, argument("DIR", "Folder of a run made with --trace full.")],
) -> None:
    """Check that a fresh scheduler gives the recorded commands of a run, and a fresh ledger its recorded numbers.

    For a simulated run with [policy] also check that its trace gives the learned weights, bit for bit.
    """
    from pipelinerl.records.recording import replay_run
    from pipelinerl.records.reports import RunReport
    from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
    from pipelinerl.records.steps import STEPS_FILE
    from pipelinerl.records.trace import Trace

    trace = Trace(folder / TRACE_FILE if os.path.isdir(folder) else folder)
    if next(trace.records(), None) is None:
        print_line("nothing to compare: the run ended before it began")
        return
    with status("replaying"):
        result = replay_run(trace)
    if result.difference is not None:
        print_line(f"different: {result.difference}")
        raise typer.Exit(1)
    print_line(f"identical: {result.num_commands} commands from {result.num_events} events")
    for name in (SUMMARY_FILE, STEPS_FILE):
        print_line(f"identical: {name}" if name in result.compared else f"not compared: {name} is not beside the trace")
    summary = trace.path.with_name(SUMMARY_FILE)
    if trace.config.policy is not None and summary.is_file():
        recorded = RunReport.read(summary).weights_sha256
        with status("learning again"):
            with options.needs_extra("learn"):
                from sim.learning.loop import relearn

            now = relearn(trace).fingerprint()
        if now != recorded:
            print_line(f"different: learned weights {now}, recorded {recorded}")
            raise typer.Exit(1)
        print_line(f"identical: learned weights, SHA-256 {now[:16]}...")


def plot(
    folders: Annotated[list[Path], argument("DIR", "Folders of runs or comparisons.")],
    out: Annotated[Path | None, option("DIR", "Where the figures go; default: DIR/figures of the first.")] = None,
) -> None:
    """Draw the figures of runs, simulated or real, side by side."""
    from pipelinerl.records.run_folder import FIGURES_FOLDER, writable

    figures = out if out is not None else folders[0] / FIGURES_FOLDER
    with writable(figures), status("drawing figures"):
        from analysis.plot import draw

        paths = draw(folders, figures)
    for path in paths:
        print_line(path)


def report(
    folders: Annotated[
        list[Path],
        argument(
            "DIR", "Folders of runs, simulated or real, of plans, or of one comparison, environments or validation."
        ),
    ],
    out: Annotated[Path, option("FILE", "page.html, or page.md for a pull request.", show_default=False)],
    show: Annotated[bool, option(None, "Open the page in the browser.", "--open")] = False,
) -> None:
    """Write one page: question, answer, interactive figures, tables, run file."""
    from pipelinerl.records.run_folder import writable

    if out.suffix not in (".html", ".md"):
        raise ConfigError(f"--out must end in .html or .md, got {out}")
    options.refuse_no_file(out)
    with status("making the page"):
        page, figures = _content(folders)
        if out.suffix == ".md":
            from pipelinerl.pages.page import page_markdown

            text = page_markdown(page)
        else:
            try:
                from analysis.page import page_html

                text = page_html(page, figures())
            except ModuleNotFoundError as error:
                name = error.name
                raise ConfigError(f"{name} is not installed; pip install {name}, or --out page.md") from None
    with writable(out, "file"):
        out.write_text(text, encoding="utf-8")
    size = len(text.encode())
    print_line(f"{out}: {size / 1e6:.2f} MB" if size >= LEAST_MB else f"{out}: {size / 1e3:.1f} kB")
    if show:
        webbrowser.open(out.resolve().as_uri())


def _content(folders: list[Path]) -> tuple[Page, Callable[[], list[Chart]]]:
    from analysis.read import read_comparison, read_run, read_runs
    from pipelinerl.pages import plans, runs
    from pipelinerl.records.comparison_report import EnvironmentsReport
    from pipelinerl.records.plan_report import PlanReport
    from pipelinerl.records.run_folder import COMPARISON_FILE, ENVIRONMENTS_FILE, PLAN_FILE, VALIDATION_FILE
    from pipelinerl.records.validation_report import ValidationReport

    kinds = (PLAN_FILE, ENVIRONMENTS_FILE, COMPARISON_FILE, VALIDATION_FILE)
    cases = _plans_in(folders)
    if len(cases) > 1:
        found = {one.name.replace("_", " "): PlanReport.read(one / PLAN_FILE) for one in cases}
        return plans.cases_page(found, cases), lambda: _figures().cases_charts(found)
    held = [(one, name) for one in folders for name in kinds if os.path.exists(one / name)]
    if not held:
        read = read_runs(folders)
        return runs.run_page({run.name: run.report for run in read}, folders), lambda: _page().run_charts(read)
    folder, file = held[0]
    if len(folders) > 1:
        raise ConfigError(f"DIR... must be runs or a single folder with a {file}, got {len(folders)} with {folder}")
    if file == PLAN_FILE:
        plan = PlanReport.read(folder / file)
        return plans.plan_page(plan, folder), lambda: [*_figures().plan_charts(plan).values()]
    if file == ENVIRONMENTS_FILE:
        numbers = EnvironmentsReport.read(folder / file)
        return runs.environments_page(numbers, folder), lambda: _figures().environments_charts(numbers)
    if file == VALIDATION_FILE:
        from pipelinerl.pages.evidence import validation_page

        validation = ValidationReport.read(folder / file)
        return validation_page(validation), lambda: [one for one in [_figures().validation_chart(validation)] if one]
    comparison = read_comparison(folder)
    arms = next(one.arms for one in comparison.scenarios if one.arms)
    shown = [read_run(folder / arm.folder, arm.name) for arm in arms]
    return runs.comparison_page(comparison, folder), lambda: _page().run_charts(shown, comparison)


def _plans_in(folders: list[Path]) -> list[Path]:
    """Return the folders of several plans, given or inside one folder, smallest cluster first."""
    from pipelinerl.records.run_folder import PLAN_FILE

    within = sorted(folders[0].glob(f"*/{PLAN_FILE}")) if len(folders) == 1 else []
    plans = [path.parent for path in within] or folders
    if not all(os.path.exists(one / PLAN_FILE) for one in plans):
        return []
    return sorted(plans, key=lambda one: [int(word) for word in one.name.split("_") if word.isdigit()])


def _page() -> ModuleType:
    from analysis import page

    return page


def _figures() -> ModuleType:
    from analysis import figures

    return figures


def timeline(
    folder: Annotated[Path, argument("DIR", "Folder of a run made with --trace full.")],
    out: Annotated[Path, option("FILE", "The JSON file to write.", show_default=False)],
    begin_s: Annotated[float, option("S", "Start of the written part (s).", "--begin", min=0.0)] = 0.0,
    end_s: Annotated[float, option("S", "End of the written part (s).", "--end", show_default="all")] = math.inf,
) -> None:
    """Write a timeline of a run; open the file at ui.perfetto.dev or in chrome://tracing."""
    from analysis.timeline import read_timeline, write_timeline

    if not begin_s < end_s:
        raise ConfigError(f"--end must be after --begin, got {begin_s:g} and {end_s:g}")
    options.refuse_no_file(out)
    with status("reading the trace"):
        made = read_timeline(folder, begin_s=begin_s, end_s=end_s)
        write_timeline(made, out)
    counts = made.counts
    print_line(
        f"{out}: {counts.optimizer_steps} optimizer steps, {counts.rollouts_finished} rollouts finished, "
        f"{counts.weights_loaded} weight loads"
    )
    if counts.stays_left_out:
        print_line(f"left out: {counts.stays_left_out} rollouts on an engine or environment without a free track")
    if counts.cut_at_s is not None:
        print_line(f"cut at {counts.cut_at_s:.6g} s, where the file is full: go on with --begin {counts.cut_at_s:.6g}")


def drift(
    folders: Annotated[list[Path], argument("DIR", "Folders of runs that learned, real or simulated.")],
    check: Annotated[list[Path], option("DIR", "A run to compare the fit with; repeatable.")] = [],  # noqa: B006 - typer copies it
    as_json: options.JsonOption = False,
) -> None:
    """Fit how fast importance weights spread with lag, and print this as a [drift] table for a run file."""
    from analysis.read import read_runs
    from pipelinerl.rl.drift import LearnedRun, fit_drift, modelled_ess

    def tokens_by_lag(run: Run) -> list[int]:
        return run.figure_data.lag_histogram.total

    with status("reading the runs"):
        model = fit_drift([LearnedRun(run.metrics_by_step(), tokens_by_lag(run)) for run in read_runs(folders)])
        checks = []
        for run in read_runs(check):
            if not run.has_ess or run.report.ess is None:
                raise ConfigError(f"--check needs runs that learned, got {run.name}, whose metrics have no ESS")
            modelled, measured = modelled_ess(model, tokens_by_lag(run)).mean, run.report.ess.mean
            checks.append({"run": run.name, "modelled": modelled, "measured": measured, "error": modelled - measured})
    if as_json:
        print_json({**model.model_dump(), "checks": checks})
        return
    print_line(f"[drift]\nexponent = {model.exponent:g}\nrates = [{', '.join(f'{rate:.4g}' for rate in model.rates)}]")
    for one in checks:
        print_line(f"# {one['run']}: ESS {one['modelled']:.3f} modelled, {one['measured']:.3f} measured")


def fleet(
    folder: Annotated[Path, argument("DIR", "Folder of a real run.")],
    add: Annotated[int, option("N", "Add engines; they wait until Ray has accelerators.", min=0, max=MOST_ADDED)] = 0,
    drain: Annotated[list[str], option("ENGINE|HOST", "Remove an engine, or all of a machine; repeatable.")] = [],  # noqa: B006 - typer copies it
    notice: Annotated[
        float, option("SECONDS", "Time for rollouts of removed engines to end there.", min=0, max=LONGEST_NOTICE_S)
    ] = 30.0,
    as_json: options.JsonOption = False,
) -> None:
    """Show the engines of a real run in progress; add some, or have some leave.

    Rollouts of an engine that leaves go on elsewhere with all their tokens. Engines are restarted by themselves.
    """
    with options.needs_extra("train-cpu"):
        from backends.driver.fleet import EngineRow, FleetRequest, ask
    with status("waiting for the run"):
        engines = ask(folder, FleetRequest(add=add, drain=drain, notice_s=notice))
    if as_json:
        print_json([one.model_dump() for one in engines])
        return
    names = list(EngineRow.model_fields)
    lines = [names, *(["-" if cell is None else str(cell) for cell in row.model_dump().values()] for row in engines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def export(
    source: Annotated[
        Path,
        argument("CHECKPOINT|RUN", "DIR/checkpoints/step_N of a run; with --to: the folder of a run with a trace."),
    ],
    out: Annotated[Path, option("DIR|FILE", "A new folder for the model, or a new file.")],
    to: Annotated[str | None, option("FORMAT", "Write the requests of a run: mooncake or dynamo.")] = None,
) -> None:
    """Write the model of a checkpoint in Hugging Face format, or with --to a run's requests for another simulator."""
    if to is not None:
        from sim.recorded import write_foreign

        options.refuse_no_file(out)
        with status("writing requests"):
            lines = write_foreign(source, out, to)
        for line in (out, *lines):
            print_line(line)
        return
    with options.needs_extra("train-cpu"), status("merging the parts of the ranks"):
        from backends.export import export as export_model

        export_model(source, out)
    print_line(out)
