"""What is in a folder, for tests."""

from __future__ import annotations

import csv
from pathlib import Path


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
    from typer.testing import CliRunner

    from pipelinerl.cli.app import app

    run = Path(__file__).parents[2] / "examples/quickstart.toml"
    options = [part for one in [*overrides, "optimizer_steps=6"] for part in ("--set", one)]
    done = CliRunner().invoke(app, ["simulate", str(run), *options, "--trace", "full", "--out", str(root / "run")])
    assert done.exit_code == 0, done.output
    return root / "run"
