"""The paper's printed numbers and closed forms worked out by hand."""

import doctest
import inspect
from pathlib import Path

import pytest
from case_study import LINEAR, TAU, case_study

from pipelinerl.hardware import utilisation
from pipelinerl.hardware.utilisation import UtilisationCurve
from pipelinerl.theory import lengths, paper
from pipelinerl.theory.lengths import Lengths, lengths_from, uniform_lengths
from pipelinerl.theory.paper import (
    Rates,
    conventional_rates,
    flash_s,
    lag_estimate,
    largest_lag,
    pipeline_rates,
    search_pipeline,
    throughput_against_lag,
)

GUIDE = Path(__file__).parents[3] / "docs" / "analytic.md"


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
