"""Lag and staleness: closed forms worked out by hand, published values, identities."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipelinerl.theory.lengths import lengths_from, uniform_lengths
from pipelinerl.theory.paper import (
    lag_estimate,
    largest_lag,
    mean_lag_conventional,
    mean_lag_pipeline,
    staleness_applied_compute,
)


def test_largest_lag_is_exact_where_the_quotient_is_a_whole_number():
    """L = 3, mean 2: H I L / (L̄ B) = 2 * 1 * 3 / (2 * 1) = 3."""
    sizes = {"generation_batch_size": 2, "generation_accelerators": 1}
    assert largest_lag(uniform_lengths(3), train_batch_size=1, **sizes) == 3
    # L = 2, mean exactly 4/3: 4 * 1 * 2 / (4/3 * 2) = 3
    sizes = {"generation_batch_size": 4, "generation_accelerators": 1}
    assert largest_lag(lengths_from([1, 1, 2]), train_batch_size=2, **sizes) == 3


def test_largest_lag_of_the_case_study_is_132():
    sizes = {"train_batch_size": 128, "generation_batch_size": 192, "generation_accelerators": 44}
    assert largest_lag(uniform_lengths(2048), **sizes) == 132
    assert lag_estimate(uniform_lengths(2048), **sizes) == pytest.approx(132 * 2048 / 2049)


@given(
    batch=st.integers(1, 4096), generators=st.integers(1, 512), train=st.integers(1, 4096), longest=st.integers(1, 300)
)
def test_largest_lag_is_the_estimate_rounded_up(batch, generators, train, longest):
    sizes = {"train_batch_size": train, "generation_batch_size": batch, "generation_accelerators": generators}
    exact = batch * generators * longest / (Fraction(longest + 1, 2) * train)
    assert lag_estimate(uniform_lengths(longest), **sizes) == pytest.approx(float(exact))
    assert largest_lag(uniform_lengths(longest), **sizes) == math.ceil(exact)


@pytest.mark.parametrize(
    ("fixed", "slots", "share", "printed_lag", "printed_mean"),
    [
        (False, 256, 0.0, 16, 5.31),
        (False, 1024, 0.0, 64, 21.25),
        (True, 1024, 0.0, 32, 16.00),
        (False, 256, 0.50, 16, 5.81),
        (True, 1024, 0.88, 32, 16.88),
    ],
)
def test_lags_are_those_of_the_simulation_check(fixed, slots, share, printed_lag, printed_mean):
    """The printed means take uniform lengths as continuous (g/3); whole tokens add a factor 1 + 1/(2 L), L = 256."""
    lengths = lengths_from([256]) if fixed else uniform_lengths(256)
    sizes = {"train_batch_size": 32, "generation_batch_size": slots // 8, "generation_accelerators": 8}
    assert largest_lag(lengths, **sizes) == printed_lag
    mean = mean_lag_pipeline(**sizes, length_cv=lengths.cv, training_share=share)
    whole_tokens = 1 if fixed else 1 + 1 / 512
    assert (mean - share) / whole_tokens + share == pytest.approx(printed_mean, abs=0.00501)


@given(longest=st.integers(1, 400), slots=st.integers(1, 2000))
def test_mean_lag_is_a_third_of_g_for_uniform_and_half_of_g_for_fixed_lengths(longest, slots):
    sizes = {"train_batch_size": 32, "generation_batch_size": slots, "generation_accelerators": 1}
    uniform, fixed = uniform_lengths(longest), lengths_from([longest])
    mean = mean_lag_pipeline(**sizes, length_cv=uniform.cv)
    assert mean == pytest.approx(lag_estimate(uniform, **sizes) / 3 * (1 + 1 / (2 * longest)))
    mean = mean_lag_pipeline(**sizes, length_cv=fixed.cv)
    assert mean == pytest.approx(lag_estimate(fixed, **sizes) / 2)


@given(tokens=st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_mean_lag_is_the_token_average_of_the_age_at_the_end(tokens):
    """Each token of a length-l answer, taken at the middle of its decode step, has lag (l - p) g / L."""
    sizes = {"train_batch_size": 8, "generation_batch_size": 24, "generation_accelerators": 2}
    lengths = lengths_from(tokens)
    per_token = lag_estimate(lengths, **sizes) / lengths.max_tokens
    lags = np.concatenate([(length - (np.arange(length) + 0.5)) * per_token for length in tokens])
    assert mean_lag_pipeline(**sizes, length_cv=lengths.cv) == pytest.approx(lags.mean())


@given(steps=st.integers(1, 500))
@example(steps=1)  # on policy: no lag
def test_conventional_mean_lag_is_the_average_over_the_batches(steps):
    assert mean_lag_conventional(steps) == sum(range(steps)) / steps


@pytest.mark.parametrize(
    ("inputs", "printed", "gap"),
    [
        # C, B, q, ρ, M: the three published runs, evaluated on the rounded inputs
        ((120, 240, 2, 0.63, 1.42), 1.34, 0.005),
        ((240, 120, 2, 0.92, 1.43), 3.78, 0.005),
        ((128, 128, 2, 1.07, 1.44), 3.25, 0.005),
        # groups of 8 log-normal lengths; M = 1.89 is itself rounded, by up to 0.005, times C/B
        ((128, 128, 1, 0.3, 1.89), 2.19, 0.01),
        ((128, 128, 1, 0.9, 1.89), 2.79, 0.01),
        ((128, 128, 1, 1.1, 1.89), 2.67, 0.01),
        ((128, 128, 1, 2.5, 1.89), 1.46, 0.01),
        ((128, 128, 2, 1.1, 1.89), 3.58, 0.01),
        ((128, 128, 2, 1.5, 1.89), 2.76, 0.01),
        ((128, 128, 2, 2.5, 1.89), 1.86, 0.01),
        ((64, 128, 1, 0.7, 1.89), 1.64, 0.01),
        ((512, 128, 1, 0.7, 1.89), 8.25, 0.025),
    ],
)
def test_staleness_has_the_published_values(inputs, printed, gap):
    names = ("in_flight", "train_batch_size", "queue_batches", "rate_ratio", "tailness")
    staleness = staleness_applied_compute(**dict(zip(names, inputs, strict=True)))
    assert staleness.total == pytest.approx(printed, abs=gap)
    assert staleness.total == staleness.pre_queue + staleness.in_queue


def test_staleness_before_the_queue_is_the_lag_estimate_when_generation_bound():
    lengths = uniform_lengths(100)
    staleness = staleness_applied_compute(
        in_flight=24 * 6,
        train_batch_size=32,
        rate_ratio=0.8,
        queue_batches=1,
        tailness=lengths.max_tokens / lengths.mean_tokens,
    )
    lag = lag_estimate(lengths, train_batch_size=32, generation_batch_size=24, generation_accelerators=6)
    assert staleness.pre_queue == pytest.approx(lag)


def test_staleness_jumps_by_queue_minus_one_where_generation_overtakes_training():
    values = {"in_flight": 64, "train_batch_size": 32, "queue_batches": 3.0, "tailness": 1.5}
    at = staleness_applied_compute(rate_ratio=1.0, **values)
    above = staleness_applied_compute(rate_ratio=1 + 1e-9, **values)
    assert at == (3.0, 1.0)
    assert above.total - at.total == pytest.approx(2.0, abs=1e-6)
