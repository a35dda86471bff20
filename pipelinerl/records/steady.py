"""Whether a run is long enough to stand for a longer one."""

from __future__ import annotations

from typing import Any

import numpy as np

START_UP_SHARE = 0.1
"""Share by which the second half of a run may be faster, or have more lag, than the whole; beyond it the start-up has
not faded. The whole lacks start-up time / duration of it: with twice as many steps the share would be about half."""
LAG_STEPS = 0.25
"""Difference in mean lag that nobody would notice (optimizer steps)."""


def steady_part(num_rows: int, unit: int) -> tuple[int, int]:
    """Return the first and the last but one index of the rows that stand for the rest of a run, in whole units."""
    end = num_rows // unit * unit
    return end // 2 // unit * unit, end


def too_short(steps: np.recarray[Any, Any], *, rl_step: int | None) -> list[str]:
    """Return the reasons why a run, by its steps.csv, is too short to stand for a longer one.

    Its throughput and mean lag are compared with its second half's, in whole RL steps (of ``rl_step`` optimizer
    steps, if any). A throughput that falls and a lag that shrinks are not judged: no start-up does that.
    """
    start, end = steady_part(len(steps), rl_step or 1)
    if rl_step is not None and len(steps) and not start:
        return [f"{len(steps):,} are fewer than two RL steps of {rl_step}"]
    if not start or not steps.time_s[end - 1] > steps.time_s[start - 1]:
        return []
    lines = []
    later = _rate(steps, start, end)
    if later > (1 + START_UP_SHARE) * _rate(steps, 0, len(steps)):
        lines.append(f"the second half alone gives {later:,.0f} tokens/s")
    lag, later = _mean_lag(steps, 0, len(steps)), _mean_lag(steps, start, end)
    if later - lag > max(LAG_STEPS, START_UP_SHARE * lag):
        lines.append(f"the second half alone has a mean lag of {later:.2f}")
    return lines


def _rate(steps: np.recarray[Any, Any], start: int, end: int) -> float:
    seconds = steps.time_s[end - 1] - (steps.time_s[start - 1] if start else 0.0)
    return float(steps.tokens[start:end].sum() / seconds)


def _mean_lag(steps: np.recarray[Any, Any], start: int, end: int) -> float:
    tokens = steps.tokens[start:end]
    return float(steps.lag_mean[start:end] @ tokens / max(1, tokens.sum()))
