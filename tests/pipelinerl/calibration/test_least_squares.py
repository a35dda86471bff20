"""Least squares with bounds: known coefficients come back, unknown ones are named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.calibration.solve import Column, fit


@settings(deadline=None, max_examples=50)
@given(true=st.tuples(*[st.floats(0, 10)] * 3), seed=st.integers(0, 99))
def test_a_fit_gives_back_the_coefficients_of_noiseless_times(true: tuple[float, ...], seed: int) -> None:
    factors = np.random.default_rng(seed).uniform(0.5, 2.0, size=(12, 3))
    base = np.full(12, 0.1)
    seconds = base + factors @ np.array(true)
    found = fit([Column(name, factors[:, index]) for index, name in enumerate("abc")], seconds, base)
    assert list(found.values.values()) == pytest.approx(true, abs=1e-6)
    assert not found.undetermined
    assert found.max_error < 1e-6


def test_no_coefficient_falls_below_its_bound_and_the_others_are_the_best_with_it_there() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    seconds = 5.0 - x  # falls with x: the slope would be -1
    found = fit([Column("fixed", np.ones(4)), Column("slope", x)], seconds)
    assert found.values["slope"] == 0.0
    # weighted by 1 / fitted^2, a constant is the plain mean of 4, 3, 2, 1
    assert found.values["fixed"] == pytest.approx(2.5)


def test_columns_that_are_proportional_are_named_and_the_last_is_kept() -> None:
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    columns = [Column("step", np.ones(4)), Column("sequence", batch), Column("context", 512 * batch, kept=0.001)]
    found = fit(columns, 3 + 1.512 * batch)
    assert found.undetermined == {"context": "cannot be told from sequence"}
    assert found.values == pytest.approx({"step": 3.0, "sequence": 1.0, "context": 0.001})


def test_of_columns_that_are_proportional_one_that_is_nothing_of_the_time_is_kept() -> None:
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    found = fit([Column("context", 0.001 * batch, kept=1.0), Column("sequence", batch, kept=0.5)], batch)
    assert found.values == pytest.approx({"context": 1.0, "sequence": 0.999})  # and not 500 and 0.5


def test_a_value_to_keep_that_contradicts_the_times_is_not_kept_if_another_can_be() -> None:
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    columns = [Column("sequence", batch), Column("context", 512 * batch, kept=1.0)]  # 512 times too much
    found = fit(columns, batch)
    assert found.undetermined == {"sequence": "cannot be told from context"}
    assert found.max_error < 1e-9


def test_a_coefficient_that_noise_hides_is_named() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.uniform(0.99, 1.01, 40)  # always about the same: no line through them
    seconds = (0.5 + 0.5 * tokens) * rng.normal(1, 0.05, 40)
    found = fit([Column("token", tokens), Column("fixed", np.ones(40))], seconds)
    assert set(found.undetermined) == {"fixed"}
    assert found.values["token"] == pytest.approx(1.0, rel=0.03)


def test_the_error_left_out_is_that_of_fitting_without_the_row() -> None:
    x, noise = np.arange(1.0, 7.0), np.array([1.02, 0.97, 1.01, 0.99, 1.04, 0.98])
    seconds = (2 + x) * noise
    columns = [Column("fixed", np.ones(6)), Column("slope", x)]
    found = fit(columns, seconds)
    errors = []
    for left in range(6):
        rest = np.arange(6) != left
        one = fit([Column(c.name, c.factors[rest]) for c in columns], seconds[rest])
        errors.append(abs((one.values["fixed"] + one.values["slope"] * x[left]) / seconds[left] - 1))
    assert found.held_out_error == pytest.approx(np.mean(errors), rel=0.1)
