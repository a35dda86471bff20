"""The figures of rollouts with turns: where their time goes, what lag a turn has, and who is dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from analysis.read import Run
from analysis.style import (
    BLUE,
    COLUMN_IN,
    GREEN,
    INK,
    MUTED,
    PAGE_IN,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    add_legend,
    handy_time,
    house_style,
    make_panels,
)

PLACE_COLORS = {"environment": GREEN, "waiting": PALE, "engine": SKY, "scoring": PURPLE}
"""Colour of the place in which a rollout is."""
PLACE_NAMES = {"environment": "environment acts", "waiting": "waits for a slot", "engine": "on an engine"}
PLACE_NAMES["scoring"] = "is scored"
PART_COLORS = {**PLACE_COLORS, "queue": MUTED, "prefill": VERMILLION, "decode": SKY}
"""Colour of what the time of a rollout goes to."""
PART_NAMES = {
    **{place: PLACE_NAMES[place] for place in ("environment", "waiting", "engine")},
    **{"queue": "in an engine's queue", "prefill": "prefill", "decode": "decode", "scoring": PLACE_NAMES["scoring"]},
}
"""Words for it, in the order of a turn."""


@house_style
def rollout_time(runs: Sequence[Run]) -> Figure:
    """Draw where the time of a rollout goes: a bar per run, its length the seconds of a finished rollout.

    Args:
        runs: Runs with environments.
    """
    figure, [[axes]] = make_panels(COLUMN_IN, 0.9 + 0.3 * len(runs))
    rows, starts = np.arange(len(runs)), np.zeros(len(runs))
    parts = [run.report.environments.seconds.parts for run in runs if run.report.environments]
    for name in (one for one in PART_NAMES if any(one in mine for mine in parts)):
        seconds = np.array([mine.get(name, 0.0) for mine in parts])
        axes.barh(rows, seconds, 0.7, starts, color=PART_COLORS[name], label=PART_NAMES[name])
        starts += seconds
    axes.set_yticks(rows, [run.name for run in runs])
    axes.set(xlabel="time of a rollout (s)", ylim=(len(runs) - 0.5, -0.5))
    add_legend(figure, axes, "Where the time of a rollout goes")
    return figure


def ess_by_turn(run: Run) -> dict[int, float]:
    """Return the effective sample size of the tokens of each turn: measured, else modelled, else none."""
    if run.report.ess is not None and run.report.ess.by_turn:
        return run.report.ess.by_turn
    modelled = run.figure_data.turns and run.figure_data.turns.ess_modelled
    return {turn: ess for turn, ess in enumerate(modelled or (), start=1) if ess is not None}


@house_style
def turns(run: Run) -> Figure:
    """Draw a run with turns: environments in use over time by what they do, lag by turn, and who is dropped.

    Returns:
        Three panels. The second has the effective sample size of each turn, too, where it is known. The third has the
        rollouts trained on and dropped, by their turns so far, in at most 20 bins.
    """
    profile, report = run.figure_data.turns, run.report.environments
    assert profile is not None  # the caller has seen to it
    assert report is not None
    figure, [[left, middle, right]] = make_panels(PAGE_IN, 2.45, columns=3)
    scale, unit = handy_time(profile.places.time_s[-1])
    tops = [getattr(profile.places, place) for place in PLACE_NAMES]
    left.stackplot(
        np.array(profile.places.time_s) / scale,
        tops,
        colors=[PLACE_COLORS[place] for place in PLACE_NAMES],
        labels=list(PLACE_NAMES.values()),
        step="post",
    )
    left.axhline(report.count, color=INK, linewidth=0.8, linestyle="--", label="environments")
    left.set(title="Environments in use", xlabel=f"time ({unit})", ylabel="rollouts", ylim=(0, 1.1 * report.count))
    lags = np.array(profile.lag_mean, dtype=np.float64)
    middle.plot(np.arange(1, len(lags) + 1), lags, color=BLUE, label="mean lag of a turn")
    middle.set(title="Lag by turn", xlabel="turn", ylabel="mean lag (optimizer steps)", ylim=(0, None))
    if ess := ess_by_turn(run):
        beside = middle.twinx()
        beside.plot(list(ess), list(ess.values()), color=PURPLE, linestyle="--", label="ESS of a turn")
        beside.set(ylabel="effective sample size", ylim=(0, 1.02))
    edges = np.unique(np.linspace(0, len(profile.trained), 21).astype(int))
    trained, dropped = (np.add.reduceat(one, edges[:-1]) for one in (profile.trained, profile.dropped))
    right.stairs(trained, edges, fill=True, color=MUTED, alpha=0.5, label="trained on")
    right.stairs(dropped, edges, color=VERMILLION, linewidth=1.3, label="dropped")
    right.set(title="Who is dropped", xlabel="turns so far", ylabel="rollouts", ylim=(0, None))
    figure.legend(loc="outside upper left", ncols=4, title=f"Rollouts with turns: {run.name}", alignment="left")
    return figure
