"""The analytic model against the paper's printed numbers, closed forms worked out by hand, and identities."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import math
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import ConfigError
from pipelinerl.hardware import utilisation
from pipelinerl.hardware.utilisation import UtilisationCurve, fitted_utilisation, read_utilisation
from pipelinerl.theory import lengths, paper
from pipelinerl.theory.lengths import Lengths, lengths_from, uniform_lengths
from pipelinerl.theory.paper import (
    LagPoint,
    PipelineChoice,
    Rates,
    Setting,
    conventional_rates,
    flash_s,
    lag_estimate,
    largest_lag,
    mean_lag_conventional,
    mean_lag_pipeline,
    pipeline_rates,
    search_pipeline,
    staleness_applied_compute,
    throughput_against_lag,
)

GUIDE = Path(__file__).parents[3] / "docs" / "analytic.md"

TAU = 4.918  # flashes per token: 128 / 26.02 = 84 / 17.08, paper A.4
LINEAR = UtilisationCurve(lambda h: np.full_like(h, 467.1))  # U(h) = h / 467.1


def case_study(**changes: Any) -> Setting:
    """Paper A.4: N = B = 128, lengths uniform on 1..2048."""
    return dataclasses.replace(Setting(fitted_utilisation(), uniform_lengths(2048), 128, 128, TAU), **changes)


# ------------------------------------------------------------------------ the paper's case study, A.4


def test_flash_of_qwen_7b_on_h100_is_15_microseconds():
    # two FLOPs for each of 7.615e9 parameters at 989e12 FLOP/s
    assert flash_s(flops_per_token=2 * 7.615e9, peak_flops=989e12) == pytest.approx(15.4e-6, abs=0.05e-6)


def test_conventional_rates_are_the_papers_at_134_steps_per_rl_step():
    rates = conventional_rates(case_study(), optimizer_steps_per_rl_step=134)
    assert rates.generation == pytest.approx(18.3, abs=0.05)
    assert rates.training == pytest.approx(26.02, abs=0.01)
    assert rates.total == pytest.approx(10.74, abs=0.005)


def test_pipeline_rates_are_the_papers_at_192_sequences_on_44_accelerators():
    rates = pipeline_rates(case_study(), generation_batch_size=192, generation_accelerators=44)
    assert rates == pytest.approx(Rates(16.9, 17.08, 16.9), abs=0.005)


def test_papers_two_rates_combine_to_the_papers_total():
    """Lengths of 1 token make t_gen one step: U is chosen so that r_gen is 18.3 exactly; r_train 26.02 is given."""
    curve = UtilisationCurve(lambda h: h * 128 / 18.3)
    setting = case_study(curve=curve, lengths=uniform_lengths(1), training_flashes_per_token=128 / 26.02)
    rates = conventional_rates(setting, optimizer_steps_per_rl_step=1)
    assert rates == pytest.approx(Rates(18.3, 26.02, 10.744), abs=0.0005)


@pytest.mark.parametrize(
    ("max_lag", "chosen", "printed"),
    [
        (8, (8, 64), (1.10, 1.18, 0.93)),
        (16, (16, 64), (2.19, 2.14, 1.02)),  # the table's ratio 1.03 is 1.0248 rounded twice; its rates give 1.02
        (32, (32, 64), (4.38, 3.85, 1.14)),
        (64, (64, 64), (8.75, 6.64, 1.32)),
        (96, (99, 62), (13.04, 8.79, 1.48)),
        (112, (135, 53), (14.98, 9.69, 1.55)),
        (128, (178, 46), (16.61, 10.50, 1.58)),
        (132, (192, 44), (16.90, 10.69, 1.58)),
        (133, (193, 44), (16.97, 10.74, 1.58)),
        (160, (268, 38), (18.30, 11.88, 1.54)),
        (256, (496, 33), (19.32, 14.71, 1.31)),
        (512, (1024, 32), (19.45, 17.72, 1.10)),
    ],
)
def test_search_gives_the_table_of_the_case_study(max_lag, chosen, printed):
    (point,) = throughput_against_lag(case_study(), [max_lag])
    choice = point.pipeline
    assert (choice.generation_batch_size, choice.generation_accelerators) == chosen
    assert choice.largest_lag == max_lag
    values = (choice.rates.total, point.conventional.total, point.speedup)
    assert values == pytest.approx(printed, abs=0.00501)


def test_speedup_peaks_where_the_paper_says():
    points = throughput_against_lag(case_study(), range(1, 300))
    best = max(points, key=lambda point: point.speedup)
    assert 130 <= best.max_lag <= 136  # the paper: about 133
    assert best.speedup == pytest.approx(1.57, abs=0.02)


def test_multiples_of_64_reproduce_the_papers_speedup():
    choice = search_pipeline(case_study(), max_lag=133, generation_batch_multiple=64)
    assert (choice.generation_batch_size, choice.generation_accelerators) == (192, 44)
    conventional = conventional_rates(case_study(), optimizer_steps_per_rl_step=134)
    assert choice.rates.total / conventional.total == pytest.approx(1.574, abs=0.0005)


@pytest.mark.parametrize(
    ("h", "printed", "digits"),
    [
        (1, 0.0021, 4), (32, 0.069, 3), (64, 0.137, 3), (96, 0.204, 3), (128, 0.269, 3), (160, 0.330, 3),
        (192, 0.384, 3), (224, 0.431, 3), (256, 0.470, 3), (320, 0.525, 3), (384, 0.557, 3), (512, 0.588, 3),
        (1024, 0.608, 3),
    ],
)  # fmt: skip
def test_fitted_curve_has_the_printed_values(h, printed, digits):
    """Half a digit, plus what a = 467.1 flashes leaves open by its own rounding: 0.05/467.1."""
    rounding = 0.5 * 10**-digits + printed * 0.05 / 467.1
    assert fitted_utilisation().utilisation(h) == pytest.approx(printed, abs=rounding)


# ------------------------------------------------------------------------------------ closed forms


def test_both_methods_tend_to_the_same_limit_without_a_lag_bound():
    limit = 128 / (TAU + 1 / 0.61)
    assert limit == pytest.approx(19.52, abs=0.005)
    conventional = conventional_rates(case_study(), optimizer_steps_per_rl_step=1_000_000)
    choice = search_pipeline(case_study(), max_lag=1_000_000, generation_batch_limit=100_000)
    assert conventional.total == pytest.approx(limit, rel=1e-6)
    assert choice.rates.total == pytest.approx(limit, rel=1e-4)  # I is a whole number
    assert choice.generation_accelerators == 32  # N / (1 + tau * 0.61) = 32.0
    assert choice.rates.total <= limit


@pytest.mark.parametrize("lengths", [uniform_lengths(2048), lengths_from([700]), lengths_from([1, 1, 5, 90])])
def test_linear_curve_lets_both_methods_generate_equally_fast_at_equal_lag(lengths):
    """r_gen = g B L̄ / (a L) for both, with g = G. H tokens of all and B = n L make g = H I L / (L̄ B) = I."""
    train, sizes = lengths.num_sequences * lengths.max_tokens, {"generation_accelerators": 24}
    sizes["generation_batch_size"] = lengths.num_tokens
    setting = case_study(curve=LINEAR, lengths=lengths, train_batch_size=train)
    assert lag_estimate(lengths, train_batch_size=train, **sizes) == 24
    expected = 24 * train * lengths.mean_tokens / (467.1 * lengths.max_tokens)
    assert pipeline_rates(setting, **sizes).generation == pytest.approx(expected)
    conventional = conventional_rates(setting, optimizer_steps_per_rl_step=24)
    assert conventional.generation == pytest.approx(expected)


def test_balanced_speedup_is_two_minus_the_generating_share():
    """Linear curve, r_gen = r_train: 2 - I/N. Fixed lengths, N = B = 128, H = 192, I = 44: g = 66."""
    tau = 84 * 467.1 / (192 * 44)
    setting = case_study(curve=LINEAR, lengths=lengths_from([10]), training_flashes_per_token=tau)
    pipeline = pipeline_rates(setting, generation_batch_size=192, generation_accelerators=44)
    conventional = conventional_rates(setting, optimizer_steps_per_rl_step=66)
    assert pipeline.generation == pytest.approx(pipeline.training)
    assert pipeline.total / conventional.total == pytest.approx(2 - 44 / 128)


@pytest.mark.parametrize(("steps", "printed"), [(32, 1.17), (64, 1.34), (96, 1.50)])
def test_generation_bound_speedup_is_one_plus_tau_times_rate_per_accelerator(steps, printed):
    """PipelineRL at the conventional generation rate (equal lag, g = G) is 1 + tau r_gen / N times as fast."""
    conventional = conventional_rates(case_study(), optimizer_steps_per_rl_step=steps)
    speedup = conventional.generation / conventional.total
    assert speedup == pytest.approx(1 + TAU * conventional.generation / 128)
    assert speedup == pytest.approx(printed, abs=0.005)
    searched = search_pipeline(case_study(), max_lag=steps).rates
    assert searched.total == searched.generation
    assert searched.total / conventional.total == pytest.approx(speedup, rel=0.01)  # rounding of H and I


def test_conventional_generation_time_is_the_sum_over_decode_steps():
    """By hand: lengths 1 and 3, B G = 8 sequences on 2 accelerators: h/N = 4, 2, 2; h/U = 10 + h."""
    setting = case_study(
        curve=UtilisationCurve(lambda h: 10 + h), lengths=lengths_from([1, 3]), accelerators=2, train_batch_size=4
    )
    rates = conventional_rates(setting, optimizer_steps_per_rl_step=2)
    assert rates.generation == pytest.approx(8 * 2 / (14 + 12 + 12))
    assert rates.training == pytest.approx(2 / TAU)


def test_equal_lengths_remove_the_drain_but_not_the_gain():
    (point,) = throughput_against_lag(case_study(lengths=lengths_from([2048])), [64])
    assert 1.2 < point.speedup < 2


def test_more_samples_per_step_buy_the_same_rate_at_less_lag():
    """g and B enter only as g B: 16 times the batch, a sixteenth of the lag (A.4: about 8 at B = 2048)."""
    sizes = {"generation_batch_size": 192, "generation_accelerators": 44}
    lag = lag_estimate(uniform_lengths(2048), train_batch_size=128 * 16, **sizes)
    assert lag == pytest.approx(132 / 16, rel=1e-3)
    assert largest_lag(uniform_lengths(2048), train_batch_size=128 * 16, **sizes) == 9
    few = conventional_rates(case_study(), optimizer_steps_per_rl_step=128)
    many = conventional_rates(case_study(train_batch_size=2048), optimizer_steps_per_rl_step=8)
    assert few == pytest.approx(many)


# -------------------------------------------------------------------------------------------- lags


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
def test_conventional_mean_lag_is_the_average_over_the_batches(steps):
    assert mean_lag_conventional(steps) == sum(range(steps)) / steps


def test_one_step_per_rl_step_is_on_policy():
    assert mean_lag_conventional(1) == 0


@given(n=st.integers(2, 200), batch=st.integers(1, 500), train=st.integers(1, 500))
def test_doubling_the_accelerators_doubles_the_lag(n, batch, train):
    lengths = uniform_lengths(64)
    one = {"train_batch_size": train, "generation_batch_size": batch, "generation_accelerators": n // 2}
    two = one | {"generation_accelerators": 2 * (n // 2)}
    assert lag_estimate(lengths, **two) == 2 * lag_estimate(lengths, **one)
    assert mean_lag_pipeline(**two, length_cv=0.5) == 2 * mean_lag_pipeline(**one, length_cv=0.5)


# --------------------------------------------------------------------------------------- staleness


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


# ------------------------------------------------------------------------------------------ lengths


def test_uniform_lengths_have_the_case_studys_survivor_and_mean():
    lengths = uniform_lengths(4)
    assert (lengths.unfinished / lengths.num_sequences).tolist() == [1, 0.75, 0.5, 0.25]
    assert (lengths.max_tokens, lengths.mean_tokens) == (4, 2.5)
    assert uniform_lengths(2048).mean_tokens == 1024.5


@given(tokens=st.lists(st.integers(1, 500), min_size=1, max_size=50))
def test_lengths_from_keeps_count_maximum_mean_and_spread(tokens):
    lengths = lengths_from(tokens)
    assert lengths.num_sequences == len(tokens)
    assert lengths.max_tokens == max(tokens)
    assert lengths.num_tokens == sum(tokens)
    assert lengths.unfinished.tolist() == [sum(one >= step for one in tokens) for step in range(1, max(tokens) + 1)]
    assert lengths.cv == pytest.approx(np.std(tokens) / np.mean(tokens), abs=1e-7)


@given(longest=st.integers(1, 200))
def test_uniform_lengths_are_those_of_one_answer_of_each_length(longest):
    expected = lengths_from(np.arange(1, longest + 1))
    assert uniform_lengths(longest).unfinished.tolist() == expected.unfinished.tolist()


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [1.5], [3, 0], [-1]])
def test_lengths_from_refuses_what_is_no_list_of_lengths(tokens):
    with pytest.raises(ValueError, match="tokens must be a list of whole numbers, each at least 1, got"):
        lengths_from(tokens)


# ------------------------------------------------------------------------------------ search: identities


@st.composite
def a_setting(draw: st.DrawFn) -> Setting:
    """Small settings, so that the constraint and the limits bind in turn."""
    lengths = draw(
        st.one_of(
            st.integers(1, 60).map(uniform_lengths),
            st.lists(st.integers(1, 60), min_size=1, max_size=8).map(lengths_from),
        )
    )
    return Setting(
        curve=draw(st.sampled_from([fitted_utilisation(), LINEAR])),
        lengths=lengths,
        accelerators=draw(st.integers(2, 40)),
        train_batch_size=draw(st.integers(1, 64)),
        training_flashes_per_token=draw(st.floats(0.01, 100)),
    )


def least_lag(setting: Setting, multiple: int = 1) -> int:
    return largest_lag(
        setting.lengths,
        train_batch_size=setting.train_batch_size,
        generation_batch_size=multiple,
        generation_accelerators=1,
    )


@settings(max_examples=60, deadline=None)
@given(setting=a_setting(), spare=st.integers(0, 80), limit=st.integers(1, 60), multiple=st.sampled_from([1, 2, 7]))
def test_search_is_the_best_of_all_feasible_points_with_the_stated_tie_break(setting, spare, limit, multiple):
    limit = max(limit, multiple)
    max_lag = least_lag(setting, multiple) + spare
    choice = search_pipeline(setting, max_lag=max_lag, generation_batch_limit=limit, generation_batch_multiple=multiple)
    batches = np.arange(multiple, limit + 1, multiple)
    feasible = []
    for generators in range(1, setting.accelerators):
        for batch, share in zip(batches.tolist(), setting.curve.utilisation(batches).tolist(), strict=True):
            sizes = {"generation_batch_size": batch, "generation_accelerators": generators}
            lag = largest_lag(setting.lengths, train_batch_size=setting.train_batch_size, **sizes)
            training = (setting.accelerators - generators) / setting.training_flashes_per_token
            if lag <= max_lag:
                feasible.append((-min(share * generators, training), batch * generators, batch, generators, lag))
    rate, _, *best = min(feasible)
    assert [choice.generation_batch_size, choice.generation_accelerators, choice.largest_lag] == best
    assert choice.largest_lag <= max_lag
    assert choice.rates.total == pytest.approx(-rate, rel=1e-12)  # powers of numbers and arrays: the last bit


def test_ties_go_to_the_least_in_flight_and_then_to_the_least_batch():
    # Training is far slower than any generation: all H at I = 1 tie, and H = 1 has least lag.
    slow = case_study(training_flashes_per_token=1e9)
    choice = search_pipeline(slow, max_lag=50)
    assert (choice.generation_batch_size, choice.generation_accelerators) == (1, 1)
    # Free training and an exactly linear curve: H I = 12 ties for all its factorings, and H = 1 is least.
    fast = case_study(
        curve=UtilisationCurve(lambda h: np.full_like(h, 512.0)),
        lengths=lengths_from([1]),
        train_batch_size=1,
        training_flashes_per_token=1e-9,
    )
    choice = search_pipeline(fast, max_lag=12)
    assert (choice.generation_batch_size, choice.generation_accelerators) == (1, 12)
    # U is 0.25 from H = 2 on and 0.5 from H = 8 on: I = 2, H = 8 and I = 4, H = 2 both reach 1, the second with
    # less in flight (8 against 16 sequences).
    steps = UtilisationCurve(lambda h: h / np.select([h >= 8, h >= 2], [0.5, 0.25], 0.0625))
    choice = search_pipeline(dataclasses.replace(fast, curve=steps, accelerators=5), max_lag=16)
    assert (choice.generation_batch_size, choice.generation_accelerators) == (2, 4)


@settings(max_examples=60, deadline=None)
@given(setting=a_setting(), spare=st.integers(0, 60))
def test_search_never_loses_from_a_looser_bound(setting, spare):
    max_lag = least_lag(setting) + spare
    tight = search_pipeline(setting, max_lag=max_lag, generation_batch_limit=64)
    loose = search_pipeline(setting, max_lag=max_lag + 1, generation_batch_limit=64)
    assert loose.rates.total >= tight.rates.total * (1 - 1e-12)


@given(setting=a_setting(), steps=st.integers(1, 100))
def test_conventional_rates_are_positive_and_rise_with_steps_per_rl_step(setting, steps):
    one = conventional_rates(setting, optimizer_steps_per_rl_step=steps)
    more = conventional_rates(setting, optimizer_steps_per_rl_step=steps + 1)
    assert 0 < one.total < min(one.generation, one.training)
    assert more.generation >= one.generation
    assert more.training == one.training


@given(setting=a_setting(), batch=st.integers(1, 2000), share=st.floats(0, 1))
def test_pipeline_rate_is_the_slower_side_and_generation_rises_with_batch(setting, batch, share):
    generators = 1 + int(share * (setting.accelerators - 2))
    one = pipeline_rates(setting, generation_batch_size=batch, generation_accelerators=generators)
    more = pipeline_rates(setting, generation_batch_size=batch + 1, generation_accelerators=generators)
    assert 0 < one.total == min(one.generation, one.training)
    assert more.generation > one.generation
    used = one.training * setting.training_flashes_per_token + generators
    assert used == pytest.approx(setting.accelerators)


def test_speedup_compares_totals():
    choice = PipelineChoice(8, 4, 3, Rates(generation=7.0, training=6.0, total=6.0))
    assert LagPoint(3, choice, Rates(generation=6.0, training=3.0, total=2.0)).speedup == 3.0


def test_points_come_in_the_given_order_with_one_step_more_than_the_lag():
    setting = case_study()
    points = throughput_against_lag(setting, [64, 8], generation_batch_limit=16)
    assert [point.max_lag for point in points] == [64, 8]
    assert all(point.pipeline.generation_batch_size <= 16 for point in points)
    assert points[1].conventional == conventional_rates(setting, optimizer_steps_per_rl_step=9)


# ------------------------------------------------------------------------------------------ the curve


def test_step_of_no_sequence_costs_nothing_and_has_no_utilisation():
    curve = fitted_utilisation()
    assert curve.step_flashes(0) == 0.0
    assert curve.utilisation(0) == 0.0
    assert curve.step_flashes(np.array([0, 1])).tolist() == [0.0, pytest.approx(467.1, rel=1e-6)]


def test_numbers_give_floats_and_arrays_give_arrays():
    curve = fitted_utilisation()
    assert type(curve.step_flashes(3)) is float
    assert type(curve.utilisation(3.0)) is float
    assert curve.step_flashes(np.ones((2, 3))).shape == (2, 3)
    assert curve.utilisation(np.ones(5)).shape == (5,)


@pytest.mark.parametrize("h", [-1, math.nan, math.inf])
def test_curve_refuses_what_is_no_number_of_sequences(h):
    with pytest.raises(ValueError, match="h must be finite and at least 0, got"):
        fitted_utilisation().step_flashes(h)
    with pytest.raises(ValueError, match="h must be finite and at least 0, got"):
        fitted_utilisation().utilisation(np.array([1.0, h]))


@given(h=st.floats(0.001, 1e6), more=st.floats(1.001, 2))
def test_fitted_curve_rises_to_its_plateau_and_never_loses_on_a_larger_step(h, more):
    curve = fitted_utilisation()
    assert 0 < curve.utilisation(h) <= curve.utilisation(h * more) * (1 + 1e-12) <= 0.61 * (1 + 1e-11)
    assert curve.step_flashes(h) <= curve.step_flashes(h * more) * (1 + 1e-12)
    assert curve.step_flashes(h) >= max(467.1, h / 0.61) * (1 - 1e-12)


def test_curves_cross_process_borders(tmp_path):
    table = tmp_path / "u.csv"
    table.write_text("batch,utilisation\n1,0.01\n100,0.5\n", encoding="utf-8")
    for curve in (fitted_utilisation(), read_utilisation(table)):
        assert pickle.loads(pickle.dumps(curve)).step_flashes(7) == curve.step_flashes(7)


# ------------------------------------------------------------------------------------------ the table


def write(folder: Path, text: str) -> Path:
    path = folder / "u.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_table_interpolates_the_step_cost_and_holds_its_ends(tmp_path):
    """By hand: costs at the rows are 2/0.01 = 200, 60/0.2 = 300, 100/0.2 = 500 flashes."""
    curve = read_utilisation(write(tmp_path, "batch,utilisation\n2,0.01\n60,0.2\n\n100,0.2\n"))
    steps = curve.step_flashes(np.array([0.5, 1, 2, 31, 60, 80, 100, 200]))
    assert steps == pytest.approx([200, 200, 200, 250, 300, 400, 500, 1000])
    assert curve.utilisation(1000) == pytest.approx(0.2)


def test_table_may_come_from_a_spreadsheet(tmp_path):
    curve = read_utilisation(write(tmp_path, "\ufeff batch , utilisation \r\n1, 0.5\r\n2, 1\r\n,\r\n"))
    assert curve.utilisation(2) == 1.0


@settings(deadline=None)  # it writes files
@given(
    shares=st.lists(st.floats(0.001, 1), min_size=2, max_size=6),
    gaps=st.lists(st.floats(0.1, 100), min_size=6, max_size=6),
    h=st.floats(0.01, 1000),
)
def test_table_stays_between_its_rows(tmp_path_factory, shares, gaps, h):
    batch = 1 + np.cumsum(gaps[: len(shares)])
    rows = "".join(f"{float(b)!r},{u!r}\n" for b, u in zip(batch, shares, strict=True))
    curve = read_utilisation(write(tmp_path_factory.mktemp("table"), "batch,utilisation\n" + rows))
    assert curve.utilisation(h) <= max(shares) * (1 + 1e-12)
    if h >= batch[0]:
        assert curve.utilisation(h) >= min(shares) * (1 - 1e-12)
    assert curve.utilisation(batch) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " line 1: column batch is missing; needed: batch, utilisation"),
        ("batch,utilisation\n1,high\n", " line 2: utilisation must be a number above 0 and at most 1, got 'high'"),
        ("batch,utilisation\n0.5,0.1\n", " line 2: batch must be a number of at least 1, got '0.5'"),
        ("batch,utilisation\ninf,0.1\n", " line 2: batch must be a number of at least 1, got 'inf'"),
        ("batch,utilisation\n2,0.1\n2,0.2\n", " line 3: batch must rise from row to row, got 2 after 2"),
        ("batch,utilisation\n2,0\n", " line 2: utilisation must be a number above 0 and at most 1, got '0'"),
        ("batch,utilisation\n2,38\n", " line 2: utilisation must be a number above 0 and at most 1, got '38'"),
        ("batch,utilisation\n2,0.1\n\n", ": the table must have at least 2 rows, got 1"),
    ],
)
def test_faulty_table_is_refused_with_file_line_and_rule(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_utilisation(path)
    assert str(caught.value) == f"{path}{message}"


# ------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_s(flops_per_token=0, peak_flops=1), "flops_per_token must be above 0, got 0"),
        (lambda: flash_s(flops_per_token=1, peak_flops=-1), "peak_flops must be above 0, got -1"),
        (lambda: uniform_lengths(0), "max_tokens must be at least 1, got 0"),
        (lambda: case_study(accelerators=0), "accelerators must be at least 1, got 0"),
        (lambda: case_study(train_batch_size=0), "train_batch_size must be at least 1, got 0"),
        (
            lambda: case_study(training_flashes_per_token=0.0),
            "training_flashes_per_token must be finite and above 0, got 0.0",
        ),
        (
            lambda: conventional_rates(case_study(), optimizer_steps_per_rl_step=0),
            "optimizer_steps_per_rl_step must be at least 1, got 0",
        ),
        (
            lambda: pipeline_rates(case_study(), generation_batch_size=0, generation_accelerators=1),
            "generation_batch_size must be at least 1, got 0",
        ),
        (
            lambda: pipeline_rates(case_study(), generation_batch_size=1, generation_accelerators=128),
            "generation_accelerators must be at least 1 and below accelerators=128, got 128",
        ),
        (
            lambda: pipeline_rates(case_study(), generation_batch_size=1, generation_accelerators=0),
            "generation_accelerators must be at least 1 and below accelerators=128, got 0",
        ),
        (lambda: mean_lag_conventional(0), "optimizer_steps_per_rl_step must be at least 1, got 0"),
        (
            lambda: mean_lag_pipeline(
                train_batch_size=1,
                generation_batch_size=1,
                generation_accelerators=1,
                length_cv=0,
                training_share=1.5,
            ),
            "training_share must be at least 0 and at most 1, got 1.5",
        ),
        (
            lambda: search_pipeline(case_study(accelerators=1), max_lag=9),
            "accelerators must be at least 2 to generate and train at once, got 1",
        ),
        (
            lambda: search_pipeline(case_study(), max_lag=9, generation_batch_multiple=0),
            "generation_batch_multiple must be at least 1, got 0",
        ),
        (
            lambda: search_pipeline(case_study(), max_lag=9, generation_batch_limit=63, generation_batch_multiple=64),
            "generation_batch_limit must be at least generation_batch_multiple=64, got 63",
        ),
        (
            lambda: search_pipeline(case_study(train_batch_size=1), max_lag=127, generation_batch_multiple=64),
            "max_lag must be at least 128, the g_max of H=64, I=1, got 127",
        ),
        (
            lambda: staleness_applied_compute(
                in_flight=1, train_batch_size=1, rate_ratio=0, queue_batches=1, tailness=1
            ),
            "rate_ratio must be above 0, got 0",
        ),
        (
            lambda: staleness_applied_compute(
                in_flight=1, train_batch_size=1, rate_ratio=1, queue_batches=1, tailness=0.9
            ),
            "tailness must be at least 1, got 0.9",
        ),
    ],
)
def test_wrong_argument_is_refused_by_name_rule_and_value(call, message):
    with pytest.raises(ValueError, match=r"must be") as caught:
        call()
    assert str(caught.value) == message


# ------------------------------------------------------------------------------------------ the guide


def test_examples_of_the_guide_give_the_stored_output():
    result = doctest.testfile(str(GUIDE), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 5


def test_guide_names_every_public_function():
    public = [
        name
        for module in (lengths, paper, utilisation)
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    public.append(Lengths.__name__)
    guide = GUIDE.read_text(encoding="utf-8")
    assert [name for name in public if f"`{name}" not in guide] == []
    assert len(public) > 12
