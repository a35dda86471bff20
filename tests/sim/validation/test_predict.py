"""Validation: a row never tells about itself, known truths come out, the shipped rows keep their promised errors."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.cli.render_validation import print_validation, validation_markdown
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.derive import derive_training
from sim.batch import train_step_s
from sim.run import simulate
from sim.validation.inference import STEP, Points, Table, seconds_band, simulated_table
from sim.validation.predict import Prediction, Unusable, report, shipped_runs, validate
from sim.validation.reconstruct import as_run_config, as_subject, overhead_s
from sim.validation.records import Mode, PublishedRun

ROOT = Path(__file__).parents[3]


def row(name, mode, **values):
    base = {
        "id": name, "source": "ours", "hw": "H100", "model": "Qwen2.5-7B", "mode": mode, "gpus_total": 8,
        "prompts_per_step": 16, "n_per_prompt": 8, "max_len": 2048, "avg_len": 600.0,
    }  # fmt: skip
    return PublishedRun(**base | values)


def simulated_seconds(run, *, generation, training):
    """Seconds per RL step of a row whose system is slower than the hardware model by two known factors."""
    subject = as_subject(run, [run])
    config = as_run_config(
        subject, generation=generation, training=training, mean_tokens=600.0, rl_steps=8, training_given=False
    )
    ends, each = [], subject.optimizer_steps
    simulate(config, on_step=lambda step: ends.append(step.time_s))
    return (ends[-1] - ends[4 * each - 1]) / (len(ends) / each - 4)


def made_up_family():
    """Three rows of a system that generates 1.5 and trains 1.7 times as slowly as the hardware model's centre."""
    rows = [row("sync", "sync"), row("async", "async", gpus_gen=4, gpus_train=4, staleness_setting="eta=2")]
    rows.append(row("wide", "async", gpus_total=12, gpus_gen=8, gpus_train=4, staleness_setting="eta=2"))
    switch = {"sync": 0.0}  # conventional rows are simulated without what is learned from parts
    return [
        replace(one, step_s=simulated_seconds(one, generation=1.5, training=1.7) + switch.get(one.id, 0.0))
        for one in rows
    ]


def test_the_factors_of_a_made_up_system_are_found_from_its_other_rows():
    family = made_up_family()
    others = [one for one in family if one.id != "wide"]
    alone = {one.id: one for one in validate([family[2]], workers=1)}["wide"]
    informed = next(one for one in validate(family, workers=1) if one.id == "wide")
    assert isinstance(alone, Prediction)
    assert isinstance(informed, Prediction)
    assert informed.fitted_to == tuple(one.id for one in others)
    assert abs(informed.error) < 0.1 < abs(alone.error)
    assert informed.high / informed.low < alone.high / alone.low  # what is known narrows the band


def test_a_row_never_tells_about_itself():
    family = made_up_family()
    wrong = [replace(family[0], step_s=7 * family[0].step_s), *family[1:]]
    honest, fooled = (next(one for one in validate(rows, workers=1) if one.id == "sync") for rows in (family, wrong))
    assert fooled.predicted == honest.predicted
    assert fooled.measured == pytest.approx(7 * honest.measured)
    other_honest, other_fooled = (
        next(one for one in validate(rows, workers=1) if one.id == "async") for rows in (family, wrong)
    )
    assert other_fooled.predicted > other_honest.predicted  # but of others it does


def test_one_run_in_two_rows_counts_as_one():
    family = made_up_family()
    twin = replace(family[1], id="again")
    with_twin = next(one for one in validate([*family, twin], workers=1) if one.id == "async")
    assert "again" not in with_twin.fitted_to


def test_parts_add_up_or_run_side_by_side():
    sync = row("sync", "sync", step_s=110.0, gen_or_wait_s=60.0, old_logp_s=10.0, update_s=30.0)
    twin = replace(sync, id="twin", step_s=105.0)  # 5 s that no part shows
    off = row("off", "one-step-off", step_s=70.0, update_s=50.0, old_logp_s=10.0, note="generate_sequences 55")
    predictions = {one.id: one for one in validate([sync, twin, off], workers=1)}
    assert predictions["sync"].predicted == 60 + 10 + 30 + 5
    assert predictions["twin"].predicted == 60 + 10 + 30 + 10
    assert 60 < predictions["off"].predicted < 62  # and the weights: a second
    assert predictions["off"].inputs == ("generation", "training")


@pytest.mark.parametrize("setting", ["", "mini=4"])
def test_a_synchronous_run_on_separate_gpus_generates_and_trains_in_turn(setting):
    """It lasts as a colocated one on as many GPUs for each, and the weights' way besides; whatever G is."""
    apart = row("apart", "sync", gpus_gen=4, gpus_train=4, staleness_setting=setting)
    colocated = row("colocated", "sync", gpus_total=4, staleness_setting=setting)
    seconds, together = (simulated_seconds(one, generation=1.0, training=1.0) for one in (apart, colocated))
    way = overhead_s(apart, Level.CENTRAL, colocated=False)
    assert seconds == pytest.approx(together + way, rel=0.02)
    told = replace(apart, step_s=1.0, gen_or_wait_s=20.0, update_s=6.0)
    (one,) = validate([told], workers=1)
    assert one.predicted == pytest.approx(26 + way, rel=0.05)
    assert one.fitted_to == ()


def test_assumptions_are_told_beside_the_prediction(capsys):
    rows = [Prediction("a", "f", "", "tokens/s", 10, 11, 0, 0, (), (), ("an H100", "mean length")), told_row("b")]
    result = report(rows)
    assert "| an H100; mean length | 0 |" in validation_markdown(result)
    print_validation(result)
    assert "assumed: mean length: a, b\n" in capsys.readouterr().out


def told_row(name):
    return Prediction(name, "f", "", "s/step", 10, 11, 0, 0, (), (), ("mean length",))


def test_staleness_and_idle_share_follow_from_published_rates():
    stale = row("stale", "fully async", staleness_setting="C=120 B=240 q=2 rho=0.63 Mtail=1.42", note="measured 1.26")
    idle = row("idle", "async", note="trainer 2.0 samp/s, generator 1.4-1.6 samp/s, trainer idle ~30%")
    first, second = validate([stale, idle], workers=1)
    assert first.predicted == pytest.approx(120 * 1.42 / 240 + 0.63)
    assert first.error == pytest.approx(0.08)
    assert second.predicted == pytest.approx(0.25)
    assert (second.low, second.high) == (pytest.approx(0.2), pytest.approx(0.3))


def test_hours_of_a_whole_run_stand_for_its_steps_where_nothing_else_is_there():
    (one,) = validate([row("a", "async", gpus_gen=4, total_h=5.0, steps=100)], workers=1)
    assert isinstance(one, Prediction)
    assert one.measured == 180.0
    assert one.assumed == ("no time outside the steps",)


@pytest.mark.parametrize("changes", [{"step_s": 10.03}, {"gpus_total": None, "step_s": 10.0}])
def test_a_rounded_copy_of_a_row_is_the_row(changes):
    base = row("a", "async", gpus_gen=4, gpus_train=4, step_s=10.0, staleness_setting="eta=2")
    copy = replace(base, id="copy", **changes)
    other = replace(base, id="other", staleness_setting="eta=4")  # as fast, and another run
    predictions = {one.id: one for one in validate([base, copy, other], workers=1)}
    assert predictions["a"].fitted_to == ("other",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "who knows"}, "mode 'who knows' names no schedule"),
        ({"prompts_per_step": None}, "the batch is unknown"),
        ({"max_len": None}, "lengths are unknown"),
        ({"gpus_total": None}, "the cluster's size is not published"),
        ({"gpus_gen": None, "gpus_train": 8}, "no GPU is left to generate"),
        ({"gpus_gen": 8}, "gpus_gen must be below gpus_total=8, got 8"),
        ({"model": "DeepSeek-V3"}, "does not fit"),
        ({"step_s": None}, "neither seconds per step nor"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(changes, reason):
    values = {"gpus_gen": 4, "step_s": 10.0} | changes
    (one,) = validate([row("a", values.pop("mode", "async"), **values)], workers=1)
    assert isinstance(one, Unusable)
    assert reason in one.reason


def test_tokens_per_gpu_need_no_total_where_both_parts_are_published():
    parts = row("a", "async", gpus_total=None, gpus_gen=4, gpus_train=4, tok_s_per_gpu=1000.0)
    (one,) = validate([parts], workers=1)
    (whole,) = validate([replace(parts, gpus_total=8)], workers=1)
    assert one == whole
    assert one.measured == 8000.0


def test_a_trainer_that_never_waits_is_no_division_by_zero():
    idle = row("a", "async", gpus_gen=4, step_s=9.0, note="trainer 2 samp/s, generator 2 samp/s, trainer idle 0%")
    (one,) = validate([idle], workers=1)
    assert one.quantity == "s/step"


def test_the_report_counts_errors_and_orders():
    def told(name, measured, predicted, family="f"):
        return Prediction(name, family, "", "s/step", measured, predicted, 0, 0, (), ())

    result = report(
        [told("a", 10, 11), told("b", 20, 15), told("c", 30, 12), told("d", 1, 1, "g"), Unusable("e", "no")]
    )
    assert [one["error"] for one in result["rows"]] == pytest.approx([0.1, -0.25, -0.6, 0.0])
    assert result["summary"]["median_error"] == pytest.approx(0.175)
    assert result["summary"]["within_30_percent"] == 0.75
    assert [pair["in_order"] for pair in result["pairs"]] == [True, True, False]  # ab, ac, bc
    assert "e" in validation_markdown(result)


def made_table(step_s, *, scale=True):
    """A row whose step lasts step_s times the factor on generation, whatever the rest is."""
    run = row("made", "async", gpus_gen=4, gpus_train=4, step_s=step_s)
    subject = replace(as_subject(run, [run]), scale_is_known=scale)
    ratio = np.linspace(-1.4, 1.4, 5)
    log_RMQ = np.repeat((math.log(step_s) + ratio)[:, None, None], 3, axis=2)
    return Table(subject, False, log_RMQ)


def test_between_nodes_the_table_is_linear_and_at_nodes_exact():
    table = made_table(10.0)
    for ratio in (-1.4, -0.3, 0.0, 0.35, 1.4, 2.0):
        assert table.at(np.array([ratio]), np.zeros(1), STEP) == pytest.approx([math.log(10) + ratio])


def test_without_other_rows_the_prediction_is_the_model_and_its_own_uncertainty():
    band = seconds_band(made_table(10.0), [], switch_s=0.0)
    assert band.middle_s == pytest.approx(10.0, rel=0.02)
    assert math.log(band.high_s / band.middle_s) == pytest.approx(1.28 * math.hypot(0.35, 0.15), rel=0.1)


def test_of_an_unknown_scale_only_ratios_count():
    twice = made_table(20.0, scale=False)
    reference = made_table(10.0, scale=False)
    measured = replace(reference.subject.run, id="other", step_s=7.0)
    known = Table(replace(reference.subject, run=measured), False, reference.log_RMQ)
    assert seconds_band(twice, [known], switch_s=0.0).middle_s == pytest.approx(14.0)


def test_points_carry_every_combination_once():
    from sim.validation.inference import points_for

    points: Points = points_for([made_table(10.0)])
    triples = {*zip(points.generation_P, points.training_P, points.mean_P, strict=True)}
    assert len(triples) == len(points.log_prior_P)
    assert points.log_prior_P.max() == 0.0


def test_a_fraction_of_a_cluster_waits_for_the_longest_of_the_whole():
    """2048 sequences on 512 GPUs, simulated as 1024 on 256: an optimizer step lasts as if none were left out."""
    many = {"gpus_total": 512, "prompts_per_step": 256, "max_len": 8192, "avg_len": 1000.0}
    wide = row("wide", "sync", **many, note="sp=1")
    subject = as_subject(wide, [wide])
    scales = {"generation": 1.0, "mean_tokens": 1000.0, "rl_steps": 1, "training_given": False}
    config = as_run_config(subject, training=1.0, **scales)
    assert (config.cluster.accelerators, config.scheduler.train_batch_size) == (256, 1024)
    whole = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"accelerators": 512}),
            "scheduler": config.scheduler.model_copy(update={"train_batch_size": 2048}),
            "hardware": config.hardware.model_copy(
                update={"training": derived_training(subject, accelerators=512, shared=1)}
            ),
        }
    )
    assert train_step_s(config) == pytest.approx(train_step_s(whole), rel=0.05)
    shared = replace(wide, note="sp=8")
    divided = as_run_config(as_subject(shared, [shared]), training=1.0, **scales).hardware.training
    assert divided.step_s < 0.7 * config.hardware.training.step_s
    slower = as_run_config(subject, training=2.0, **scales).hardware.training
    assert slower.step_s == pytest.approx(2 * config.hardware.training.step_s)


def derived_training(subject, *, accelerators, shared):
    known = {"extra_forward_passes": 1.0, "sequence_accelerators": float(shared)}
    return derive_training(
        subject.gpu,
        subject.model,
        training_accelerators=accelerators,
        coefficients=coefficients(Level.CENTRAL, known),
    )


def test_how_many_gpus_share_a_sequence_is_taken_from_the_family():
    rows = [row("a", "sync", note="sp=4"), row("b", "async", gpus_gen=4, gpus_train=4)]
    assert as_subject(rows[1], rows).run.number_after("sp") == 4
    assert as_subject(rows[1], rows[1:]).run.number_after("sp") is None


@pytest.mark.slow
def test_the_shipped_rows_keep_the_promised_errors_and_docs_say_what_comes_out():
    result = report(validate(shipped_runs()))
    summary = result["summary"]
    assert summary["median_error"] <= 0.15
    assert summary["within_30_percent"] >= 0.9
    assert summary["pairs_in_order"] >= 0.9
    assert summary["largest_staleness_error"] <= 0.3
    curve = {one["id"]: one for one in result["rows"] if one["id"].startswith("areal_eta")}
    start = curve.pop("areal_eta0")["measured"]
    assert len(curve) == 5
    for point in curve.values():  # the curve over what was measured at 0, as the plot of the paper has it
        assert abs(point["predicted"] / start - point["measured"] / start) <= 0.15 * point["measured"] / start
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    between = re.search(r"<!-- table -->\n(.*)<!-- end -->", page, flags=re.DOTALL)
    assert between is not None
    assert between[1] == validation_markdown(result)


@pytest.mark.slow
def test_areals_curve_follows_from_one_rate_and_one_length_tail():
    """Throughput over that at eta = 0, of all six points with the same two numbers, is within 15 % at each."""
    runs = [one for one in shipped_runs() if one.id.startswith("areal_eta")]
    tables = [simulated_table(as_subject(one, runs), training_given=False) for one in runs]
    ratio_P, mean_P = (axis.ravel() for axis in np.meshgrid(np.linspace(-1.4, 1.4, 29), np.linspace(-2, 1.2, 33)))
    seconds_KP = np.exp([table.at(ratio_P, mean_P, STEP) for table in tables])
    measured_K = np.array([one.tok_s_total for one in runs])
    error_KP = (seconds_KP[0] / seconds_KP) / (measured_K / measured_K[0])[:, None] - 1
    assert np.abs(error_KP).max(axis=0).min() <= 0.15


def test_every_mode_has_a_row_that_is_simulated():
    modes = {one.schedule for one in shipped_runs()}
    assert modes == {None, *Mode} - {Mode.APART}  # nobody has published one
