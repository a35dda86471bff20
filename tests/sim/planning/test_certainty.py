"""A plan that knows what it does not know, from end to end: what is measured makes it surer, and right."""

from functools import cache
from pathlib import Path

import pytest
from tiny_plan import in_this_process, planned, unknown_run

from pipelinerl.config.check import check_config
from pipelinerl.hardware.prior import CERTAIN
from pipelinerl.records.plan_report import PlanReport
from sim.planning.search import plan
from sim.planning.simulate import HowToPlan
from sim.run import simulate

TRUTH = "hardware.coefficients={sync_s_per_root_gb=6.0, kv_efficiency=0.6, training_mfu=0.5}"
"""A system whose weights take 10 s, five times as long as the hardware model has it."""


def planned_unknown(*overrides: str, measured: tuple[Path, ...] = ()) -> PlanReport:
    with in_this_process():
        return plan(unknown_run(*overrides), HowToPlan(measured=measured))


@cache
def before() -> PlanReport:
    return planned_unknown()


def checked(kind: str, folder: Path) -> Path:
    """Return the folder of a check of the true system, as `train --check` leaves one."""
    config = check_config(unknown_run(f"scheduler.kind={kind}", TRUTH))
    simulate(config, out=folder / kind, trace=True)
    return folder / kind


@pytest.mark.slow
def test_measurements_make_a_plan_surer_and_right(tmp_path):
    """A check of the pipeline turns the plan to the schedule that is the best in truth; one of both arms settles it."""
    pipeline, conventional = checked("pipeline", tmp_path), checked("conventional", tmp_path)
    first = before()
    second = planned_unknown(measured=(pipeline,))
    third = planned_unknown(measured=(pipeline, conventional))
    truth = planned_unknown(TRUTH)
    assert first.recommended.family == "pipeline"
    assert truth.recommended.family == second.recommended.family == third.recommended.family == "conventional"
    assert third.recommended.label == truth.recommended.label
    assert third.recommended.tokens_per_s == pytest.approx(truth.recommended.tokens_per_s, rel=0.1)

    right = [one.certainty.right for one in (first, second, third)]
    assert right == sorted(right)
    assert (right[0] < 0.7, right[2] > 0.95) == (True, True)
    regret = [one.certainty.regret for one in (first, second, third)]
    assert regret == sorted(regret, reverse=True)
    unknown = [one.certainty.unknown for one in (first, second, third)]
    for name in unknown[0]:
        assert unknown[1][name] <= unknown[0][name] or name == "weight transfer of synchronous RL"
        assert unknown[2][name] <= unknown[1][name]
    assert [one.certainty.asynchronous.certain for one in (first, second, third)] == [False, False, True]
    assert third.certainty.asynchronous.faster < 1 - CERTAIN


@pytest.mark.slow
def test_the_measurement_that_the_plan_asks_for_is_the_one_that_turned_it():
    certainty = before().certainty
    best = certainty.measurements[0]
    assert best.measured == ["weight transfer of asynchronous RL"]
    assert best.gain > 0.05
    assert best.regret == pytest.approx(certainty.least_regret - best.gain, abs=0.02)
    assert certainty.asynchronous.decided_by == best.measured[0]
    assert certainty.regret >= certainty.least_regret


@pytest.mark.slow
def test_a_plan_of_one_arm_is_compared_with_the_other_by_the_screening():
    certainty = planned("plan.schedulers=['pipeline']").certainty
    assert certainty.asynchronous is not None
    assert planned("plan.schedulers=['conventional']").certainty.asynchronous is None


@pytest.mark.slow
def test_hardware_in_numbers_leaves_the_answers_and_what_the_model_leaves_out():
    certainty = planned("hardware={decode={kind='affine', step_s=0.01}, training={token_s=1e-4}}").certainty
    assert certainty.fits is None
    assert [row.measured for row in certainty.measurements] == [["mean answer"]]
    assert before().certainty.fits > 0.99


@pytest.mark.slow
def test_the_same_plan_is_as_sure():
    assert planned_unknown().to_dict() == before().to_dict()
    other = planned_unknown("seed=1").certainty
    assert other.right != before().certainty.right or other.regret != before().certainty.regret
