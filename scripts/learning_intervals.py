"""Tables of a comparison that learned, on stdout, with 95 % intervals over seeds.

    pipelinerl compare examples/learning.toml --out runs/lag
    python scripts/learning_intervals.py runs/lag

Every arm is paired with the first one, seed by seed: both have the same prompts and the same random number for each
token. A ratio of times is the geometric mean over seeds, and its interval is Student's t of the logarithms. If an
interval includes 1 (for a difference: 0), these seeds do not show which arm is better.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis.figures import mean_and_band
from analysis.read import Run, read_comparison, read_run

LEAST_SEEDS = 3
"""Least number of seeds (count): the interval of two is 13 times as wide as half their difference."""
LEVELS = ("0.8", "0.85", "0.9")
"""Rewards whose times are compared, reached by the mean of 8 steps (``reward.reached`` of ``summary.json``)."""
LAST_STEPS = 40
"""Last optimizer steps whose reward is compared (count)."""

Seeds = Mapping[int, Run]
"""The runs of an arm, by seed."""


def read_arms(folder: Path) -> dict[str, Seeds]:
    """Return the runs of every arm of a comparison with seeds."""
    return {
        arm.name: {one.seed: read_run(folder / one.folder) for one in arm.repeats or ()}
        for arm in read_comparison(folder).arms
    }


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and half of its 95 % interval."""
    mean, half = mean_and_band(np.array(values)[:, None])
    return f"{mean[0]:.{digits}f}" + (f" ± {half[0]:.{digits}f}" if len(values) >= LEAST_SEEDS else "")


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the geometric mean of paired ratios and its 95 % interval."""
    mean, half = (one[0] for one in mean_and_band(np.log(np.array(over) / np.array(under))[:, None]))
    bounds = f" ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})" if len(over) >= LEAST_SEEDS else ""
    return f"{math.exp(mean):.2f}{bounds}, {len(over)} seeds"


def reached_s(run: Run, level: str) -> float:
    """Return the time at which the run reached a reward (s); infinity: never."""
    reached = {} if run.report.reward is None else run.report.reward.reached
    return reached[level].time_s if level in reached else math.inf


def later_by(pairs: Sequence[tuple[Run, Run]], level: str) -> str:
    """Return the ratios of times to a reward, first over second, for pairs in which both reached it."""
    times = [(reached_s(run, level), reached_s(first, level)) for run, first in pairs]
    both = [pair for pair in times if math.isfinite(sum(pair))]
    missing = f"; in {len(times) - len(both)} not reached by both" if len(both) < len(times) else ""
    return (ratio(*zip(*both, strict=True)) if both else "-") + missing


def numbers(run: Run) -> dict[str, float]:
    """Return the numbers that are averaged over seeds."""
    report, reward = run.report, run.steps.reward_mean
    assert report.ess is not None
    return {
        "s per step": report.duration_s / report.optimizer_steps,
        "mean lag": report.lag.mean,
        "largest lag": report.lag.max,
        "ESS": report.ess.mean,
        "least ESS of a step": report.ess.min,
        "ESS of whole answers": report.ess.sequence_mean,
        "tokens of an answer": float(run.steps.length_mean.mean()),
        "tokens thrown away": (report.tokens.discarded + report.tokens.aborted) / report.tokens.generated,
        "reward, all steps": float(reward.mean()),
        f"reward, last {LAST_STEPS}": float(reward[-LAST_STEPS:].mean()),
    }


COMPARED = ("ESS", "reward, all steps", f"reward, last {LAST_STEPS}")
"""Numbers whose differences to the first arm are printed."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def main() -> None:
    """Print the arms, their differences to the first, and the ratios of their times to its times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="written by pipelinerl compare, with compare.seeds and [policy]")
    arms = read_arms(parser.parse_args().folder)
    if not all(run.has_ess for runs in arms.values() for run in runs.values()) or not all(arms.values()):
        parser.error("needs a comparison with compare.seeds whose runs have a [policy]")
    values = {name: {seed: numbers(run) for seed, run in runs.items()} for name, runs in arms.items()}
    columns = list(numbers(next(iter(next(iter(arms.values())).values()))))
    print_table(
        ["arm", "seeds", *columns],
        [
            [name, f"{len(own)}", *(interval([one[column] for one in own.values()]) for column in columns)]
            for name, own in values.items()
        ],
    )
    first, *others = arms
    rows = []
    for name in others:
        both = sorted(arms[first].keys() & arms[name].keys())
        less = [[values[name][seed][key] - values[first][seed][key] for seed in both] for key in COMPARED]
        later = [later_by([(arms[name][seed], arms[first][seed]) for seed in both], level) for level in LEVELS]
        rows.append([name, *map(interval, less), *later])
    levels = [f"seconds to {level}, times {first}'s" for level in LEVELS]
    print_table(["arm", *(f"{key}, less {first}'s" for key in COMPARED), *levels], rows)


if __name__ == "__main__":
    main()
