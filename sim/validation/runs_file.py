"""A CSV file of published runs, of typed or of collected columns (``published_runs/README.md`` explains both)."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.errors import ConfigError
from pipelinerl.util.table import read_table
from sim.validation.evidence import collected_runs, is_collected
from sim.validation.records import PublishedRun


def read_published_runs(path: str | Path) -> list[PublishedRun]:
    """Read rows of published runs.

    Args:
        path: A CSV file. Its columns are fields of ``PublishedRun`` and no others, or else those in which runs are
            collected: these have ``source`` and no ``system``, or have ``gen_or_wait_s``.

    Returns:
        One value per row, in order.

    Raises:
        ConfigError: If the file cannot be read or has no rows, a column or a cell is wrong, or two rows have one id.
    """
    table = read_table(Path(path), "published runs")
    runs = collected_runs(table) if is_collected(table.header.cells) else [run for _, run in table.rows(PublishedRun)]
    names = [run.id for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: id must be different in every row, got {name!r} {names.count(name)} times")
    return runs
