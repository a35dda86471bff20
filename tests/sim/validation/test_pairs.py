"""Asynchronous against synchronous: what is common cancels, what is an arm's own does not, other families only."""

import math

import numpy as np
import pytest
from published import changed, row

from pipelinerl.hardware.prior import RUN_SD, SYNC_ARM_SD, SYNC_SD
from pipelinerl.pages.evidence import speed_up_words
from pipelinerl.records.validation_report import SpeedUp
from sim.validation.infer import SimulationGrid
from sim.validation.pairs import speed_up_summary, speed_ups
from sim.validation.predict import validate
from sim.validation.reconstruct import reconstruct_run

APART = {"gpus_gen": 4, "gpus_train": 4, "max_staleness": 1.0}


def arm(name, schedule, seconds, *, step_s=10.0, **values):
    """A row whose simulated step lasts as long whatever generation and training cost, apart from a common factor."""
    run = reconstruct_run(one := row(name, schedule, step_s=step_s, **values), [one])
    return SimulationGrid(run, False, np.full((5, 1, 3), math.log(seconds)))


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Weights and switch are counted in one test only."""
    monkeypatch.setattr("sim.validation.pairs.weights_s", lambda row, level: 0.0)
    monkeypatch.setattr("sim.validation.pairs.switch_s", lambda row, level: 0.0)


def test_common_factors_cancel_and_the_rest_is_normal():
    """Log ratio ln 1.3, of which only the spread between two runs is uncertain: P = Phi(ln 1.3 / (0.15 sqrt 2))."""
    (one,) = speed_ups([arm("s", "sync", 13.0), arm("a", "async", 10.0, **APART)])
    assert one.predicted == pytest.approx(1.3, rel=0.02)
    deviations = math.log(1.3) / (RUN_SD * math.sqrt(2))
    assert one.probability == pytest.approx(0.5 * (1 + math.erf(deviations / math.sqrt(2))), abs=0.02)
    assert one.decided_by == "run-to-run spread"
    assert "not certain, by the run-to-run spread most of all" in speed_up_words(one)


def test_weights_are_each_arms_own_and_the_common_part_cancels(monkeypatch):
    """Steps of nothing but weights, 8 s and 2 s: only the arms' own factors are left of what is uncertain of them."""
    monkeypatch.setattr("sim.validation.pairs.weights_s", lambda row, level: 8.0 if row.id == "s" else 2.0)
    (one,) = speed_ups([arm("s", "sync", 1e-9), arm("a", "async", 1e-9, **APART)])
    sd = math.hypot(SYNC_ARM_SD, RUN_SD) * math.sqrt(2)
    assert math.log(one.high / one.low) / 2 / 1.2816 == pytest.approx(sd, rel=0.05)
    assert sd < math.hypot(SYNC_ARM_SD, SYNC_SD) * math.sqrt(2)
    assert one.decided_by == "weights"


def family(name, measured, predicted):
    """A synchronous and an asynchronous row of a system of its own."""
    of = {"system": name}
    return [
        arm(f"{name}s", "sync", 10 * predicted, step_s=10 * measured, **of),
        arm(f"{name}a", "async", 10.0, **of, **APART),
    ]


def test_no_measurement_of_the_family_is_used():
    others = [*family("b", 1.5, 1.5), *family("c", 2.0, 2.0), *family("d", 1.2, 1.2)]
    near, far = (speed_ups([*family("a", measured, 1.4), *others])[0] for measured in (1.4, 9.0))
    assert (near.predicted, near.probability, near.constant) == (far.predicted, far.probability, 1.5)


def test_a_common_error_of_the_other_families_ratios_is_taken_out():
    """Four families whose asynchronous arms come out 1.5 times as fast as measured, without scatter: the centre is
    shrunk by hand, 0.09 / (0.09 + 0) = 1."""
    made = speed_ups([one for name in "abcd" for one in family(name, 1.0, 1.5)])
    assert [one.predicted for one in made] == pytest.approx([1.0] * 4, rel=0.02)


def test_scores_by_hand():
    """Probabilities near 1 of what was measured faster and slower: squares 0 and 1, mean 1/2, and one of two right."""
    made = speed_ups([*family("a", 9.0, 9.0), *family("b", 0.5, 9.0)])
    summary = speed_up_summary(made)
    assert summary.brier == pytest.approx(0.5, abs=1e-3)
    assert (summary.always_brier, summary.certain, summary.certain_right, summary.faster) == (0.5, 2, 1, 1)
    assert speed_up_summary(()) is None


def test_intervals_of_differences_to_the_naive_rules_by_hand():
    """Nine pairs of a family with nothing wrong (the constant 0.5 off), one pair of another: P 0, ratio 0.9 off,
    constant 0.4. Two families, drawn anew, are twice the first (1 in 4), both (1 in 2), or twice the second (1 in 4).
    Differences of the Brier scores: 0, 1/2, 1. Of the medians of all pairs: 0 - 0.5, 0 - 0.5, 0.9 - 0.4. With rows
    drawn in place of families the upper ends would be lower.
    """
    good = pair("good", probability=1.0, predicted=2.0, constant=3.0)
    bad = pair("bad", probability=0.0, predicted=3.8, constant=2.8)
    summary = speed_up_summary([*[good] * 9, bad])
    assert (summary.brier_difference_low, summary.brier_difference_high) == (0.0, 1.0)
    assert summary.error_difference_low == pytest.approx(-0.5)
    assert summary.error_difference_high == pytest.approx(0.5)


def pair(name, *, probability, predicted, constant):
    """A pair that was measured twice as fast."""
    return SpeedUp(
        synchronous="s",
        asynchronous="a",
        family=name,
        measured=2.0,
        predicted=predicted,
        low=1.0,
        high=4.0,
        probability=probability,
        decided_by="weights",
        constant=constant,
    )


@pytest.mark.parametrize(
    "change", [{"gpus_total": 16}, {"avg_len": 900.0}, {"system": "theirs"}, {"schedule": "sync_apart"}]
)
def test_only_like_is_paired_with_like(change):
    other = {"schedule": "async", "seconds": 10.0, **APART} | change
    if "gpus_total" in change:
        other |= {"gpus_gen": 8, "gpus_train": 8}
    assert speed_ups([arm("s", "sync", 13.0), arm("a", **other)]) == ()


def test_one_run_in_two_rows_makes_one_pair():
    twins = [arm("a", "async", 10.0, **APART), arm("again", "async", 10.0, **APART)]
    assert len(speed_ups([arm("s", "sync", 13.0), *twins])) == 1


@pytest.mark.slow
def test_the_report_does_not_depend_on_which_process_is_first(monkeypatch):
    """Results come as processes end; here in the opposite order of the rows."""

    def backwards(function, jobs, *, workers):
        yield from [function(job) for job in reversed(jobs)]

    rows = [row("s", "sync", step_s=60.0), *(row(name, "async", step_s=30.0, **APART) for name in ("a", "b"))]
    rows[2] = changed(rows[2], step_s=40.0)
    first = validate(rows, workers=1)
    monkeypatch.setattr("sim.validation.predict.run_all", backwards)
    assert len(first.speed_ups) == 2
    assert validate(rows) == first


def test_validate_reports_pairs_of_the_rows_that_were_asked_for():
    sync = row("s", "sync", step_s=60.0)
    fast = row("a", "async", step_s=30.0, **APART)
    theirs = [changed(one, system="theirs", id=f"{one.id}2") for one in (sync, fast)]
    report = validate([sync, fast], others=theirs, workers=1)
    (pair,) = report.speed_ups
    assert (pair.synchronous, pair.asynchronous, pair.measured) == ("s", "a", 2.0)
    assert report.summary.speed_ups.pairs == 1
