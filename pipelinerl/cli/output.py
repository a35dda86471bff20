"""Results on stdout; errors, progress and notes on stderr; figures into the folder of the results.

Progress is drawn where stderr is a terminal, else printed as lines. rich is imported where it draws: ``--help`` does
without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from pipelinerl.pages.page import Page
    from pipelinerl.records.comparison_report import ComparisonReport, EnvironmentsReport
    from pipelinerl.util.strict_model import Report

    MakePage = Callable[[], Page]

REFRESHES_PER_S = 2
"""Rate at which progress is drawn (1/s). Ten, which is rich's default, takes a tenth of a simulation's time."""
SPEED_PERIOD_S = 3600.0
"""Time over which the speed is measured from which the rest follows (s); rich's default is shorter than some steps."""
LINE_EVERY_S = 10.0
"""Time between two lines of progress, without a terminal (s)."""
SAME_LINE_EVERY = 6
"""Times ``LINE_EVERY_S`` until a line is repeated that only the clock has changed."""
LOOK_FIRST = (
    "plan_throughput_against_lag", "rollouts_against_environments", "throughput_against_max_lag", "learning",
    "time_split", "lag_by_step",
)  # fmt: skip
"""Figures to look at first, by file name; the first three that were drawn are shown by path."""


def print_line(text: object, *, nl: bool = True, err: bool = False) -> None:
    """Print a line that drives no terminal, whatever names it has."""
    from pipelinerl.util.explain import printable

    try:
        typer.echo(printable(str(text)), nl=nl, err=err)
    except BrokenPipeError:
        from pipelinerl.pages.terminal import no_reader

        no_reader()


def complain(text: str) -> None:
    """Print each line on stderr, after the program's name."""
    for line in text.split("\n"):
        print_line(f"pipelinerl: {line}", err=True)


def print_json(data: Any) -> None:
    """Print results for programs on stdout."""
    print_line(json.dumps(data, indent=2))


def print_report(report: Report, page: MakePage, name: str, *, as_json: bool, only_table: bool = False) -> None:
    """Print a report as JSON, or else its page, made only then, with ``name`` before the title of its table."""
    if as_json:
        print_json(report.to_dict())
        return
    from pipelinerl.pages.terminal import print_page

    print_page(page(), name, only_table=only_table)


def end_of_runs(
    report: ComparisonReport | EnvironmentsReport, page: MakePage, name: str, *, out: Path | None, as_json: bool
) -> NoReturn:
    """Print a report of several runs and its failures, draw the figures of its folder, and end with the exit status."""
    print_report(report, page, name, as_json=as_json)
    if not report.complete:
        for failure in report.failures or ["interrupted; the runs that had ended are kept"]:
            complain(failure)
    if out is not None:
        draw_kept(out, quiet=as_json)
    raise typer.Exit(0 if report.complete else 1)


# Progress


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show a line until this block ends, where nothing can be counted."""
    if not sys.stderr.isatty():
        with _bars() as progress:
            progress.add_task(text, total=None)
            yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text, refresh_per_second=REFRESHES_PER_S):
        yield


@contextmanager
def _bars() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    on_terminal = console.is_terminal and sys.stderr.isatty()  # to rich a notebook is one
    with Progress(
        *columns, console=console, transient=True, disable=not on_terminal, refresh_per_second=REFRESHES_PER_S,
        speed_estimate_period=SPEED_PERIOD_S,
    ) as progress:  # fmt: skip
        ended = Event()
        if progress.disable and not console.is_jupyter:
            Thread(target=_print_lines, args=(progress, ended), daemon=True).start()
        try:
            yield progress
        finally:
            ended.set()


def _print_lines(progress: Any, ended: Event) -> None:
    """Print the newest bar as a line every ``LINE_EVERY_S``, more rarely if only the clock has changed it."""
    last, num_same = None, 0
    while not ended.wait(LINE_EVERY_S):
        for bar in progress.tasks[-1:]:
            now = (bar.id, bar.completed, bar.description)
            last, num_same = now, num_same + 1 if now == last else 0
            if num_same % SAME_LINE_EVERY:
                continue
            parts = [str(timedelta(seconds=int(bar.elapsed)))]
            parts += [f"{bar.completed:.0f}/{bar.total:.0f}"] if bar.completed else []
            parts += [bar.description]
            parts += [f"{timedelta(seconds=bar.time_remaining)} left"] if bar.time_remaining else []
            print_line("  ".join(parts), err=True)


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show one bar; yields a function to call after each piece."""
    with _bars() as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar per stage; yields a function of the stage, the pieces done and all pieces."""
    with _bars() as progress:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        yield update


@contextmanager
def training_bar(total: int) -> Iterator[Callable[[Any, dict[str, float]], None]]:
    """Show optimizer steps with their metrics; yields a function to call after each step."""
    with _bars() as progress:
        task = progress.add_task("starting", total=total)

        def step_done(row: Any, metrics: dict[str, float]) -> None:
            ess = metrics.get("ess/token_raw", float("nan"))
            learning = f"reward {row.reward_mean:.3f}  lag {row.lag_mean:.2f}  ESS {ess:.3f}"
            speed = f"trainer waits {metrics['idle/trainer']:.0%}  {metrics['throughput/tokens_per_s']:,.0f} tokens/s"
            progress.update(task, completed=row.step, description=f"{learning}  {speed}")

        yield step_done


# Figures


def draw_kept(folder: Path, *, quiet: bool) -> None:
    """Draw the figures of a folder; unless ``quiet`` print the paths of three of them and the names of the others."""
    with without_matplotlib_a_line(folder):
        with status("drawing figures"):
            from analysis.plot import draw

            paths = draw([folder])
        if paths and not quiet:
            print_line(figures_named(paths))


@contextmanager
def without_matplotlib_a_line(folder: Path) -> Iterator[None]:
    """Draw inside this block; without matplotlib a line on stderr names it, and the numbers stay."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        complain(f"no figures: matplotlib is not installed; the numbers are in {folder}; pip install matplotlib")


def figures_named(paths: list[Path]) -> str:
    """Return the paths of the figures to look at first, and the names of the others."""
    stems = list(dict.fromkeys(path.stem for path in paths))
    first = [stem for stem in LOOK_FIRST if stem in stems][:3] or stems[:3]
    others = [stem for stem in stems if stem not in first]
    folder = paths[0].parent
    lines = ["Figures:", *(f"  {folder / stem}.png" for stem in first)]
    if others:
        lines.append(f"  and {', '.join(others)}")
    return "\n".join(lines)
