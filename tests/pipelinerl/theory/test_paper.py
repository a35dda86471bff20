"""The paper's printed numbers and closed forms worked out by hand."""

import doctest
import inspect
import math
from fractions import Fraction
from pathlib import Path

import pytest
from case_study import LINEAR, TAU, case_study
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.hardware import utilisation
from pipelinerl.hardware.utilisation import UtilisationCurve
from pipelinerl.theory import lengths, paper
from pipelinerl.theory.lengths import Lengths, lengths_from, uniform_lengths
from pipelinerl.theory.paper import (
    conventional_rates,
    largest_lag,
    pipeline_rates,
    search_pipeline,
    staleness_applied_compute,
    throughput_against_lag,
)

GUIDE = Path(__file__).parents[3] / "docs" / "analytic.md"


@pytest.mark.parametrize(
    ("max_lag", "chosen", "printed"),
    [
        (16, (16, 64), (2.19, 2.14, 1.02)),  # the table's ratio 1.03 is 1.0248 rounded twice; its rates give 1.02
        (64, (64, 64), (8.75, 6.64, 1.32)),
        (96, (99, 62), (13.04, 8.79, 1.48)),
        (112, (135, 53), (14.98, 9.69, 1.55)),
        (132, (192, 44), (16.90, 10.69, 1.58)),
        (160, (268, 38), (18.30, 11.88, 1.54)),
    ],
)
def test_search_gives_the_table_of_the_case_study(max_lag, chosen, printed):
    """The guide has the other rows."""
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


def test_the_papers_own_split_reproduces_its_speedup():
    pipeline = pipeline_rates(case_study(), generation_batch_size=192, generation_accelerators=44)
    conventional = conventional_rates(case_study(), optimizer_steps_per_rl_step=134)
    assert pipeline.total / conventional.total == pytest.approx(1.574, abs=0.0005)


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
    assert largest_lag(lengths, train_batch_size=train, **sizes) == 24
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
    assert largest_lag(uniform_lengths(2048), train_batch_size=128 * 16, **sizes) == 9
    few = conventional_rates(case_study(), optimizer_steps_per_rl_step=128)
    many = conventional_rates(case_study(train_batch_size=2048), optimizer_steps_per_rl_step=8)
    assert few == pytest.approx(many)


# --------------------------------------------------------------------------------- lag and staleness


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


@given(
    batch=st.integers(1, 4096), generators=st.integers(1, 512), train=st.integers(1, 4096), longest=st.integers(1, 300)
)
def test_largest_lag_is_the_exact_quotient_rounded_up(batch, generators, train, longest):
    sizes = {"train_batch_size": train, "generation_batch_size": batch, "generation_accelerators": generators}
    exact = batch * generators * longest / (Fraction(longest + 1, 2) * train)
    assert largest_lag(uniform_lengths(longest), **sizes) == math.ceil(exact)


@pytest.mark.parametrize(
    ("inputs", "printed"),
    [
        # C, B, q, ρ, M: the three published runs, evaluated on the rounded inputs
        ((120, 240, 2, 0.63, 1.42), 1.34),
        ((240, 120, 2, 0.92, 1.43), 3.78),
        ((128, 128, 2, 1.07, 1.44), 3.25),
    ],
)
def test_staleness_has_the_published_values(inputs, printed):
    names = ("in_flight", "train_batch_size", "queue_batches", "rate_ratio", "tailness")
    staleness = staleness_applied_compute(**dict(zip(names, inputs, strict=True)))
    assert staleness.total == pytest.approx(printed, abs=0.005)
    assert staleness.total == staleness.pre_queue + staleness.in_queue


def test_staleness_before_the_queue_is_the_papers_lag_when_generation_bound():
    lengths = uniform_lengths(100)
    staleness = staleness_applied_compute(
        in_flight=24 * 6,
        train_batch_size=32,
        rate_ratio=0.8,
        queue_batches=1,
        tailness=lengths.max_tokens / lengths.mean_tokens,
    )
    assert staleness.pre_queue == pytest.approx(24 * 6 * lengths.max_tokens / (lengths.mean_tokens * 32))  # A.3


def test_staleness_jumps_by_queue_minus_one_where_generation_overtakes_training():
    values = {"in_flight": 64, "train_batch_size": 32, "queue_batches": 3.0, "tailness": 1.5}
    at = staleness_applied_compute(rate_ratio=1.0, **values)
    above = staleness_applied_compute(rate_ratio=1 + 1e-9, **values)
    assert at == (3.0, 1.0)
    assert above.total - at.total == pytest.approx(2.0, abs=1e-6)


# ------------------------------------------------------------------------------------------- the guide


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
    assert len(public) > 10
