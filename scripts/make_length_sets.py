"""Make the shipped length sets in ``sim/data`` from a table of single answers.

    python scripts/make_length_sets.py response_lengths.csv sim/data

The source table is a CSV file with one row per answer and, among others, the columns
``source_id, model, benchmark, prompt_id, prompt_tokens, response_tokens, correct``. It is not part of
the repository; ``sim/data/README.md`` names the public files with its numbers.

The script does only this to the rows of a set:

1. Rows of one ``source_id`` (for some sets, of one ``model``) are kept, in the order of the table.
2. A prompt is a pair of benchmark and ``prompt_id``. Prompts are numbered 0, 1, ... in the order in which
   they first appear, because ids repeat across benchmarks, and rows are sorted by that number (stably).
3. ``response_tokens`` becomes at least 1, for the end token.
4. The columns ``prompt_id, prompt_tokens, response_tokens, correct`` are written; the others are dropped.

The same table gives the same bytes. The summary of each set is printed as the rows of two Markdown tables.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SETS: Mapping[str, tuple[str, str | None]] = {
    "rgym_llama_400": ("rgym_llama", "Llama-3B-RG-step400"),
    "rgym_llama_800": ("rgym_llama", "Llama-3B-RG-step800"),
    "skythought": ("skythought", None),
    "areal_deepscaler": ("areal_32", "DeepScaleR-1.5B-Preview"),
    "areal_nemotron": ("areal_32", "OpenMath-Nemotron-1.5B"),
}
"""Name of the shipped set: ``source_id`` and model of its rows. None: all models are one set."""

COLUMNS = ("prompt_id", "prompt_tokens", "response_tokens", "correct")
"""Columns of a shipped set."""

Row = tuple[int, int, int, int]
"""One answer, in the order of ``COLUMNS``."""


def rows_of_set(table: Sequence[Mapping[str, str]], *, source_id: str, model: str | None) -> list[Row]:
    """Return the rows of one set, grouped by prompt.

    Args:
        table: Rows of the source table.
        source_id: Rows of this source are kept.
        model: Rows of this model are kept; None keeps all.

    Returns:
        Rows sorted by the new prompt number.

    Raises:
        ValueError: If the table has no such row.
    """
    numbers: dict[tuple[str, str], int] = {}
    rows: list[Row] = []
    for row in table:
        if row["source_id"] != source_id or model not in (None, row["model"]):
            continue
        prompt = numbers.setdefault((row["benchmark"], row["prompt_id"]), len(numbers))
        tokens = max(1, int(row["response_tokens"]))
        rows.append((prompt, int(row["prompt_tokens"]), tokens, int(row["correct"])))
    if not rows:
        raise ValueError(f"the table has no rows with source_id={source_id!r}, model={model!r}")
    return sorted(rows, key=lambda row: row[0])


def expected_longest(lengths: Sequence[int], count: int) -> float:
    """Return the mean longest of ``count`` answers over all subsets of that size.

    E[max] = sum_i x_(i) C(i - 1, count - 1) / C(n, count), with x_(1) <= ... <= x_(n).

    Args:
        lengths: Lengths of n answers (tokens).
        count: Answers drawn without replacement (count).

    Returns:
        Tokens.
    """
    ways = sum(math.comb(i, count - 1) * length for i, length in enumerate(sorted(lengths)))
    return ways / math.comb(len(lengths), count)


def between_share(groups: Sequence[Sequence[int]]) -> float:
    """Return the share of the variance of lengths that lies between prompts, for groups of equal size n.

    One-way analysis of variance: (MSB - MSW) / (MSB + (n - 1) MSW), with the mean squares between and within.
    """
    size = len(groups[0])
    between = size * statistics.variance([statistics.fmean(group) for group in groups])
    within = statistics.fmean(statistics.variance(group) for group in groups)
    return (between - within) / (between + (size - 1) * within)


def summary(name: str, rows: Sequence[Row]) -> tuple[str, str]:
    """Return the set's rows of the two tables in ``sim/data/README.md``."""
    groups: dict[int, list[int]] = {}
    correct: dict[int, set[int]] = {}
    for prompt, _, tokens, right in rows:
        groups.setdefault(prompt, []).append(tokens)
        correct.setdefault(prompt, set()).add(right)
    lengths = sorted(row[2] for row in rows)
    count, mean, spread = len(lengths), statistics.fmean(lengths), statistics.pstdev(lengths)
    quantiles = statistics.quantiles(lengths, n=100, method="inclusive")
    longest = [expected_longest(group, 8) / statistics.fmean(group) for group in groups.values()]
    single = (
        f"| `{name}` | {count} | {mean:.0f} | {statistics.median(lengths):.0f} | {spread / mean:.2f} "
        f"| {quantiles[94]:.0f} | {quantiles[98]:.0f} | {lengths[0]} | {lengths[-1]} "
        f"| {100 * statistics.fmean(row[3] for row in rows):.0f} % |"
    )
    grouped = (
        f"| `{name}` | {len(groups)} x {count // len(groups)} "
        f"| {statistics.fmean(longest):.2f} ({min(longest):.2f}-{max(longest):.2f}) "
        f"| {expected_longest(lengths, 8) / mean:.2f} | {between_share(list(groups.values())):.2f} "
        f"| {statistics.fmean(len(seen) == 2 for seen in correct.values()):.2f} |"
    )
    return single, grouped


def main(arguments: Sequence[str]) -> int:
    """Write all sets; print their summaries.

    Args:
        arguments: Path of the source table and of the folder to write to.

    Returns:
        Exit status: 0 done, 2 wrong arguments or a table without the rows of a set.
    """
    if len(arguments) != 2:
        sys.stderr.write("usage: make_length_sets.py SOURCE_TABLE.csv FOLDER\n")
        return 2
    source, folder = map(Path, arguments)
    with source.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    try:
        sets = {name: rows_of_set(table, source_id=key, model=model) for name, (key, model) in SETS.items()}
    except ValueError as error:
        sys.stderr.write(f"{source}: {error}\n")
        return 2
    for name, rows in sets.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    summaries = [summary(name, rows) for name, rows in sets.items()]
    sys.stdout.write("\n".join([single for single, _ in summaries] + [grouped for _, grouped in summaries]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
