"""The figures of what a command has kept: drawn where matplotlib is, and those named that say most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from pipelinerl.cli.options import complain
from pipelinerl.cli.waiting import waiting

LOOK_FIRST = (
    "plan_throughput_against_lag",
    "rollouts_against_environments",
    "throughput_against_max_lag",
    "learning",
    "time_split",
    "lag_by_step",
)
"""Figures that say most, by file name; of those that there are, the first three are shown."""


def draw_kept(folder: Path, *, quiet: bool) -> None:
    """Draw the figures of a folder, and print the paths of three of them and the names of the others.

    Args:
        folder: What the command has written.
        quiet: Whether to print no paths, since stdout is for a program.
    """
    with where_matplotlib_is(folder):
        with waiting("drawing figures"):
            from analysis.plot import draw

            paths = draw([folder])
        if paths and not quiet:
            typer.echo(figures_named(paths))


@contextmanager
def where_matplotlib_is(folder: Path) -> Iterator[None]:
    """Draw inside this block; without matplotlib a line on stderr says what is missing, and the numbers stay."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        complain(f"no figures: matplotlib is not installed; the numbers are in {folder}; pip install matplotlib")


def figures_named(paths: list[Path]) -> str:
    """Return which figures to look at first, and the names of the others."""
    stems = list(dict.fromkeys(path.stem for path in paths))
    first = [stem for stem in LOOK_FIRST if stem in stems][:3] or stems[:3]
    others = [stem for stem in stems if stem not in first]
    folder = paths[0].parent
    lines = ["Figures:", *(f"  {folder / stem}.png" for stem in first)]
    if others:
        lines.append(f"  and {', '.join(others)}")
    return "\n".join(lines)
