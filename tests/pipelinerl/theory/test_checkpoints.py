"""Daly's interval between checkpoints: his own numbers, and the least expected time by his complete model."""

import math

import numpy as np
import pytest

from pipelinerl.theory.steady_state import daly_interval


@pytest.mark.parametrize(("mtbf_min", "interval_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_interval_is_that_of_the_paper(mtbf_min: float, interval_min: float) -> None:
    """Captions of Figs. 3 to 5, checkpoints of 5 min; their last digit."""
    digits = 1 if interval_min < 10 else 0
    assert round(daly_interval(5 * 60, mtbf_min * 60) / 60, digits) == interval_min


def test_short_checkpoints_have_youngs_interval_and_long_ones_the_mean_time_between_failures() -> None:
    """Young 1974: sqrt(2 checkpoint mtbf)."""
    assert daly_interval(1e-6, 1e6) == pytest.approx(math.sqrt(2), rel=1e-5)
    assert daly_interval(2000.0, 1000.0) == daly_interval(9000.0, 1000.0) == 1000.0


@pytest.mark.parametrize("checkpoint_s", [1.0, 20.0, 100.0, 500.0, 1000.0, 1999.0, 2000.0, 5000.0])
def test_the_expected_time_is_the_least_that_an_interval_has(checkpoint_s: float) -> None:
    """Daly's complete model, in work of 1 s; the expansion costs less than 0.2 %."""
    mtbf_s = 1000.0

    def expected_s(interval_s: float) -> float:
        return mtbf_s * math.expm1((interval_s + checkpoint_s) / mtbf_s) / interval_s

    least_s = min(map(expected_s, np.geomspace(1.0, 2000.0, 4000).tolist()))
    assert least_s * (1 - 1e-6) <= expected_s(daly_interval(checkpoint_s, mtbf_s)) < least_s * 1.002
