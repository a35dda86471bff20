"""Progress on stderr, if that is a terminal: one bar, a bar per stage, or a bar with the state of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

REFRESHES_PER_S = 2
"""Rate at which bars are drawn (1/s). Ten, which is rich's default, takes a tenth of a simulation's time."""


@contextmanager
def _bars() -> Iterator[Any]:
    """Show progress on stderr if it is a terminal; yields rich's progress."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES_PER_S,
    ) as progress:
        yield progress


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show one bar; yields a function to call after each piece."""
    with _bars() as progress:
        task = progress.add_task(what, total=total)
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
            how = f"{learning}  trainer waits {metrics['idle/trainer']:.0%}"
            progress.update(task, completed=row.step, description=how)

        yield step_done
