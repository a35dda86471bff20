"""Systems that nobody has measured: the spread between families, bands from other families only, the naive rule."""

import math

import numpy as np
import pytest
from published import predicted, row

from pipelinerl.records.validation_table import validation_sentence
from sim.validation.predict import validate
from sim.validation.unseen import AloneRun, family_interval, spread_of, truly_simulated, unseen_bands


def test_the_spread_of_three_families_by_hand():
    """Means -0.3, 0, 0.6: their mean 0.1, variance 0.21. Rows 0.1 about the mean of a family of two: variance 0.02 (one
    degree of freedom), of which a family's mean has 0.02 * (1/2 + 1 + 1)/3 = 1/60.
    """
    spread = spread_of({"a": [-0.2, -0.4], "b": [0.0], "c": [0.6]})
    between = 0.21 - 1 / 60
    assert spread.row_sd == pytest.approx(math.sqrt(0.02))
    assert spread.family_sd == pytest.approx(math.sqrt(between))
    assert spread.centre == pytest.approx(0.1 * 0.09 / (0.09 + 0.21 / 3))
    assert spread.sd == pytest.approx(math.sqrt(between + 0.02))


def test_few_families_say_nothing_about_a_new_one():
    assert spread_of({"a": [1.0], "b": [1.0]}).centre == 0.0
    assert spread_of({}).sd == 0.4


def bands_of(*, a_s=10.0, **log_errors):
    """Bands of rows that last 10 s, those of family a another time."""
    return unseen_bands(
        AloneRun(f"{family}{index}", ("s", "H100", family), 10 * math.exp(error), a_s if family == "a" else 10.0)
        for family, errors in log_errors.items()
        for index, error in enumerate(errors)
    )


def test_a_family_never_makes_its_own_band():
    """Whatever time its rows were measured at, their bands are the same; those of other families are not."""
    errors = {"a": [0.0], "b": [0.1, 0.2], "c": [-0.3], "d": [0.0], "e": [0.2]}
    near, moved = bands_of(**errors), bands_of(a_s=70.0, **errors)
    assert moved["a0"] == near["a0"]
    assert moved["b0"].high_s / moved["b0"].low_s > near["b0"].high_s / near["b0"].low_s


def test_a_common_error_is_taken_out():
    """All families 30 % too fast, hardly any spread: the next one is predicted about right, and with a narrow band."""
    band = bands_of(a=[-0.36], b=[-0.35], c=[-0.36], d=[-0.355])["a0"]
    assert band.middle_s == pytest.approx(10.0, rel=0.02)
    assert band.high_s < 10.4


def test_families_are_resampled_and_not_rows():
    """One family of nine good rows and one of a bad one: the median of resampled families is either's."""
    families = [np.full(9, 0.1), np.array([0.9])]
    assert family_interval(families, lambda sample: float(np.median(np.concatenate(sample)))) == (0.1, 0.9)


@pytest.mark.parametrize("missing", [{"avg_len": None}, {"gpus_total": None}, {"step_s": None}])
def test_alone_needs_mean_answer_size_and_seconds(missing):
    whole = {"step_s": 50.0}
    assert truly_simulated(row("a", "sync", **whole)) is not None
    assert truly_simulated(row("a", "sync", **(whole | missing))) is None


def test_a_row_of_no_known_mean_and_no_sibling_has_no_seconds():
    (one,) = predicted([row("a", "sync", avg_len=None, step_s=50.0)])
    assert "avg_len is not published" in one.reason


def test_one_family_alone_has_no_naive_rule():
    """There are no others to take tokens per second and GPU from; that is no error of 0 %."""
    report = validate([row("sync", "sync", step_s=60.0)], workers=1)
    assert report.summary.alone is not None
    assert report.summary.alone.naive_median_error is None
    assert "by tokens per second" not in validation_sentence(report)
