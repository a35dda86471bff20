"""Draws of coefficients between their levels."""

import numpy as np
import pytest

from pipelinerl.hardware.coefficients import Level
from pipelinerl.hardware.prior import END_SDS, between_levels


def test_levels_are_the_middle_and_the_ends_of_80_percent() -> None:
    levels = {Level.OPTIMISTIC: 1.0, Level.CENTRAL: 4.0, Level.PESSIMISTIC: 64.0}
    normal = np.array([-9.0, -END_SDS, -END_SDS / 2, 0.0, END_SDS / 2, END_SDS, 9.0])
    assert between_levels(levels, normal) == pytest.approx([1, 1, 2, 4, 16, 64, 64])


def test_a_coefficient_that_may_be_0_is_linear_between_its_levels() -> None:
    levels = {Level.OPTIMISTIC: 0.0, Level.CENTRAL: 1.0, Level.PESSIMISTIC: 3.0}
    assert between_levels(levels, np.array([-END_SDS, -END_SDS / 2, 0.0, END_SDS / 2])) == pytest.approx([0, 0.5, 1, 2])
