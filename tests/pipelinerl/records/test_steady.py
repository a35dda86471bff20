"""When optimizer steps are too few for the numbers of a run to stand for those of a longer one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipelinerl.records.reports import steady_part, too_short
from pipelinerl.records.steps import StepRow, as_records


def steps(seconds: Sequence[float], lags: Sequence[float]) -> np.recarray[Any, Any]:
    """Steps of 100 tokens that took these seconds and have these mean lags."""
    rest = dict.fromkeys(StepRow.model_fields, 0)
    return as_records(
        [
            StepRow(**rest | {"step": step, "time_s": sum(seconds[:step]), "tokens": 100, "lag_mean": lag})
            for step, lag in enumerate(lags, start=1)
        ]
    )


@pytest.mark.parametrize(
    ("rows", "unit", "expected"), [(10, 1, (5, 10)), (11, 4, (4, 8)), (7, 4, (0, 4)), (0, 1, (0, 0))]
)
def test_the_second_half_is_of_whole_units(rows: int, unit: int, expected: tuple[int, int]) -> None:
    assert steady_part(rows, unit) == expected


RATE, LAG = "the second half alone gives 100 tokens/s", "the second half alone has a mean lag of 4.00"


@pytest.mark.parametrize(
    ("first_s", "lags", "reasons"),
    [
        (1.0, [4.0] * 10, []),
        (1.8, [4.0] * 10, []),  # 10.8 s in all, 8 % more than 10 s
        (2.1, [4.0] * 10, [RATE]),  # 11.1 s in all, 11 % more
        (1.0, [3.4] * 5 + [4.0] * 5, []),  # 3.7 in all: 0.3 and 8 % less than in the second half
        (1.0, [3.0] * 5 + [4.0] * 5, [LAG]),  # 3.5 in all: 0.5 and 14 %
        (1.0, [0.1] * 5 + [0.4] * 5, []),  # three fifths more, and a difference of 0.15 steps
        (1.0, [4.0] * 5 + [3.0] * 5, []),  # it shrinks: no start-up does that
    ],
)
def test_a_second_half_that_is_a_tenth_faster_or_has_a_tenth_and_a_quarter_of_a_step_more_lag_is_a_reason(
    first_s: float, lags: list[float], reasons: list[str]
) -> None:
    """10 steps of 1 s, but for the first."""
    assert too_short(steps([first_s] + [1.0] * 9, lags), rl_step=None) == reasons


def test_rl_steps_are_compared_whole() -> None:
    """G = 4: generating takes 9 s, four steps 1 s each. Half of 20 steps would begin in the middle of an RL step."""
    seconds, lags = [10.0, 1.0, 1.0, 1.0] * 5, [0.0, 1.0, 2.0, 3.0] * 5
    assert too_short(steps(seconds, lags), rl_step=4) == []
    assert too_short(steps(seconds[:7], lags[:7]), rl_step=4) == ["7 are fewer than two RL steps of 4"]


def test_a_run_without_a_step_or_without_time_says_nothing() -> None:
    assert too_short(steps([], []), rl_step=4) == []
    assert too_short(steps([0.0] * 4, [1.0] * 4), rl_step=None) == []
