"""What is in a folder, for tests."""

from __future__ import annotations

import csv
from pathlib import Path

from pages import EXAMPLES

from pipelinerl.config.run import load_run
from sim.run import simulate


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return the rows of steps.csv, each whole."""
    text = (folder / "steps.csv").read_text()
    assert text.endswith("\n")
    rows = list(csv.DictReader(text.splitlines(), strict=True))
    for row in rows:
        assert None not in row  # no cell too many
        assert None not in row.values()  # and none too few
    return rows


def simulated_steps(root: Path, overrides: list[str]) -> Path:
    """Return the folder of six optimizer steps of the quickstart, with a trace."""
    run = load_run(EXAMPLES / "quickstart.toml", [*overrides, "optimizer_steps=6"])
    simulate(run, out=root / "run", trace=True)
    return root / "run"
