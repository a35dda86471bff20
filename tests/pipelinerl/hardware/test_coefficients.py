"""Coefficients: their three levels, and replacing single ones."""

import pytest
from refusals import message

from pipelinerl.hardware.coefficients import Coefficients, Level, coefficient_table, coefficients


def test_every_coefficient_has_three_ordered_values_and_a_source():
    table = coefficient_table()
    assert list(table) == list(Coefficients.model_fields)
    for name, entry in table.items():
        assert set(entry) == {"optimistic", "central", "pessimistic", "source"}, name
        values = [entry[level] for level in Level]
        assert values in (sorted(values), sorted(values, reverse=True)), name


def test_single_coefficients_are_replaced():
    values = coefficients(Level.OPTIMISTIC, {"training_mfu": 0.31})
    assert values == coefficients(Level.OPTIMISTIC).model_copy(update={"training_mfu": 0.31})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"mfu": 0.3}, "hardware.coefficients.mfu is an unknown key; allowed: "),
        ({"training_mfo": 0.3}, "hardware.coefficients.training_mfo is an unknown key; did you mean training_mfu? "),
        ({"training_mfu": 31.0}, "hardware.coefficients.training_mfu must be at most 1, got 31"),
        ({"training_mfu": 0.0}, "hardware.coefficients.training_mfu must be above 0, got 0"),
        ({"pause_s": -1.0}, "hardware.coefficients.pause_s must be at least 0, got -1"),
        ({"pause_s": float("nan")}, "hardware.coefficients.pause_s must be a number, got NaN"),
    ],
)
def test_a_wrong_coefficient_is_one_line(changed, line):
    assert message(coefficients, Level.CENTRAL, changed).startswith(line)
